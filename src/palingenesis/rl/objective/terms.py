"""What each rollout brings to the loss, once for a step: its advantage, its tokens' weight, whether it is left out.

    TrainSequence... ─> centred rewards, totals ─(one all-reduce)─> SequenceTerms [R], in the order of the sequences

The one sum over ranks carries the batch's std and the normalizers together; the groups' means need no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palingenesis.rl.objective.advantages import batch_moments, centre, scale
from palingenesis.rl.objective.aggregate import batch_totals, token_weights
from palingenesis.rl.objective.losses import Level
from palingenesis.rl.objective.tokens import TrainSequence

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import LossConfig


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTerms:
    """One entry a sequence, on the CPU.

    Attributes:
        advantage: float64 [R].
        weight: float64 [R], of each sampled token of the sequence.
        dropped: bool [R], cut by a budget under `truncation: mask`: coefficient 0, but it stays in the group's mean,
            the std and the denominators.
    """

    advantage: Tensor
    weight: Tensor
    dropped: Tensor


def one_rank(totals: Tensor) -> Tensor:
    """The sum over ranks of a single process."""
    return totals


def sequence_terms(
    sequences: Sequence[TrainSequence],
    options: LossConfig,
    level: Level,
    max_completion_tokens: int,
    all_reduce: Callable[[Tensor], Tensor] = one_rank,
) -> SequenceTerms:
    """Advantages, weights and drops of this rank's sequences.

    Args:
        level: that of the loss.
        max_completion_tokens: resolved (never the config's 0).
        all_reduce: the sum over ranks of a float64 [5]. Called exactly once, also by a rank without sequences.
    """
    group = torch.tensor([s.group for s in sequences], dtype=torch.int64)
    lengths = torch.tensor([s.sampled_tokens for s in sequences], dtype=torch.int64)
    centred = centre(torch.tensor([s.reward for s in sequences], dtype=torch.float64), group)
    totals = all_reduce(torch.cat([batch_moments(centred), batch_totals(lengths, group)]))
    cut = torch.tensor([s.truncated for s in sequences], dtype=torch.bool)
    return SequenceTerms(
        advantage=scale(centred, group, options.advantage_std, totals[:2]),
        weight=token_weights(lengths, group, options.aggregation, level, max_completion_tokens, totals[2:]),
        dropped=cut if options.truncation == "mask" else torch.zeros_like(cut),
    )
