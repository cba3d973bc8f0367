"""Rooms kept warm, and jobs played in them.

    run(jobs), from any thread or loop ──> the pool's own loop (thread "pgs-sandbox")
        job ──> Slots: an idle room, else a new one ──> orders.py ──> Result
                  │                                        └─ the room was lost: close it, once more in another
                  └─ N rooms for programs; up to N more for tests, started when first needed

Invariants: a job is played at most twice, and ends as a Result: a program's failure is never an exception, trouble with
rooms is UNAVAILABLE, and a job that broke two rooms is BROKE. Every wait has a deadline. A room plays one job at a time
and goes back only when that job has ended in good order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from palingenesis.rl.errors import SandboxError
from palingenesis.rl.observe.waits import progress, waiting
from palingenesis.rl.sandbox.job import Check, Job, Program, Result, SandboxUsage, Status
from palingenesis.rl.sandbox.orders import GRACE, run_call, run_check, run_program
from palingenesis.rl.sandbox.room import START_TIMEOUT, Backend, Room, RoomLostError

DOWN = 5.0  # seconds after two failed starts in which no other is tried: of thousands of jobs each would try twice
EXAMPLES = 10  # jobs kept that did not end DONE
SHOWN = 2000  # characters of an example's source and stderr


class Pool:
    """A Sandbox over any backend's rooms.

    Args:
        backend: starts rooms.
        rooms: how many programs run at once.
        timeout: seconds a job may run that names no time itself.
    """

    def __init__(self, backend: Backend, rooms: int, timeout: float) -> None:
        self._backend, self._timeout = backend, timeout
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._examples: deque[dict[str, str]] = deque(maxlen=EXAMPLES)
        self._programs = Slots(backend, rooms, self._count)
        self._checkers = Slots(backend, rooms, self._count)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the warm rooms and run a trivial job.

        Raises:
            SandboxError: a room does not start, or does not do what it is told; with the cure.
        """
        try:
            self._wait(self._warm_up)
        except BaseException:
            self.close()
            raise

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, as many at once as there are rooms; results in order."""
        loop = self._own_loop()
        longest = max((job.timeout or self._timeout for job in jobs), default=0.0)
        with waiting("sandbox", f"{len(jobs)} programs", 2 * (2 * longest + 4 * GRACE + START_TIMEOUT)):
            work = asyncio.run_coroutine_threadsafe(self._run(jobs), loop)
            return await asyncio.wrap_future(work)

    def usage(self) -> SandboxUsage:
        """Work since it was last asked."""
        with self._lock:
            usage = SandboxUsage(dict(self._counts), tuple(self._examples))
            self._counts.clear()
            self._examples.clear()
        return usage

    def close(self) -> None:
        """End every room; jobs that still run end as UNAVAILABLE. Idempotent."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is not None and self._thread is not None:
            try:
                asyncio.run_coroutine_threadsafe(self._shut(), loop).result()
            finally:
                loop.call_soon_threadsafe(loop.stop)
                self._thread.join()

    @property
    def rooms(self) -> frozenset[Room]:
        """Those that there are now."""
        return frozenset(self._programs.all | self._checkers.all)

    # ------------------------------------------------------------------------------------------------ on the own loop

    async def _warm_up(self) -> None:
        await self._programs.fill()
        (result,) = await self._run([Program("print(6 * 7)", timeout=START_TIMEOUT)])
        if result.status is not Status.DONE or result.stdout != "42\n":
            raise SandboxError(
                f"sandbox.backend: a program that prints 42 ended {result.status} ({result.reason}), "
                f"with output {result.stdout[:200]!r} {result.stderr[:500]}"
            )
        self.usage()

    async def _run(self, jobs: Sequence[Job]) -> list[Result]:
        return list(await asyncio.gather(*map(self._job, jobs)))

    async def _job(self, job: Job) -> Result:
        try:
            result = await self._attempt(job)
        except RoomLostError as first:
            self._count("retried")
            try:
                result = await self._attempt(job)
            except RoomLostError as second:
                broke = first.broke and second.broke
                result = Result(Status.BROKE if broke else Status.UNAVAILABLE, str(second))
        progress("sandbox", f"a program: {result.status}")
        self._note(job, result)
        return result

    async def _attempt(self, job: Job) -> Result:
        timeout = job.timeout or self._timeout
        if isinstance(job, Check):  # the checker first: where none starts, no program's room is lost for it
            async with self._checkers.room() as checker, self._programs.room() as room:
                return await run_check(job, room, checker, timeout)
        async with self._programs.room() as room:
            if isinstance(job, Program):
                return await run_program(job, room, timeout)
            return await run_call(job, room, timeout)

    async def _shut(self) -> None:
        await asyncio.gather(self._programs.close(), self._checkers.close())
        await self._backend.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=GRACE)

    # ---------------------------------------------------------------------------------------------------- any thread

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="pgs-sandbox", daemon=True)
                self._thread.start()
            return self._loop

    def _wait(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = self._own_loop()
        asyncio.run_coroutine_threadsafe(work(), loop).result()

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _note(self, job: Job, result: Result) -> None:
        self._count(str(result.status))
        if result.status is not Status.DONE:
            example = {
                "status": str(result.status),
                "reason": result.reason,
                "source": job.source[:SHOWN],
                "stderr": result.stderr[-SHOWN:],
            }
            with self._lock:
                self._examples.append(example)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


class Slots:
    """Up to `size` rooms of one kind. An empty slot gets its room when it is taken."""

    def __init__(self, backend: Backend, size: int, count: Callable[[str], None]) -> None:
        self._backend, self._size, self._count = backend, size, count
        self._free = asyncio.Semaphore(size)
        self._idle: list[Room] = []
        self.all: set[Room] = set()
        self._failures: list[tuple[float, SandboxError]] = []  # starts in a row that failed
        self._closed = False

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Room]:
        """A room for one job. It is closed unless the job leaves it in good order.

        Raises:
            RoomLostError: there is none to be had.
        """
        async with self._free:
            room = await self._take()
            try:
                yield room
            except BaseException:
                await self._discard(room)
                raise
            self._idle.append(room)

    async def fill(self) -> None:
        """Start all rooms at once.

        Raises:
            SandboxError: one does not start.
        """
        self._idle += await asyncio.gather(*(self._open() for _ in range(self._size)))

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(room.close() for room in self.all))

    async def _take(self) -> Room:
        if self._closed:
            raise RoomLostError("the sandbox was closed")
        while self._idle:
            room = self._idle.pop()
            if room.alive:
                return room
            await self._discard(room)
        if len(self._failures) > 1 and time.monotonic() - self._failures[-1][0] < DOWN:
            raise RoomLostError(str(self._failures[-1][1]))
        try:
            return await self._open()
        except SandboxError as error:
            self._failures.append((time.monotonic(), error))
            raise RoomLostError(str(error)) from error

    async def _open(self) -> Room:
        room = await self._backend.open()
        self._failures.clear()
        self.all.add(room)
        if self._closed:
            await self._discard(room)
            raise RoomLostError("the sandbox was closed")
        return room

    async def _discard(self, room: Room) -> None:
        self.all.discard(room)
        self._count("replaced")
        await room.close()


__all__ = ["Pool"]
