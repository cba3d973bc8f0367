"""Losses as functions of ratio and advantage, the surrogate's masks and statistics, and extreme inputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palingenesis.rl.config import LossConfig
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.objective import LOSSES, STATISTICS, Surrogate, build_loss, policy_metrics, surrogate
from palingenesis.rl.objective.losses import Loss
from tests.unit.objective_batches import options

NAMES = tuple(LOSSES)


def answer(name: str, r: float, advantage: float, **changes: float) -> tuple[float, bool]:
    """Coefficient and clipped of one unit."""
    loss = build_loss(options(type=name, **changes))
    one = torch.tensor([math.log(r) - 1.0, -1.0, advantage], dtype=torch.float64)
    coefficient, clipped = loss(one[:1], one[1:2], one[2:])
    return float(coefficient), bool(clipped)


@pytest.mark.parametrize(
    ("name", "r", "advantage", "coefficient", "clipped"),
    [
        ("masked_is", 1.27, 2.0, 2.54, False),
        ("masked_is", 1.29, 2.0, 0.0, True),  # above 1 + eps_high, pushed further up
        ("masked_is", 1.29, -2.0, -2.58, False),  # above, pushed back
        ("masked_is", 0.81, -2.0, -1.62, False),
        ("masked_is", 0.79, -2.0, 0.0, True),  # below 1 − eps_low, pushed further down
        ("masked_is", 0.79, 2.0, 1.58, False),
        ("masked_is", 9.0, -2.0, -10.0, True),  # capped at is_cap 5
        ("masked_is", 9.0, 0.0, 0.0, True),
        ("cispo", 1.29, 2.0, 2.58, False),
        ("cispo", 0.1, -2.0, -0.2, False),
        ("cispo", 9.0, 2.0, 10.0, True),
        ("icepop", 0.51, 2.0, 1.02, False),
        ("icepop", 0.49, 2.0, 0.0, True),
        ("icepop", 4.9, -2.0, -9.8, False),
        ("icepop", 5.1, -2.0, 0.0, True),
        ("gspo", 1.003, 2.0, 2.006, False),
        ("gspo", 1.005, 2.0, 0.0, True),
        ("gspo", 1.005, -2.0, -2.01, False),
        ("gspo", 0.995, -2.0, 0.0, True),
        ("gspo", 0.995, 2.0, 1.99, False),
    ],
)
def test_coefficients_by_hand(name: str, r: float, advantage: float, coefficient: float, clipped: bool) -> None:
    assert answer(name, r, advantage) == (pytest.approx(coefficient), clipped)


ratios = st.floats(0.05, 8.0)
signed = st.floats(-3.0, 3.0)


@given(ratios, signed)
def test_masked_is_is_cispo_where_it_clips_nothing(r: float, advantage: float) -> None:
    coefficient, clipped = answer("masked_is", r, advantage)
    if not clipped:
        assert coefficient == answer("cispo", r, advantage)[0]


@given(st.sampled_from(NAMES), signed)
def test_on_policy_every_coefficient_is_the_advantage(name: str, advantage: float) -> None:
    assert answer(name, 1.0, advantage) == (pytest.approx(advantage), False)


@given(ratios, signed)
def test_gspo_of_one_token_is_masked_is_with_its_bounds(r: float, advantage: float) -> None:
    """A rollout of one token has s = r; GSPO is then PPO's clip with symmetric bounds and no cap."""
    alike = answer("masked_is", r, advantage, eps_low=4e-3, eps_high=4e-3, is_cap=1e9)
    assert answer("gspo", r, advantage) == alike


def step(
    name: str,
    log_ratios: list[list[float]],
    advantage: list[float] | None = None,
    dropped: list[bool] | None = None,
    dtype: torch.dtype = torch.float64,
    mu: float = -1.0,
    **changes: float,
) -> tuple[Surrogate, Tensor]:
    """The surrogate of rollouts given by their log-ratios (weight 1 a token), and the gradient in logp."""
    config = options(type=name, **changes)
    flat = [x for values in log_ratios for x in values]
    logp = torch.tensor([mu + x for x in flat], dtype=dtype, requires_grad=True)
    count = len(log_ratios)
    result = surrogate(
        logp,
        torch.full((len(flat),), mu, dtype=dtype),
        torch.arange(count).repeat_interleave(torch.tensor([len(values) for values in log_ratios])),
        torch.full((len(flat),), 0.5, dtype=dtype),
        advantage=torch.tensor(advantage or [1.0] * count, dtype=torch.float64),
        weight=torch.ones(count, dtype=torch.float64),
        dropped=torch.tensor(dropped or [False] * count),
        loss=build_loss(config),
        seq_mask=config.seq_mask,
    )
    result.loss.backward()
    assert logp.grad is not None
    return result, logp.grad


def test_the_sequence_mask_drops_a_drifting_rollout() -> None:
    far, near = [0.3, 0.0], [0.05, -0.05]  # mean |r − 1|: 0.175, 0.05
    result, gradient = step("cispo", [far, near])
    assert result.seq_masked.tolist() == [True, False]
    assert gradient[:2].tolist() == [0, 0]
    assert gradient[2:].tolist() == pytest.approx([-math.exp(0.05), -math.exp(-0.05)])
    assert policy_metrics(result.sums)["policy/seq_masked"] == 0.5
    off, gradient = step("cispo", [far, near], seq_mask=0.0)
    assert off.seq_masked.tolist() == [False, False]
    assert gradient[0] == pytest.approx(-math.exp(0.3))


