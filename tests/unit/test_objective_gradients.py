"""The production path (head, surrogate, backward) against reference.py and against finite differences, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from palingenesis.rl.config.schema import LossConfig
from palingenesis.rl.objective.reference import Reference, reference_objective
from tests.unit.objective_batches import (
    MAX_COMPLETION,
    TEMPERATURE,
    Problem,
    gradient_of,
    options,
    problem,
    production,
)

LOSS_NAMES = ("masked_is", "cispo", "icepop", "gspo")
SCALINGS = ("batch", "group", "none")
AGGREGATIONS = ("prompt", "token", "constant")
# Narrow enough that the drift of the problem clips, caps and masks some tokens and leaves others.
BOUNDS = {"eps_low": 0.2, "eps_high": 0.28, "is_cap": 1.2, "icepop_low": 0.8, "icepop_high": 1.3, "gspo_eps": 0.01}


def reference(case: Problem, config: LossConfig) -> Reference:
    return reference_objective(
        case.batch, case.logits(), config, temperature=TEMPERATURE, max_completion_tokens=MAX_COMPLETION
    )


def reference_gradients(case: Problem, config: LossConfig) -> list[Tensor]:
    for leaf in case.leaves:
        leaf.grad = None
    reference(case, config).loss.backward()
    return [gradient_of(leaf) for leaf in case.leaves]


def differences(case: Problem, function: Callable[[], float], step: float = 1e-5) -> list[Tensor]:
    """Central differences of `function` over every entry of the head's weight and bias."""
    out = []
    for leaf in case.leaves[:2]:
        slopes = torch.zeros_like(leaf)
        with torch.no_grad():
            for at in itertools.product(*map(range, leaf.shape)):
                value = leaf[at].item()
                leaf[at] = value + step
                above = function()
                leaf[at] = value - step
                below = function()
                leaf[at] = value
                slopes[at] = (above - below) / (2 * step)
        out.append(slopes)
    return out


