"""The embedded engine: the trainer's own model, or a copy of it, generates through transformers' `generate`.

    rollout loop ── generate() ──> pending ──(a burst)──> one wave ──> engine thread ── model.generate ──> futures

Invariants:
- One wave runs at a time. It holds every request that was pending when it started, so on a CPU the batch a row is
  computed in, and with it every bit of its log-probs, is a function of what was asked and not of timing; but for turns
  that had to wait for a tool or an environment (a thread, a server): they are asked for when that has answered.
- A request's draw depends on its seed and its logits alone: token t is the inverse CDF of the softmax at the t-th
  uniform number of the request's own generator (float64 on both sides; in float32 a vocabulary's tail has no mass).
- The log-prob of a token is read from the logits it was drawn from, at the request's temperature.
- A half-precision model computes as the trainer's does (kernels.precision), and its logits in float32: rounded to bf16, a
  logit of 16 is off by 0.06, and so were the log-probs (mean |r-1| of SmolLM2-135M on one H200: 0.035).
- At staleness 0 the weights are the trainer's own tensors: `load` only moves the version. Where generation goes on while
  the trainer steps, the engine has its own copy (`own_copy`) and `load` copies into it: on the trainer's thread, while the
  engine's thread stands still between two tokens. A wave under way keeps its keys and values and goes on with the new
  weights; a token carries the version it was sampled with.

Transformers' continuous batching was measured and left out (bench/hf_engine.py, 512 sequences): with the packaged policy
`generate` is 3 times as fast on two CPU cores and 22 times on one H200, with SmolLM2-135M and 192 tokens 4 times there.
The schedule of continuous batching also depends on arrival times, so no run could be repeated bit for bit.
"""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from palingenesis.rl.errors import EngineError
from palingenesis.rl.kernels.head import wide_product
from palingenesis.rl.kernels.precision import HALF, mixed_precision
from palingenesis.rl.kernels.sample import sample_reference
from palingenesis.rl.observe.pace import settled
from palingenesis.rl.observe.waits import progress, wait_for
from palingenesis.rl.types import Completion, EngineUsage, Finish, SamplingParams, Weights

STILL_S = 300.0  # a token takes seconds at most; the first one of many long prompts on a CPU takes minutes
CLOSE_S = 10.0  # a wave ends at its next token; one that does not hangs, and its thread, a daemon, is left behind


@dataclass(eq=False)
class _Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    future: asyncio.Future[Completion]


