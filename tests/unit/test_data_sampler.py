"""The sampler: every row once an epoch, exact continuation, retirement, and refusal of another data set's state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.data import Sampler
from palingenesis.rl.errors import CheckpointError, DataError
from palingenesis.rl.types import Message, Row


def rows_of(n: int) -> list[Row]:
    return [Row(str(i), (Message("user", f"q{i}"),), {"answer": i}) for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(0, 5), st.integers(1, 3))
def test_every_row_comes_once_an_epoch(n: int, seed: int, epochs: int) -> None:
    sampler = Sampler(rows_of(n), seed)
    for epoch in range(epochs):
        assert sorted(row.id for row in sampler.draw(n)) == sorted(map(str, range(n)))
        assert sampler.epoch == epoch


def test_orders_differ_by_seed_and_epoch_and_not_otherwise() -> None:
    first, again, other = Sampler(rows_of(50), 0), Sampler(rows_of(50), 0), Sampler(rows_of(50), 1)
    one, two = first.draw(50), first.draw(50)
    assert one == again.draw(50)
    assert one != other.draw(50)
    assert one != two


actions = st.lists(
    st.one_of(st.integers(0, 7), st.tuples(st.integers(0, 11), st.sampled_from([0.5, 1.0]))), max_size=24
)


def act(sampler: Sampler, script: list[Any]) -> list[Any]:
    seen: list[Any] = []
    for action in script:
        try:
            if isinstance(action, int):
                seen.append([row.id for row in sampler.draw(action)])
            else:
                seen.append(sampler.observe(str(action[0]), action[1]))
        except DataError:
            seen.append("all retired")
    return [*seen, sampler.epoch, sampler.retired]


@settings(max_examples=120, deadline=None)
@given(actions, actions, st.integers(0, 3))
def test_a_restored_sampler_continues_exactly(before: list[Any], after: list[Any], seed: int) -> None:
    unbroken = Sampler(rows_of(12), seed, retire_above=0.9)
    act(unbroken, before)
    state = json.loads(json.dumps(unbroken.state_dict()))
    restored = Sampler(rows_of(12), seed, retire_above=0.9)
    act(restored, after[:3])  # whatever it did before
    restored.load_state_dict(state)
    assert act(restored, after) == act(unbroken, after)


def test_a_prompt_retires_when_its_mean_reaches_the_bound() -> None:
    sampler = Sampler(rows_of(4), 0, retire_above=0.9)
    assert not sampler.observe("0", 0.89)
    assert sampler.observe("1", sum([0.9] * 8) / 8)
    assert not sampler.observe("1", 1.0)
    assert sampler.retired == 1
    assert {row.id for row in sampler.draw(30)} == {"0", "2", "3"}


def test_zero_never_retires() -> None:
    sampler = Sampler(rows_of(2), 0)
    assert not sampler.observe("0", 1.0)
    assert sampler.retired == 0


def test_copies_are_drawn_apart_and_retire_together() -> None:
    rows = rows_of(3)
    sampler = Sampler([*rows, rows[0]], 0, retire_above=1.0)
    assert sorted(row.id for row in sampler.draw(4)) == ["0", "0", "1", "2"]
    sampler.observe("0", 1.0)
    assert sorted(row.id for row in sampler.draw(2)) == ["1", "2"]


def test_all_retired_is_an_error_that_says_so() -> None:
    sampler = Sampler(rows_of(2), 0, retire_above=0.5)
    sampler.observe("0", 1.0)
    sampler.observe("1", 1.0)
    with pytest.raises(DataError, match=r"all 2 prompts are retired.*data\.retire_above \(0\.5\)"):
        sampler.draw(1)


def test_no_rows_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.dataset"):
        Sampler([], 0)


def test_an_unknown_row_is_a_defect_of_the_caller() -> None:
    with pytest.raises(ValueError, match="'9'"):
        Sampler(rows_of(2), 0, retire_above=0.5).observe("9", 1.0)


CHANGED = {
    "a row more": rows_of(6),
    "another order": rows_of(5)[::-1],
    "another answer": [*rows_of(4), replace(rows_of(5)[4], columns={"answer": 99})],
    "another prompt": [*rows_of(4), replace(rows_of(5)[4], messages=(Message("user", "?"),))],
}


@pytest.mark.parametrize("rows", CHANGED.values(), ids=CHANGED.keys())
def test_a_changed_data_set_is_refused(rows: list[Row]) -> None:
    state = Sampler(rows_of(5), 0).state_dict()
    with pytest.raises(CheckpointError, match=r"not those of the checkpoint \(5 rows then"):
        Sampler(rows, 0).load_state_dict(state)


def test_another_seed_and_a_damaged_state_are_refused() -> None:
    state = Sampler(rows_of(5), 0).state_dict()
    with pytest.raises(CheckpointError, match=r"data\.seed is 1"):
        Sampler(rows_of(5), 1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="damaged"):
        Sampler(rows_of(5), 0).load_state_dict({**state, "epoch": None})
    with pytest.raises(CheckpointError, match="damaged"):
        Sampler(rows_of(5), 0).load_state_dict({})


def test_many_rows_make_a_small_state() -> None:
    sampler = Sampler(rows_of(100_000), 0, retire_above=1.0)
    drawn = sampler.draw(1000)
    for row in drawn:
        sampler.observe(row.id, 1.0)
    state = sampler.state_dict()
    assert len(json.dumps(state)) < 20_000
    assert not {row.id for row in sampler.draw(100_000 - 1000)} & {row.id for row in drawn}
