"""Threads for blocking work, started on demand and never waited for at exit.

`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends, so one user function that never
returns would keep a finished run alive for ever. These threads are daemons.

Invariant: a thread lives as long as its `Threads`. A child process started by one of them with a parent-death signal
is therefore not killed by its thread's end (Linux sends that signal when the *thread* that forked ends).
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Up to `limit` daemon threads that run submitted calls in order of submission."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._waiting = 0  # submitted calls that no thread has finished
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on a thread, in a copy of the caller's context; the future holds its result or exception."""
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} threads are closed")
            self._waiting += 1
            if self._started < min(self._limit, self._waiting):
                self._started += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        self._jobs.put(lambda: _fulfil(future, lambda: context.run(call)))
        return future

    def close(self) -> None:
        """Let the threads end once their present calls return; calls not begun yet still run."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._waiting -= 1
            del job


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future, SystemExit included
        future.set_exception(error)
    else:
        future.set_result(result)
