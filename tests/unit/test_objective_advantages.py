"""Advantages and weights: worked numbers, the sum over ranks, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palingenesis.rl.objective import sequence_terms, train_sequences
from palingenesis.rl.objective.advantages import batch_moments, centre, scale
from palingenesis.rl.objective.aggregate import batch_totals, token_weights
from palingenesis.rl.types import Finish
from tests.unit.objective_batches import batch_of, options, rollout_of

SCALINGS = ("batch", "group", "none")
LENGTHS, GROUP = torch.tensor([2, 4, 3, 1, 5]), torch.tensor([0, 0, 7, 7, 7])


def advantages(rewards: list[list[float]], std: str) -> list[list[float]]:
    group = torch.tensor([g for g, values in enumerate(rewards) for _ in values])
    centred = centre(torch.tensor([r for values in rewards for r in values], dtype=torch.float64), group)
    flat = scale(centred, group, std, batch_moments(centred)).tolist()
    return [[flat.pop(0) for _ in values] for values in rewards]


def test_worked_numbers() -> None:
    rewards = [[1.0, 0.0], [3.0, 1.0, 2.0]]  # centred: ±0.5; 1, −1, 0
    assert advantages(rewards, "none") == [[0.5, -0.5], [1.0, -1.0, 0.0]]
    assert advantages(rewards, "group")[0] == pytest.approx([1, -1])
    assert advantages(rewards, "group")[1] == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0])
    std = math.sqrt((0.25 + 0.25 + 1 + 1) / 5)
    assert advantages(rewards, "batch")[1] == pytest.approx([1 / std, -1 / std, 0])


@pytest.mark.parametrize("std", SCALINGS)
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, -1e9, 0.0])
def test_equal_rewards_have_no_advantage(std: str, reward: float) -> None:
    """The mean of three times 0.1 is not 0.1 in binary; its rounding error must not be scaled up to 1."""
    assert advantages([[reward] * 3, [reward] * 7], std) == [[0.0] * 3, [0.0] * 7]
    noise = [0.1 + 0.2, 0.3, 0.3]
    assert advantages([noise], std) == [[0.0] * 3]


def test_an_empty_rank_has_no_advantages() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    centred = centre(torch.zeros(0), none)
    assert scale(centred, none, "batch", torch.tensor([4.0, 2.0])).shape == (0,)
    assert scale(centred, none, "group", torch.tensor([4.0, 2.0])).shape == (0,)
    assert batch_moments(centred).tolist() == [0, 0]
    assert batch_totals(none, none).tolist() == [0, 0, 0]
    for aggregation in ("prompt", "token", "constant"):
        assert token_weights(none, none, aggregation, "token", 9, torch.tensor([1.0, 2.0, 3.0])).shape == (0,)


reward_groups = st.lists(
    st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=2, max_size=5), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=60)
@given(reward_groups, st.sampled_from(SCALINGS))
def test_advantages_sum_to_zero_in_each_group(rewards: list[list[float]], std: str) -> None:
    for values in advantages(rewards, std):
        assert sum(values) == pytest.approx(0, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(reward_groups, st.sampled_from(("batch", "group")), st.floats(1e-3, 1e3), st.integers(-4, 4))
def test_a_std_takes_the_scale_and_the_offset_of_rewards_away(
    rewards: list[list[float]], std: str, factor: float, offset: int
) -> None:
    moved = [[factor * (r + offset) for r in values] for values in rewards]
    for a, b in zip(advantages(rewards, std), advantages(moved, std), strict=True):
        assert a == pytest.approx(b, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(reward_groups)
def test_the_batch_std_has_unit_variance(rewards: list[list[float]]) -> None:
    flat = [a for values in advantages(rewards, "batch") for a in values]
    assert sum(a * a for a in flat) / len(flat) == pytest.approx(1 if any(flat) else 0)


@pytest.mark.parametrize(
    ("aggregation", "level", "expected"),
    [
        ("prompt", "token", [1 / 12, 1 / 12, 1 / 18, 1 / 18, 1 / 18]),
        ("token", "token", [1 / 15] * 5),
        ("constant", "token", [1 / 50] * 5),
        ("prompt", "sequence", [1 / 8, 1 / 16, 1 / 18, 1 / 6, 1 / 30]),
        ("token", "sequence", [1 / 10, 1 / 20, 1 / 15, 1 / 5, 1 / 25]),
        ("constant", "sequence", [1 / 10, 1 / 20, 1 / 15, 1 / 5, 1 / 25]),
    ],
)
def test_weights_by_hand(aggregation: str, level: str, expected: list[float]) -> None:
    weights = token_weights(LENGTHS, GROUP, aggregation, level, 10, batch_totals(LENGTHS, GROUP))  # type: ignore[arg-type]
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["prompt", "token"])
def test_means_weigh_one_in_all(aggregation: str, level: str) -> None:
    weights = token_weights(LENGTHS, GROUP, aggregation, level, 10, batch_totals(LENGTHS, GROUP))  # type: ignore[arg-type]
    assert float((weights * LENGTHS).sum()) == pytest.approx(1)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["prompt", "token", "constant"])
@pytest.mark.parametrize("std", SCALINGS)
def test_two_ranks_agree_with_one(std: str, aggregation: str, level: str) -> None:
    groups = [
        [rollout_of([((4,) * (1 + i + g), (-1.0,) * (1 + i + g))], float(i * g - i % 2), i) for i in range(3)]
        for g in range(4)
    ]
    config = options(advantage_std=std, aggregation=aggregation)
    whole = sequence_terms(train_sequences(batch_of(groups)), config, level, 9)  # type: ignore[arg-type]
    ranks = [train_sequences(batch_of(groups[:1])), train_sequences(batch_of(groups[1:])), []]

    asked: list[Tensor] = []
    for rank in ranks:
        sequence_terms(rank, config, level, 9, lambda x: asked.append(x) or x)  # type: ignore[arg-type,func-returns-value]
    total = torch.stack(asked).sum(0)
    parts = [sequence_terms(rank, config, level, 9, lambda _: total) for rank in ranks]  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat([p.advantage for p in parts]), whole.advantage)
    torch.testing.assert_close(torch.cat([p.weight for p in parts]), whole.weight)


def test_a_masked_rollout_stays_in_mean_std_and_denominators() -> None:
    group = [
        rollout_of([((4, 4), (-1.0, -1.0))], 1.0, 0),
        rollout_of([((4,) * 6, (-1.0,) * 6)], 0.0, 1, Finish.LENGTH),
        rollout_of([((4,), (-1.0,))], 0.0, 2, Finish.CONTEXT),
    ]
    sequences = train_sequences(batch_of([group]))
    scored, masked = (sequence_terms(sequences, options(truncation=t), "token", 9) for t in ("score", "mask"))
    assert scored.dropped.tolist() == [False, False, False]
    assert masked.dropped.tolist() == [False, True, True]
    assert masked.advantage.tolist() == scored.advantage.tolist()
    assert masked.weight.tolist() == scored.weight.tolist()
