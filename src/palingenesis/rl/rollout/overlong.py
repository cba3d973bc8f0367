"""The soft punishment of long answers (DAPO): a slope before the hard limit instead of a cliff at it.

What is added to the reward, by length in sampled tokens:

          0 ─────────────────────┐
                                  ╲
    −penalty                       └───────
                    max − buffer   max
"""

from __future__ import annotations


def overlong_penalty(length: int, max_completion_tokens: int, buffer: int, penalty: float) -> float:
    """What is added to the reward of a rollout of `length` sampled tokens: between −penalty and 0.

    With x = length − (max_completion_tokens − buffer), how far the rollout is into the buffer: 0 where x ≤ 0, else
    −penalty · min(x, buffer) / buffer. A buffer of 0 is off. Example: max 100, buffer 20, penalty 1: 80 tokens give 0,
    90 give −0.5, 100 give −1.
    """
    into_buffer = length - (max_completion_tokens - buffer)
    if buffer <= 0 or into_buffer <= 0:
        return 0.0
    return -penalty * min(into_buffer, buffer) / buffer
