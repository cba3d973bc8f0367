"""The rollout half over the scripted engine: what a step draws, replaces, skips and hands to the trainer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from palingenesis.rl.chat.template import RenderedPrompt
from palingenesis.rl.data import Sampler
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.errors import EngineError, OutageError, SkipSample
from palingenesis.rl.observe.metrics import batch_metrics, engine_metrics
from palingenesis.rl.rewards import RewardSet, bind
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.collect import Collector
from palingenesis.rl.rollout.episode import Episodes, request_seed
from palingenesis.rl.rollout.producer import Producer
from palingenesis.rl.rollout.score import Scorer
from palingenesis.rl.types import EngineUsage, Finish, Message, Row, SamplingParams

STOP = 0


class Letters:
    """A template whose tokens are code points: a prompt is its last user text."""

    def render(self, messages: Sequence[Message], tools: object = (), *, source: str = "") -> RenderedPrompt:
        text = messages[-1].content
        return RenderedPrompt(tuple(map(ord, text)), text, text.endswith("<think>\n"))

    def decode(self, ids: Sequence[int], marks: Sequence[str] = ()) -> str:
        return "".join(map(chr, ids))


def script(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """`mixed`: a digit of the seed; `same`: always x. A right answer is an even digit."""
    text = "".join(map(chr, prompt))
    return [*map(ord, str(params.seed % 10) if "mixed" in text else "x"), STOP]


def even(completion: str) -> float:
    return float(completion.isdigit() and int(completion) % 2 == 0)


def rows(*texts: str) -> list[Row]:
    return [Row(f"{n}", (Message("user", text),), {}, source=f"rows.jsonl:{n + 1}") for n, text in enumerate(texts)]


def collector(
    texts: Sequence[str],
    rewards: Sequence[Callable[..., Any]] = (even,),
    engine: Any = None,
    scorer: dict[str, Any] | None = None,
    budget: Budget | None = None,
    **options: Any,
) -> Collector:
    reward_set = RewardSet([bind(f.__name__, f) for f in rewards])
    limits = budget or Budget(8, 0, 100)
    episodes = Episodes(engine or ScriptedEngine(script), Letters(), (STOP,), limits)  # type: ignore[arg-type]
    retire = options.pop("retire_above", 0.0)
    defaults = {"batch_prompts": 4, "group_size": 8, "max_refill": 2.0, "max_skipped": 0.5, "temperature": 1.0}
    defaults |= {"max_staleness": 0, "steps": 1000}
    return Collector(
        episodes,
        Scorer(reward_set, limits.completion, **(scorer or {})),
        Sampler(rows(*texts), seed=0, retire_above=retire),
        **{**defaults, "seed": 0, **options},
    )


def collect(made: Collector, steps: int = 1) -> list[Any]:
    async def one(step: int) -> Any:
        made.episodes.engine.version = step - 1  # type: ignore[attr-defined]
        return await made.collect(step)

    async def all_steps() -> list[Any]:
        return [await one(step) for step in range(1, steps + 1)]

    return asyncio.run(all_steps())


def test_a_batch_holds_informative_groups_and_nothing_is_lost() -> None:
    (batch,) = collect(collector(["mixed"] * 3 + ["same"]))
    assert len(batch.groups) == 4
    assert all(group.informative for group in batch.groups)
    assert all(len(group.rollouts) == 8 for group in (*batch.groups, *batch.set_aside))
    numbers = [group.number for group in (*batch.groups, *batch.set_aside)]
    assert sorted(numbers) == list(range(len(numbers)))
    assert batch.set_aside, "the zero-variance groups that were replaced"


def test_refills_end_at_max_refill_and_the_step_takes_what_there_is() -> None:
    (batch,) = collect(collector(["same"] * 9 + ["mixed"], max_refill=1.5))
    assert len(batch.groups) + len(batch.set_aside) == 4 + 6
    assert 0 < len(batch.groups) < 4
    (none,) = collect(collector(["same"] * 5, max_refill=0.5))
    assert len(none.groups) == 0
    assert len(none.set_aside) == 6
    assert batch_metrics(none)["groups/zero_variance"] == 1.0


def test_the_expected_rate_launches_ahead() -> None:
    """Once half the groups carry nothing, a first round asks for about twice what it needs."""
    made = collector(["mixed", "same"] * 50, max_refill=3.0)
    rounds: list[int] = []
    original = made.sampler.draw

    def counted(count: int) -> Any:
        if count:
            rounds.append(count)
        return original(count)

    made.sampler.draw = counted  # type: ignore[method-assign]
    collect(made, steps=8)
    assert rounds[0] == 4
    assert rounds[-1] >= 6


def test_what_is_drawn_depends_on_the_state_alone() -> None:
    texts = ["mixed", "same", "mixed b", "same b", "mixed c"] * 4
    made = collector(texts)
    collect(made, steps=2)
    state = made.state_dict()
    (after,) = collect(made)
    resumed = collector(texts)
    resumed.load_state_dict(state)
    (again,) = collect(resumed)

    def drawn(batch: Any) -> list[Any]:
        rollouts = [(g.row.id, r) for g in (*batch.groups, *batch.set_aside) for r in g.rollouts]
        return [(row, r.trajectory.completion_ids, r.score) for row, r in rollouts]

    assert drawn(again) == drawn(after)


def test_skipped_rollouts_are_out_of_the_group_and_counted() -> None:
    def flaky(completion: str) -> float:
        if int(completion) < 5:
            raise SkipSample("the judge is away")
        return float(completion)

    (batch,) = collect(collector(["mixed"], rewards=[flaky], max_skipped=1.0))
    metrics = batch_metrics(batch)
    assert 0.2 < metrics["skipped"] < 0.8
    for group in batch.groups:
        assert len(group.scored_rewards) == sum(r.score.scored for r in group.rollouts)
        skipped = [r for r in group.rollouts if not r.score.scored]
        assert all(r.score.reward is None and r.score.skip_reason == "the judge is away" for r in skipped)


def test_three_batches_of_outage_stop_the_run() -> None:
    def down(completion: str) -> float:
        raise SkipSample("connection refused")

    made = collector(["mixed"], rewards=[down])
    collect(made, steps=2)
    with pytest.raises(OutageError, match=r"100%.*max_skipped is 0.5.*by down: connection refused"):
        collect(made)


def test_the_overlong_penalty_is_a_reward_of_its_own() -> None:
    def long(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        return [ord("2")] * (1 + params.seed % 8) + [STOP]

    made = collector(
        ["mixed"], engine=ScriptedEngine(long), scorer={"overlong_buffer": 4, "overlong_penalty": 0.5}, max_skipped=1.0
    )
    (batch,) = collect(made)
    for group in batch.groups:
        for rollout in group.rollouts:
            over = max(0, rollout.trajectory.sampled_tokens - 4)
            assert rollout.score.rewards["overlong"] == pytest.approx(-0.5 * over / 4)
            assert rollout.score.reward == pytest.approx(1.0 - 0.5 * over / 4)


def test_retired_prompts_are_not_drawn_again() -> None:
    def good(completion: str) -> float:
        return 1.0

    made = collector(["mixed", "same"], rewards=[good], retire_above=0.9)
    (batch,) = collect(made)
    assert made.exhausted
    assert batch.groups == ()
    assert made.sampler.retired == 2


def test_an_engine_that_fails_reaches_the_caller_as_one_error() -> None:
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Any:
            raise EngineError("out of memory")

    producer = Producer()
    try:
        with pytest.raises(EngineError, match="out of memory"):
            producer.run(collector(["mixed"], engine=Broken(script)).collect(1))
    finally:
        producer.close()


def test_the_producer_can_be_interrupted() -> None:
    class Stop(Exception):
        pass

    def interrupted() -> None:
        raise Stop

    producer = Producer()
    began = time.monotonic()
    with pytest.raises(Stop):
        producer.run(asyncio.sleep(60), interrupted)
    producer.close()
    assert time.monotonic() - began < 5


def test_a_time_out_inside_the_work_is_its_own() -> None:
    async def work() -> None:
        raise TimeoutError("mine")

    producer = Producer()
    with pytest.raises(TimeoutError, match="mine"):
        producer.run(work())
    producer.close()


@pytest.mark.parametrize(
    ("budget", "sampled", "total", "expected"),
    [
        (Budget(10, 0, 100), 0, 20, (10, Finish.LENGTH)),
        (Budget(10, 25, 100), 20, 60, (5, Finish.LENGTH)),
        (Budget(10, 0, 25), 0, 20, (5, Finish.CONTEXT)),
        (Budget(10, 0, 20), 0, 20, (0, Finish.CONTEXT)),
        (Budget(10, 25, 100), 25, 90, (0, Finish.LENGTH)),
    ],
)
def test_budgets(budget: Budget, sampled: int, total: int, expected: tuple[int, Finish]) -> None:
    assert budget.next_turn(sampled, total) == expected


def test_a_rollout_cut_by_the_context_says_so() -> None:
    def endless(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        return [ord("1")] * 99

    (batch,) = collect(collector(["mixed"], engine=ScriptedEngine(endless), budget=Budget(50, 0, 9), max_skipped=1.0))
    finishes = {r.trajectory.finish for g in batch.set_aside for r in g.rollouts}
    assert finishes == {Finish.CONTEXT}
    assert all(r.trajectory.total_tokens == 9 for g in batch.set_aside for r in g.rollouts)


def test_reasoning_is_removed_before_scoring() -> None:
    seen: list[tuple[str, str]] = []

    def look(completion: str, reasoning: str) -> float:
        seen.append((completion, reasoning))
        return 0.0

    def thinks(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        text = "so 4</think>\n\n4" if params.seed % 2 else "so 4, but"
        return [*map(ord, text), STOP]

    collect(collector(["q<think>\n"], rewards=[look], engine=ScriptedEngine(thinks), budget=Budget(50, 0, 100)))
    assert set(seen) == {("4", "so 4"), ("", "so 4, but")}


def test_seeds_differ_by_everything_that_is_sampled() -> None:
    seeds = {request_seed(run, "train", group, index, 0) for run in (0, 1) for group in range(9) for index in range(9)}
    assert len(seeds) == 2 * 9 * 9
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_engine_metrics_of_a_timeline() -> None:
    usage = EngineUsage(((0.0, 8), (2.0, 1), (3.0, 0)), prefill_tokens=30, cached_tokens=10, generated_tokens=5)
    metrics = engine_metrics(usage)
    assert metrics["engine/seqs_mean"] == pytest.approx((2 * 8 + 1) / 3)
    assert metrics["engine/tail_s"] == pytest.approx(1.0)
    assert metrics["engine/prefix_hit"] == pytest.approx(0.25)
    assert metrics["engine/prefill_tokens"] == 30
    assert re.fullmatch(r"engine/\w+", next(iter(metrics)))
