"""An engine that answers from a function: the double that tests of the rollout half use in a model's place.

It keeps the same promises as a real engine (one log-prob and one version a token, the finish reason, usage), so the
contract suite runs over it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from palingenesis.rl.observe.waits import progress
from palingenesis.rl.types import Completion, EngineUsage, Finish, SamplingParams, Weights

Script = Callable[[tuple[int, ...], SamplingParams], Sequence[int]]
Delay = Callable[[tuple[int, ...], SamplingParams], float]


class ScriptedEngine:
    """Answers each prompt with the token ids `script(prompt_ids, params)` returns, within `delay` seconds.

    The answer ends at the first stop token or at `max_new_tokens`. Its tokens come one by one over the delay and carry the
    version of their moment. An infinite delay is an engine that hangs. Every log-prob is `logprob`.
    """

    def __init__(self, script: Script, delay: float | Delay = 0.0, logprob: float = -1.0) -> None:
        self.script = script
        self.delay = delay if callable(delay) else lambda prompt, params: delay
        self.logprob = logprob
        self.version = 0
        self.asleep = False
        self._running = 0
        self._timeline: list[tuple[float, int]] = []
        self._prefill = self._generated = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        prompt = tuple(prompt_ids)
        versions: list[int] = []
        self._count(1)
        try:
            delay = self.delay(prompt, params)
            ids = list(self.script(prompt, params))[: params.max_new_tokens]
            stops = [at for at, token in enumerate(ids) if token in params.stop_token_ids]
            ids = ids[: stops[0] + 1] if stops else ids
            for _ in ids:
                await asyncio.sleep(delay / len(ids))
                versions.append(self.version)
                progress("engine", f"token {len(versions)} of a request")
        finally:
            self._count(-1)
        self._prefill += len(prompt_ids)
        self._generated += len(ids)
        return Completion(
            token_ids=tuple(ids),
            logprobs=(self.logprob,) * len(ids),
            versions=tuple(versions),
            finish=Finish.STOP if stops else Finish.LENGTH,
        )

    def _count(self, change: int) -> None:
        self._running += change
        self._timeline.append((time.monotonic(), self._running))

    def load(self, weights: Weights) -> None:
        self.version = weights.version

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    @property
    def fp8_groups(self) -> tuple[tuple[str, ...], ...]:
        return ()

    def usage(self) -> EngineUsage:
        used = EngineUsage(tuple(self._timeline), self._prefill, 0, self._generated)
        self._timeline, self._prefill, self._generated = [], 0, 0
        return used

    def close(self) -> None:
        """Nothing is held."""


__all__ = ["ScriptedEngine"]
