"""The thread the rollout half lives in.

    trainer's thread ── run(coroutine) ──> event loop thread ──> result or the one exception that ended it

The trainer waits in short naps, so that a signal is noticed while rollouts run: `interrupted` is asked between naps and
may raise. An `ExceptionGroup` from concurrent rollouts is unwrapped to its first error; the others are its consequences.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")
NAP_S = 0.2
CLOSE_S = 5.0


class Producer:
    """Runs coroutines of the rollout half for the trainer's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], interrupted: Callable[[], None] = lambda: None) -> T:
        """Run `work` to its end and return its result.

        Args:
            interrupted: called between naps; what it raises cancels the work and goes to the caller.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=NAP_S)
                except FutureTimeout:
                    if future.done():  # in this very moment, or with a TimeoutError of its own
                        return future.result()
                    interrupted()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            future.cancel()

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> bool:
        """Run `last`, then end the loop and its tasks. False when something of the user's would not end in time; its
        thread is a daemon and is left behind."""

        async def drain() -> None:
            if last is not None:
                await last
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(drain(), self._loop).result(timeout=CLOSE_S)
        except FutureTimeout:
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
