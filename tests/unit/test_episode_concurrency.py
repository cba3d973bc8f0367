"""512 episodes at once, from their environments to their scores: the rollout loop goes on coming round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from palingenesis.rl.config.schema import EnvConfig
from palingenesis.rl.data import Sampler
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.envs import Environments
from palingenesis.rl.envs.classes import ClassEnvironment
from palingenesis.rl.observe.pace import pace
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.collect import Collector
from palingenesis.rl.rollout.episode import Episodes
from palingenesis.rl.rollout.score import Scorer
from palingenesis.rl.types import Finish, Message, Rollout, Row, SamplingParams
from tests.unit.loop_watch import MOST_S, Heartbeat, assert_no_loop, frozen_heap
from tests.unit.tool_families import Model, model

ROWS, GROUP = 64, 8
TURNS = 1
TIME_OUT_S = 2.0


class Trouble:
    """Tools of every bad kind that answer all at once; each asks for a long text to be cut and shown."""

    alive: ClassVar[set[Trouble]] = set()
    made: ClassVar[int] = 0

    def reset(self, number: int) -> str:
        assert_no_loop()
        self.alive.add(self)
        Trouble.made += 1
        return f"Episode {number}."

    def quick(self) -> str:
        """Answer."""
        return "the cat sat on the mat. " * 100

    def slow(self) -> str:
        """Answer late."""
        assert_no_loop()
        time.sleep(0.5)
        return self.quick()

    async def slow_async(self) -> str:
        """Answer late."""
        await asyncio.sleep(0.5)
        return self.quick()

    def failing(self) -> str:
        """Fail."""
        raise RuntimeError("broken " * 200)

    async def stuck(self) -> str:
        """Never answer."""
        await asyncio.Event().wait()
        raise AssertionError

    def get_reward(self) -> float:
        assert_no_loop()
        return 1.0

    async def close(self) -> None:
        self.alive.remove(self)


TOOLS = ("quick", "slow", "slow_async", "failing", "stuck")


class Caller(ScriptedEngine):
    """Calls two tools in each of the first turns, at no cost on the loop; every rollout others."""

    def __init__(self, subject: Model) -> None:
        self.subject = subject
        self.prompts: list[int] = []
        calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in TOOLS]
        self.calls = [subject.encode(f"{call}\n{calls[0]}") for call in calls]
        self.answer = subject.encode("ok")
        super().__init__(self._say, delay=0.05)

    def _say(self, prompt: tuple[int, ...], params: SamplingParams) -> Sequence[int]:
        turn = prompt.count(self.subject.stop) // 2  # of each turn and of the answers to it
        said = self.calls[params.seed % len(TOOLS)] if turn <= TURNS else self.answer
        return [*said, self.subject.stop]


async def evaluate(subject: Model) -> tuple[Heartbeat, list[list[Rollout]]]:
    config = EnvConfig(type="m:C", tool_timeout=TIME_OUT_S)
    environments = Environments(ClassEnvironment(Trouble, {}), config)
    budget = Budget(400, 4000, 16_000)
    episodes = Episodes(Caller(subject), subject.template, (subject.stop,), budget, environments, max_turns=9)
    episodes.check_tools()
    rows = [Row(f"r{n}", (Message("user", f"{n}. " + "the cat " * 100),), {"number": n}) for n in range(ROWS)]
    defaults: dict[str, Any] = {"batch_prompts": 2, "group_size": GROUP, "max_refill": 0.0, "max_staleness": 0}
    defaults |= {"steps": 1, "max_skipped": 1.0, "temperature": 1.0, "seed": 0}
    collector = Collector(episodes, Scorer(RewardSet([]), budget.completion), Sampler(rows, seed=0), **defaults)
    heartbeat = Heartbeat()
    groups = await collector.evaluate(rows, temperature=1.0, samples=GROUP)
    heartbeat.stop()
    return heartbeat, groups


def test_512_rollouts_with_slow_failing_and_hanging_tools_do_not_block_the_loop() -> None:
    subject = model("Qwen3")
    seen = []
    for _ in range(3):  # the calmest of three: what a page fault or a hot processor costs is not ours
        Trouble.made = 0
        began = time.monotonic()
        with frozen_heap():
            heartbeat, groups = asyncio.run(evaluate(subject))
        assert time.monotonic() - began < 60
        assert (Trouble.made, Trouble.alive) == (ROWS * GROUP, set())
        rollouts = [rollout for group in groups for rollout in group]
        assert {r.trajectory.finish for r in rollouts} == {Finish.STOP}
        assert {r.score.reward for r in rollouts} == {1.0}
        told = {m.content.partition(" ")[2][:12] for r in rollouts for m in r.trajectory.messages if m.role == "tool"}
        assert told == {"cat sat on t", "RuntimeError", "TimeoutError"}
        seen.append((heartbeat.blocked, heartbeat.wall))
        if heartbeat.blocked < MOST_S:
            return
    pytest.fail(f"the loop was blocked for (seconds; by the clock): {seen}")


def test_the_loop_comes_round_between_many_computations() -> None:
    """The same work with and without `pace`, by the rounds that another task of the loop gets."""

    async def rounds(paced: bool) -> int:
        count = 0

        async def watch() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        async def compute() -> None:
            if paced:
                await pace()
            until = time.thread_time() + 0.002
            while time.thread_time() < until:
                pass

        watcher = asyncio.ensure_future(watch())
        await asyncio.gather(*(compute() for _ in range(100)))
        watcher.cancel()
        return count

    assert asyncio.run(rounds(paced=False)) < 5
    assert asyncio.run(rounds(paced=True)) >= 15
