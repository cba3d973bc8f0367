"""Our attention in the decoding steps that we capture, in the place of vLLM's FlashAttention and of its write to the cache.

    layer ──> write (key, value) ──> kept ──> attend ──┬─> kernels/attend_triton.py, which writes them too
                                                       └─> a layer it does not cover: vLLM's write, vLLM's attention

Not covered: windows, soft caps, sinks, positions by slope, a quantized cache, heads that are no power of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from palingenesis.rl.engines.vllm.graphs import changed
from palingenesis.rl.kernels.attend_triton import Workspace, attend


class DecodeAttention:
    """Stands in for two functions of vLLM's FlashAttention backend while a step is captured.

    Args:
        sequences: the most that decode at once.
        device: of the engine.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        from vllm.v1.attention.backends import flash_attn

        self._module = flash_attn
        self._sequences, self._device = sequences, device
        self._vllms_write, self._vllms_attend = flash_attn.reshape_and_cache_flash, flash_attn.flash_attn_varlen_func
        self._kept: tuple[Any, ...] | None = None  # the arguments of a write that its layer's attention may do
        self._work: dict[tuple[int, int, int], Workspace] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with changed(self._module, reshape_and_cache_flash=self._write, flash_attn_varlen_func=self._attend):
            yield

    def _write(self, *write: Any) -> None:
        self._kept = write

    def _attend(self, **call: Any) -> Any:
        write, self._kept = self._kept, None
        if write is None:  # a layer that reads another's cache
            return self._vllms_attend(**call)
        key, value, key_cache, value_cache, slots, *_ = write
        if not _covered(key, value, key_cache, call):
            self._vllms_write(*write)
            return self._vllms_attend(**call)
        query, table, lengths = call["q"], call["block_table"], call["seqused_k"]
        work = self._workspace(query, key)
        attend(
            query, key, value, key_cache, value_cache, slots, table, lengths, call["softmax_scale"], call["out"], work
        )
        return call["out"]

    def _workspace(self, query: torch.Tensor, key: torch.Tensor) -> Workspace:
        shape = (query.shape[1], key.shape[1], query.shape[2])
        if shape not in self._work:
            self._work[shape] = Workspace.of(self._sequences, *shape, self._device)
        return self._work[shape]


def _covered(key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, call: dict[str, Any]) -> bool:
    """The layer's attention is what the kernel computes."""
    query, dim = call["q"], key.shape[-1]
    plain = ("alibi_slopes", "s_aux", "mask_mod", "dynamic_causal")
    return (
        call["max_seqlen_q"] == 1
        and len(key) == len(query)
        and key.shape == value.shape
        and call["k"].data_ptr() == key_cache.data_ptr()
        and query.dtype == key.dtype == key_cache.dtype
        and dim >= 16
        and dim & (dim - 1) == 0
        and call["window_size"] in (None, [-1, -1])
        and not call["softcap"]
        and all(call.get(name) is None for name in plain)
    )
