"""The objective as the formulas say it, from whole logits in float64: the ground truth of the tests.

    ScoredBatch, logits of every scored rollout ─> loss (its autograd gradient is the policy gradient), terms, metrics

Written with Python loops over groups, rollouts and tokens, and shares no code with the production path. Where a formula
leaves a choice, it is made here once and named in a comment. Slow on purpose; for batches of a few hundred tokens.

The loss is −Σ weight · coefficient · logp with coefficients held fixed, so its finite differences agree with its
gradient only while the coefficients are frozen: `Reference.frozen_loss` evaluates it so at other logits. On-policy
(r = 1) the gradient is also that of −Σ weight · A · r, the true policy gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palingenesis.rl.types import Rollout, ScoredBatch

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import LossConfig

# A rollout by (position of its group in the batch, Rollout.index).
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Term:
    """One sampled token's place in the loss: −weight · coefficient · logp."""

    rollout: Key
    position: int
    token: int
    weight: float
    coefficient: float


@dataclass(frozen=True, slots=True)
class Reference:
    """The loss, and what it was made of.

    Attributes:
        loss: float64 scalar, differentiable with respect to the logits.
        terms: one a sampled token.
        advantages: by rollout.
        metrics: `policy/*` by their logged names.
    """

    loss: Tensor
    terms: tuple[Term, ...]
    advantages: Mapping[Key, float]
    metrics: Mapping[str, float]
    temperature: float

    def frozen_loss(self, logits: Mapping[Key, Tensor]) -> Tensor:
        """The loss at other logits, with the coefficients of this one."""
        return _total(self.terms, logits, self.temperature)


def reference_objective(
    batch: ScoredBatch,
    logits: Mapping[Key, Tensor],
    options: LossConfig,
    *,
    temperature: float,
    max_completion_tokens: int,
) -> Reference:
    """The objective of a batch on one process.

    Args:
        logits: float64 [L, V] for each scored rollout: the logits its L sampled tokens were, by the policy, drawn from.
        options: the `loss` section.
        temperature: the sampling temperature.
        max_completion_tokens: the most sampled tokens a rollout may have.
    """
    rollouts = _scored_rollouts(batch)
    advantages = _advantages(rollouts, options.advantage_std)
    log_ratios = {key: _log_ratios(rollout, logits[key], temperature) for key, rollout in rollouts.items()}
    ratios = {key: [math.exp(x) for x in values] for key, values in log_ratios.items()}
    weights = _weights(rollouts, options, max_completion_tokens)

    terms: list[Term] = []
    clipped = seq_masked = 0
    for key, rollout in rollouts.items():
        coefficients, was_clipped = _coefficients(options, ratios[key], log_ratios[key], advantages[key])
        clipped += sum(was_clipped)
        if _mean_deviation(ratios[key]) > options.seq_mask > 0 and options.type != "gspo":
            seq_masked += 1
            coefficients = [0.0 for _ in coefficients]
        # "Ended by length" is any token budget: a turn's, the rollout's or the context's.
        if options.truncation == "mask" and rollout.trajectory.finish.is_truncated:
            coefficients = [0.0 for _ in coefficients]
        for position, token in enumerate(_sampled_tokens(rollout)):
            terms.append(Term(key, position, token, weights[key], coefficients[position]))

    tokens = max(len(terms), 1)
    every = [x for values in log_ratios.values() for x in values]
    metrics = {
        "policy/abs_ratio_dev": math.fsum(abs(math.exp(x) - 1) for x in every) / tokens,
        "policy/mismatch_k3": math.fsum(math.expm1(x) - x for x in every) / tokens,
        "policy/clipped": clipped / tokens,
        "policy/seq_masked": seq_masked / max(len(rollouts), 1),
        "policy/entropy": math.fsum(_entropy(row / temperature) for key in rollouts for row in logits[key]) / tokens,
    }
    return Reference(_total(terms, logits, temperature), tuple(terms), advantages, metrics, temperature)


def _scored_rollouts(batch: ScoredBatch) -> dict[Key, Rollout]:
    """Scored rollouts of the groups with at least two; what is skipped or alone is in nothing that follows."""
    found: dict[Key, Rollout] = {}
    for number, group in enumerate(batch.groups):
        scored = [rollout for rollout in group.rollouts if rollout.score.scored]
        if len(scored) < 2:
            continue
        for rollout in scored:
            found[number, rollout.index] = rollout
    return found


def _advantages(rollouts: Mapping[Key, Rollout], std: str) -> dict[Key, float]:
    """A = (R − mean of the group) / σ; 0 where σ is 0."""
    rewards = {key: _reward(rollout) for key, rollout in rollouts.items()}
    centred: dict[Key, float] = {}
    for key in rewards:
        group = [rewards[other] for other in rewards if other[0] == key[0]]
        # Rewards that are equal but for rounding are equal.
        equal = max(group) - min(group) <= 1e-12 * max(abs(reward) for reward in group)
        centred[key] = 0.0 if equal else rewards[key] - math.fsum(group) / len(group)
    advantages: dict[Key, float] = {}
    for key, value in centred.items():
        if std == "batch":
            deviation = _population_std(list(centred.values()))
        elif std == "group":
            deviation = _population_std([centred[other] for other in centred if other[0] == key[0]])
        else:
            deviation = 1.0
        advantages[key] = value / deviation if deviation > 0 else 0.0
    return advantages


