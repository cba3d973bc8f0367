"""Processes that can be killed: how text from a policy meets code that may never return.

    submit(payload) -> a thread of the pool -> an idle worker or a new one -> answer
                                          deadline passed -> the worker is killed      -> TaskTimeoutError
                                          worker died     -> once more on a new one    -> TaskCrashedError
                                          cannot start    ->                              WorkersUnavailableError

A thread cannot be stopped and `signal.alarm` works in main threads only, so a symbolic comparison that never ends can
be ended by killing its process and by nothing else. Workers are `python -c` children with pipes, not `multiprocessing`:
that would import the user's script a second time (spawn) or copy a process full of threads (fork).

Invariants: a worker serves one payload at a time; a deadline counts from when the worker got the payload, never its
time in the queue or its start; no worker outlives its parent, however that ends (see worker_main).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from palingenesis.rl.rewards.threads import Threads

START_TIMEOUT = 120.0  # seconds for the child's imports on a busy machine
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from palingenesis.rl.rewards.worker_main import main; main(int(sys.argv[1]))"
)


class TaskTimeoutError(Exception):
    """The payload took longer than its deadline; its worker was killed."""


class TaskCrashedError(Exception):
    """The payload ended two workers, one after the other."""


class TaskFailedError(Exception):
    """The task raised. `kind` is the exception's type name, `trace` its traceback as text."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.trace = trace


class WorkersUnavailableError(Exception):
    """No worker process could be started."""


class _DiedError(Exception):
    """The worker's pipe closed."""


class Worker:
    """One child process. Use from one thread at a time.

    Args:
        task: `module:function`; the child calls `function(init)` once and gets the handler of payloads.
        init: anything that pickles.

    Raises:
        WorkersUnavailableError: the process did not start or died at once.
        TaskFailedError: `function(init)` raised.
    """

    def __init__(self, task: str, init: Any = None, start_timeout: float = START_TIMEOUT) -> None:
        command = [sys.executable, "-P", "-c", _BOOT, str(os.getpid()), json.dumps(sys.path)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
            )
        except OSError as error:
            raise WorkersUnavailableError(f"a worker process cannot be started: {error}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        try:
            self.call({"task": task, "init": init}, start_timeout)
        except (_DiedError, TaskTimeoutError) as error:
            status = self._process.poll()
            how = f"did not start within {start_timeout:g} s" if status is None else f"ended with status {status}"
            raise WorkersUnavailableError(f"a worker process {how}") from error
        except TaskFailedError:
            self.dispose()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, payload: Any, timeout: float) -> Any:
        """The task's answer to `payload`. After any exception but TaskFailedError the worker is dead."""
        deadline = time.monotonic() + timeout
        data = pickle.dumps(payload)
        try:
            self._write(struct.pack(">I", len(data)) + data, deadline)
            (length,) = struct.unpack(">I", self._read(4, deadline))
            answer = json.loads(self._read(length, deadline))
        except BaseException:
            self.dispose()
            raise
        if "error" in answer:
            error = answer["error"]
            raise TaskFailedError(error["type"], error["message"], error["traceback"])
        return answer["value"]

    def kill(self) -> None:
        """End the process and the programs it started. Any thread may; a call in progress then fails."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def dispose(self) -> None:
        """Kill, and close the pipes. Only where no call is in progress: a closed descriptor is soon another file's."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise _DiedError from error

    def _read(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            _wait(self._stdout, select.POLLIN, deadline)
            try:
                part = os.read(self._stdout, count)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _DiedError from error
            if not part:
                raise _DiedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class WorkerPool:
    """Workers of one task, started when first needed and kept.

    `submit` may be called from any thread; a coroutine awaits `asyncio.wrap_future(pool.submit(...))`.
    """

    def __init__(self, task: str, size: int, init: Any = None) -> None:
        self._task, self._init = task, init
        self._threads = Threads(size, "pgs-worker")
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """The live workers' process ids."""
        with self._lock:
            return sorted(worker.pid for worker in self._all)

    def submit(self, payload: Any, timeout: float) -> Future[Any]:
        """Have `payload` answered; the future's exception is one of this module's four."""
        return self._threads.submit(lambda: self._run(payload, timeout))

    def close(self) -> None:
        """Kill every worker. In a fork of the process that made the pool it does nothing: they are not its own."""
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, busy = self._idle, self._all.difference(self._idle)
            self._idle = []
        self._threads.close()
        for worker in idle:
            worker.dispose()
        for worker in busy:
            worker.kill()
        atexit.unregister(self.close)

    def _run(self, payload: Any, timeout: float) -> Any:
        try:
            return self._once(payload, timeout)
        except _DiedError:
            pass  # somebody else's kill, or the payload's own doing: a second death tells
        try:
            return self._once(payload, timeout)
        except _DiedError as error:
            raise TaskCrashedError("the worker process died twice on this task") from error

    def _once(self, payload: Any, timeout: float) -> Any:
        worker = self._take()
        keep = False
        try:
            answer = worker.call(payload, timeout)
            keep = True
            return answer
        except TaskFailedError:
            keep = True
            raise
        finally:
            self._give(worker, keep)

    def _take(self) -> Worker:
        with self._lock:
            if self._closed:
                raise WorkersUnavailableError("the reward workers are closed")
            if self._idle:
                return self._idle.pop()
        worker = Worker(self._task, self._init)
        with self._lock:
            if not self._closed:
                self._all.add(worker)
                return worker
        worker.dispose()
        raise WorkersUnavailableError("the reward workers are closed")

    def _give(self, worker: Worker, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed:
                self._idle.append(worker)
            else:
                self._all.discard(worker)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(max(1, left * 1000)):
        raise TaskTimeoutError("no answer before the deadline")
