"""The optimizer and its learning-rate schedule.

Schedules are multiples of `train.learning_rate` at optimizer step k = 0, 1, ...: a linear warm-up
`(k + 1) / warmup_steps`, then 1 (`constant`) or a half cosine down to 0 at `train.steps` (`cosine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def build_optimizer(
    parameters: Sequence[torch.nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over float32 masters; weight decay on matrices only, as is usual for language models."""
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps)


def schedule(name: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """The multiple of the learning rate at each step."""
    after = {"constant": _constant, "cosine": _cosine}[name]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return after(step - warmup_steps, max(1, steps - warmup_steps))

    return factor


def _constant(step: int, span: int) -> float:
    return 1.0


def _cosine(step: int, span: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / span)))
