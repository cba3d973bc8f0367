"""Many episodes at once with tools that are slow, fail or hang: all end in time, every environment is closed, nothing
blocks the event loop, and what was left behind is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from typing import Any, ClassVar

import pytest

from palingenesis.rl.config.schema import EnvConfig
from palingenesis.rl.envs import Environments, running, session
from palingenesis.rl.envs.classes import ClassEnvironment
from palingenesis.rl.errors import SkipSample, StallError
from palingenesis.rl.types import Message, Row, ToolCall
from tests.unit.loop_watch import MOST_S, Heartbeat, assert_no_loop, frozen_heap


def row(number: int = 0, **columns: Any) -> Row:
    return Row(f"r{number}", (Message("user", "go"),), {"number": number, **columns})


def environments(cls: type, **options: Any) -> Environments:
    config = EnvConfig(type="m:C", **options)
    return Environments(ClassEnvironment(cls, config.args, allowed=config.allowed_tools), config)


class Trouble:
    """Tools of every bad kind. Counts its objects by what became of them."""

    made: ClassVar[list[Trouble]] = []
    release = threading.Event()

    def __init__(self) -> None:
        assert_no_loop()
        self.closed = 0
        self.number = 0
        self.done = False
        Trouble.made.append(self)

    def reset(self, number: int) -> str:
        assert_no_loop()
        self.number = number
        if number % 32 == 5:
            raise ConnectionError("no such room")
        if number % 32 == 6:
            time.sleep(0.2)
        return f"episode {number}"

    def quick(self) -> int:
        return self.number

    def slow(self) -> str:
        assert_no_loop()
        time.sleep(0.3)
        return "slept"

    async def slow_async(self) -> str:
        await asyncio.sleep(0.3)
        return "slept"

    def failing(self) -> None:
        raise RuntimeError("broken")

    def stuck(self) -> None:
        Trouble.release.wait(30)

    async def stuck_async(self) -> None:
        await asyncio.Event().wait()

    def large(self) -> list[int]:
        return list(range(20_000))

    def spinning(self) -> None:
        while True:
            pass

    async def finish(self) -> None:
        self.done = True

    def get_reward(self) -> float:
        assert_no_loop()
        return float(self.number % 2)

    async def close(self) -> None:
        self.closed += 1
        if self.number % 64 == 7:
            await asyncio.sleep(0.1)


TOOLS = ("quick", "slow", "slow_async", "failing", "stuck", "stuck_async", "large", "failing")
EPISODES = 512


async def episode(envs: Environments, number: int, spins: bool, answers: list[tuple[int, str, str]]) -> float | None:
    opened = await envs.open(row(number))
    try:
        assert opened.opening == f"episode {number}"
        for turn in range(2):
            name = "spinning" if spins else TOOLS[(number + turn) % len(TOOLS)]
            calls = [ToolCall("quick", {}), ToolCall(name, {})]
            for call, answer in zip(calls, await asyncio.gather(*map(opened.call, calls)), strict=True):
                answers.append((number, call.name, answer.text))
        await opened.call(ToolCall("finish", {}))
        assert opened.done or "still runs" in answers[-1][2] or number % len(TOOLS) in (3, 4) or spins
        components = await opened.reward([])
        return None if components is None else components["reward"]
    finally:
        await opened.close()


async def stress(spinning: tuple[int, ...]) -> tuple[Heartbeat, list[Any], list[tuple[int, str, str]]]:
    Trouble.made.clear()
    Trouble.release.clear()
    envs = environments(Trouble, tool_timeout=1.0)
    answers: list[tuple[int, str, str]] = []
    heartbeat = Heartbeat()
    tasks = [asyncio.ensure_future(episode(envs, number, number in spinning, answers)) for number in range(EPISODES)]
    await asyncio.sleep(0.25)
    for task in tasks[::16]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    await envs.aclose()
    heartbeat.stop()
    Trouble.release.set()
    return heartbeat, outcomes, answers


def played(spinning: tuple[int, ...]) -> Heartbeat:
    """Play them; all end in time as they should, and every environment is closed once."""
    began = time.monotonic()
    with frozen_heap():
        heartbeat, outcomes, answers = asyncio.run(stress(spinning))
    assert time.monotonic() - began < 30
    assert len(Trouble.made) == EPISODES
    assert all(env.closed == 1 for env in Trouble.made)
    kinds = [type(outcome).__name__ for outcome in outcomes]
    assert kinds.count("CancelledError") >= EPISODES // 16 - 2
    assert kinds.count("SkipSample") == EPISODES // 32
    assert set(kinds) == {"CancelledError", "SkipSample", "float"}
    told = {name: {text for _, tool, text in answers if tool == name} for name in ("failing", "stuck", "spinning")}
    assert told["failing"] >= {"Error: RuntimeError: broken"}
    assert told["stuck"] >= {"Error: TimeoutError: tool 'stuck' took longer than 1 s"}
    if spinning:
        assert "Error: TimeoutError: tool 'spinning' took longer than 1 s" in told["spinning"]
    return heartbeat


def test_512_episodes_with_slow_failing_and_hanging_tools_do_not_block_the_loop() -> None:
    seen = []
    for _ in range(3):  # the calmest of three: what a page fault or a hot processor costs is not ours
        heartbeat = played(spinning=())
        seen.append((heartbeat.blocked, heartbeat.wall))
        if heartbeat.blocked < MOST_S:
            return
    pytest.fail(f"the loop was blocked for (seconds; by the clock): {seen}")


def test_a_tool_that_computes_for_ever_is_ended_among_512_episodes() -> None:
    """It shares the interpreter with the loop until then, so how fast the loop comes round is not asked here."""
    played(spinning=(100,))


# ------------------------------------------------------------------------------------------------------ what is left behind


def running_functions() -> set[str]:
    return {frame.f_code.co_name for frame in sys._current_frames().values()}


def test_a_thread_that_computes_is_ended_and_one_that_blocks_is_left() -> None:
    release = threading.Event()

    class Env:
        def spin(self) -> None:
            while True:
                pass

        def block(self) -> None:
            while not release.wait(30):
                pass

        def ok(self) -> str:
            return "ok"

    async def main() -> None:
        envs = environments(Env, tool_timeout=0.2)
        first, second = await envs.open(row()), await envs.open(row())
        assert (await first.call(ToolCall("spin", {}))).text.startswith("Error: TimeoutError")
        assert "spin" not in running_functions()
        assert (await first.call(ToolCall("ok", {}))).text == "ok"

        assert (await second.call(ToolCall("block", {}))).text.startswith("Error: TimeoutError")
        for _ in range(2):
            answer = await second.call(ToolCall("ok", {}))
            assert answer.is_error
            assert "still runs" in answer.text
        assert (await first.call(ToolCall("ok", {}))).text == "ok"
        release.set()
        await asyncio.sleep(0.1)
        assert (await second.call(ToolCall("ok", {}))).text == "ok"
        await envs.aclose()

    asyncio.run(main())


def test_too_many_calls_that_never_end_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_LEFT", 2)
    release = threading.Event()

    class Env:
        def block(self) -> None:
            release.wait(30)

    async def main() -> None:
        envs = environments(Env, tool_timeout=0.05)
        for _ in range(2):
            opened = await envs.open(row())
            assert "took longer" in (await opened.call(ToolCall("block", {}))).text
        opened = await envs.open(row())
        with pytest.raises(StallError, match=r"3 calls of environment Env .* never ended, the last: tool 'block'"):
            await opened.call(ToolCall("block", {}))
        release.set()
        await envs.aclose()

    asyncio.run(main())


def test_an_asynchronous_tool_that_ignores_its_end_is_left_too() -> None:
    class Env:
        async def stubborn(self) -> None:
            for _ in range(5):
                try:
                    await asyncio.sleep(0.3)
                except asyncio.CancelledError:
                    continue

        async def ok(self) -> str:
            return "ok"

    async def main() -> None:
        envs = environments(Env, tool_timeout=0.05)
        opened = await envs.open(row())
        assert "took longer" in (await opened.call(ToolCall("stubborn", {}))).text
        assert "still runs" in (await opened.call(ToolCall("ok", {}))).text
        await asyncio.sleep(1.3)
        assert (await opened.call(ToolCall("ok", {}))).text == "ok"
        await opened.close()

    asyncio.run(main())


def test_the_time_out_counts_from_when_a_call_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_THREADS", 2)

    class Env:
        def nap(self) -> str:
            time.sleep(0.2)
            return "ok"

    async def main() -> None:
        envs = environments(Env, tool_timeout=0.5)
        opened = [await envs.open(row()) for _ in range(8)]
        answers = await asyncio.gather(*(one.call(ToolCall("nap", {})) for one in opened))
        assert {answer.text for answer in answers} == {"ok"}
        await envs.aclose()

    asyncio.run(main())


def test_calls_of_a_turn_run_at_once() -> None:
    class Env:
        def nap(self) -> str:
            time.sleep(0.4)
            return "sync"

        async def doze(self) -> str:
            await asyncio.sleep(0.4)
            return "async"

    async def main() -> None:
        envs = environments(Env)
        opened = await envs.open(row())
        began = time.monotonic()
        answers = await asyncio.gather(*(opened.call(ToolCall(name, {})) for name in ("nap", "doze") * 4))
        assert time.monotonic() - began < 1.2
        assert [answer.text for answer in answers] == ["sync", "async"] * 4
        await opened.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------- one task for the hooks


def test_hooks_share_a_task_and_calls_of_a_turn_have_their_own() -> None:
    seen: dict[str, asyncio.Task[Any] | None] = {}

    class Env:
        async def reset(self) -> None:
            seen["reset"] = asyncio.current_task()
            self.both = asyncio.Barrier(2)

        async def meet(self, name: str) -> str:
            seen[name] = asyncio.current_task()
            await self.both.wait()
            return name

        def get_reward(self) -> Any:
            """Not `async`, but what it returns is to be awaited."""

            async def reward() -> float:
                seen["get_reward"] = asyncio.current_task()
                return 1.0

            return reward()

        async def close(self) -> None:
            seen["close"] = asyncio.current_task()

    async def main() -> None:
        opened = await environments(Env, tool_timeout=5.0).open(row())
        answers = await asyncio.gather(*(opened.call(ToolCall("meet", {"name": name})) for name in "ab"))
        assert [answer.text for answer in answers] == ["a", "b"]
        assert await opened.reward([]) == {"reward": 1.0}
        await opened.close()

    asyncio.run(main())
    assert len(set(seen.values())) == 3
    assert seen["reset"] is seen["get_reward"] is seen["close"]


class Connected:
    """Holds a task group open between `reset` and `close`, as clients of servers do."""

    closed: ClassVar[list[str]] = []

    async def reset(self, breaks: bool = False) -> None:
        import anyio

        self.group = anyio.create_task_group()
        await self.group.__aenter__()
        self.asked, self.requests = anyio.create_memory_object_stream[tuple[int, Any]](9)
        self.group.start_soon(self.serve, breaks)

    async def serve(self, breaks: bool) -> None:
        async for number, reply in self.requests:
            if breaks:
                raise ConnectionError("gone")
            reply.set_result(number + 1)

    async def plus_one(self, number: int) -> int:
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.asked.send((number, reply))
        return await reply

    async def get_reward(self) -> float:
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.asked.send((0, reply))
        return float(await reply)

    async def close(self) -> None:
        self.asked.close()
        try:
            await self.group.__aexit__(None, None, None)
        except BaseExceptionGroup as errors:
            self.closed.append(repr(errors.exceptions[0]))
        else:
            self.closed.append("")


def test_a_task_group_may_stay_open_from_reset_to_close() -> None:
    pytest.importorskip("anyio")
    Connected.closed.clear()

    async def main() -> None:
        envs = environments(Connected)
        opened = await asyncio.gather(*(envs.open(row(number)) for number in range(8)))
        for one in opened:
            calls = [ToolCall("plus_one", {"number": number}) for number in range(3)]
            assert [answer.text for answer in await asyncio.gather(*map(one.call, calls))] == ["1", "2", "3"]
        await asyncio.gather(*(one.close() for one in opened))

    asyncio.run(main())
    assert Connected.closed == [""] * 8


def test_a_task_group_that_fails_closes_the_environment_and_skips_the_sample() -> None:
    pytest.importorskip("anyio")
    Connected.closed.clear()

    async def main() -> None:
        envs = environments(Connected, tool_timeout=0.5, max_concurrent=1)
        opened = await envs.open(row(breaks=True))
        for _ in range(2):
            with pytest.raises(SkipSample, match="environment Connected is lost"):
                await opened.call(ToolCall("plus_one", {"number": 1}))
        with pytest.raises(SkipSample, match="environment Connected is lost"):
            await opened.reward([])
        assert Connected.closed == ["ConnectionError('gone')"]
        await opened.close()
        again = await asyncio.wait_for(envs.open(row()), 10)  # the slot is free
        await again.close()

    asyncio.run(main())
    assert Connected.closed == ["ConnectionError('gone')", ""]


def test_a_task_group_that_fails_in_the_last_call_skips_the_sample() -> None:
    """Also where the environment has no reward that would notice."""
    anyio = pytest.importorskip("anyio")

    class Lost:
        async def reset(self) -> None:
            self.group = anyio.create_task_group()
            await self.group.__aenter__()
            self.group.start_soon(self.breaks)

        async def breaks(self) -> None:
            await asyncio.sleep(0.05)
            raise ConnectionError("gone")

        async def go(self) -> str:
            await asyncio.sleep(0.2)
            return "an answer made without the server"

        async def close(self) -> None:
            with contextlib.suppress(BaseException):
                await self.group.__aexit__(None, None, None)

    async def main() -> None:
        opened = await environments(Lost).open(row())
        with pytest.raises(SkipSample, match="environment Lost is lost"):
            await opened.call(ToolCall("go", {}))
        with pytest.raises(SkipSample, match="environment Lost is lost"):
            await opened.reward([])
        await opened.close()

    asyncio.run(main())


def test_a_task_group_that_fails_under_a_reward_skips_the_sample() -> None:
    pytest.importorskip("anyio")
    Connected.closed.clear()

    async def main() -> None:
        opened = await environments(Connected).open(row(breaks=True))
        with pytest.raises(SkipSample, match="environment Connected is lost"):
            await opened.reward([])
        await opened.close()

    asyncio.run(main())
    assert Connected.closed == ["ConnectionError('gone')"]


def test_close_does_not_wait_for_a_hook_that_ignores_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RESET_S", 0.1)
    closed = []

    class Env:
        async def reset(self) -> None:
            for _ in range(3):
                try:
                    await asyncio.sleep(0.5)
                except asyncio.CancelledError:
                    continue

        async def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(SkipSample, match="reset of Env failed: TimeoutError"):
            await environments(Env).open(row())
        assert len(closed) == 1
        assert time.monotonic() - began < 1.0
        await asyncio.sleep(1.5)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_an_environment_left_open_is_closed_with_the_loop() -> None:
    closed = []

    class Env:
        async def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        await environments(Env).open(row())

    asyncio.run(main())
    assert len(closed) == 1


# --------------------------------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("where", ["constructor", "reset", "reset_async", "call", "get_reward", "open"])
def test_a_cancelled_rollout_closes_its_environment(where: str) -> None:
    made, closed, started = [], [], threading.Event()

    def wait(place: str) -> None:
        if place == where:
            started.set()
            time.sleep(0.4)

    class Env:
        def __init__(self) -> None:
            wait("constructor")
            made.append(self)

        async def reset(self) -> None:
            await asyncio.get_running_loop().run_in_executor(None, wait, "reset")
            if where == "reset_async" and len(made) == 1:
                started.set()
                await asyncio.sleep(60)

        def tool(self) -> None:
            wait("call")

        def get_reward(self) -> float:
            wait("get_reward")
            if where == "open":
                started.set()
            return 1.0

        async def close(self) -> None:
            closed.append(self)

    async def rollout(envs: Environments) -> None:
        opened = await envs.open(row())
        try:
            await opened.call(ToolCall("tool", {}))
            await opened.reward([])
            await asyncio.sleep(60)
        finally:
            await opened.close()

    async def main() -> None:
        envs = environments(Env, max_concurrent=1)
        task = asyncio.ensure_future(rollout(envs))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made == closed
        assert len(made) == 1
        again = await asyncio.wait_for(envs.open(row()), 10)  # the slot is free
        await again.close()

    asyncio.run(main())


def test_what_a_constructor_makes_after_its_limit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RESET_S", 0.1)
    made, closed = [], []

    class Env:
        def __init__(self) -> None:
            time.sleep(1.0)
            made.append(self)

        async def close(self) -> None:
            closed.append(self)

    async def main() -> None:
        envs = environments(Env, max_concurrent=1)
        with pytest.raises(SkipSample, match="the constructor of Env failed: TimeoutError"):
            await envs.open(row())
        assert (made, closed) == ([], [])
        await asyncio.sleep(1.2)

    asyncio.run(main())
    assert len(made) == 1
    assert made == closed


def test_a_second_cancellation_does_not_cut_the_closing_off() -> None:
    closed = []

    class Env:
        async def close(self) -> None:
            await asyncio.sleep(0.2)
            closed.append(self)

    async def rollout(envs: Environments) -> None:
        opened = await envs.open(row())
        try:
            await asyncio.sleep(60)
        finally:
            await opened.close()

    async def main() -> None:
        envs = environments(Env)
        task = asyncio.ensure_future(rollout(envs))
        for _ in range(2):
            await asyncio.sleep(0.1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not closed
        await envs.aclose()
        assert len(closed) == 1

    asyncio.run(main())


def test_never_more_than_max_concurrent_are_alive() -> None:
    alive, most = set(), 0

    class Env:
        def __init__(self) -> None:
            nonlocal most
            alive.add(self)
            most = max(most, len(alive))

        async def close(self) -> None:
            await asyncio.sleep(0.01)
            alive.discard(self)

    async def rollout(envs: Environments) -> None:
        opened = await envs.open(row())
        await asyncio.sleep(0.01)
        await opened.close()
        await opened.close()  # again does nothing

    async def main() -> None:
        envs = environments(Env, max_concurrent=3)
        await asyncio.gather(*(rollout(envs) for _ in range(20)))

    asyncio.run(main())
    assert most == 3
    assert not alive


def test_hanging_hooks_skip_the_sample_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RESET_S", 0.1)
    monkeypatch.setattr(session, "REWARD_S", 0.1)
    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    closed = []

    class Env:
        async def reset(self, number: int) -> None:
            if number == 0:
                await asyncio.sleep(60)

        async def get_reward(self) -> float:
            await asyncio.sleep(60)
            return 1.0

        async def close(self) -> None:
            closed.append(self)
            await asyncio.sleep(60)

    async def main() -> None:
        envs = environments(Env)
        with (
            pytest.warns(
                RuntimeWarning, match=r"close of environment Env failed: TimeoutError: close of Env for row r0"
            ),
            pytest.raises(SkipSample, match=r"reset of Env failed: TimeoutError: reset of Env for row r0 took longer"),
        ):
            await envs.open(row(0))
        opened = await envs.open(row(1))
        with pytest.raises(SkipSample, match=r"get_reward of Env for row r1 took longer"):
            await opened.reward([])
        with pytest.warns(RuntimeWarning):
            await opened.close()

    asyncio.run(main())
    assert len(closed) == 2
