"""Rollouts that go on while the trainer trains (`max_staleness` >= 1), over the scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.data import Sampler
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.errors import EngineError, RewardError
from palingenesis.rl.observe.metrics import batch_metrics
from palingenesis.rl.rollout.collect import Collector
from palingenesis.rl.types import Group, SamplingParams, ScoredBatch
from tests.unit.test_rollout import collector, rows, script

Prompt = tuple[int, ...]


def by_prompt(**seconds: float) -> Callable[[Prompt, SamplingParams], float]:
    """A delay for prompts that hold a word."""

    def delay(prompt: Prompt, params: SamplingParams) -> float:
        text = "".join(map(chr, prompt))
        return next((s for word, s in seconds.items() if word in text), 0.001)

    return delay


async def train(made: Collector, steps: int, seconds: float = 0.0, first: int = 1) -> list[ScoredBatch]:
    """The trainer's side: collect, compute for a while, publish."""
    batches = []
    for step in range(first, first + steps):
        batches.append(await made.collect(step))
        await asyncio.sleep(seconds)
        made.episodes.engine.version = step  # type: ignore[attr-defined]
        made.published(step)
    return batches


def run(made: Collector, steps: int, seconds: float = 0.0) -> list[ScoredBatch]:
    async def work() -> list[ScoredBatch]:
        batches = await train(made, steps, seconds)
        made.close()
        return batches

    return asyncio.run(work())


def groups_of(batch: ScoredBatch) -> tuple[Group, ...]:
    return (*batch.groups, *batch.set_aside)


@pytest.mark.parametrize(("staleness", "goes_on"), [(0, False), (1, True)])
def test_rollouts_go_on_while_the_trainer_trains(staleness: int, goes_on: bool) -> None:
    engine = ScriptedEngine(script, delay=0.02)
    scored: list[str] = []

    def watched(completion: str) -> float:
        scored.append(completion)
        return float(int(completion) % 2)

    made = collector(["mixed"] * 8, rewards=[watched], engine=engine, max_staleness=staleness)

    async def work() -> None:
        await made.collect(1)
        before = engine._generated, len(scored)
        await asyncio.sleep(0.2)
        after = engine._generated, len(scored)
        assert (after > before) is goes_on
        if goes_on:
            assert after[1] > before[1], "rewards too"
        made.close()

    asyncio.run(work())


def watch_launches(made: Collector) -> list[float]:
    """Expected informative groups in no batch yet, after every top-up."""
    seen: list[float] = []
    original = made._top_up

    def watched(collecting: bool = False) -> None:
        original(collecting)
        seen.append(len(made._ready()) + len(made._flying) * (1.0 - min(made._rate, 0.9)))

    made._top_up = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_more_is_launched_than_staleness_and_the_run_allow(staleness: int) -> None:
    made = collector(["mixed", "same"] * 20, max_staleness=staleness, steps=6, engine=ScriptedEngine(script, 0.002))
    seen = watch_launches(made)
    run(made, 6, 0.003)
    launched_by_a_low_rate = 2  # what was launched before the rate was learned may all turn out informative
    assert max(seen) < (1 + staleness) * 4 + 1 + launched_by_a_low_rate

    exact = collector(["mixed"] * 9, rewards=[_seeded], max_staleness=staleness, steps=6)
    batches = run(exact, 6)
    assert [len(batch.groups) for batch in batches] == [4] * 6
    assert exact._number == 24, "nothing is launched that no step needs"


def _seeded(completion_ids: list[int]) -> float:
    """The digit: eight equal ones, a group without a gradient, come once in ten million."""
    return float(completion_ids[0])


def test_a_due_group_is_waited_for_and_never_dropped() -> None:
    delay = by_prompt(slow=0.3)
    made = collector(["mixed"] * 7 + ["mixed slow"], engine=ScriptedEngine(script, delay), max_staleness=1)
    first, second, *_ = run(made, 3, 0.2)
    assert all("slow" not in group.row.last_user_text for group in first.groups)
    (late,) = [group for group in second.groups if "slow" in group.row.last_user_text]
    assert second.metrics["groups/continued"] >= 1
    assert second.metrics["staleness/max"] == 1
    versions = {v for r in late.rollouts for s in r.trajectory.segments for v in s.versions}
    assert versions == {0, 1}, "one rollout on two versions of the weights"