def _population_std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _log_ratios(rollout: Rollout, logits: Tensor, temperature: float) -> list[float]:
    """log r = logp − mu of each sampled token, held within ±20."""
    tokens, mu = _sampled_tokens(rollout), _sampler_logprobs(rollout)
    values = []
    for position, token in enumerate(tokens):
        logp = float(_logp(logits[position].detach(), token, temperature))
        values.append(min(max(logp - mu[position], -20.0), 20.0))
    return values


def _coefficients(
    options: LossConfig, ratios: list[float], log_ratios: list[float], advantage: float
) -> tuple[list[float], list[bool]]:
    """Coefficient and clipped, one a token."""
    if options.type == "gspo":
        s = math.exp(math.fsum(log_ratios) / len(log_ratios)) if log_ratios else 1.0
        low, high = 1 - options.gspo_eps, 1 + options.gspo_eps
        flat = (advantage > 0 and s > high) or (advantage < 0 and s < low)
        return [0.0 if flat else s * advantage for _ in ratios], [flat for _ in ratios]
    answers = [_TOKEN_LOSSES[options.type](options, r, advantage) for r in ratios]
    return [coefficient for coefficient, _ in answers], [clipped for _, clipped in answers]


def _masked_is(options: LossConfig, r: float, advantage: float) -> tuple[float, bool]:
    if (advantage > 0 and r > 1 + options.eps_high) or (advantage < 0 and r < 1 - options.eps_low):
        return 0.0, True
    return min(r, options.is_cap) * advantage, r > options.is_cap


def _cispo(options: LossConfig, r: float, advantage: float) -> tuple[float, bool]:
    return min(r, options.is_cap) * advantage, r > options.is_cap


def _icepop(options: LossConfig, r: float, advantage: float) -> tuple[float, bool]:
    if options.icepop_low <= r <= options.icepop_high:
        return r * advantage, False
    return 0.0, True


_TOKEN_LOSSES: Mapping[str, Callable[[LossConfig, float, float], tuple[float, bool]]] = {
    "masked_is": _masked_is,
    "cispo": _cispo,
    "icepop": _icepop,
}


def _weights(rollouts: Mapping[Key, Rollout], options: LossConfig, max_completion_tokens: int) -> dict[Key, float]:
    """What each token of a rollout weighs. Masked and clipped tokens count in every denominator."""
    lengths = {key: len(_sampled_tokens(rollout)) for key, rollout in rollouts.items()}
    groups = len({key[0] for key in rollouts})
    weights: dict[Key, float] = {}
    for key, length in lengths.items():
        group = [lengths[other] for other in lengths if other[0] == key[0]]
        if options.type == "gspo":
            # A rollout weighs once; a mean over "what is summed" is a mean over rollouts.
            share = 1 / (groups * len(group)) if options.aggregation == "prompt" else 1 / len(rollouts)
            weights[key] = share / max(length, 1)
        elif options.aggregation == "prompt":
            weights[key] = 1 / (groups * max(sum(group), 1))
        elif options.aggregation == "token":
            weights[key] = 1 / max(sum(lengths.values()), 1)
        else:
            weights[key] = 1 / (len(rollouts) * max_completion_tokens)
    return weights


def _total(terms: tuple[Term, ...] | list[Term], logits: Mapping[Key, Tensor], temperature: float) -> Tensor:
    """−Σ weight · coefficient · logp, over the tokens that have a coefficient."""
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        if term.coefficient != 0:
            logp = _logp(logits[term.rollout][term.position], term.token, temperature)
            total = total - term.weight * term.coefficient * logp
    return total


def _logp(logits: Tensor, token: int, temperature: float) -> Tensor:
    scaled = logits / temperature
    return scaled[token] - torch.logsumexp(scaled, dim=0)


def _entropy(logits: Tensor) -> float:
    p = torch.softmax(logits.detach(), dim=0)
    return -math.fsum(float(q) * math.log(float(q)) for q in p if q > 0)


def _mean_deviation(ratios: list[float]) -> float:
    return math.fsum(abs(r - 1) for r in ratios) / len(ratios) if ratios else 0.0


def _reward(rollout: Rollout) -> float:
    assert rollout.score.reward is not None
    return rollout.score.reward


def _sampled_tokens(rollout: Rollout) -> list[int]:
    return [token for segment in rollout.trajectory.segments if segment.sampled for token in segment.token_ids]


def _sampler_logprobs(rollout: Rollout) -> list[float]:
    return [value for segment in rollout.trajectory.segments if segment.sampled for value in segment.logprobs]
