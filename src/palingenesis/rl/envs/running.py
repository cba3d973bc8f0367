"""Runs the user's code and never waits for it on the loop: asynchronous calls are tasks, synchronous ones threads.

    run(call, limit) ──┬─ async ──> a task of the loop ────────────────────────────┬──> Ended(value | error)
                       └─ sync ───> a thread of its own (an awaitable result: ──┘ a task)
        limit passed, or the caller was cancelled:
                            the task is cancelled, a thread that computes is ended, one that blocks is left behind

The hooks of one environment (`reset`, `tool_schemas`, `get_reward`, `close`) run in one task, its Home, one after another:
what `reset` enters there, `close` can leave (a task group, a client session and a time-out belong to the task that entered
them). Tools run in tasks of their own, because the calls of a turn run at once.

Whatever a call raises is a value here (`Ended.error`): SystemExit and KeyboardInterrupt would end the loop, and a future
cannot carry StopIteration. Invariants: at most MAX_THREADS calls run in threads at once, and a call's limit counts from
when it begins, not while it waits for its turn; a call that does not end is remembered until it does, and more than
MAX_LEFT of them end the run.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import ctypes
import functools
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from palingenesis.rl.errors import SkipSample, StallError
from palingenesis.rl.observe.pace import pace
from palingenesis.rl.observe.waits import progress, waiting

Call = Callable[[], Any]

MAX_THREADS = 256  # synchronous calls at once: tools that wait for a network are many and cheap
MAX_LEFT = 1000  # calls that never ended, over a run: each keeps a thread's memory
GRACE_S = 0.2  # what a call that was told to end has for it
SLACK_S = 60.0  # a limit passed by this much went unnoticed: the loop is blocked, and the trainer's thread says so


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended: with `value`, or with `error`.

    Attributes:
        late: it passed its limit; `error` says so.
        left: the call itself, when it runs on.
    """

    value: Any = None
    error: BaseException | None = None
    late: bool = False
    left: Running | None = None