def test_gspo_has_no_sequence_mask_and_one_ratio_a_rollout() -> None:
    result, gradient = step("gspo", [[0.8, -0.8], [0.003, 0.0]])
    assert result.seq_masked.tolist() == [False, False]
    assert gradient.tolist() == pytest.approx([-1.0, -1.0, -math.exp(0.0015), -math.exp(0.0015)])


def test_a_dropped_rollout_has_no_gradient_but_is_counted() -> None:
    result, gradient = step("masked_is", [[0.01], [0.02]], dropped=[True, False])
    assert gradient[0] == 0
    assert gradient[1] != 0
    sums = dict(zip(STATISTICS, result.sums.tolist(), strict=True))
    assert (sums["tokens"], sums["rollouts"], sums["seq_masked"]) == (2, 2, 0)


def test_statistics_by_hand() -> None:
    result, _ = step("masked_is", [[0.0, 0.5], [-0.5]], advantage=[1.0, -1.0])
    metrics = policy_metrics(result.sums)
    up, down = math.exp(0.5) - 1, 1 - math.exp(-0.5)
    assert metrics == {
        "policy/abs_ratio_dev": pytest.approx((up + down) / 3),
        "policy/mismatch_k3": pytest.approx((up - 0.5 + 0.5 - down) / 3),
        "policy/clipped": pytest.approx(2 / 3),
        "policy/seq_masked": 1.0,
        "policy/entropy": 0.5,
    }
    assert not result.sums.requires_grad
    assert not result.seq_masked.requires_grad


def test_k3_of_a_small_mismatch_is_not_rounding_noise() -> None:
    """In float32 r − 1 − log r of 1e-4 is 0 or 6e-8; the truth is 5e-9."""
    result, _ = step("masked_is", [[1e-4]], mu=0.0, dtype=torch.float32)
    assert policy_metrics(result.sums)["policy/mismatch_k3"] == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -20.0, 89.0, 1e4, -math.inf, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_give_finite_gradients(
    name: str, log_ratio: float, advantage: float, dtype: torch.dtype
) -> None:
    for seq_mask in (0.0, 0.1):
        result, gradient = step(name, [[log_ratio, 0.01]], [advantage], dtype=dtype, seq_mask=seq_mask)
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(result.sums).all()
        assert not torch.isnan(result.loss)


def test_nan_is_not_hidden() -> None:
    """A policy that computes NaN must not look like one with nothing to learn."""
    result, _ = step("cispo", [[math.nan, 0.01]], seq_mask=0.0)
    assert torch.isnan(result.loss)
    assert torch.isnan(result.sums).any()


def test_no_tokens_still_have_a_gradient() -> None:
    """A rank that ran out of micro-batches takes part in the collectives with nothing."""
    result, gradient = step("masked_is", [[]])
    assert gradient.shape == (0,)
    assert policy_metrics(result.sums)["policy/abs_ratio_dev"] == 0


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(NAMES),
    st.lists(st.lists(st.floats(-0.6, 0.6), min_size=1, max_size=4), min_size=2, max_size=5),
    st.data(),
)
def test_rollouts_do_not_see_each_other(name: str, log_ratios: list[list[float]], data: st.DataObject) -> None:
    advantage = data.draw(st.lists(st.floats(-2, 2), min_size=len(log_ratios), max_size=len(log_ratios)))
    whole, gradient = step(name, log_ratios, advantage)
    parts = [step(name, [values], [a]) for values, a in zip(log_ratios, advantage, strict=True)]
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(sum(r.sums for r, _ in parts), whole.sums, rtol=1e-12, atol=1e-12)


def test_a_users_loss_is_one_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_losses.py"
    file.write_text(
        "import torch\n"
        "class Plain:\n"
        "    level = 'token'\n"
        "    def __init__(self, options):\n"
        "        pass\n"
        "    def __call__(self, logp, mu, advantage):\n"
        "        return advantage, torch.zeros_like(advantage, dtype=torch.bool)\n"
    )
    loss: Loss = build_loss(options().model_copy(update={"type": f"{file}:Plain"}))
    assert loss.level == "token"
    with pytest.raises(ConfigError, match=r"loss\.type.*did you mean 'gspo'"):
        build_loss(options().model_copy(update={"type": "gspoo"}))


def test_a_loss_of_the_users_own_is_one_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my_losses.py"
    file.write_text(
        "import torch\n"
        "class Reinforce:\n"
        "    level = 'token'\n"
        "    def __init__(self, options): self.cap = options.is_cap\n"
        "    def __call__(self, logp, mu, advantage):\n"
        "        return advantage * self.cap, torch.zeros_like(advantage, dtype=torch.bool)\n",
        encoding="utf-8",
    )
    loss = build_loss(LossConfig(type=f"{file}:Reinforce", is_cap=2.0))
    coefficient, clipped = loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))
    assert coefficient.tolist() == [2.0, -2.0]
    assert not clipped.any()
