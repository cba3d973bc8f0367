"""The `docker` backend: a worker as PID 1 of a container, reached through `docker run -i`.

    Pool ──pipes──> docker CLI (one a room) ──> daemon ──> container: no network, read-only root, nobody, no capabilities

The CLI is the room's process: when this process dies, the CLI's stdin ends, the daemon closes the container's, and the
worker goes; `--rm` removes what is left. The CLI's exit code is the worker's. A daemon that is killed itself cannot do so:
its containers stay idle until it starts again, which ends them.

Invariant: what a container cannot be limited in (a daemon without a memory or pids cgroup) the worker watches itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox.inside.limits import NOBODY
from palingenesis.rl.sandbox.room import (
    ENVIRONMENT,
    KILLED,
    ROOM_MB,
    SCRATCH_FILES,
    SCRATCH_MB,
    START_TIMEOUT,
    PipeRoom,
    RoomLostError,
    WorkerSettings,
    worker_argv,
)

WORKERS = 2  # processes of the room's own: PID 1 and the supervisor
SCRATCH, SHARED = "/tmp", "/dev/shm"  # the second for the locks of multiprocessing; both are emptied after each job
ASK_TIMEOUT = 20.0  # seconds for the daemon to answer a question
PULL_TIMEOUT = 900.0
LABEL = "palingenesis.sandbox"

# `env -i` in the container: what the image or the CLI's configuration (proxies, with passwords) put there stays out of
# /proc/self/environ too. The image's PATH finds its python3.
_CLEAN = 'exec env -i PATH="$PATH" {given} python3 "$@"'.format(
    given=" ".join(f"{name}={value}" for name, value in ENVIRONMENT.items() if name != "PATH")
)
# Root's: a job can set no times, attributes or modes of the folder itself, which would outlive it.
_WRITABLE = f"rw,noexec,nosuid,nodev,size={SCRATCH_MB}m,nr_inodes={SCRATCH_FILES},mode=1777"


class DockerRoom(PipeRoom):
    """A container; knows the daemon's word on how it ended."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(name, process)
        self._since = time.time()

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        if "run" in message:
            self._since = time.time()
        return await super().exchange(message, limit)

    async def cause(self, code: int | None) -> RoomLostError:
        """A job can end its room by taking all its memory in ways that spare the job; the daemon then saw it happen."""
        if code == KILLED and await self._ran_out_of_memory():
            return RoomLostError("the program took the memory of its container, and the worker with it", broke=True)
        return await super().cause(code)

    async def close(self) -> None:
        await super().close()
        if self.process.returncode == -9:  # it did not go by itself
            await _docker("rm", "--force", self.name)

    async def _ran_out_of_memory(self) -> bool:
        asked = (f"--since={self._since - 1:.3f}", f"--until={time.time() + 1:.3f}")
        code, events, _ = await _docker("events", *asked, f"--filter=container={self.name}", "--filter=event=oom")
        return code == 0 and bool(events.strip())


