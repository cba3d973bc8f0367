"""Kill a sandbox's parts from outside, and find what is left of them. For bench/sandbox.py and the sandboxes' contract."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRAINER = """
import asyncio, warnings
from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.sandbox import Program, open_sandbox
warnings.simplefilter("ignore")
sandbox = open_sandbox(SandboxConfig(backend={backend!r}, image={image!r}, allow_unsafe={unsafe}, workers=2))
sandbox.start()
jobs = [Program("import subprocess; subprocess.run(['sleep', {mark!r}])", timeout=300)] * 200
print("started", flush=True)
asyncio.run(sandbox.run(jobs))
"""


def unique() -> str:
    """An argument for `sleep` that no other process has: how long-lived programs are told apart."""
    return f"{5000 + random.randrange(1000)}.{random.randrange(10**9):09}"


def living(mark: str) -> list[int]:
    """Processes of this machine whose command line has `mark`: those in rooms too."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (path / "cmdline").read_text(encoding="utf-8", errors="replace"):
                found.append(int(path.name))
    return found


def gone(mark: str, within: float = 5.0) -> bool:
    return becomes(lambda: not living(mark), within)


def becomes(true: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill_trainer(backend: str, image: str) -> bool:
    """Start a trainer whose rooms are busy, kill it, and say whether nothing is left of it."""
    mark = unique()
    source = TRAINER.format(backend=backend, image=image, unsafe=backend == "subprocess", mark=mark)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"started\n"
        assert becomes(lambda: len(living(mark)) >= 3, within=30)  # the trainer, and a program in each room
        trainer.kill()
    return gone(mark, within=20) and becomes(lambda: not containers(f"palingenesis-{trainer.pid}-"), within=20)


def containers(name: str) -> list[str]:
    """Docker's, in whatever state; none where there is no docker."""
    command = ["docker", "ps", "--all", "--quiet", f"--filter=name={name}"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return []


def is_container(room: Any) -> bool:
    return type(room).__module__.endswith(".docker")


def worker_of(room: Any) -> int:
    """The worker of a room, as this machine numbers processes. Raises OSError or the like when the room has gone."""
    if is_container(room):
        command = ["docker", "inspect", "--format={{.State.Pid}}", room.name]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    pid = int(room.process.pid)
    while not Path(f"/proc/{pid}/comm").read_text().startswith("python"):  # bwrap, and what is before it
        pid = children(pid)[0]
    return pid


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def kill_container(room: Any) -> None:
    if is_container(room):
        subprocess.run(["docker", "kill", room.name], capture_output=True, check=True)
    else:
        kill(worker_of(room))


def kill_supervisor(room: Any) -> None:
    kill(children(worker_of(room))[0])


def kill(pid: int) -> None:
    if pid <= 1:
        raise ProcessLookupError("of a container that does not run: 0 would be our own process group")
    os.kill(pid, signal.SIGKILL)


KILLS: dict[str, Callable[[Any], None]] = {
    "container": kill_container,
    "worker": lambda room: kill(worker_of(room)),
    "supervisor": kill_supervisor,
    "client": lambda room: kill(room.process.pid),
}


def kill_one(what: str, rooms: list[Any]) -> bool:
    """Kill a part of one of the rooms; false when there was nothing to kill just now."""
    try:
        KILLS[what](random.choice(rooms))
    except (OSError, IndexError, ValueError, subprocess.CalledProcessError):
        return False
    return True
