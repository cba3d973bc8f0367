"""The thread the rollout half lives in.

    trainer's thread ── run(coroutine) ──> event loop thread ──> result or the one exception that ended it

The trainer waits in short naps. Between them `interrupted` is asked and may raise, so that a signal is noticed while
rollouts run, and the waits of the whole run are checked for one past its deadline: here, and not on the loop, because code
of the user's may block the loop. That is a wait of its own: each nap asks the loop for a sign of life.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from palingenesis.rl.errors import StallError
from palingenesis.rl.observe import waits

T = TypeVar("T")
CLOSE_S = 5.0
# Seconds the loop may be blocked: a reward written as `async def` that computes does it for seconds. Less than the engine's
# deadline: a blocked loop does not take the engine's answers, and is the one to be named.
LOOP_S = 200.0
LOOP = "rollout loop"


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

        Raises:
            StallError: something stood still past its deadline.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            with waits.waiting(LOOP, "a sign of life; code of the user's may block it", LOOP_S):
                while True:
                    try:
                        return future.result(timeout=waits.NAP_S)
                    except FutureTimeout:
                        if future.done():  # in this very moment, or with a TimeoutError of its own
                            return future.result()
                        interrupted()
                        if not self._thread.is_alive():
                            raise StallError(
                                "the rollout loop has ended: code of yours that runs on it called sys.exit()."
                            ) from None
                        self.soon(waits.progress, LOOP)
                        waits.check()
        finally:
            future.cancel()

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Have the loop make a call, and do not wait for it."""
        self._loop.call_soon_threadsafe(call, *args)

    def close(self, last: Coroutine[Any, Any, None] | None = None, patience: float = 0.0) -> bool:
        """Run `last`, then end the loop and its tasks. False when something of the user's would not end in time; its
        thread is a daemon and is left behind.

        Args:
            patience: seconds on top of CLOSE_S, for a `last` that may rightly take long.
        """

        if not self._thread.is_alive():
            return False

        async def drain() -> None:
            if last is not None:
                await last
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        try:
            asyncio.run_coroutine_threadsafe(drain(), self._loop).result(timeout=CLOSE_S + patience)
        except FutureTimeout:
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return True
