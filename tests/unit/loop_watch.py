"""How long the event loop of a test does not come round."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

BEAT_S = 0.005
MOST_S = 0.1  # the loop is never blocked for longer


class Heartbeat:
    """Looks, from a task of the loop, how long the loop takes to come round again.

    Attributes:
        blocked: the longest of these times in seconds, without what other processes took of the processors: of each time
            no more counts than this process has computed in it, in any thread. So a loop that computes, or waits for the
            interpreter behind computing tools, is seen on a busy machine as on an idle one. One that sleeps in a blocking
            call is not: tests of that have the call look at its own thread (`assert_no_loop`).
        wall: the longest by the clock, to be told beside it.
    """

    def __init__(self) -> None:
        self.blocked = 0.0
        self.wall = 0.0
        self._task = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            clock, computed = time.monotonic(), time.process_time()
            await asyncio.sleep(BEAT_S)
            wall = time.monotonic() - clock - BEAT_S
            self.wall = max(self.wall, wall)
            self.blocked = max(self.blocked, min(wall, time.process_time() - computed - BEAT_S))

    def stop(self) -> None:
        self._task.cancel()


def assert_no_loop() -> None:
    """This thread runs no event loop, so what blocks here blocks nobody else."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError("synchronous code of an environment was called on the event loop")


@contextmanager
def frozen_heap() -> Iterator[None]:
    """What is loaded already is not walked through by the collector, which takes it 0.2 s; a run does the same."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