def close(mine: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> None:
    for a, b in zip(mine, other, strict=False):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seq_mask", [0.0, 0.1])
@pytest.mark.parametrize("truncation", ["score", "mask"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradients_equal_the_reference(
    name: str, scaling: str, aggregation: str, truncation: str, seq_mask: float
) -> None:
    config = options(
        type=name,
        advantage_std=scaling,
        aggregation=aggregation,
        truncation=truncation,
        seq_mask=seq_mask,
        **BOUNDS,
    )
    case = problem(seed=3)
    mine = production(case, config)
    truth = reference_gradients(case, config)
    assert any(gradient.abs().max() > 1e-3 for gradient in truth)
    close(mine.gradients, truth, 1e-12)
    assert mine.metrics == pytest.approx(dict(reference(case, config).metrics), abs=1e-12)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_the_problem_meets_every_branch(name: str) -> None:
    """The comparison above means little if nothing is clipped, masked and dropped in it."""
    config = options(type=name, **BOUNDS)
    result = reference(problem(seed=3), config)
    assert 0 < result.metrics["policy/clipped"] < 1
    assert (0 < result.metrics["policy/seq_masked"] < 1) is (name != "gspo")
    trained = {t.rollout for t in result.terms if t.coefficient != 0}
    assert len(trained) >= 3
    assert {key for key in result.advantages if key[0] == 3} == set()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradients_equal_the_reference_on_other_draws(name: str, seed: int) -> None:
    config = options(type=name, seq_mask=0.0, **BOUNDS)
    case = problem(seed=seed, drift=0.1 * (seed + 1))
    close(production(case, config).gradients, reference_gradients(case, config), 1e-12)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_finite_differences_with_frozen_coefficients(name: str) -> None:
    """The coefficient is detached by definition, so it is held where it was while the parameters move."""
    config = options(type=name, seq_mask=0.0, **BOUNDS)
    case = problem(seed=1)
    frozen = reference(case, config)
    slopes = differences(case, lambda: float(frozen.frozen_loss(case.logits())))
    close(slopes, production(case, config).gradients, 1e-8)


# What each loss is the derivative of, where it is differentiable: written from the papers, without detaching anything.
def ppo_clip(config: LossConfig, logp: Tensor, mu: Tensor, advantage: float) -> Tensor:
    r = torch.exp(logp - mu)
    return torch.minimum(r * advantage, r.clamp(1 - config.eps_low, 1 + config.eps_high) * advantage)


def band(config: LossConfig, logp: Tensor, mu: Tensor, advantage: float) -> Tensor:
    r = torch.exp(logp - mu)
    return torch.where((r >= config.icepop_low) & (r <= config.icepop_high), r * advantage, 0.0)


def gspo_clip(config: LossConfig, logp: Tensor, mu: Tensor, advantage: float) -> Tensor:
    s = torch.exp((logp - mu).mean())
    surrogate = torch.minimum(s * advantage, s.clamp(1 - config.gspo_eps, 1 + config.gspo_eps) * advantage)
    return surrogate.expand_as(logp)


LIVE = {"masked_is": ppo_clip, "icepop": band, "gspo": gspo_clip}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LIVE)
def test_finite_differences_of_the_published_objective(name: str, aggregation: str) -> None:
    """Nothing is frozen here: PPO's clip, IcePop's band and GSPO's clip have the gradient their losses claim."""
    config = options(type=name, seq_mask=0.0, aggregation=aggregation, **{**BOUNDS, "is_cap": 1e6})
    case = problem(seed=2)
    result = reference(case, config)
    weights = {term.rollout: term.weight for term in result.terms}
    sampled = {key: ([t.token for t in result.terms if t.rollout == key]) for key in weights}
    mu = {
        (g, r.index): torch.tensor([x for s in r.trajectory.segments for x in s.logprobs], dtype=torch.float64)
        for g, group in enumerate(case.batch.groups)
        for r in group.rollouts
    }

    def objective() -> float:
        total = 0.0
        for key, logits in case.logits().items():
            if key in weights:
                logp = (logits / TEMPERATURE).log_softmax(1)[torch.arange(len(sampled[key])), sampled[key]]
                values = LIVE[name](config, logp, mu[key], result.advantages[key])
                total -= weights[key] * float(values.sum())
        return total

    close(differences(case, objective), production(case, config).gradients, 1e-7)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_on_policy_it_is_the_policy_gradient(name: str) -> None:
    """With mu the policy's own log-probs, r = 1 and every loss is the gradient of −Σ weight · A · π/π_old."""
    config = options(type=name)
    case = problem(seed=4, drift=0.0)
    result = reference(case, config)
    start = {key: logits.detach() for key, logits in case.logits().items()}

    def logp(logits: Tensor, token: int) -> Tensor:
        return (logits / TEMPERATURE).log_softmax(0)[token]

    def objective() -> float:
        now = case.logits()
        return -sum(
            t.weight
            * result.advantages[t.rollout]
            * float(torch.exp(logp(now[t.rollout][t.position], t.token) - logp(start[t.rollout][t.position], t.token)))
            for t in result.terms
        )

    mine = production(case, config)
    close(differences(case, objective), mine.gradients, 1e-8)
    assert mine.metrics["policy/abs_ratio_dev"] < 1e-14
    assert mine.metrics["policy/clipped"] == 0


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_micro_batches_do_not_change_the_total(name: str) -> None:
    config = options(type=name, truncation="mask", **BOUNDS)
    case = problem(seed=5)
    whole = production(case, config)
    splits = [[[i] for i in range(9)], [[8, 0], [3, 2, 1], [7], [6, 5, 4]], [list(range(8, -1, -1))]]
    for micro in splits:
        parts = production(case, config, micro=micro, slice_rows=2)
        close(parts.gradients, whole.gradients, 1e-12)
        torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-12, atol=1e-12)
