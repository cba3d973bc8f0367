"""The vLLM engine: one thread steps it, the rollout loop asks, the trainer's thread loads weights while it stands still.

    rollout loop ── generate ──> inbox ──┐                    ┌──> future of the request, the step it finishes
                                         ├─> engine thread: inbox, step, inbox, step ...
    trainer ── load, sleep, wake ──> "stand still" ──┘ acknowledged between two steps; released when the trainer is done

Invariants:
- A request joins the batch before the next step and is answered by the step that finishes it.
- What the trainer does to the engine happens on the trainer's thread (under FSDP gathering the weights is a collective),
  never during a step: the engine thread has said that it stands still.
- The first failure of a step ends the engine: every request, and everything asked of it later, gets that one error.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from palingenesis.rl.engines.vllm.core import Core, VLLMOptions, fp8_groups
from palingenesis.rl.errors import EngineError, PalingenesisError, StallError
from palingenesis.rl.observe.waits import progress, wait_for
from palingenesis.rl.types import Completion, EngineUsage, SamplingParams, Weights

START_S = 1200.0  # compiling and capturing took 40 to 150 s on one H200; a cold cache and a large model take longer
STILL_S = 300.0  # a step takes milliseconds; the first ones of new shapes may compile


class VLLMEngine:
    """vLLM in this process.

    Args:
        options: what vLLM is built with.

    Raises:
        ConfigError, EngineError: vLLM does not start; the message says what to change.
    """

    def __init__(self, options: VLLMOptions) -> None:
        self._options = options
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._closed = False
        self._timeline: list[tuple[float, int]] = []
        self._seen = {"prefill": 0, "cached": 0, "generated": 0}
        self.core: Core
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm-engine", daemon=True)
        self._thread.start()
        wait_for(started.wait, "engine", f"vLLM to start with {options.model}", START_S)
        if self._failure:
            raise self._failure

    # --- the engine's thread ---

    def _run(self, started: threading.Event) -> None:
        try:
            self.core = Core(self._options)
        except Exception as error:  # noqa: BLE001 - the constructor raises it on the caller's thread
            self._failure = error
            return
        finally:
            started.set()
        while self._take_orders():
            if self._failure is None and self.core.busy:
                self._step()

    def _take_orders(self) -> bool:
        """Do what was asked since the last step; wait for it when there is nothing to step. False ends the thread."""
        idle = self._failure is not None or not self.core.busy
        while True:
            try:
                order = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            try:
                order()
            except Exception as error:  # noqa: BLE001 - a thread that dies would leave everybody waiting
                self._fail(error)
            idle = False

    def _step(self) -> None:
        try:
            self.core.step()
        except Exception as error:  # noqa: BLE001 - whatever a step raises ends the engine and reaches every request
            self._fail(error)
        progress("engine", f"a step of {self.core.steps.seqs} sequences")
        if not self._timeline or self._timeline[-1][1] != self.core.steps.seqs:
            self._timeline.append((time.monotonic(), self.core.steps.seqs))

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, PalingenesisError):
            cause, error = error, EngineError(f"a step of vLLM failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        self._failure = error
        for tell in self.core.forget():
            tell(error)

    # --- the rollout loop ---

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one continuation of `prompt_ids`.

        Raises:
            EngineError: vLLM refused the request, or a step failed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        name: list[str] = []

        def tell(result: Completion | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(_settle, answer, result)

        def add() -> None:
            if self._failure is not None:
                return tell(self._failure)
            try:
                name.append(self.core.add(tuple(prompt_ids), params, tell))
            except EngineError as error:
                tell(error)

        self._inbox.put(add)
        try:
            return await answer
        except asyncio.CancelledError:
            self._inbox.put(lambda: self.core.abort(name[0]) if name else None)
            raise

    # --- the trainer's thread ---

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """The engine thread has acknowledged that it is between two steps, and stays there."""
        standing, go_on = threading.Event(), threading.Event()

        def stand() -> None:
            standing.set()
            go_on.wait()

        self._inbox.put(stand)
        try:
            wait_for(standing.wait, "engine", "the engine's thread to stand still between two steps", STILL_S)
            if self._failure is not None:
                raise self._failure
            try:
                yield
            except StallError as stall:  # the GPU hangs: nothing more can be asked of the engine
                self._failure = stall
                raise
        finally:
            go_on.set()

    def load(self, weights: Weights) -> None:
        """Take new weights; running requests go on with them, and tokens sampled from here on carry their version."""
        with self._standing_still():
            self.core.load(weights)

    def sleep(self) -> None:
        """Give the memory back until `wake`. Nothing on a CPU, or with `rollout.sleep: false`."""
        if self._options.sleep:
            with self._standing_still():
                self.core.sleep()

    def wake(self) -> None:
        """Take the memory back; weights were loaded since `sleep`."""
        if self._options.sleep:
            with self._standing_still():
                self.core.wake()

    @property
    def fp8_groups(self) -> list[tuple[str, ...]]:
        """See `types.Engine`."""
        return fp8_groups(self.core._runner.model)

    def usage(self) -> EngineUsage:
        """What was done since the last call. Called between the loop's requests; counts are of whole requests."""
        count = len(self._timeline)  # the engine's thread may append meanwhile
        timeline = self._timeline[:count]
        del self._timeline[: max(0, count - 1)]  # the last entry is where the next span begins
        totals = {name: self.core.steps.totals[name] for name in self._seen}
        spent = {name: totals[name] - before for name, before in self._seen.items()}
        self._seen = totals
        idle = [] if self.core.requests else [(time.monotonic(), 0)]
        return EngineUsage(
            timeline=(*timeline, *idle),
            prefill_tokens=spent["prefill"],
            cached_tokens=spent["cached"],
            generated_tokens=spent["generated"],
        )

    def close(self) -> None:
        """End the thread and give everything back. A step that hangs is left behind with its thread, a daemon."""
        self._inbox.put(None)
        self._thread.join(timeout=10.0)
        if self._closed or self._thread.is_alive() or not hasattr(self, "core"):
            return
        self._closed = True
        if self._failure is None:  # after a failed step even giving back may fail or hang: the process's end gives back
            self.core.close()


def _settle(answer: asyncio.Future[Completion], result: Completion | Exception) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


__all__ = ["VLLMEngine", "VLLMOptions"]
