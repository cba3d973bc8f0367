"""How many tokens the next turn may sample, and which limit would end it.

Three limits act at once: `max_new_tokens` a turn, `max_completion_tokens` over all turns of a trajectory (sampled tokens
only; given ones do not count), and `max_model_len` over everything the model sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from palingenesis.rl.types import Finish


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in tokens. `max_completion_tokens` 0 means `max_new_tokens`."""

    max_new_tokens: int
    max_completion_tokens: int
    max_model_len: int

    @property
    def completion(self) -> int:
        """Sampled tokens a trajectory may have."""
        return self.max_completion_tokens or self.max_new_tokens

    def next_turn(self, sampled: int, total: int) -> tuple[int, Finish]:
        """Tokens the next turn may sample, and how the rollout ends if it uses them all.

        Args:
            sampled: tokens sampled so far.
            total: tokens in the trajectory so far, given ones included.
        """
        by_policy = min(self.max_new_tokens, self.completion - sampled)
        by_context = self.max_model_len - total
        if by_context < by_policy:
            return max(0, by_context), Finish.CONTEXT
        return max(0, by_policy), Finish.LENGTH
