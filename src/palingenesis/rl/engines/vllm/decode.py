"""Steps in which everybody decodes, each one CUDA graph and one copy to the host.

    rows: who stands where ──> [ inputs ──> model, with our attention ──> head, draw, state ] ──> tokens and log-probs
    (when somebody left)         positions, slots

Why: vLLM's runner launches kernel by kernel what a step has before and after a graph of the model. Beside a few sequences
a third of the step was the host's Python (SmolLM2 on one H200), for which the trainer's thread waits as well while training
and generation overlap.

Invariants:
- A step leaves vLLM's runner as its own way would have, so that the next may take either. Only the host's copies of how much
  is computed lag behind; vLLM brings them up to date with each step of its own.
- Captured kernels read tensors that stay where they are. What vLLM moves between steps (temperatures, seeds, the number of
  blocks) is read outside the graphs, when rows or blocks change.
- Built for the runner that `JoinGraphs` knows; anything else decodes vLLM's way.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from palingenesis.rl.engines.vllm.graphs import can_capture
from palingenesis.rl.kernels.sample import sample

# Made anew after a sleep, of the block tables' own places: captured kernels go on reading the first ones.
_LAYOUT = ("block_table_ptrs", "block_table_strides", "block_sizes_tensor", "input_block_table_ptrs")


class DecodeGraphs:
    """Stands in for the runner's `execute_model` and `sample_tokens`.

    Args:
        runner: vLLM's model runner, for which `can_decode` holds.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.v1.outputs import AsyncModelRunnerOutput

        from palingenesis.rl.engines.vllm.attention import DecodeAttention  # needs triton, which a GPU's vLLM brings

        AsyncModelRunnerOutput.register(Decoded)
        self.runner = runner
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        self._names: list[str] = []  # who stands in which row; nobody after a step of vLLM's own
        self._launched: list[str] = []
        seqs, device = runner.max_num_reqs, runner.device
        # Of each row: the runner's index of its request, whether it is live (1 or 0), and live rows before it.
        width = -(-(seqs + 1) // 4) * 4  # kernels are compiled for tensors that begin at 16 bytes
        self._placed = torch.arange(width, dtype=torch.int32, device=device).repeat(3, 1)
        self._placed[1] = 1
        self._temperature = torch.ones(seqs, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(seqs, dtype=torch.int64, device=device)
        self._none = torch.zeros(seqs, dtype=torch.int32, device=device)
        # tokens, and log-probs as the bits of a float64
        self._drawn = torch.zeros(seqs, 2, dtype=torch.int64, device=device)
        self._layout = {name: getattr(runner.block_tables, name) for name in _LAYOUT}
        self._attention = DecodeAttention(seqs, device)
        self._graphs = self._capture(seqs)

    def take_over(self) -> None:
        self._names = []
        self.runner.execute_model, self.runner.sample_tokens = self.execute_model, self.sample_tokens

    def let_go(self) -> None:
        del self.runner.execute_model, self.runner.sample_tokens

    def woken(self) -> None:
        """After a sleep: the captured kernels' tensors get what vLLM has made anew."""
        tables = self.runner.block_tables
        for name, tensor in self._layout.items():
            tensor.copy_(getattr(tables, name))
            setattr(tables, name, tensor)

    # --- a step ---

    @torch.inference_mode()
    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        names = getattr(scheduled, "decoded", None)
        if not names or scheduled.others is not None or getattr(scheduled, "new_block_ids_to_zero", None):
            self._names = []
            return self._execute(scheduled, *args, **kwargs)
        runner, count = self.runner, len(names)
        runner.finish_requests(scheduled)
        size, graph = self._graphs[count]
        moved = names != self._names
        if moved:
            self._place(names)
        if self._grow(names, scheduled.scheduled_cached_reqs.new_block_ids) or moved:
            runner.block_tables.gather_block_tables(self._placed[0, :count], num_reqs_padded=size)
        graph.replay()
        self._launched = names
        return None

    @torch.inference_mode()
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if not self._launched:
            return self._sample(*args, **kwargs)
        names, self._launched = self._launched, []
        return Decoded(names, self._drawn[: len(names)])

    def _place(self, names: list[str]) -> None:
        """Give each its row. The rows that fill a graph up repeat the first, are not live, and leave no trace."""
        index, count = self.runner.req_states.req_id_to_index, len(names)
        placed = np.zeros(self._placed.shape, dtype=np.int32)
        placed[0] = index[names[0]]
        placed[0, :count] = [index[name] for name in names]
        placed[1, :count] = 1
        placed[2] = np.minimum(np.arange(placed.shape[1]), count)
        self._placed.copy_(torch.from_numpy(placed).pin_memory(), non_blocking=True)
        states, rows = self.runner.sampler.sampling_states, self._placed[0, : len(self._seeds)]
        torch.index_select(states.temperature.gpu, 0, rows, out=self._temperature)
        torch.index_select(states.seeds.gpu, 0, rows, out=self._seeds)
        self._names = names

    def _grow(self, names: list[str], blocks: list[Any]) -> bool:
        """Write down the new blocks; whether there were any."""
        index, tables, grown = self.runner.req_states.req_id_to_index, self.runner.block_tables, False
        for name, ids in zip(names, blocks, strict=True):
            if ids is not None:
                tables.append_block_ids(index[name], ids, overwrite=False)
                grown = True
        if grown:
            tables.apply_staged_writes()
        return grown

    # --- the graphs ---

    @torch.inference_mode()
    def _capture(self, seqs: int) -> dict[int, tuple[int, torch.cuda.CUDAGraph]]:
        """`{number of sequences: (rows of the graph that holds so many, the graph)}`."""
        from vllm.v1.worker.gpu.input_batch import InputBatch

        graphs: dict[int, tuple[int, torch.cuda.CUDAGraph]] = {}
        pool, manager = torch.cuda.graph_pool_handle(), self.runner.cudagraph_manager
        for count in range(seqs, 0, -1):  # the largest first: the others fit into its memory
            size = manager.dispatch(count, count, 1, num_active_loras=0).num_reqs
            if count + 1 in graphs and graphs[count + 1][0] == size:
                graphs[count] = graphs[count + 1]
            else:
                batch = InputBatch.make_dummy(size, size, self.runner.input_buffers)
                with self._attention.in_place():
                    graphs[count] = size, self._captured(pool, partial(self._step, batch))
        return graphs

    def _captured(self, pool: Any, launch: Any) -> torch.cuda.CUDAGraph:
        states = self.runner.req_states
        for tensor in (states.total_len.gpu, states.num_computed_tokens.gpu):  # nobody is there yet
            tensor.zero_()
        launch()  # compiled and loaded before it is captured
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and waits for the whole GPU each time.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            launch()
        except BaseException:
            with suppress(RuntimeError):  # of a capture that failed; what failed in it is the news
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def _step(self, batch: Any) -> None:
        slots = self._slots(batch.num_reqs)
        self._draw(batch.num_reqs, self._model(batch, slots))

    def _slots(self, size: int) -> Tensor:
        """Put the model's inputs where it reads them; returns where its keys and values go."""
        from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens

        runner, buffers = self.runner, self.runner.input_buffers
        states, tables = runner.req_states, runner.block_tables
        rows, live, starts = self._placed[0, :size], self._placed[1, :size], buffers.query_start_loc[: size + 1]
        buffers.query_start_loc.copy_(self._placed[2, : len(buffers.query_start_loc)])
        buffers.input_ids[:size].copy_(torch.index_select(states.last_sampled_tokens.view(-1), 0, rows))
        prepare_pos_seq_lens(rows, starts, states.num_computed_tokens.gpu, buffers.positions, buffers.seq_lens)
        buffers.seq_lens[:size].mul_(live)
        return cast(
            Tensor, tables.compute_slot_mappings(rows, starts, buffers.positions[:size], num_tokens_padded=size)
        )

    def _model(self, batch: Any, slots: Tensor) -> Tensor:
        """Hidden states of the new tokens."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        runner, buffers, size = self.runner, self.runner.input_buffers, batch.num_reqs
        metadata = runner.model_state.prepare_attn(
            batch,
            CUDAGraphMode.FULL,
            tuple(table[:size] for table in runner.block_tables.input_block_tables),
            slots,
            runner.attn_groups,
            runner.kv_cache_config,
            for_capture=True,
        )
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=size,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=build_slot_mappings_by_layer(slots, runner.kv_cache_config),
        ):
            return cast(Tensor, runner.model(input_ids=buffers.input_ids[:size], positions=buffers.positions[:size]))

    def _draw(self, size: int, hidden: Tensor) -> None:
        """Logits, tokens and log-probs, and the runner's state of the live rows one token further."""
        runner, buffers = self.runner, self.runner.input_buffers
        rows, live, starts = self._placed[0, :size], self._placed[1, :size], buffers.query_start_loc[: size + 1]
        logits = runner.model.compute_logits(hidden)
        positions = buffers.positions[:size]
        tokens, logprobs = sample(logits, self._temperature[:size], self._seeds[:size], positions)
        runner.postprocess_sampled(rows, tokens.view(-1, 1), live, self._none[:size], starts)
        self._drawn[:size, 0].copy_(tokens)
        self._drawn.view(torch.float64)[:size, 1].copy_(logprobs)


class Decoded:
    """A step's tokens on their way to the host; one of vLLM's `AsyncModelRunnerOutput`."""

    def __init__(self, names: list[str], drawn: Tensor) -> None:
        self.names = names
        self._host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        self._host.copy_(drawn, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def get_output(self) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self._event.synchronize()
        return ModelRunnerOutput(
            req_ids=self.names,
            req_id_to_index={name: row for row, name in enumerate(self.names)},
            sampled_token_ids=self._host[:, :1].tolist(),
            logprobs=self._host.view(torch.float64)[:, 1].tolist(),
        )


def can_decode(runner: Any) -> bool:
    """Nothing is configured that these graphs leave out."""
    if not can_capture(runner):
        return False
    from vllm import envs
    from vllm.model_executor.offloader import base

    largest = runner.cudagraph_manager.dispatch(runner.max_num_reqs, runner.max_num_reqs, 1, num_active_loras=0)
    return (
        largest.cg_mode == type(largest.cg_mode).FULL
        and not runner.supports_mm_inputs
        and not runner.is_encoder_decoder
        and not runner.num_speculative_steps
        and not runner.use_dcp
        and runner.dp_size == 1
        and not runner.lora_config
        and not runner.use_aux_hidden_state_outputs
        and not runner.parallel_config.enable_eplb
        and not envs.VLLM_MOE_SKIP_PADDING
        and not envs.VLLM_BATCH_INVARIANT
        and isinstance(base.get_offloader(), base.NoopOffloader)
        and runner.model_state.rope_state is None
        and runner.model_config.rswa_window is None
    )