class DockerBackend:
    """Containers of `sandbox.image` on the daemon that the docker command reaches (DOCKER_HOST, or its context)."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._ready: asyncio.Task[list[str]] | None = None

    async def open(self) -> DockerRoom:
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.create_task(self._prepare())
        command = await asyncio.shield(self._ready)
        name = f"palingenesis-{os.getpid()}-{secrets.token_hex(6)}"
        try:
            argv = [*command[:2], f"--name={name}", *command[2:]]
            return await DockerRoom.start(argv, os.environ, name)
        except RoomLostError as lost:
            await _docker("rm", "--force", name)
            raise self._not_started(str(lost)) from lost

    async def close(self) -> None:
        """Nothing is shared."""

    async def _prepare(self) -> list[str]:
        """Look at the daemon and fetch the image, once. The command that starts a room, but for its name."""
        if shutil.which("docker") is None:
            raise SandboxError(
                "sandbox.backend: docker needs the docker command, which is not installed. Install it, or use "
                "backend bubblewrap, which needs no daemon."
            )
        code, told, error = await _docker("info", "--format={{json .}}")
        if code:
            raise _unreachable(error)
        await self._fetch_image()
        return self._command(json.loads(told))

    async def _fetch_image(self) -> None:
        image = self._config.image
        code, _, error = await _docker("image", "inspect", "--format={{.Id}}", image)
        if code == 0:
            return
        print(f"sandbox: pulling {image} ...", file=sys.stderr, flush=True)
        code, _, error = await _docker("pull", "--quiet", image, limit=PULL_TIMEOUT)
        if code:
            raise SandboxError(
                f"sandbox.image: {image} is not on this machine and cannot be pulled: {_short(error)}. Name an image "
                "that is there (`docker images`), or pull it where there is a network and bring it with `docker save` and "
                "`docker load`."
            )

    def _command(self, daemon: Mapping[str, Any]) -> list[str]:
        config = self._config
        memory = config.memory_mb + ROOM_MB
        limited = bool(daemon.get("MemoryLimit")) and bool(daemon.get("PidsLimit"))
        settings = WorkerSettings(
            scratch=SCRATCH,
            also_emptied=(SHARED,),
            memory_mb=config.memory_mb,
            max_processes=config.max_processes,
            watch=not limited,
        )
        python, *worker = worker_argv("python3", settings)
        return [
            "docker",
            "run",
            "--rm",
            "--interactive",
            "--pull=never",
            f"--label={LABEL}={socket.gethostname()}:{os.getpid()}",
            "--network=none",
            "--read-only",
            f"--user={NOBODY}:{NOBODY}",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            "--ipc=none",
            "--log-driver=none",
            f"--memory={memory}m",
            f"--memory-swap={memory}m",
            f"--pids-limit={config.max_processes + WORKERS}",
            *(["--cpus=1"] if daemon.get("CpuCfsQuota") else []),
            f"--tmpfs={SCRATCH}:{_WRITABLE}",
            f"--tmpfs={SHARED}:{_WRITABLE}",
            "--tmpfs=/dev/mqueue:ro,size=4k,mode=0555",  # else a queue's name there would outlive its job
            "--workdir=/",
            "--entrypoint=sh",
            config.image,
            "-c",
            _CLEAN,
            python,
            *worker,
        ]

    def _not_started(self, why: str) -> SandboxError:
        image = self._config.image
        if "exit code 127" in why or "exit code 126" in why:
            return SandboxError(
                f"sandbox.image: {image} has no python3 to run the sandbox's worker with ({_short(why)}). Use an image with "
                "Python 3.9 or newer, such as python:3.12-slim."
            )
        return SandboxError(f"sandbox.backend: docker does not start a container of {image}: {_short(why)}")


def _unreachable(error: str) -> SandboxError:
    where = os.environ.get("DOCKER_HOST", "its usual socket")
    if "permission denied" in error.lower():
        return SandboxError(
            f"sandbox.backend: docker's daemon at {where} refuses this user: {_short(error)}. Add the user to the group "
            "docker, or use backend bubblewrap, which needs no daemon."
        )
    return SandboxError(
        f"sandbox.backend: no docker daemon answers at {where}: {_short(error)}. Start it, set DOCKER_HOST, or use backend "
        "bubblewrap, which needs no daemon."
    )


async def _docker(*arguments: str, limit: float = ASK_TIMEOUT) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a docker command; code -1 where it does not end in time."""
    process = await asyncio.create_subprocess_exec(
        "docker",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit):
            out, error = await process.communicate()
    except TimeoutError:
        return -1, "", f"`docker {arguments[0]}` gave no answer within {limit:g} s"
    finally:
        if process.returncode is None:  # late, or nobody waits for it any more
            process.kill()
    return process.returncode or 0, out.decode("utf-8", "replace"), error.decode("utf-8", "replace")


def _short(text: str) -> str:
    return " ".join(text.split())[:400].rstrip(".?")


__all__ = ["LABEL", "START_TIMEOUT", "DockerBackend"]
