"""What one sampled token of a rollout weighs in the loss. Every token of a rollout weighs the same, so weights are [R].

    lengths, group ─> batch_totals ─(all-reduce between ranks)─> token_weights ─> weight [R]

With L_i the sampled tokens of rollout i, T_g = Σ_{j in g} L_j those of its group, n_g the group's scored rollouts, and,
over all ranks, G groups, R rollouts and T tokens:

| loss.aggregation | token losses                       | gspo: a rollout is the unit, its tokens share its weight |
|------------------|------------------------------------|----------------------------------------------------------|
| prompt           | 1 / (G · T_g)                      | 1 / (G · n_g) · 1 / L_i                                  |
| token            | 1 / T                              | 1 / R · 1 / L_i                                          |
| constant         | 1 / (R · max_completion_tokens)    | 1 / R · 1 / L_i                                          |

`prompt` is the mean over a group's tokens, then over groups (ScaleRL); `token` the mean over all tokens (DAPO);
`constant` divides the sum by what the rollouts could have been (Dr. GRPO). In the right column each denominator counts
rollouts where the left one counts tokens; a rollout can be at most one rollout, so there `constant` is `token`.

Denominators count every sampled token of the scored rollouts of trained groups, also the masked and the clipped: a mask
takes a gradient away, it never makes the others larger. A group lies on one rank; only G, R and T are global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from palingenesis.rl.objective.losses import Level


def batch_totals(lengths: Tensor, group: Tensor) -> Tensor:
    """float64 [3]: groups, rollouts, sampled tokens. Summed over ranks they are the global batch's."""
    counts = [torch.unique(group).shape[0], lengths.shape[0], int(lengths.sum())]
    return torch.tensor(counts, dtype=torch.float64, device=lengths.device)


def token_weights(
    lengths: Tensor, group: Tensor, aggregation: str, level: Level, max_completion_tokens: int, totals: Tensor
) -> Tensor:
    """The weight of each token of each rollout, float64 [R].

    Args:
        lengths: int64 [R], sampled tokens of each scored rollout.
        group: int64 [R], labels of the groups.
        aggregation: `prompt`, `token` or `constant` (option loss.aggregation).
        level: the loss's; at `sequence` a rollout weighs once.
        max_completion_tokens: the sampled tokens a rollout may have; read by `constant` alone.
        totals: `batch_totals`, summed over the ranks.
    """
    index = torch.unique(group, return_inverse=True)[1]
    by_rollout = level == "sequence"
    unit = torch.ones_like(lengths, dtype=torch.float64) if by_rollout else lengths.double()
    groups, rollouts, tokens = totals.to(lengths.device)
    batch = _Batch(
        unit=unit,
        index=index,
        groups=groups,
        rollouts=rollouts,
        units=rollouts if by_rollout else tokens,
        most=1 if by_rollout else max_completion_tokens,
    )
    weight = 1 / _DENOMINATORS[aggregation](batch).clamp_min(1)
    return weight / lengths.clamp_min(1) if by_rollout else weight


@dataclass(frozen=True, slots=True)
class _Batch:
    """`unit` [R] counts each rollout's units: its tokens, or itself. `most` is how many units a rollout can have."""

    unit: Tensor
    index: Tensor
    groups: Tensor
    rollouts: Tensor
    units: Tensor
    most: int


def _prompt(batch: _Batch) -> Tensor:
    """G · (units of the rollout's group)."""
    return batch.groups * torch.bincount(batch.index, weights=batch.unit)[batch.index]


def _token(batch: _Batch) -> Tensor:
    """All units."""
    return batch.units.expand_as(batch.unit)


def _constant(batch: _Batch) -> Tensor:
    """R · (the most units a rollout can have)."""
    return (batch.rollouts * batch.most).expand_as(batch.unit)


_DENOMINATORS: dict[str, Callable[[_Batch], Tensor]] = {"prompt": _prompt, "token": _token, "constant": _constant}
