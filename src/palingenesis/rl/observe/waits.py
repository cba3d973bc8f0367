"""What is being waited for, and since when: nothing in a run waits without an owner and a deadline.

    with waiting("engine", "request 12, prompt 73 tokens", 300):     whoever waits registers, in any thread
        ...
    progress("engine", "token 40 of 32 sequences")                   the part that works says that it moves
    progress()                                                       the same, from inside the block that waits
    check()                                                          the trainer's thread asks while it naps

A wait is on a part. It is late when, for its limit, it has not ended and its part has not moved: a deadline is about
standing still, so a long rollout that samples on is never late. `check` runs on the trainer's thread, because code of the
user's may block the event loop.

Invariant: the first `check` that finds a late wait takes the stacks, forgets every wait and raises; the run ends with that
one error, and a thread that hangs for ever cannot end the next run of this process too.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from palingenesis.rl.errors import StallError

NAP_S = 0.2  # how often a waiting trainer's thread looks around
SHOWN = 50  # waits that are written out, the oldest first


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait: `detail` is waited for from `part`, since `began`, at most `limit` seconds without a move."""

    part: str
    detail: str
    limit: float
    began: float


_lock = threading.Lock()
_waits: set[Wait] = set()
_inside: ContextVar[str] = ContextVar("the part of the innermost wait", default="")
_moved: dict[str, tuple[float, str]] = {}  # part -> when it last moved, and what it did


@contextmanager
def waiting(part: str, detail: str, limit: float) -> Iterator[None]:
    """Register a wait on `part` while the block runs; it may be a block of a coroutine."""
    wait = Wait(part, detail, limit, time.monotonic())
    with _lock:
        _waits.add(wait)
    before = _inside.get()
    _inside.set(part)
    try:
        yield
    finally:
        _inside.set(before)  # not `reset`, which fails where a forgotten coroutine is closed in another context
        with _lock:
            _waits.discard(wait)


def progress(part: str = "", note: str = "") -> None:
    """`part` has moved: a token, a finished call. Cheap enough for every token; any thread. The last note is kept.

    Without a name it is the part that the caller's innermost `waiting` block waits for.
    """
    part = part or _inside.get()
    _moved[part] = (time.monotonic(), note or _moved.get(part, (0.0, ""))[1])


def wait_for(over: Callable[[float], object], part: str, detail: str, limit: float) -> None:
    """Wait on the trainer's thread. `over(seconds)` waits that long at most and is true when the wait has ended.

    Raises:
        StallError: this wait or another one is late.
    """
    with waiting(part, detail, limit):
        while not over(NAP_S):
            check()


def check() -> None:
    """Raise StallError when a wait is late."""
    now = time.monotonic()
    with _lock:
        waits = sorted(_waits, key=lambda wait: wait.began)
        late = [wait for wait in waits if _idle(wait, now) > wait.limit]
        if not late:
            return
        _waits.clear()
    worst = max(late, key=lambda wait: _idle(wait, now) - wait.limit)
    raise StallError(
        f"{worst.part} stood still for {_idle(worst, now):.0f} s (at most {worst.limit:g} s): "
        f"waited for {worst.detail}.",
        _report(waits, now),
    )


def _idle(wait: Wait, now: float) -> float:
    return now - max(wait.began, _moved.get(wait.part, (0.0, ""))[0])


def _report(waits: list[Wait], now: float) -> str:
    """The oldest waits, what their parts last did, and the stacks of all threads."""
    lines = [f"{len(waits)} waits, the oldest first:"]
    lines += [f"  {now - wait.began:8.1f} s  {wait.part}: {wait.detail}" for wait in waits[:SHOWN]]
    for part in dict.fromkeys(wait.part for wait in waits):
        at, note = _moved.get(part, (None, ""))
        lines.append(f"{part} last moved {f'{now - at:.1f} s ago' if at else 'never'}{note and f': {note}'}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines += ["", f"thread {names.get(ident, ident)}:", "".join(traceback.format_stack(frame)).rstrip()]
    return "\n".join(lines) + "\n"


__all__ = ["NAP_S", "check", "progress", "wait_for", "waiting"]
