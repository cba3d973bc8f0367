"""Our attention in the decoding steps that we capture, in the place of vLLM's FlashAttention and of its write to the cache.

    layer ──> update (key, value) ──> nothing
          └─> forward ──┬─> kernels/attend_triton.py, which writes them to the cache too
                        └─> a layer it does not cover: vLLM's update, vLLM's forward

Not covered: windows, soft caps, sinks, positions by slope, a quantized cache, a layer that reads another's cache, heads
of another size than 16, 32, 64, 128 or 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from palingenesis.rl.engines.vllm.graphs import changed
from palingenesis.rl.kernels.attend_triton import Workspace, attend


class DecodeAttention:
    """Stands in for two methods of vLLM's FlashAttention while a step is captured.

    Args:
        sequences: the most that decode at once.
        device: of the engine.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._sequences, self._device = sequences, device
        self._work: dict[tuple[int, int, int], Workspace] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For what is launched, or captured, meanwhile."""
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        vllms_forward, vllms_update = FlashAttentionImpl.forward, FlashAttentionImpl.do_kv_cache_update

        def update(own: Any, *args: Any) -> None:
            """Left to `forward`."""

        def forward(
            own: Any,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            metadata: Any,
            output: Tensor,
            **rest: Any,
        ) -> Tensor:
            if covered(own, query, key, value, kv_cache, metadata):
                self._attend(own, query, key, value, kv_cache, metadata, output)
                return output
            if own.kv_sharing_target_layer_name is None and key is not None:
                vllms_update(own, layer, key, value, kv_cache, metadata.slot_mapping)
            vllms_forward(own, layer, query, key, value, kv_cache, metadata, output, **rest)
            return output

        with changed(FlashAttentionImpl, forward=forward, do_kv_cache_update=update):
            yield

    def _attend(
        self, own: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor
    ) -> None:
        shape = (query.shape[1], key.shape[1], query.shape[2])
        if shape not in self._work:
            self._work[shape] = Workspace.of(self._sequences, *shape, self._device)
        keys, values = kv_cache.unbind(1)
        attend(
            query,
            key,
            value,
            keys,
            values,
            metadata.slot_mapping,
            metadata.block_table,
            metadata.seq_lens,
            own.scale,
            output,
            self._work[shape],
        )


def covered(own: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> bool:
    """The kernel computes this layer's attention.

    Args:
        own: vLLM's `FlashAttentionImpl` of the layer.
        metadata: its `FlashAttentionMetadata`.
    """
    return (
        own.kv_sharing_target_layer_name is None
        and own.attn_type == "decoder"
        and own.alibi_slopes is None
        and own.sinks is None
        and not own.logits_soft_cap
        and all(tuple(window or (-1, -1)) == (-1, -1) for window in (own.sliding_window, metadata.sliding_window))
        and metadata.max_query_len == 1
        and query.dtype == key.dtype == kv_cache.dtype
        and len(query) == len(key) == len(metadata.seq_lens)
        and key.shape == value.shape
        and key.shape[-1] in (16, 32, 64, 128, 256)
    )