def test_a_batch_grows_to_hold_every_due_group() -> None:
    made = collector(["mixed"] * 9, rewards=[_seeded], max_staleness=1)
    made._rate = 0.75  # expects four times as many zero-variance groups as there are
    batches = run(made, 3)
    assert len(batches[0].groups) == 4
    launched_at_first = 2 * 12  # max_refill for each of two steps; 2 * 4 / 0.25 are asked for
    assert len(batches[1].groups) == launched_at_first - 4
    assert all(batch.metrics["staleness/max"] <= 1 for batch in batches)
    assert all(not group.informative for batch in batches for group in batch.set_aside)


def test_staleness_0_sets_its_surplus_aside() -> None:
    made = collector(["mixed"] * 9, rewards=[_seeded])
    made._rate = 0.5
    (batch,) = run(made, 1)
    assert (len(batch.groups), len(batch.set_aside)) == (4, 4)
    assert batch.metrics["groups/continued"] == batch.metrics["staleness/mean"] == batch.metrics["staleness/max"] == 0


def test_a_step_takes_what_there_is_when_refills_are_spent() -> None:
    made = collector(["same"] * 9 + ["mixed"], max_refill=0.5, max_staleness=1, max_skipped=1.0)
    batches = run(made, 5)
    launched = [len(groups_of(batch)) for batch in batches]
    assert sum(launched) <= (1 + 1) * 6 + 4 * 6
    assert any(len(batch.groups) < 4 for batch in batches)


def test_a_step_whose_refills_are_spent_does_not_drain_the_engine() -> None:
    engine = ScriptedEngine(script, by_prompt(slow=0.3))
    made = collector(["mixed"] * 3 + ["same"] + ["mixed slow"] * 4, max_refill=0, max_staleness=1, engine=engine)

    async def work() -> ScoredBatch:
        made.sampler._order = type(made.sampler._order)("L", range(8))
        batch = await made.collect(1)
        assert {4, 5, 6, 7} <= {launch.number for launch in made._flying.values()}, "the second step's go on"
        made.close()
        return batch

    batch = asyncio.run(work())
    assert (len(batch.groups), len(batch.set_aside)) == (3, 1)


def test_without_an_informative_group_batches_are_empty() -> None:
    batches = run(collector(["same"] * 5, max_refill=0.5, max_staleness=1), 3)
    assert all(batch.groups == () for batch in batches)
    assert all(batch_metrics(batch)["groups/zero_variance"] == 1.0 for batch in batches)


def test_a_failure_in_the_background_is_one_error_of_the_next_collect() -> None:
    calls: list[str] = []

    def fails_later(completion: str) -> float:
        calls.append(completion)
        if len(calls) > 8 * 8:
            raise ZeroDivisionError("mine")
        return float(int(completion) % 2)

    made = collector(["mixed"] * 9, rewards=[fails_later], engine=ScriptedEngine(script, 0.01), max_staleness=2)

    async def work() -> None:
        await made.collect(1)
        await asyncio.sleep(0.2)
        assert not made._flying, "the others were cancelled, and none was launched"
        with pytest.raises(RewardError, match=r"fails_later.*ZeroDivisionError: mine"):
            await made.collect(2)

    asyncio.run(work())


