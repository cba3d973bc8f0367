"""Where a step's wall time went.

`with clock("train"):` adds to one part; `lap()` closes the step and returns `time/<part>` and `time/step`. Parts never
nest; what lies between them is `time/other`, so the parts always add up to the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by part since the last lap."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """`{"time/rollout": 1.2, ..., "time/other": 0.0, "time/step": 2.0}`; starts the next step."""
        now = time.perf_counter()
        step = now - self._began
        parts = {**self._parts, "other": step - sum(self._parts.values()), "step": step}
        out = {f"time/{part}": seconds for part, seconds in parts.items()}
        self._began, self._parts = now, {}
        return out