class HFEngine:
    """Generate with a transformers causal model that lives in this process.

    Args:
        model: the policy; generation runs under `eval()` and `no_grad()`.
        pad_token_id: fills the left of shorter prompts; masked out.
        max_rows: rows decoded at once; 0 decodes a whole wave together.
        own_copy: generate from a copy of `model`, so that it can be trained meanwhile.
    """

    def __init__(self, model: Any, pad_token_id: int, max_rows: int = 0, own_copy: bool = False) -> None:
        self.own_copy = own_copy
        self.model = copy.deepcopy(model).requires_grad_(False) if own_copy else model
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.version = 0
        self._pending: list[_Request] = []
        self._wave: asyncio.Task[None] | None = None
        self._closing = False
        self._usage = EngineUsage()
        self._turn = _Turn()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._own_config = self.model.generation_config
        self._thread = threading.Thread(target=self._work, name="hf-engine", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """The engine's thread."""
        while (job := self._jobs.get()) is not None:
            job()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one continuation of `prompt_ids`.

        Raises:
            EngineError: the model failed on the wave this request was part of.
        """
        loop = asyncio.get_running_loop()
        request = _Request(tuple(prompt_ids), params, loop.create_future())
        self._pending.append(request)
        if self._wave is None:
            self._wave = loop.create_task(self._waves())
        return await request.future

    async def _waves(self) -> None:
        """Run waves until nothing is pending. What asks in one burst is one wave, however long the burst takes."""
        try:
            while await self._requests():
                wave, self._pending = self._pending, []
                for batch in self._batches(wave):
                    await self._run(batch)
        finally:
            self._wave = None

    async def _requests(self) -> bool:
        await settled()
        return bool(self._pending)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
                done.set_exception(error)

        self._jobs.put(job)
        return await asyncio.wrap_future(done)

    async def _run(self, batch: list[_Request]) -> None:
        batch = [request for request in batch if not request.future.cancelled()]
        if not batch:
            return
        try:
            completions, times = await self._in_thread(lambda: self._decode(batch))
        except Exception as error:  # noqa: BLE001 - whatever the model raises belongs to every request of the wave
            failure = EngineError(f"generation failed on {len(batch)} prompts: {type(error).__name__}: {error}")
            failure.__cause__ = error
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(failure)
            return
        self._record(batch, completions, times)
        for request, completion in zip(batch, completions, strict=True):
            if not request.future.done():
                request.future.set_result(completion)

    def _batches(self, wave: list[_Request]) -> list[list[_Request]]:
        """Rows that stop on the same tokens decode together, at most `max_rows` at once."""
        by_stop: dict[tuple[int, ...], list[_Request]] = {}
        for request in wave:
            by_stop.setdefault(request.params.stop_token_ids, []).append(request)
        out = []
        for rows in by_stop.values():
            size = self.max_rows or len(rows)
            out += [rows[at : at + size] for at in range(0, len(rows), size)]
        return out

    def _decode(self, batch: list[_Request]) -> tuple[list[Completion], list[float]]:
        """In the engine's thread: decode one batch; the completions, and when each step's tokens were drawn."""
        from transformers import GenerationConfig
        from transformers.generation.logits_process import LogitsProcessorList
        from transformers.generation.stopping_criteria import StoppingCriteriaList

        sampler = _Sampler(self, [r.params for r in batch])
        width = max(len(r.prompt) for r in batch)
        pads = [width - len(r.prompt) for r in batch]
        ids = torch.tensor([[self.pad_token_id] * pad + list(r.prompt) for pad, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        # `generate` fills what a config leaves unset (penalties, top-k) from the model's own: give it nothing to find.
        stop = list(batch[0].params.stop_token_ids)
        config = GenerationConfig(
            max_new_tokens=sampler.steps,
            do_sample=False,
            use_cache=True,
            eos_token_id=stop or None,
            pad_token_id=self.pad_token_id,
        )
        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_hook(_wide_logits)]
        hooks += [layer.register_forward_hook(_moved) for layer in _layers(self.model)]
        self.model.eval()
        self.model.generation_config = config
        try:
            with self._turn.mine(), torch.no_grad(), mixed_precision(self.model):
                self.model.generate(
                    input_ids=ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([sampler]),
                    stopping_criteria=StoppingCriteriaList([self._stop_when_closing]),
                )
        finally:
            self.model.generation_config = self._own_config
            for hook in hooks:
                hook.remove()
        return sampler.completions(), sampler.times

    def _drawn(self, rows: int, tokens: int) -> None:
        """A token of each row is drawn: before the next forward pass the trainer may have its turn."""
        progress("engine", f"token {tokens} of {rows} sequences")
        self._turn.pass_on()

    def _stop_when_closing(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """A wave nobody waits for any more ends at its next token, so that a signal does not wait minutes for it."""
        return torch.full((input_ids.shape[0],), self._closing, device=input_ids.device)

    def _record(self, batch: list[_Request], completions: list[Completion], times: list[float]) -> None:
        lengths = [len(c.token_ids) for c in completions]
        running = [(at, sum(n > step for n in lengths)) for step, at in enumerate(times)]
        self._usage = EngineUsage(
            timeline=(*self._usage.timeline, *running, (time.monotonic(), 0)),
            prefill_tokens=self._usage.prefill_tokens + sum(len(r.prompt) for r in batch),
            generated_tokens=self._usage.generated_tokens + sum(lengths),
        )

    def load(self, weights: Weights) -> None:
        """Take new weights. Without a copy of its own the engine has the tensors already, and no wave may run.

        Raises:
            StallError: the engine's thread does not stand still.
        """
        with self._turn.yours():
            if self.own_copy:
                self._copy(weights)
            self.version = weights.version

    @torch.no_grad()
    def _copy(self, weights: Weights) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights.tensors():
            own.pop(name).copy_(tensor)
        if own:
            raise EngineError(f"the weights of step {weights.version} lack {', '.join(own)}.")

    def sleep(self) -> None:
        """Nothing to give back: the key-value cache of a wave ends with the wave."""

    def wake(self) -> None:
        """Nothing to take back."""

    @property
    def fp8_groups(self) -> tuple[tuple[str, ...], ...]:
        return ()

    def usage(self) -> EngineUsage:
        used, self._usage = self._usage, EngineUsage()
        return used

    def close(self) -> None:
        """End the thread; a wave under way ends at its next token."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        self.model.generation_config = self._own_config  # a wave that hangs has bent it


def _wide_logits(head: Any, inputs: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
    """The head's output again, in float32, where the model computes it in half precision."""
    if logits.dtype not in HALF:
        return logits
    with torch.autocast(logits.device.type, enabled=False):
        hidden = inputs[0].to(head.weight.dtype)
        wide = wide_product(hidden.flatten(0, -2), head.weight).view(logits.shape)
        return wide if head.bias is None else wide.add_(head.bias)


def _layers(model: Any) -> list[Any]:
    """The blocks of the model: the members of its module lists."""
    return [layer for part in model.modules() if isinstance(part, torch.nn.ModuleList) for layer in part]


def _moved(*_: Any) -> None:
    """A layer is done. The first token of many long prompts takes minutes on a CPU, a layer of it seconds."""
    progress("engine")


class _Turn:
    """Who may touch the weights: the engine's thread while it computes a token, or the trainer's between two tokens.

    The trainer asks; the engine's thread, once its token is drawn, says that it stands still and waits to be released.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing = False
        self._asked = False

    @contextmanager
    def mine(self) -> Iterator[None]:
        """The engine's thread computes."""
        self._take()
        try:
            yield
        finally:
            self._give()

    def pass_on(self) -> None:
        """The engine's thread is between two tokens."""
        if self._asked:
            self._give()
            self._take()

    @contextmanager
    def yours(self) -> Iterator[None]:
        """The engine's thread stands still."""
        with self._changed:
            self._asked = True
        try:
            wait_for(self._is_still, "engine", "the engine's thread to stand still between two tokens", STILL_S)
            yield
        finally:
            with self._changed:
                self._asked = False
                self._changed.notify_all()

    def _is_still(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._computing, seconds)

    def _take(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._asked)  # the trainer releases it whatever happens
            self._computing = True

    def _give(self) -> None:
        with self._changed:
            self._computing = False
            self._changed.notify_all()


class _Sampler:
    """A logits processor that draws each row's token itself and leaves `generate` only the argmax to take."""

    def __init__(self, engine: HFEngine, params: list[SamplingParams]) -> None:
        device = engine.model.device
        self.engine = engine
        self.params = params
        self.steps = max(p.max_new_tokens for p in params)
        self.temperature = torch.tensor([p.temperature for p in params], device=device)
        self.uniform = torch.stack([self._draws(p.seed) for p in params]).to(device)
        self.tokens: list[torch.Tensor] = []
        self.logprobs: list[torch.Tensor] = []
        self.versions: list[int] = []
        self.times: list[float] = []

    def _draws(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(self.steps, generator=generator, dtype=torch.float64)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.monotonic())
        drawn = sample_reference(scores, self.temperature, self.uniform[:, len(self.tokens)])
        token, logprob = (values.unsqueeze(1) for values in drawn)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(self.engine.version)
        self.engine._drawn(len(self.params), len(self.tokens))
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)

    def completions(self) -> list[Completion]:
        """Cut each row at its first stop token or its own budget; the only copy off the device."""
        tokens = torch.cat(self.tokens, dim=1).tolist()
        logprobs = torch.cat(self.logprobs, dim=1).tolist()
        return [self._cut(*row) for row in zip(self.params, tokens, logprobs, strict=True)]

    def _cut(self, params: SamplingParams, tokens: list[int], logprobs: list[float]) -> Completion:
        budget = min(params.max_new_tokens, len(tokens))
        stop = set(params.stop_token_ids)
        ended = next((at for at in range(budget) if tokens[at] in stop), None)
        length = budget if ended is None else ended + 1
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            versions=tuple(self.versions[:length]),
            finish=Finish.LENGTH if ended is None else Finish.STOP,
        )


__all__ = ["HFEngine"]