def test_an_engine_that_fails_while_another_group_hangs() -> None:
    class Fails(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
            done = await super().generate(prompt_ids, params)
            if "bad" in "".join(map(chr, prompt_ids)):
                raise EngineError("out of memory")
            return done

    engine = Fails(script, by_prompt(hangs=float("inf")))
    made = collector(["mixed bad", "mixed hangs"], engine=engine, max_staleness=1)
    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(asyncio.wait_for(made.collect(1), 5))


def test_close_ends_what_is_in_flight() -> None:
    made = collector(["mixed"], engine=ScriptedEngine(script, float("inf")), max_staleness=1)

    async def work() -> None:
        waits = asyncio.ensure_future(made.collect(1))
        await asyncio.sleep(0.05)
        assert len(made._flying) == 8
        waits.cancel()
        await asyncio.sleep(0.05)
        assert len(made._flying) == 8, "an interrupted collect cancels nothing"
        made.close()
        await asyncio.sleep(0.05)
        assert not made._flying

    asyncio.run(work())


def test_prompts_under_way_are_drawn_again_first() -> None:
    texts = [f"mixed {n}" for n in range(30)]
    made = collector(texts, engine=ScriptedEngine(script, by_prompt(mixed=0.01)), max_staleness=2)

    async def work() -> tuple[dict[str, Any], list[str], list[str]]:
        batches = await train(made, 2, 0.005)
        state = json.loads(json.dumps(made.state_dict()))
        had = [group.row.id for batch in batches for group in groups_of(batch)]
        order = [row.id for row in Sampler(rows(*texts), seed=0).draw(30)]
        made.close()
        return state, had, order

    state, had, order = asyncio.run(work())
    assert state["sampler"]["again"], "some were under way"
    resumed = collector(texts, max_staleness=2)
    resumed.load_state_dict(state)
    drawn = [row.id for row in resumed.sampler.draw(30 - len(had))]
    assert drawn == [one for one in order if one not in had], "every prompt of the epoch once, in the epoch's order"

    again = collector(texts, max_staleness=2)
    again.load_state_dict(state)
    again.episodes.engine.version = 2  # type: ignore[attr-defined]
    (batch,) = asyncio.run(train(again, 1, first=3))
    assert min(group.number for group in groups_of(batch)) >= state["number"], "no number comes twice"


def test_retired_prompts_are_not_drawn_again_after_a_resume() -> None:
    sampler = Sampler(rows("a", "b", "c"), seed=0, retire_above=0.9)
    first, second = sampler.draw(2)
    sampler.observe(first.id, 1.0)
    state = sampler.state_dict(unused=[first, second])
    again = Sampler(rows("a", "b", "c"), seed=0, retire_above=0.9)
    again.load_state_dict(state)
    assert again.draw(1)[0].id == second.id


def test_the_run_ends_when_all_prompts_are_retired_and_all_groups_are_in() -> None:
    def good(completion: str) -> float:
        return 1.0 if int(completion) else 0.9

    made = collector(
        ["mixed", "mixed slow"],
        rewards=[good],
        engine=ScriptedEngine(script, by_prompt(slow=0.05)),
        max_staleness=1,
        retire_above=0.9,
    )

    async def work() -> int:
        step = 0
        while not made.exhausted:
            step += 1
            await train(made, 1, first=step)
        return step

    assert 1 <= asyncio.run(asyncio.wait_for(work(), 5)) <= 4
    assert made.sampler.remaining == 0
    assert not made._landed


def test_an_evaluation_among_rollouts_leaves_their_usage() -> None:
    made = collector(["mixed"] * 9, engine=ScriptedEngine(script, 0.01), max_staleness=1)

    async def work() -> None:
        await train(made, 1)
        await asyncio.sleep(0.05)  # the groups of the third batch are generated
        found = await made.evaluate(rows("mixed", "same"), temperature=0.0, samples=2)
        assert [len(one) for one in found] == [2, 2]
        batch = await made.collect(2)
        assert batch.metrics["engine/prefill_tokens"] >= 4 * 8 * len("mixed")
        made.close()

    asyncio.run(work())


@settings(max_examples=40, deadline=None)
@given(
    staleness=st.integers(0, 3),
    refill=st.sampled_from([0.0, 1.0, 2.0]),
    dull=st.integers(0, 3),
    pace=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    training=st.integers(0, 5),
)
def test_no_token_is_too_old_and_no_group_is_lost(
    staleness: int, refill: float, dull: int, pace: list[int], training: int
) -> None:
    """Whatever takes how long. Times are in milliseconds."""

    def delay(prompt: Prompt, params: SamplingParams) -> float:
        return pace[params.seed % len(pace)] * 1e-3 * (4 if prompt[-1] == ord("4") else 1)

    texts = [f"mixed {n}" for n in range(5)] + ["same"] * dull
    steps = 6
    made = collector(
        texts,
        engine=ScriptedEngine(script, delay),
        max_staleness=staleness,
        max_refill=refill,
        steps=steps,
        batch_prompts=2,
        group_size=3,
    )
    finished: dict[int, Group] = {}
    original = made._group

    async def recorded(row: Any, number: int) -> Group:
        finished[number] = await original(row, number)
        return finished[number]

    made._group = recorded  # type: ignore[method-assign]
    batches = run(made, steps, training * 1e-3)
    for batch in batches:
        for group in batch.groups:
            assert group.informative
            for rollout in group.rollouts:
                oldest = min(v for s in rollout.trajectory.segments for v in s.versions)
                assert 0 <= batch.step - 1 - oldest <= staleness
        if staleness:
            assert not any(group.informative for group in batch.set_aside)
        else:
            assert len(batch.groups) <= 2
    handed = [group.number for batch in batches for group in groups_of(batch)]
    waiting = [one.launch.number for one in made._landed]
    assert len(handed) == len(set(handed))
    assert sorted([*handed, *waiting]) == sorted(finished), "each is in one batch, or waits for the next"
    assert max(batch.metrics["staleness/max"] for batch in batches) <= staleness
