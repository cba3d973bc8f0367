#!/usr/bin/env python3
"""Attention of a decoding step alone, microseconds a layer: ours, vLLM's FlashAttention 3, and the bytes' own time.

    python bench/attention.py

One new token a sequence, random keys in blocks of 16, lengths log-normal (sigma 0.35) around the given mean. `flash` is what
vLLM launches: the write to the cache, FlashAttention 3 with its schedule made beforehand and at most 32 parts of the keys;
`ours` is kernels/attend_triton.py, which writes as well. Layers of different keys and values in one CUDA graph, 98 MB and
more, so that no cache helps, and no two sequences share a prompt; the median of five, in alternation. The floor reads the
keys and values once, at 4.3 TB/s.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from shapes import BANDWIDTH, keep, table

from palingenesis.rl.kernels.attend_triton import Workspace, attend

HEADS = {"qwen3-0.6b": (16, 8, 128), "smollm2-135m": (9, 3, 64)}
CASES = ((256, 155), (256, 350), (128, 450), (64, 650), (32, 900), (16, 1200), (8, 1500), (2, 2000))
LAYERS, BLOCK, LONGEST = 32, 16, 4096


def graph(launch: Callable[[int], Any]) -> torch.cuda.CUDAGraph:
    launch(0)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for layer in range(LAYERS):
            launch(layer)
    made.replay()
    return made


def microseconds(made: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(5):
        made.replay()
    ended.record()
    ended.synchronize()
    return 1e3 * began.elapsed_time(ended) / 5 / LAYERS


def case(heads: int, key_heads: int, dim: int, sequences: int, mean: int) -> dict[str, Any]:
    from vllm._custom_ops import reshape_and_cache_flash
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    device, half = torch.device("cuda"), torch.bfloat16
    torch.manual_seed(0)
    draw = random.Random(0)
    scale = [math.exp(draw.gauss(0.0, 0.35)) for _ in range(sequences)]
    counts = [min(LONGEST, max(20, round(s * mean * sequences / sum(scale)))) for s in scale]
    blocks = [-(-n // BLOCK) for n in counts]
    order = (torch.randperm(sum(blocks)) + 1).split(blocks)
    places = torch.zeros(sequences, LONGEST // BLOCK, dtype=torch.int32)
    for row, ids in enumerate(order):
        places[row, : len(ids)] = ids
    slots = torch.tensor([int(ids[-1]) * BLOCK + (n - 1) % BLOCK for ids, n in zip(order, counts, strict=True)])
    places, slots = places.to(device), slots.to(device)
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    caches = [torch.randn(sum(blocks) + 1, 2, BLOCK, key_heads, dim, device=device, dtype=half) for _ in range(LAYERS)]
    made = torch.randn(sequences, heads + 2 * key_heads, dim, device=device, dtype=half)
    query, key, value = made.split([heads, key_heads, key_heads], 1)
    out, flash_out = torch.empty(2, sequences, heads, dim, device=device, dtype=half).unbind()
    starts = torch.arange(sequences + 1, device=device, dtype=torch.int32)
    one, window = torch.ones((), device=device), [-1, -1]
    schedule = get_scheduler_metadata(
        batch_size=sequences,
        max_seqlen_q=1,
        max_seqlen_k=LONGEST,
        num_heads_q=heads,
        num_heads_kv=key_heads,
        headdim=dim,
        cache_seqlens=lengths,
        qkv_dtype=half,
        cu_seqlens_q=starts,
        page_size=BLOCK,
        causal=True,
        window_size=(-1, -1),
        num_splits=32,
    )
    work = Workspace.of(sequences, heads, key_heads, dim, device)

    def flash(layer: int) -> None:
        keys, values = caches[layer].unbind(1)
        reshape_and_cache_flash(key, value, keys, values, slots, "auto", one, one)
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=flash_out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=LONGEST,
            softmax_scale=dim**-0.5,
            causal=True,
            window_size=window,
            block_table=places,
            softcap=0.0,
            scheduler_metadata=schedule,
            fa_version=3,
            num_splits=32,
        )

    def ours(layer: int) -> None:
        keys, values = caches[layer].unbind(1)
        attend(query, key, value, keys, values, slots, places, lengths, dim**-0.5, out, work)

    graphs = {"flash": graph(flash), "ours": graph(ours)}
    seen: dict[str, list[float]] = {side: [] for side in graphs}
    for turn in range(5):
        for side in graphs if turn % 2 == 0 else reversed(graphs):
            seen[side].append(microseconds(graphs[side]))
    took = {side: statistics.median(of) for side, of in seen.items()}
    return {
        "sequences": sequences,
        "mean": mean,
        "floor": round(1e6 * sum(counts) * 4 * key_heads * dim / BANDWIDTH, 1),
        **{side: round(value, 1) for side, value in took.items()},
        "ratio": round(took["flash"] / took["ours"], 2),
        "apart": round((out.float() - flash_out.float()).abs().max().item(), 4),
    }


def main() -> int:
    for name, shape in HEADS.items():
        rows = [case(*shape, *of) for of in CASES]
        print(name)
        table(rows)
        keep("attention", {name: {f"{row['sequences']} x {row['mean']}": row for row in rows}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
