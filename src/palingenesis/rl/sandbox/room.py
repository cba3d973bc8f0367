"""A room: one worker of `inside/`, somewhere, that runs one job at a time.

    Pool ──open()──> Backend ──> Room ──exchange(message)──> event        messages and events: inside/worker.py

To add a backend: write `<name>.py` with a class that takes a `SandboxConfig`, whose `open()` starts a room and whose
`close()` ends what the rooms share; add it to `BACKENDS` in `__init__.py` and to the contract suite. Where a command can
start a process with pipes, its `open()` is three lines: `worker_argv(python, WorkerSettings(...))`, the command before
it, `await PipeRoom.start(argv, environment, ...)`. What it must see to is that

- the worker is PID 1 of a PID namespace, or it cannot promise that nothing survives a job;
- EOF on the worker's stdin reaches it when this process dies;
- memory and processes are limited from outside, or `watch` is on;
- the worker's exit code comes back as the command's: 70 says that the job broke its room.

A room that fails is of no more use; `RoomLostError` says whether that was the job's doing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any, Protocol, Self

from palingenesis.rl.errors import SandboxError

MODULES = ("values", "limits", "harness", "worker")  # of inside/, in the order of their imports
BROKE = 70  # the worker's exit code when a job ended its supervisor
FRAME_CAP = 128 * 2**20  # bytes of one event
START_TIMEOUT = 60.0  # seconds for a room to start, on a busy machine
CLOSE_TIMEOUT = 5.0  # seconds for a room to end by itself
KILLED = 128 + 9  # exit code of a command that carries a PID 1 elsewhere, when that was killed
SCRATCH_MB = 64  # of files a job may write, where that is limited
SCRATCH_FILES = 16_384  # of them and folders; an inode of tmpfs costs the kernel about a KiB
ROOM_MB = 128  # of memory for the worker and what it holds of a job's output, beside the program's


class RoomLostError(Exception):
    """The room is gone or of no more use.

    Attributes:
        broke: the job did it: it killed or stopped its supervisor, or took the room's memory.
    """

    def __init__(self, reason: str, *, broke: bool = False) -> None:
        super().__init__(reason)
        self.broke = broke


class Room(Protocol):
    """One worker. One exchange at a time. `alive` is False once it is known to have ended."""

    @property
    def alive(self) -> bool: ...

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Send a message and return the event that answers it, within `limit` seconds.

        Raises:
            RoomLostError: it did not come.
        """
        ...

    async def close(self) -> None:
        """End the room and what runs in it. Idempotent; never raises, and takes seconds at most."""
        ...


class Backend(Protocol):
    """Starts rooms. Made from a `SandboxConfig`; used from one event loop."""

    async def open(self) -> Room:
        """Start a room and wait until it is ready.

        Raises:
            SandboxError: the backend cannot be used; with the cure.
        """
        ...

    async def close(self) -> None:
        """After the last room was closed."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts.

    Attributes:
        scratch: the folder a job starts in and may write to; emptied after each.
        also_emptied: whatever else a job may write to.
        memory_mb: MiB of memory, where `watch` is on.
        max_processes: processes and threads, where `watch` is on.
        watch: nothing outside limits memory and processes: limit address space, and look every 25 ms.
        uid: the user that programs become, when the worker is root; None leaves them what they are.
        user_processes: RLIMIT_NPROC, which counts all processes of a user, not of a room; 0 is none.
        file_mb: MiB of the largest file.
    """

    scratch: str
    memory_mb: int
    max_processes: int
    watch: bool
    uid: int | None = None
    user_processes: int = 0
    file_mb: int = SCRATCH_MB
    also_emptied: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


# What the interpreter must know before it starts: a fixed hash seed, so that a score is a function of the program.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",  # an arena takes 64 MiB of address space, which `watch` limits
}

_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]
import base64, builtins, json, types, zlib
sources = json.loads(zlib.decompress(base64.b64decode({packed!r})))
package = {package!r}
names = package.split(".")
made = [".".join(names[:n + 1]) for n in range(len(names))]
sys.modules.update((name, types.ModuleType(name)) for name in made)
for name, source in sources:
    module = sys.modules[package + "." + name] = types.ModuleType(package + "." + name)
    module.__builtins__ = dict(vars(builtins))
    setattr(sys.modules[package], name, module)
    made.append(module.__name__)
    exec(compile(source, name + ".py", "exec"), vars(module))
