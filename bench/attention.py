#!/usr/bin/env python3
"""Attention of a step alone, microseconds a layer: ours, vLLM's FlashAttention 3, and for decoding the bytes' own time.

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
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from shapes import BANDWIDTH, keep, table

from palingenesis.rl.kernels.attend_triton import Workspace, attend, extend, tile_tokens, tiles_of

HEADS = {"qwen3-0.6b": (16, 8, 128), "smollm2-135m": (9, 3, 64)}
CASES = ((256, 155), (256, 350), (128, 450), (64, 650), (32, 900), (16, 1200), (8, 1500), (2, 2000))
JOINS = (  # sequences and mean of those that decode; sequences, tokens before and new tokens of those that join
    (192, 155, 8, 0, 32),
    (192, 350, 8, 0, 100),
    (192, 350, 8, 700, 16),
    (64, 650, 1, 0, 700),
    (64, 650, 2, 2000, 300),
    (8, 1500, 1, 0, 16),
)
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


def spread(sequences: int, mean: int) -> list[int]:
    draw = random.Random(0)
    scale = [math.exp(draw.gauss(0.0, 0.35)) for _ in range(sequences)]
    return [min(LONGEST, max(20, round(s * mean * sequences / sum(scale)))) for s in scale]


class Step:
    """New tokens of sequences, and the cache they are in; on the GPU.

    Args:
        lengths: of each sequence, its new tokens included.
        counts: of new tokens.
    """

    def __init__(self, heads: int, key_heads: int, dim: int, lengths: list[int], counts: list[int]) -> None:
        device, half = torch.device("cuda"), torch.bfloat16
        torch.manual_seed(0)
        self.heads, self.key_heads, self.dim, self.lengths, self.counts = heads, key_heads, dim, lengths, counts
        blocks = [-(-n // BLOCK) for n in lengths]
        places = torch.zeros(len(blocks), LONGEST // BLOCK, dtype=torch.int32)
        for row, ids in enumerate((torch.randperm(sum(blocks)) + 1).split(blocks)):
            places[row, : len(ids)] = ids
        new = [(row, n - c + i) for row, (n, c) in enumerate(zip(lengths, counts, strict=True)) for i in range(c)]
        slots = [int(places[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in new]
        self.places, self.slots = places.to(device), torch.tensor(slots, device=device)
        self.positions = torch.tensor([at for _, at in new], device=device)
        self.seen = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        self.caches = torch.randn(LAYERS, sum(blocks) + 1, 2, BLOCK, key_heads, dim, device=device, dtype=half)
        made = torch.randn(len(new), heads + 2 * key_heads, dim, device=device, dtype=half)
        self.query, self.key, self.value = made.split([heads, key_heads, key_heads], 1)
        self.out, self.flash_out = torch.empty(2, len(new), heads, dim, device=device, dtype=half).unbind()
        self.one = torch.ones((), device=device)

    def write(self, layer: int) -> None:
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(
            self.key, self.value, *self.caches[layer].unbind(1), self.slots, "auto", self.one, self.one
        )

    def flash(self, longest: int, splits: int) -> Callable[[int], None]:
        """vLLM's launches of a layer, for queries of up to `longest` tokens."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        schedule = get_scheduler_metadata(
            batch_size=len(self.lengths),
            max_seqlen_q=longest,
            max_seqlen_k=LONGEST,
            num_heads_q=self.heads,
            num_heads_kv=self.key_heads,
            headdim=self.dim,
            cache_seqlens=self.seen,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=BLOCK,
            causal=True,
            window_size=(-1, -1),
            num_splits=splits,
        )

        def launch(layer: int) -> None:
            self.write(layer)
            keys, values = self.caches[layer].unbind(1)
            flash_attn_varlen_func(
                q=self.query,
                k=keys,
                v=values,
                out=self.flash_out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=longest,
                seqused_k=self.seen,
                max_seqlen_k=LONGEST,
                softmax_scale=self.dim**-0.5,
                causal=True,
                window_size=[-1, -1],
                block_table=self.places,
                softcap=0.0,
                scheduler_metadata=schedule,
                fa_version=3,
                num_splits=splits,
            )

        return launch

    def decode(self) -> Callable[[int], None]:
        work = Workspace.of(len(self.lengths), self.heads, self.key_heads, self.dim, self.query.device)

        def launch(layer: int) -> None:
            attend(
                self.query, self.key, self.value, *self.caches[layer].unbind(1), self.slots, self.places, self.seen,
                self.dim**-0.5, self.out, work,
            )  # fmt: skip

        return launch

    def join(self) -> Callable[[int], None]:
        tokens = tile_tokens(self.heads // self.key_heads)
        room = min(len(self.query), len(self.lengths) + len(self.query) // tokens)
        work = Workspace.of(room, self.heads, self.key_heads, self.dim, self.query.device, tokens)
        tiles = torch.from_numpy(tiles_of(np.array(self.counts), tokens, room)).to(self.query.device)

        def launch(layer: int) -> None:
            self.write(layer)
            extend(
                self.query, *self.caches[layer].unbind(1), self.places, tiles, self.positions, self.dim**-0.5, self.out,
                work,
            )  # fmt: skip

        return launch

    def compare(self, flash: Callable[[int], None], ours: Callable[[int], None]) -> dict[str, float]:
        graphs = {"flash": graph(flash), "ours": graph(ours)}
        seen: dict[str, list[float]] = {side: [] for side in graphs}
        for turn in range(5):
            for side in graphs if turn % 2 == 0 else reversed(graphs):
                seen[side].append(microseconds(graphs[side]))
        took = {side: statistics.median(of) for side, of in seen.items()}
        return {
            **{side: round(value, 1) for side, value in took.items()},
            "ratio": round(took["flash"] / took["ours"], 2),
            "apart": round((self.out.float() - self.flash_out.float()).abs().max().item(), 4),
        }


def decoding(heads: int, key_heads: int, dim: int, sequences: int, mean: int) -> dict[str, Any]:
    lengths = spread(sequences, mean)
    step = Step(heads, key_heads, dim, lengths, [1] * sequences)
    floor = 1e6 * sum(lengths) * 4 * key_heads * dim / BANDWIDTH
    return {"sequences": sequences, "mean": mean, "floor": round(floor, 1)} | step.compare(
        step.flash(1, 32), step.decode()
    )


def joining(
    heads: int, key_heads: int, dim: int, decode: int, mean: int, count: int, old: int, new: int
) -> dict[str, Any]:
    lengths, counts = [*spread(decode, mean), *[old + new] * count], [1] * decode + [new] * count
    step = Step(heads, key_heads, dim, lengths, counts)
    case = {"decode": decode, "mean": mean, "join": count, "before": old, "new": new}
    return case | step.compare(step.flash(sum(counts), 1), step.join())


def main() -> int:
    for name, shape in HEADS.items():
        rows = [decoding(*shape, *of) for of in CASES]
        joins = [joining(*shape, *of) for of in JOINS]
        print(name)
        table(rows)
        table(joins)
        kept = {f"{row['sequences']} x {row['mean']}": row for row in rows}
        kept |= {f"{r['decode']} x {r['mean']} and {r['join']} x {r['before']} + {r['new']}": r for r in joins}
        keep("attention", {name: kept})
    return 0


if __name__ == "__main__":
    sys.exit(main())