class Runner:
    """Runs calls of one environment or set of tools, on one event loop.

    Args:
        part: whose code it is, for reports of what the run waits for.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._slots = asyncio.Semaphore(MAX_THREADS)
        self._left: set[Running] = set()

    async def run(self, call: Call, what: str, limit: float, home: Home | None = None) -> Ended:
        """Run `call` for at most `limit` seconds; then its error is a TimeoutError.

        Args:
            home: whose task runs it. Without one, and where that is still at work, it has a task of its own.

        Raises:
            StallError: more than MAX_LEFT calls have passed their limits and still run.
        """
        async with nullcontext() if is_async(call) else self._slots:
            await pace()
            running = Running(call, home)
            with waiting(self._part, what, limit + SLACK_S):
                try:
                    await asyncio.wait({running.task}, timeout=limit)
                except asyncio.CancelledError:
                    await self._leave(running)
                    raise
                finally:
                    progress(self._part)
            if running.task.done():
                return running.ended()
            await self._leave(running)
        if len(self._left) > MAX_LEFT:
            raise StallError(
                f"{len(self._left)} calls of {self._part} passed their limits and never ended, the last: {what}. Give "
                "what they wait for a time-out of its own (a socket, a lock, a subprocess), or make them asynchronous."
            )
        error = TimeoutError(f"{what} took longer than {limit:g} s")
        return Ended(error=error, late=True, left=running if running.alive else None)

    async def _leave(self, running: Running) -> None:
        """Tell the call to end and give it a moment; remember it if it does not."""
        running.abandon()
        await asyncio.wait(running.parts, timeout=GRACE_S)
        if running.end_if_it_computes():
            await asyncio.wait(running.parts, timeout=GRACE_S)
        self._left = {call for call in (*self._left, running) if call.alive}


class Running:
    """One call under way.

    Attributes:
        task: gives how it ended.
        parts: all that runs for it: the task, and a future of the thread.
    """

    task: asyncio.Future[Ended]
    _cancel: Callable[[], object]

    def __init__(self, call: Call, home: Home | None = None) -> None:
        self._thread: _Thread | None = None
        if home is not None and home.is_free:
            self.task, self._cancel = home.start(self._run(call)), home.cancel
        else:
            task = asyncio.get_running_loop().create_task(self._run(call))
            self.task, self._cancel = task, task.cancel
        self.parts: list[asyncio.Future[Ended]] = [self.task]

    @property
    def alive(self) -> bool:
        return not all(part.done() for part in self.parts)

    def ended(self) -> Ended:
        """How it ended, once it has. A call that cancelled itself has failed."""
        return Ended(error=asyncio.CancelledError()) if self.task.cancelled() else self.task.result()

    def abandon(self) -> None:
        """Nobody waits for its result; what it awaits is cancelled."""
        if not self.task.done():
            self._cancel()
        if self._thread is not None:
            self._thread.abandon()

    def end_if_it_computes(self) -> bool:
        """End a thread that has used the processor since `abandon`; true when it was told to end."""
        return self._thread is not None and self._thread.end_if_it_computes()

    async def _run(self, call: Call) -> Ended:
        if is_async(call):
            return await _awaited(call)
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.parts.append(future)
        self._thread = _Thread(call, future)
        ended = await asyncio.shield(future)  # cancelling the task must not hide that the thread still runs
        if inspect.isawaitable(ended.value):
            result: Awaitable[Any] = ended.value
            return await _awaited(lambda: result)
        return ended


class Home:
    """The task in which the hooks of one environment run.

    A task group that a hook has entered cancels this task when one of the group's own tasks fails, again and again until it
    is left. So a cancellation that did not come from `cancel` means that the environment is lost.

    Args:
        lost: sees to it that `close` runs here and that `end` is called. It may be called several times.
    """

    def __init__(self, lost: Callable[[], object]) -> None:
        self._lost = lost
        self._work: Coroutine[Any, Any, Ended] | None = None  # not begun
        self._now: asyncio.Future[Ended] | None = None  # of the work that waits or is under way
        self._told = False  # that work was cancelled by `cancel`
        self._over = False
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def is_free(self) -> bool:
        return self._now is None and not self._over

    def start(self, work: Coroutine[Any, Any, Ended]) -> asyncio.Future[Ended]:
        """Run `work` here, where nothing else runs; the future gives how it ended."""
        self._work, self._now = work, asyncio.get_running_loop().create_future()
        self._wake.set()
        return self._now

    def cancel(self) -> None:
        """Cancel the work that was started."""
        self._told = True
        self._task.cancel()

    def end(self) -> None:
        """Nothing more is started."""
        self._over = True
        self._wake.set()

    async def _serve(self) -> None:
        while self._work is not None or not self._over:
            try:
                await self._wake.wait()
                self._wake.clear()
                if self._work is not None:
                    work, self._work = self._work, None
                    self._settle(await work)
            except asyncio.CancelledError as error:
                self._cancelled(error)

    def _cancelled(self, error: asyncio.CancelledError) -> None:
        while self._task.cancelling():
            self._task.uncancel()
        told, self._told = self._told, False
        if told and self._work is not None:
            self._work.close()
            self._work = None
        if self._work is None:
            self._settle(Ended(error=error))
        if not told:
            self._lost()

    def _settle(self, ended: Ended) -> None:
        now, self._now, self._told = self._now, None, False
        if now is not None:
            now.set_result(ended)


class _Thread:
    """A thread for one call; it keeps neither the loop nor the end of the process waiting.

    The lock guards what the thread's end and the loop both decide on.
    """

    def __init__(self, call: Call, future: asyncio.Future[Ended]) -> None:
        self._call = call
        self._future = future
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._ident: int | None = None  # while the call runs
        self._abandoned = False
        self._used = 0.0  # processor seconds when it was abandoned
        _starter().put(self)

    def start(self) -> None:
        """In the starter's thread."""
        try:
            _thread.start_new_thread(self._context.run, (self._work,))
        except RuntimeError as error:
            self._finish(Ended(error=SkipSample(f"no thread could be started for a call: {error}")))

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            self._used = self._processor_seconds()

    def end_if_it_computes(self) -> bool:
        """Raise SystemExit in the thread if it has moved since it was abandoned; true when that was done.

        A loop that never ends would compete with the event loop for the rest of the run. A thread that blocks outside of
        Python is left alone: the exception would stay pending, which makes Python 3.11 hang under a profiler.
        """
        with self._lock:
            if self._ident is None or self._processor_seconds() == self._used:
                return False
            ident, self._ident = self._ident, None  # once, and never at a thread that has ended: numbers are used again
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit))
            return True

    def _processor_seconds(self) -> float:
        if self._ident is None or not hasattr(time, "pthread_getcpuclockid"):  # macOS has none
            return self._used
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))

    def _work(self) -> None:
        with self._lock:
            if self._abandoned:
                return self._finish(Ended(error=SystemExit()))
            self._ident = threading.get_ident()
        ended = Ended(error=SystemExit())
        try:
            ended = _called(self._call)
            with self._lock:
                self._ident = None
        except SystemExit:  # from `end_if_it_computes`, after the call's own end; it comes once
            pass
        self._finish(ended)

    def _finish(self, ended: Ended) -> None:
        with suppress(RuntimeError):  # the loop is closed: the run is over, and nobody waits
            self._loop.call_soon_threadsafe(self._settle, ended)

    def _settle(self, ended: Ended) -> None:
        if not self._future.done():
            self._future.set_result(ended)


@functools.cache
def _starter() -> queue.SimpleQueue[_Thread]:
    """A thread that starts threads.

    Starting one takes 40 us, which for 500 calls at once is a jolt on the loop, and `threading.Thread.start` waits until
    the new thread has had the interpreter, which behind busy tools took 0.5 s.
    """
    starts: queue.SimpleQueue[_Thread] = queue.SimpleQueue()

    def work() -> None:
        while True:
            starts.get().start()

    threading.Thread(target=work, name="pgs-env-starter", daemon=True).start()
    return starts


def _called(call: Call) -> Ended:
    try:
        return Ended(call())
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything; whoever asked decides
        return Ended(error=error)


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Ended:
    try:
        return Ended(await call())
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        return Ended(error=error)


def is_async(function: Callable[..., Any]) -> bool:
    """Calling it gives a coroutine: a function, a method, an object with an asynchronous `__call__`, partial or not."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