for name in made:
    del sys.modules[name]
module.main(json.loads(sys.argv[1]))
"""


def worker_source(modules: Sequence[str] = MODULES) -> str:
    """Source text for `python3 -c`: it builds modules of `inside/` and runs the last one's `main`; the worker's, that is.

    Each module gets builtins of its own, which a program cannot patch, and none stays in `sys.modules`.
    """
    package = "palingenesis.rl.sandbox.inside"
    folder = resources.files(package)
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in modules]
    packed = base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()
    return _BOOT.format(packed=packed, package=package)


def worker_argv(python: str, settings: WorkerSettings) -> list[str]:
    """The command that is a worker, talking over its stdin and stdout. Give it `ENVIRONMENT` and nothing more."""
    environment = {**ENVIRONMENT, "HOME": settings.scratch, "TMPDIR": settings.scratch, **settings.environment}
    told = json.dumps({**asdict(settings), "environment": environment})
    return [python, "-s", "-B", "-c", worker_source(), told]


class PipeRoom:
    """A worker at the other end of a child's stdin and stdout. The child may be a client that carries both elsewhere."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.about: dict[str, Any] = {}  # pid and python, in the worker's own words
        self._errors: deque[bytes] = deque(maxlen=50)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, argv: Sequence[str], environment: Mapping[str, str], name: str, limit: float = START_TIMEOUT
    ) -> Self:
        """Start `argv` and wait until the worker says that it is ready.

        Raises:
            SandboxError: the command is not there.
            RoomLostError: it ended, or said nothing in time; with what it wrote to stderr.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,  # a Ctrl-C is the trainer's, which saves first
            )
        except OSError as error:
            raise SandboxError(f"{argv[0]} cannot be started: {error.strerror}") from error
        room = cls(name, process)
        try:
            room.about = (await room._event(limit))["ready"]
        except BaseException:
            await room.close()
            raise
        return room

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        text = json.dumps(message).encode("ascii")
        self.process.stdin.write(len(text).to_bytes(4, "big") + text)  # whether it arrives shows in the event
        return await self._event(limit)

    async def close(self) -> None:
        process = self.process
        if process.stdin is not None:
            process.stdin.close()
        await self._ended(CLOSE_TIMEOUT)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await self._ended(CLOSE_TIMEOUT)
        self._listener.cancel()

    async def cause(self, code: int | None) -> RoomLostError:
        """Why the room ended, from its exit code; None when it has not ended. Backends that know more say more."""
        errors = b"".join(self._errors).decode("utf-8", "replace").strip()[-2000:]
        said = f": {errors}" if errors else ""
        if code is None:
            return RoomLostError(f"{self.name} does not answer{said}")
        if code == BROKE:
            return RoomLostError("the program ended what supervises it", broke=True)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RoomLostError(f"{self.name} {how}{said}")

    async def _ended(self, limit: float) -> None:
        """Wait for the end of the process and of its stderr, but not long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self.process.wait()
                await asyncio.shield(self._listener)

    async def _event(self, limit: float) -> dict[str, Any]:
        """The next event."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(limit):
                length = int.from_bytes(await self.process.stdout.readexactly(4), "big")
                if length > FRAME_CAP:
                    raise ValueError(f"an event of {length} bytes")
                return dict(json.loads(await self.process.stdout.readexactly(length)))
        except TimeoutError as error:
            raise await self.cause(self.process.returncode) from error
        except (OSError, EOFError, ValueError, TypeError, RecursionError) as error:
            await self._ended(CLOSE_TIMEOUT)
            raise await self.cause(self.process.returncode) from error

    async def _listen(self) -> None:
        """Keep the last of stderr, so that it never fills."""
        assert self.process.stderr is not None
        while part := await self.process.stderr.read(4096):
            self._errors.append(part)


__all__ = [
    "ENVIRONMENT",
    "SCRATCH_MB",
    "START_TIMEOUT",
    "Backend",
    "PipeRoom",
    "Room",
    "RoomLostError",
    "WorkerSettings",
    "worker_argv",
    "worker_source",
]
