"""Rewards to advantages: reward − mean of the group's scored rollouts, over a standard deviation.

    centre(reward, group) ─> batch_moments ─(all-reduce between ranks)─> scale ─> advantage [R]

With R_i the reward of rollout i, and g its group of n_g scored rollouts:

    c_i = R_i − (1 / n_g) Σ_{j in g} R_j                                    the baseline of GRPO (DeepSeekMath, eq. 21)
    batch   A_i = c_i / sqrt(Σ_j c_j² / n),   j over all n scored rollouts of all ranks          (Magistral, ScaleRL)
    group   A_i = c_i / sqrt(Σ_{j in g} c_j² / n_g)                                                            (GRPO)
    none    A_i = c_i                                                                                      (Dr. GRPO)

Both are population standard deviations; the batch's centred rewards have mean 0, so no second mean is taken. A zero
standard deviation gives zero advantages. Everything is float64: a batch has hundreds of rewards, not millions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from palingenesis.rl.types import EQUAL_WITHIN


def centre(reward: Tensor, group: Tensor) -> Tensor:
    """`reward` [R] minus its group's mean, float64; exactly 0 where a group's rewards are all equal.

    Args:
        reward: float [R], of the scored rollouts alone.
        group: int64 [R], any labels that are equal within a group.
    """
    reward, index = reward.double(), _dense(group)
    centred = reward - _group_sum(reward, index)[index] / _group_sum(torch.ones_like(reward), index)[index]
    spread = _group_max(reward, index) + _group_max(-reward, index)
    return torch.where(spread[index] <= EQUAL_WITHIN * _group_max(reward.abs(), index)[index], 0.0, centred)


def batch_moments(centred: Tensor) -> Tensor:
    """float64 [2]: the sum of squares and the count. Summed over ranks they are the global batch's."""
    return torch.stack([centred.double().square().sum(), centred.new_tensor(centred.shape[0], dtype=torch.float64)])


def scale(centred: Tensor, group: Tensor, std: str, moments: Tensor) -> Tensor:
    """Advantages float64 [R].

    Args:
        centred, group: as given to and returned by `centre`.
        std: `batch`, `group` or `none` (option loss.advantage_std).
        moments: `batch_moments`, summed over the ranks; read by `batch` alone.
    """
    deviation = _DEVIATIONS[std](centred, _dense(group), moments)
    return torch.where(deviation > 0, centred / deviation.clamp_min(torch.finfo(torch.float64).tiny), 0.0)


def _batch_std(centred: Tensor, index: Tensor, moments: Tensor) -> Tensor:
    return (moments[0] / moments[1].clamp_min(1)).sqrt().expand_as(centred)


def _group_std(centred: Tensor, index: Tensor, moments: Tensor) -> Tensor:
    variance: Tensor = _group_sum(centred.square(), index) / _group_sum(torch.ones_like(centred), index)
    return torch.sqrt(variance[index])


def _no_std(centred: Tensor, index: Tensor, moments: Tensor) -> Tensor:
    return torch.ones_like(centred)


_DEVIATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "batch": _batch_std,
    "group": _group_std,
    "none": _no_std,
}


def _dense(group: Tensor) -> Tensor:
    """Labels 0, 1, 2, ... in place of any labels."""
    index: Tensor = torch.unique(group, return_inverse=True)[1]
    return index


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.bincount(index, weights=values)


def _group_max(values: Tensor, index: Tensor) -> Tensor:
    groups = torch.bincount(index).shape[0]
    return values.new_full((groups,), -torch.inf).scatter_reduce(0, index, values, "amax")
