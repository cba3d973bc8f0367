"""The losses: each turns log-probs and advantages into the detached coefficient of ∇ logp. One small class a loss.

    logp, mu, advantage ──loss──> coefficient c (detached), clipped
    gradient of the objective:  − Σ weight · c · ∇ logp          (surrogate.py)

With r = exp(logp − mu), mu the sampler's log-prob and A the advantage:

| loss      | unit    | coefficient                                       | source                                  |
|-----------|---------|---------------------------------------------------|-----------------------------------------|
| masked_is | token   | min(r, is_cap)·A, 0 where PPO's clip has no slope | PPO-clip, DAPO's clip-higher, TIS's cap |
| cispo     | token   | min(r, is_cap)·A                                  | CISPO (MiniMax-M1), its upper bound     |
| icepop    | token   | r·A inside [icepop_low, icepop_high], else 0      | IcePop (Ring-1T), on the one ratio π/μ  |
| gspo      | rollout | s·A, 0 where the clip 1 ± gspo_eps has no slope   | GSPO; s = exp(mean(logp − mu))          |

A loss of `level` "token" gets one entry a sampled token. One of level "sequence" gets one entry a rollout: the means of
logp and mu over its sampled tokens, and a coefficient it returns holds for each of them; the sequence mask does not
apply to it, and it weighs a rollout once (aggregate.py). Inputs are float64 and carry no gradient.

To add a loss: write one class here and name it in LOSSES, or in your own file and set `loss.type: my_losses.py:Name`.
It is built with the `loss` section of the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch
from torch import Tensor

from palingenesis.rl.plugins import resolve

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import LossConfig

Level = Literal["token", "sequence"]

# exp(20) = 4.9e8: past it a ratio says only that the two models disagree, and exp would soon be infinite. Keeps every
# coefficient finite, also that of gspo with A < 0, which its clip does not bound.
LOG_RATIO_LIMIT = 20.0


class Loss(Protocol):
    """Log-probs and advantages to coefficients.

    Attributes:
        level: what an entry of the inputs is, a sampled token or a rollout.
    """

    level: Level

    def __call__(self, logp: Tensor, mu: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """`(coefficient, clipped)`, both of the inputs' shape; `clipped` is bool, for the metric policy/clipped."""
        ...


def log_ratio(logp: Tensor, mu: Tensor) -> Tensor:
    """log r = logp − mu, within ±LOG_RATIO_LIMIT."""
    return (logp - mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(logp: Tensor, mu: Tensor) -> Tensor:
    """r = exp(logp − mu), finite and positive."""
    return log_ratio(logp, mu).exp()


def outside_trust(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Where min(r·A, clip(r, low, high)·A) has no slope in r: r has left [low, high] on the side A pushes to (PPO)."""
    return ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


class MaskedIS:
    """min(r, is_cap)·A, and 0 where (A > 0 and r > 1 + eps_high) or (A < 0 and r < 1 − eps_low).

    PPO's clip written as a mask, with DAPO's asymmetric bounds; the truncated importance weight (TIS) bounds the one
    side PPO leaves open, A < 0 with a large r.
    """

    level: Level = "token"

    def __init__(self, options: LossConfig) -> None:
        self.low, self.high, self.cap = 1 - options.eps_low, 1 + options.eps_high, options.is_cap

    def __call__(self, logp: Tensor, mu: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        r = ratio(logp, mu)
        masked = outside_trust(r, advantage, self.low, self.high)
        coefficient = torch.where(masked, 0.0, r.clamp(max=self.cap) * advantage)
        return coefficient, masked | (r > self.cap)


class CISPO:
    """min(r, is_cap)·A: the weight is capped, but no token loses its gradient (MiniMax-M1)."""

    level: Level = "token"

    def __init__(self, options: LossConfig) -> None:
        self.cap = options.is_cap

    def __call__(self, logp: Tensor, mu: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        r = ratio(logp, mu)
        return r.clamp(max=self.cap) * advantage, r > self.cap


class IcePop:
    """r·A where icepop_low ≤ r ≤ icepop_high, else 0: tokens on which sampler and trainer disagree are left out."""

    level: Level = "token"

    def __init__(self, options: LossConfig) -> None:
        self.low, self.high = options.icepop_low, options.icepop_high

    def __call__(self, logp: Tensor, mu: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        r = ratio(logp, mu)
        outside = (r < self.low) | (r > self.high)
        return torch.where(outside, 0.0, r * advantage), outside


class GSPO:
    """s·A where the clipped surrogate with 1 ± gspo_eps has a gradient, else 0; s is the rollout's mean ratio.

    ∇ s = s · mean(∇ logp): the coefficient of each token is s·A, its weight 1/length of the rollout's.
    """

    level: Level = "sequence"

    def __init__(self, options: LossConfig) -> None:
        self.low, self.high = 1 - options.gspo_eps, 1 + options.gspo_eps

    def __call__(self, logp: Tensor, mu: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        s = ratio(logp, mu)
        masked = outside_trust(s, advantage, self.low, self.high)
        return torch.where(masked, 0.0, s * advantage), masked


LOSSES: Mapping[str, type[MaskedIS] | type[CISPO] | type[IcePop] | type[GSPO]] = {
    "masked_is": MaskedIS,
    "cispo": CISPO,
    "icepop": IcePop,
    "gspo": GSPO,
}


def build_loss(options: LossConfig) -> Loss:
    """The loss `loss.type` names, built with the `loss` section.

    Raises:
        ConfigError: no such loss.
    """
    return cast(Loss, resolve(options.type, LOSSES, "loss.type")(options))
