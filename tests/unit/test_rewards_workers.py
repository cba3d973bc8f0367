"""Worker processes: killed when late, replaced when dead, gone when their owner is."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from weakref import WeakSet

import pytest

from palingenesis.rl.config import RewardConfig
from palingenesis.rl.errors import SkipSample
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rewards import math as math_reward
from palingenesis.rl.rewards.math import Math, close_workers
from palingenesis.rl.rewards.workers import (
    TaskCrashedError,
    TaskFailedError,
    TaskTimeoutError,
    Worker,
    WorkerPool,
    WorkersUnavailableError,
)
from palingenesis.rl.types import Row, Sample

SRC = Path(__file__).parents[2] / "src"

TASKS = """
import os, sys, time, signal

def serve(init):
    if init == "broken":
        raise ValueError("no such thing")
    if init == "exit":
        os._exit(3)
    if init == "print":
        print("chatter at import")
    def handle(payload):
        what, value = payload
        if what == "sleep":
            time.sleep(value)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "die_once" and not os.path.exists(value):
            open(value, "w").close()
            os._exit(1)
        if what == "raise":
            raise RuntimeError(value)
        if what == "print":
            print("x" * 100000); sys.stdout.flush(); os.write(1, b"junk")
        if what == "big":
            return "y" * value
        return [os.getpid(), value] if what == "pid" else value
    return handle
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pool_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "pool_tasks:serve"


@pytest.fixture
def pool(task: str):
    pool = WorkerPool(task, 2)
    yield pool
    pool.close()


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_answers_and_reuses(pool: WorkerPool) -> None:
    pids = {pool.submit(("pid", i), 10).result()[0] for i in range(10)}
    assert len(pids) <= 2
    assert pool.submit(("big", 300_000), 10).result() == "y" * 300_000
    assert pool.submit(("same", "z" * 300_000), 10).result() == "z" * 300_000


def test_prints_do_not_reach_the_protocol(task: str) -> None:
    pool = WorkerPool(task, 1, "print")
    assert pool.submit(("print", 1), 10).result() == 1
    assert pool.submit(("same", 2), 10).result() == 2
    pool.close()


def test_late_ones_are_killed_and_replaced(pool: WorkerPool) -> None:
    first = pool.submit(("pid", 0), 10).result()[0]
    began = time.monotonic()
    with pytest.raises(TaskTimeoutError):
        pool.submit(("sleep", 60), 0.5).result()
    assert time.monotonic() - began < 5
    assert gone(first)
    assert pool.submit(("same", 1), 10).result() == 1


def test_a_task_that_kills_its_worker_twice_has_crashed(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(TaskCrashedError):
        pool.submit(("die", 0), 10).result()
    assert pool.submit(("die_once", str(tmp_path / "mark")), 10).result() == str(tmp_path / "mark")


def test_an_exception_keeps_the_worker(pool: WorkerPool) -> None:
    with pytest.raises(TaskFailedError, match="RuntimeError: oh") as caught:
        pool.submit(("raise", "oh"), 10).result()
    assert "pool_tasks" in caught.value.trace
    assert len(pool.pids) == 1


def test_kill_9_of_an_idle_worker_costs_nothing(pool: WorkerPool) -> None:
    pid = pool.submit(("pid", 0), 10).result()[0]
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert pool.submit(("same", 1), 10).result() == 1


def test_a_worker_that_cannot_start_is_told_from_a_wrong_answer(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskFailedError, match="no such thing"):
        Worker(task, "broken")
    with pytest.raises(WorkersUnavailableError, match="status 3"):
        Worker(task, "exit")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkersUnavailableError):
        Worker(task)


def test_close_ends_idle_and_busy_workers(task: str) -> None:
    pool = WorkerPool(task, 2)
    futures = [pool.submit(("pid", i), 10) for i in range(2)]
    assert all(f.result() for f in futures)
    busy = pool.submit(("sleep", 60), 120)
    time.sleep(0.3)
    pids = pool.pids
    pool.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(WorkersUnavailableError):
        busy.result(timeout=10)


def test_signals_meant_for_the_trainer_do_not_end_workers(pool: WorkerPool) -> None:
    pid = pool.submit(("pid", 0), 10).result()[0]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(pid, number)
    assert pool.submit(("pid", 1), 10).result()[0] == pid


