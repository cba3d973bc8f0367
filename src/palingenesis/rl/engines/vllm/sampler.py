"""Put our own draw (`kernels.sample`) in the place of vLLM's sampler, so that a token and its log-prob cost one pass.

    hidden ── head in float32 ──> logits ── kernels.sample ──> token ids  ─> vLLM, as ever
                                                          └──> log-probs ─> one float a row beside the ids, the same copy

Why not vLLM's `logprobs=0`: for 256 sequences it launches a log-softmax and a rank kernel more, and then makes a list, a
dictionary and an object a token in Python: half as much time again a step (bench/results/rollout.json).

vLLM has two model runners; which one a model gets depends on the version, the device and the architecture. Both call
`runner.sampler`, so each has a stand-in here. Requests are created without `logprobs`, `top_p`, `top_k` or penalties, so
nothing that the stand-ins leave out is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from palingenesis.rl.kernels.head import wide_product
from palingenesis.rl.kernels.sample import sample


class SampledLogprobs:
    """One float a row, in the place of vLLM's `LogprobsTensors`: what its runners copy and turn into lists."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to_cpu_nonblocking(self) -> SampledLogprobs:
        return SampledLogprobs(self.values.to("cpu", non_blocking=True))

    def tolists(self, *_: Any) -> list[float]:
        return self.values.tolist()


class _RunnerV2:
    """Stands in for the sampler of `vllm.v1.worker.gpu`: its own, with `sample` exchanged."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._logprobs = torch.empty(0)
        names = list(signature(type(inner).sample).parameters)
        self._position_at = names.index("pos") - names.index("logits") - 1  # its place moved between versions
        inner.sample = self._sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        out.logprobs_tensors = SampledLogprobs(self._logprobs)
        return out

    def _sample(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`(logits, expanded_idx_mapping, ..., pos, ...)`."""
        rows = args[0]
        positions = args[self._position_at]
        states = self.inner.sampling_states
        tokens, self._logprobs = sample(logits, states.temperature.gpu[rows], states.seeds.gpu[rows], positions)
        return tokens, logits

    def remove(self) -> Any:
        del self.inner.sample
        return self.inner


class _RunnerV1:
    """Stands in for `vllm.v1.sample.sampler.Sampler`, whose metadata knows no seeds by row: `seed_of` asks by request."""

    def __init__(self, inner: Any, runner: Any, seed_of: Callable[[str], int]) -> None:
        self.inner = inner
        self.runner = runner
        self.seed_of = seed_of
        self._batch: Any = None
        self._rows = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, logits: Tensor, sampling_metadata: Any, **_: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        count = logits.shape[0]
        if sampling_metadata is not self._batch:  # made anew whenever a request joins, leaves or moves
            seeds = [self.seed_of(name) for name in self.runner.input_batch.req_ids[:count]]
            self._rows = torch.tensor(seeds, dtype=torch.int64).to(logits.device, non_blocking=True)
            self._batch = sampling_metadata
        temperature = sampling_metadata.temperature
        if temperature is None:  # every row is greedy
            temperature = torch.zeros(count, device=logits.device)
        tokens, logprobs = sample(logits, temperature, self._rows, self.runner.seq_lens[:count])
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(-1), SampledLogprobs(logprobs))

    def remove(self) -> Any:
        return self.inner


class _WideHead:
    """Stands in for the head's `quant_method`: logits come out in float32, of the weight as it is now.

    In bf16 a logit of 16 is off by up to 0.06, and so is every log-prob of its row; the trainer's head is wide too. On a
    CPU vLLM packs the head's weight once, at start, and would go on with it: a tied head is not loaded under its own name.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = wide_product(x, layer.weight)
        return logits if bias is None else logits.add_(bias)


def install(runner: Any, seed_of: Callable[[str], int]) -> Callable[[], None]:
    """Exchange the runner's sampler and widen its head; returns what undoes both (benchmarks measure the two sides).

    Args:
        runner: vLLM's model runner.
        seed_of: the seed of a running request, by vLLM's id.
    """
    inner = runner.sampler
    stand_in = _RunnerV2(inner) if hasattr(inner, "sampling_states") else _RunnerV1(inner, runner, seed_of)
    runner.sampler = stand_in
    heads = _heads(runner.model)
    for head in heads:
        head.quant_method = _WideHead(head.quant_method)

    def undo() -> None:
        runner.sampler = stand_in.remove()
        for head in heads:
            head.quant_method = head.quant_method.inner

    return undo


def _heads(model: Any) -> list[Any]:
    """Embeddings of the vocabulary with a plain weight: heads, and embeddings that a tied head shares."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    return [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod)
    ]
