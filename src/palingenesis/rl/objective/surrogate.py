"""The scalar a micro-batch is differentiated by, and its statistics, without a sync.

    logp [N] ──┬─ detached ─ loss ─ masks ─> coefficient c [N] ──┐
               └────────────────────────────────────────────────┴─> − Σ weight · c · logp

Invariants:
- The gradient is −Σ weight · c · ∇logp with c and weight detached; the scalar's value itself means nothing.
- A sequence is whole within a micro-batch, so what is said of a rollout (gspo's s, the sequence mask) is local to the
  call, and the sum over micro-batches does not depend on how the sequences are split.
- Ratios and masks are computed in float64 (some thousand numbers; the head beside it works on billions), so that a
  token at a bound falls on the same side whatever the order of a sum, and k3 of a small mismatch is not rounding noise.
- Nothing leaves the device: statistics are sums, added over micro-batches and ranks, and read once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palingenesis.rl.objective.losses import Loss, log_ratio

STATISTICS = ("tokens", "rollouts", "abs_ratio_dev", "mismatch_k3", "clipped", "seq_masked", "entropy")


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """What one micro-batch gives.

    Attributes:
        loss: the scalar to call backward on.
        sums: float64 [7], the sums STATISTICS names; added over micro-batches, `policy_metrics` reads them.
        seq_masked: bool [S], the rollouts the sequence mask dropped (for the rollout dump).
    """

    loss: Tensor
    sums: Tensor
    seq_masked: Tensor


def surrogate(
    logp: Tensor,
    mu: Tensor,
    sequence: Tensor,
    entropy: Tensor,
    *,
    advantage: Tensor,
    weight: Tensor,
    dropped: Tensor,
    loss: Loss,
    seq_mask: float,
) -> Surrogate:
    """The loss of whole sequences: N sampled tokens of S rollouts, all tensors on one device.

    Args:
        logp: [N], requires grad: the policy's log-probs at the sampling temperature.
        mu: [N], the sampler's.
        sequence: int64 [N], the rollout (0 to S − 1) of each token, in any order.
        entropy: [N], for the statistics.
        advantage, weight, dropped: [S], from `sequence_terms`.
        seq_mask: a rollout whose mean |r − 1| exceeds it is dropped; 0 is off; losses of level `sequence` have none.
    """
    tokens = _per_rollout(torch.ones_like(sequence, dtype=torch.float64), sequence, advantage)
    current, sampler, advantage = logp.detach().double(), mu.double(), advantage.double()
    log_r = log_ratio(current, sampler)
    deviation = log_r.expm1().abs()

    coefficient, clipped = _coefficients(loss, current, sampler, advantage, sequence, tokens)
    seq_masked = torch.zeros_like(dropped)
    if seq_mask > 0 and loss.level == "token":
        seq_masked = _per_rollout(deviation, sequence, advantage) > seq_mask * tokens
    trained = torch.where(seq_masked | dropped, 0.0, weight.double())
    factor = (coefficient * trained[sequence]).to(logp.dtype)

    sums = torch.stack(
        [
            tokens.sum(),
            torch.ones_like(tokens).sum(),
            deviation.sum(),
            (log_r.expm1() - log_r).sum(),
            clipped.double().sum(),
            seq_masked.double().sum(),
            entropy.detach().double().sum(),
        ]
    )
    # A token without a coefficient must not turn 0 · (−inf) into NaN.
    value = -(factor * logp.masked_fill(factor == 0, 0.0)).sum()
    return Surrogate(loss=value, sums=sums, seq_masked=seq_masked)


def policy_metrics(sums: Tensor) -> dict[str, float]:
    """The step's `policy/*` metrics from the sums of all micro-batches and ranks; the one place that waits."""
    total = dict(zip(STATISTICS, sums.tolist(), strict=True))
    tokens, rollouts = max(total["tokens"], 1.0), max(total["rollouts"], 1.0)
    return {
        "policy/abs_ratio_dev": total["abs_ratio_dev"] / tokens,
        "policy/mismatch_k3": total["mismatch_k3"] / tokens,
        "policy/clipped": total["clipped"] / tokens,
        "policy/seq_masked": total["seq_masked"] / rollouts,
        "policy/entropy": total["entropy"] / tokens,
    }


def _coefficients(
    loss: Loss, logp: Tensor, mu: Tensor, advantage: Tensor, sequence: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss's answer, one entry a token: asked for by token, or by rollout and spread over its tokens."""
    if loss.level == "token":
        return loss(logp, mu, advantage[sequence])
    length = tokens.clamp_min(1)
    mean_logp = _per_rollout(logp, sequence, advantage) / length
    mean_mu = _per_rollout(mu, sequence, advantage) / length
    coefficient, clipped = loss(mean_logp, mean_mu, advantage)
    return coefficient[sequence], clipped[sequence]


def _per_rollout(values: Tensor, sequence: Tensor, like: Tensor) -> Tensor:
    """The sum of `values` [N] over each rollout's tokens, float64, of the shape of `like` [S]."""
    return torch.zeros_like(like, dtype=torch.float64).index_add(0, sequence, values)