SCRIPT = """
import asyncio, os, sys, time
from palingenesis.rl.rewards.math import Math, _verdicts
# No __main__ guard: workers must not run this file again.
print("started", flush=True)
async def main():
    assert await Math()(r"\\boxed{\\sqrt{16}}", answer="4") == 1.0
    print("pids", *_verdicts().pool.pids, flush=True)
    if sys.argv[1] == "busy":
        await Math(timeout=60)(r"\\boxed{9^{9^{9^9}}}", answer="5")
    elif sys.argv[1] == "wait":
        time.sleep(60)
    elif sys.argv[1] == "crash":
        raise RuntimeError("boom")
asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "number"), [("busy", 9), ("wait", 9), ("wait", 15), ("exit", 0), ("crash", 0)])
def test_no_worker_outlives_its_parent(tmp_path: Path, how: str, number: int) -> None:
    pytest.importorskip("math_verify")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = os.environ | {"PYTHONPATH": str(SRC)}
    child = subprocess.Popen(
        [sys.executable, script, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "started\n"
    pids = [int(pid) for pid in child.stdout.readline().split()[1:]]
    assert pids
    if number:
        time.sleep(0.3)
        child.send_signal(number)
    assert child.wait(timeout=30) is not None
    assert child.stdout.read() == ""
    assert all(gone(pid) for pid in pids)


def test_from_many_threads_and_loops() -> None:
    pytest.importorskip("math_verify")
    found: list[float] = []

    def work(number: int) -> None:
        found.append(asyncio.run(Math()(rf"\boxed{{\sqrt{{{number**2}}} + x}}", answer=f"x+{number}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [1.0] * 16
    close_workers()


def test_kill_9_during_a_comparison_costs_no_sample() -> None:
    pytest.importorskip("math_verify")

    async def main() -> list[float]:
        math = Math()
        assert await math(r"\boxed{\sqrt{16}}", answer="4") == 1.0
        work = [
            asyncio.ensure_future(math(rf"\boxed{{(x+{n})^2}}", answer=f"x^2+{2 * n}x+{n * n}")) for n in range(1, 30)
        ]
        await asyncio.sleep(0.02)
        os.kill(math_reward._verdicts().pool.pids[0], signal.SIGKILL)
        return await asyncio.gather(*work)

    assert sum(asyncio.run(main())) >= 28
    close_workers()


def test_workers_that_cannot_be_had_skip_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    close_workers()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SkipSample, match="math workers are unavailable"):
        asyncio.run(Math()(r"\boxed{\sqrt{16}}", answer="4"))
    close_workers()


def test_without_the_extra_strings_and_numbers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_reward, "has_math_verify", lambda: False)
    for answer, gold, equal in (
        (r"\frac12", "0.5", 1),
        (r"2\pi", r"2 \pi", 1),
        (r"\sqrt{8}", r"2\sqrt{2}", 0),
        ("(1, 2)", "(1,2)", 1),
    ):
        assert asyncio.run(Math()(rf"\boxed{{{answer}}}", answer=gold)) == equal


def test_importing_rewards_is_light() -> None:
    code = (
        "import sys, palingenesis.rl.rewards, palingenesis.rl.rewards.math, palingenesis.rl.rewards.judge, "
        "palingenesis.rl.rewards.trl, palingenesis.rl.rewards.worker_main\n"
        "print([m for m in ('torch', 'transformers', 'sympy', 'math_verify', 'httpx', 'datasets') if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": str(SRC)}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout == "[]\n"


def test_closing_the_last_user_ends_the_math_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    close_workers()
    monkeypatch.setattr(math_reward, "_users", WeakSet())  # other tests' rewards may not be collected yet
    row = Row("1", (), {"answer": "4"})
    sample = Sample(row, (), r"\boxed{\sqrt{16}}", "", "")
    first, second = (RewardSet.from_config({"m": RewardConfig(fn="math")}) for _ in range(2))
    for rewards in (first, second):
        assert asyncio.run(rewards.score([sample]))[0].reward == 1.0
    pids = math_reward._verdicts().pool.pids
    first.close()
    assert not gone(pids[0], 0.2)
    second.close()
    assert all(gone(pid) for pid in pids)
