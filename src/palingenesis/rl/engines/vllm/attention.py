"""Our attention in the steps that we capture, in the place of vLLM's FlashAttention.

    everybody decodes    layer ──> update (key, value) ──> nothing
                               └─> forward ──> `attend`, which writes them to the cache too
    prompts among them   layer ──> update ──> vLLM's
                               └─> forward ──> `extend`, over tiles that are laid out before each step

A layer that the kernels do not cover is vLLM's in both.

Not covered: windows, soft caps, sinks, positions by slope, a quantized cache, a layer that reads another's cache, heads
of another size than 16, 32, 64, 128 or 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palingenesis.rl.engines.vllm.graphs import changed
from palingenesis.rl.kernels.attend_triton import Workspace, attend, extend, tile_tokens, tiles_of


class DecodeAttention:
    """Stands in for two methods of vLLM's FlashAttention while a step of one new token a sequence is captured.

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

        vllms_update = FlashAttentionImpl.do_kv_cache_update

        def update(own: Any, *args: Any) -> None:
            """Left to `compute`."""

        def compute(own: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any,
                    output: Tensor) -> bool:  # fmt: skip
            if _one_each(query, metadata) and covered(own, query, key, value, kv_cache, metadata):
                self._attend(own, query, key, value, kv_cache, metadata, output)
                return True
            if own.kv_sharing_target_layer_name is None and key is not None:
                vllms_update(own, layer, key, value, kv_cache, metadata.slot_mapping)
            return False

        with changed(FlashAttentionImpl, do_kv_cache_update=update), _before_vllms(compute):
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


class JoinAttention:
    """Stands in for vLLM's FlashAttention while a step with prompts is captured.

    Args:
        tokens: of the largest step.
        positions: int64 [tokens], where vLLM puts those of a step's tokens.
        group: query heads a key head; a layer that has others is vLLM's.

    Attributes:
        layers: that were ours, by their implementations' ids.
    """

    def __init__(self, tokens: int, positions: Tensor, group: int) -> None:
        self._positions, self._group, self._tile = positions, group, tile_tokens(group)
        self._tiles = torch.zeros(3, tokens, dtype=torch.int32, device=positions.device)
        self._work: dict[tuple[int, int, int], Workspace] = {}
        self.layers: set[int] = set()

    def lay_out(self, counts: NDArray[np.integer[Any]]) -> None:
        """Before each step: `counts` are the new tokens of its sequences."""
        tiles = torch.from_numpy(tiles_of(counts, self._tile, self._tiles.shape[1]))
        self._tiles.copy_(tiles.pin_memory(), non_blocking=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For what is launched, or captured, meanwhile."""

        def compute(own: Any, _: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any,
                    output: Tensor) -> bool:  # fmt: skip
            ours = metadata.causal and query.shape[1] == self._group * key.shape[1]
            if not ours or not covered(own, query, key, value, kv_cache, metadata):
                return False
            self.layers.add(id(own))
            self._extend(own, query, kv_cache, metadata, output)
            return True

        with _before_vllms(compute):
            yield

    def _extend(self, own: Any, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor) -> None:
        keys, values = kv_cache.unbind(1)
        shape, most = (query.shape[1], keys.shape[2], query.shape[2]), self._tiles.shape[1]
        if shape not in self._work:
            self._work[shape] = Workspace.of(most, *shape, query.device, self._tile)
        # Each sequence's last tile may not be full.
        room = min(len(query), len(metadata.seq_lens) + len(query) // self._tile)
        extend(
            query,
            keys,
            values,
            metadata.block_table,
            self._tiles[:, :room],
            self._positions,
            own.scale,
            output,
            self._work[shape],
        )


@contextmanager
def _before_vllms(compute: Callable[..., bool]) -> Iterator[None]:
    """vLLM's attention computes what `compute` says that it has not."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    vllms = FlashAttentionImpl.forward

    def forward(own: Any, *args: Any, output: Tensor, **rest: Any) -> Tensor:
        if not compute(own, *args, output):
            vllms(own, *args, output, **rest)
        return output

    with changed(FlashAttentionImpl, forward=forward):
        yield


def _one_each(query: Tensor, metadata: Any) -> bool:
    return bool(metadata.max_query_len == 1 and len(query) == len(metadata.seq_lens))


def covered(own: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any) -> bool:
    """The kernels compute this layer's attention.

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
        and query.dtype == key.dtype == kv_cache.dtype
        and len(query) == len(key)
        and key.shape == value.shape
        and key.shape[-1] in (16, 32, 64, 128, 256)
    )
