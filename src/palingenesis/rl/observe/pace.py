"""Keep the rollout loop coming round when hundreds of episodes have something to compute at one moment.

An event loop runs everything that is ready before it looks at sockets, timers and threads again. When 512 tools answer
together, that is 512 renderings of some milliseconds each: for a second no request is taken and no time-out noticed. So
whoever is about to compute on the loop keeps pace:

    await pace()      goes on in this round if the round is young, else in a later one

Whoever wants a burst as a whole, for what comes of it must not depend on how fast this machine computes, waits for its end:

    await settled()   nobody has been kept waiting for QUIET rounds

Invariant: a round in which everybody asks lasts about SLICE_S, and the one computation that was under way then.
"""

from __future__ import annotations

import asyncio
import time
from weakref import WeakKeyDictionary

SLICE_S = 0.01
QUIET = 32  # rounds; between two computations of an episode, an asynchronous tool that answers at once takes some five

_rounds: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()  # when its round was first asked


_kept: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()  # how many wait in `pace`


async def pace() -> None:
    """Wait for a round of the loop in which less than SLICE_S were spent since somebody first asked."""
    loop = asyncio.get_running_loop()
    if time.monotonic() - _began(loop) <= SLICE_S:
        return
    _kept[loop] = _kept.get(loop, 0) + 1
    try:
        while time.monotonic() - _began(loop) > SLICE_S:  # noqa: ASYNC110 - a new round is what is waited for
            await asyncio.sleep(0)
    finally:
        _kept[loop] -= 1


async def settled() -> None:
    """Wait until nobody has been kept in `pace` for QUIET rounds of the loop."""
    loop = asyncio.get_running_loop()
    quiet = 0
    while quiet < QUIET:
        await asyncio.sleep(0)
        quiet = 0 if _kept.get(loop) else quiet + 1


def _began(loop: asyncio.AbstractEventLoop) -> float:
    began = _rounds.get(loop)
    if began is None:
        began = _rounds[loop] = time.monotonic()
        loop.call_soon(_rounds.pop, loop, None)  # runs in the next round
    return began
