"""Cut a step's sequences into micro-batches of at most `micro_tokens` padded tokens.

Sequences are sorted by length, so that a micro-batch pads little, and cut greedily: rows x longest row <= micro_tokens.
A sequence longer than the budget travels alone. Every sequence is in exactly one micro-batch, whole: what the loss needs
to know about a rollout never crosses one. The gradient's sum is the same however the cuts fall.
"""

from __future__ import annotations

from collections.abc import Sequence


def microbatches(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Indices of the sequences in each micro-batch, longest first so that memory peaks in the first one.

    Args:
        lengths: tokens in each sequence.
        micro_tokens: budget of padded tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    out: list[list[int]] = []
    for index in order:
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= micro_tokens:
            out[-1].append(index)
        else:
            out.append([index])
    return out
