"""ScoredBatch to training records, and the soft punishment of long answers."""

from __future__ import annotations

import time

import pytest
import torch

from palingenesis.rl.errors import EngineError
from palingenesis.rl.objective import train_sequences
from palingenesis.rl.rollout.overlong import overlong_penalty
from palingenesis.rl.types import Finish
from tests.unit.objective_batches import batch_of, rollout_of


def test_two_turns_become_one_sequence() -> None:
    rollout = rollout_of(
        [((4, 5), (-0.5, -1.5)), ((6,), (-2.5,))], 0.75, index=3, finish=Finish.LENGTH, prompt=(1, 2, 3)
    )
    other = rollout_of([((9,), (-0.1,))], 0.0, index=1)
    sequence, second = train_sequences(batch_of([[rollout, other]]))
    assert sequence.input_ids.tolist() == [1, 2, 3, 4, 5, 7, 6]
    assert sequence.sampled.tolist() == [False, False, False, True, True, False, True]
    assert sequence.sampler_logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, -2.5]
    assert (sequence.input_ids.dtype, sequence.sampler_logprobs.dtype) == (torch.int64, torch.float32)
    assert (sequence.group, sequence.rollout, sequence.reward) == (0, 3, 0.75)
    assert (sequence.sampled_tokens, sequence.total_tokens, sequence.truncated) == (3, 7, True)
    assert (second.rollout, second.truncated) == (1, False)


def test_skipped_rollouts_and_lone_ones_make_no_sequence() -> None:
    def group(*rewards: float | None) -> list:
        return [rollout_of([((4,), (-0.5,))], reward, index) for index, reward in enumerate(rewards)]

    made = train_sequences(batch_of([group(1.0, None, 0.0), group(None, 1.0), group(None, None), group(0.0, 1.0)]))
    assert [(s.group, s.rollout) for s in made] == [(0, 0), (0, 2), (3, 0), (3, 1)]


def test_a_rollout_that_sampled_nothing_keeps_its_place() -> None:
    made = train_sequences(batch_of([[rollout_of([], 0.0, 0), rollout_of([((4,), (-1.0,))], 1.0, 1)]]))
    assert [s.sampled_tokens for s in made] == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_a_log_prob_that_is_not_finite_is_the_engines_fault(bad: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        train_sequences(batch_of([[rollout_of([((4,), (bad,))], 1.0, i) for i in range(2)]]))


def test_a_large_batch_takes_moments() -> None:
    turn = (tuple(range(1000)), tuple(-0.001 * i for i in range(1000)))
    batch = batch_of([[rollout_of([turn], float(i), i) for i in range(8)] for _ in range(64)])
    start = time.perf_counter()
    made = train_sequences(batch)
    assert len(made) == 512
    assert time.perf_counter() - start < 3  # about 0.1 s; a loop over tokens takes longer than this


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (80, 0), (81, -0.1), (90, -1.0), (99, -1.9), (100, -2.0), (130, -2.0)]
)
def test_the_overlong_penalty_is_a_slope(length: int, expected: float) -> None:
    assert overlong_penalty(length, 100, 20, 2.0) == pytest.approx(expected)
    assert overlong_penalty(length, 100, 0, 2.0) == 0.0
