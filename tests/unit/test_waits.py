"""Nothing waits without a deadline: what stands still ends the trainer's wait with one error that names it."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.errors import StallError
from palingenesis.rl.observe import waits
from palingenesis.rl.rollout import episode, producer
from palingenesis.rl.rollout.producer import Producer
from tests.unit.test_rollout import collector, script

bind = importlib.import_module("palingenesis.rl.rewards.bind")  # its package has a function of that name


@pytest.fixture
def made() -> Iterator[Producer]:
    found = Producer()
    yield found
    found.close()


def stalls(work: Producer, coroutine: Any) -> StallError:
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        work.run(coroutine)
    assert time.monotonic() - began < 3
    return caught.value


def test_a_wait_that_moves_is_not_late_however_long_it_is() -> None:
    with waits.waiting("engine", "a request", 0.1):
        for _ in range(6):
            time.sleep(0.05)
            waits.progress("engine", "a token")
            waits.check()
        time.sleep(0.15)
        with pytest.raises(StallError, match=r"^engine stood still for 0 s \(at most 0.1 s\): waited for a request\.$"):
            waits.check()


def test_progress_of_another_part_does_not_help() -> None:
    with waits.waiting("engine", "a request", 0.05):
        time.sleep(0.1)
        waits.progress("reward 'correct'")
        with pytest.raises(StallError):
            waits.check()


def test_one_error_and_then_silence() -> None:
    with waits.waiting("engine", "a request", 0.0), waits.waiting("engine", "another", 0.0):
        time.sleep(0.01)
        with pytest.raises(StallError):
            waits.check()
        waits.check()


def test_the_report_has_the_oldest_waits_and_all_stacks() -> None:
    waits.progress("engine", "token 40 of 32 sequences")
    stop = threading.Event()

    def standing_around() -> None:
        stop.wait()

    thread = threading.Thread(target=standing_around, name="somebody")
    thread.start()
    try:
        with waits.waiting("engine", "a request", 0.0), waits.waiting("reward 'correct'", "row 7", 9.0):
            time.sleep(0.01)
            with pytest.raises(StallError) as caught:
                waits.check()
    finally:
        stop.set()
        thread.join()
    for text in (
        "engine: a request",
        "reward 'correct': row 7",
        "token 40 of 32",
        "thread somebody:",
        "standing_around",
    ):
        assert text in caught.value.report


def test_wait_for_has_a_deadline_of_its_own() -> None:
    began = time.monotonic()
    with pytest.raises(StallError, match="the engine's thread to stand still"):
        waits.wait_for(threading.Event().wait, "engine", "the engine's thread to stand still", 0.3)
    assert time.monotonic() - began < 2
    done = threading.Event()
    done.set()
    waits.wait_for(done.wait, "engine", "what is there", 0.3)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_that_hangs(made: Producer, monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    monkeypatch.setattr(episode, "ENGINE_S", 0.4)
    engine = ScriptedEngine(script, delay=float("inf"))
    error = stalls(made, collector(["mixed"], engine=engine, max_staleness=staleness).collect(1))
    assert "engine stood still" in str(error)
    assert "a request of row 0 (rows.jsonl:1), prompt 5 tokens, at most 8 more" in str(error)


def test_an_engine_that_is_slow_but_moves(made: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode, "ENGINE_S", 0.5)
    engine = ScriptedEngine(lambda prompt, params: [ord(str(params.seed % 10))] * 8, delay=1.5)
    assert made.run(collector(["mixed"], engine=engine, max_refill=0).collect(1)).groups


def test_a_reward_that_hangs_in_its_thread(made: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "CALL_S", 0.4)
    gate = threading.Event()

    def hangs(completion: str) -> float:
        gate.wait()
        return 0.0

    error = stalls(made, collector(["mixed"], rewards=[hangs]).collect(1))
    gate.set()
    assert "reward 'hangs' stood still" in str(error)
    assert "row 0 (rows.jsonl:1)" in str(error)
    assert "gate.wait()" in error.report


def test_a_reward_that_awaits_for_ever(made: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "CALL_S", 0.4)

    async def hangs(completion: str) -> float:
        await asyncio.Event().wait()
        return 0.0

    assert "reward 'hangs' stood still" in str(stalls(made, collector(["mixed"], rewards=[hangs]).collect(1)))


def test_rewards_that_queue_for_a_thread_are_not_late(made: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take longer together than one may."""
    monkeypatch.setattr(bind, "CALL_S", 0.5)

    def slow(completion: str) -> float:
        time.sleep(0.25)
        return float(int(completion) % 2)

    assert made.run(collector(["mixed"], rewards=[slow], batch_prompts=24, max_refill=0).collect(1)).groups


def test_a_blocked_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "LOOP_S", 0.5)
    monkeypatch.setattr(producer, "CLOSE_S", 0.3)
    gate = threading.Event()

    async def blocks(completion: str) -> float:
        gate.wait()
        return 0.0

    made = Producer()
    error = stalls(made, collector(["mixed"], rewards=[blocks]).collect(1))
    assert "rollout loop stood still" in str(error)
    assert "in blocks" in error.report
    assert not made.close(), "it is left behind"
    gate.set()


LEAVES = """
import concurrent.futures, threading
from palingenesis.rl.observe import exits
exits.LEAVE_S = 0.5
concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)
exits.leave(7)
"""


def test_the_process_ends_although_a_pool_thread_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVES], timeout=20, check=False).returncode == 7
