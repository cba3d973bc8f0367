"""CUDA graphs for steps in which prompts are computed beside requests that decode, so that joining costs little.

    dispatch ──> one token each: vLLM's graphs for decoding
             ├─> prompts among them: ours, up to `tokens`
             └─> larger: as vLLM would, in pieces or kernel by kernel

vLLM 0.25.1 offers such graphs (`cudagraph_mode: FULL`), but captures them with one token a request, and FlashAttention 3
takes the longest query of the capture for that of every replay: it picks its tiles by it, and joins the parts of a split key
range for no query beyond it. Longer prompts came out as whatever lay in memory. So they are captured here.

Attention is ours where it can be (attention.py): FlashAttention 3 takes 74 us a layer for 8 prompts of 32 tokens beside 192
sequences of a Qwen3-0.6B shape on one H200, where those 192 alone take ours 34.

Invariants:
- Where a layer's attention is vLLM's, a graph and its schedule name the same longest query: the graph's own size, which no
  prompt exceeds.
- There keys are not split: joining the parts of queries that long would cost more than it saves.
- Built for vLLM's newer runner with FlashAttention 3, as 0.25.1 has them; anything else keeps vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np

JOINING_TOKENS = 768  # of prompts in a step that a graph still holds, beside one of every running sequence
# Of vLLM's `ModelCudaGraphManager.capture`, as it is called here.
_CAPTURED = (
    *("self", "model", "model_state", "input_buffers", "intermediate_tensors", "block_tables", "attn_groups"),
    *("kv_cache_config", "has_lora", "use_aux_hidden_state_outputs", "lora_capture_hook", "progress_bar_desc"),
)


class JoinGraphs:
    """Stands in for the runner's graph manager, and for its model state's attention metadata.

    Args:
        runner: vLLM's model runner, for which `can_capture` holds.
        max_model_len: of a sequence.
        attention: makes the stand-in for vLLM's attention, for so many tokens; None: there is none.

    Attributes:
        tokens: the largest step for which there is a graph.
    """

    def __init__(self, runner: Any, max_model_len: int, attention: Callable[[int], Any] | None) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        self.runner = runner
        self._decoding = runner.cudagraph_manager
        self._state = runner.model_state
        self._prepare_attn = self._state.prepare_attn
        self._full = CUDAGraphMode.FULL
        seqs = runner.scheduler_config.max_num_seqs
        sizes = join_sizes(seqs, max_model_len, runner.max_num_tokens)
        self.tokens = sizes[-1]
        with changed(runner.compilation_config, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=self.tokens):
            self._joining = ModelCudaGraphManager(runner.vllm_config, runner.device, self._full, decode_query_len=1)
        self._attention = attention(self.tokens) if attention else None
        self._in_graph = True  # what is prepared now belongs to one of ours
        self._ours_alone = False  # nothing that vLLM prepares for its attention is read
        self._state.prepare_attn = self.prepare_attn
        try:
            with self._attention.in_place() if self._attention else nullcontext():
                self._joining.capture(
                    runner.model,
                    runner.model_state,
                    runner.input_buffers,
                    runner.intermediate_tensors,
                    runner.block_tables,
                    runner.attn_groups,
                    runner.kv_cache_config,
                )
        finally:
            del self._state.prepare_attn
        self._in_graph = False
        layers = sum(len(group.layer_names) for groups in runner.attn_groups for group in groups)
        self._ours_alone = self._attention is not None and len(self._attention.layers) == layers

    def take_over(self) -> None:
        self.runner.cudagraph_manager = self
        self._state.prepare_attn = self.prepare_attn

    def let_go(self) -> None:
        self.runner.cudagraph_manager = self._decoding
        del self._state.prepare_attn

    def woken(self) -> None:
        """After a sleep everything is where it was."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoding, name)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, **kwargs: Any) -> Any:
        """The graph of a step, or what vLLM does without one."""
        step = (num_reqs, num_tokens, uniform_token_count)
        found = self._decoding.dispatch(*step, **kwargs)
        self._in_graph = False
        if uniform_token_count == 1 and found.cg_mode == self._full:
            return found
        joining = self._joining.dispatch(*step, **kwargs)
        self._in_graph = joining.cg_mode == self._full
        # A graph of vLLM's for longer queries (its mode FULL) may be too short for them: then none, as `joining` says.
        return joining if self._in_graph or found.cg_mode == self._full else found

    def run_fullgraph(self, graph: Any) -> Any:
        return (self._joining if self._in_graph else self._decoding).run_fullgraph(graph)

    def prepare_attn(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """What attention needs before a step; of vLLM's, for one of our graphs as it was captured, whatever the step's
        longest prompt is."""
        if not self._in_graph:
            return self._prepare_attn(batch, *args, **kwargs)
        if self._attention:
            self._attention.lay_out(batch.num_scheduled_tokens)
        if self._ours_alone:
            return None
        longest = np.array([batch.num_tokens_after_padding], dtype=np.int32)  # its largest is all that is read
        with unsplit(self.runner, self.tokens):
            return self._prepare_attn(replace(batch, num_scheduled_tokens=longest), *args, **kwargs)


def can_capture(runner: Any) -> bool:
    """The runner, its graphs and its attention are those that `JoinGraphs` knows."""
    manager = getattr(runner, "cudagraph_manager", None)
    state = getattr(runner, "model_state", None)
    if manager is None or type(state).__name__ != "DefaultModelState":
        return False
    mode = manager.cudagraph_mode
    return (
        mode.decode_mode() == type(mode).FULL
        and tuple(signature(type(manager).capture).parameters) == _CAPTURED
        and all(map(_is_flash_attention_3, _builders(runner)))
    )


def join_sizes(max_num_seqs: int, max_model_len: int, max_num_tokens: int) -> list[int]:
    """Tokens of a step for which a graph is captured, about as dense as vLLM's own.

    Above `max_num_seqs` vLLM captures with every place taken and gives the last one what does not divide evenly: where
    that is longer than a sequence may be, it reads past its blocks (0.25.1: "illegal memory access").
    """
    top = min(max_num_seqs + JOINING_TOKENS, max_num_tokens)
    sizes = [*range(8, 256, 8), *range(256, top + 1, 16), max_num_seqs]
    fitting = {n for n in sizes if n <= max_num_seqs or n // max_num_seqs + n % max_num_seqs <= max_model_len}
    return sorted(n for n in fitting if n <= top)


@contextmanager
def unsplit(runner: Any, tokens: int) -> Iterator[None]:
    """Attention is scheduled with its keys in one part, for steps of up to `tokens`."""
    with ExitStack() as stack:
        for builder in _builders(runner):
            stack.enter_context(changed(builder, max_num_splits=1, max_cudagraph_size=tokens))
        yield


@contextmanager
def changed(settings: Any, **values: Any) -> Iterator[None]:
    """Other values for a while."""
    before = {name: getattr(settings, name) for name in values}
    for name, value in values.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def _is_flash_attention_3(builder: Any) -> bool:
    return type(builder).__name__ == "FlashAttentionMetadataBuilder" and bool(builder.aot_schedule)


def _builders(runner: Any) -> list[Any]:
    return [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
