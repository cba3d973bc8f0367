"""Attention over keys and values in blocks: of one new token a sequence, and of several that join it.

    attend    one new token a sequence, which it writes to the cache as well: `[n · Hk, parts]` programs, each a part of one
              sequence's keys for the queries of one key head; part 0 begins with the new token
    extend    a tile of neighbours of one sequence a program, whose keys and values the cache holds already:
              `[tiles · Hk, parts]` programs

    both      a pass of the online softmax over the part's keys; the part that ends last joins all of them

Invariants:
- `attend` has the new key and value in registers: what it writes to the cache nobody reads before the next launch.
- A row of length 0, or a tile without a token, fills a graph up: nothing is written for it but zeros of `attend`'s output.
- `counters` are 0 between launches. Launches that share them follow one another on a stream.

Why beside FlashAttention 3: contexts are short where the batch is large. 256 sequences of 155 tokens (16 query and 8 key
heads of 128, one H200) take it 87 us a layer, writing the new tokens down included; the bytes take 38 (bench/attention.py).
Where prompts join, its tiles are 128 queries high for those that decode, too.

Source: online softmax, Milakov and Gimelshein 2018; the split over keys, Flash-Decoding, Dao et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

KEYS = 64  # at once
PROGRAMS = 1056  # eight for each of an H200's multiprocessors
MOST_PARTS = 16
QUERIES = 16  # the least that a tensor core multiplies
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Workspace:
    """Where parts of a sequence's keys meet.

    Args:
        partial: float32, of unnormalized outputs, maxima and sums.
        counters: int32, one for each sequence, or tile, and key head; 0.
    """

    partial: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, rows: int, heads: int, key_heads: int, head_dim: int, device: torch.device, tokens: int = 1
    ) -> Workspace:
        """For up to `rows` sequences, or tiles of up to `tokens`."""
        split = (n * parts(n * key_heads) for n in range(1, rows + 1) if parts(n * key_heads) > 1)
        partial = torch.empty(
            max(split, default=0) * tokens * heads * (head_dim + 2), dtype=torch.float32, device=device
        )
        return cls(partial, torch.zeros(rows * key_heads, dtype=torch.int32, device=device))


def parts(programs: int) -> int:
    """In how many parts keys are read, a power of two: as many as fill the GPU."""
    return min(MOST_PARTS, 1 << (-(-PROGRAMS // programs) - 1).bit_length())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    work: Workspace,
) -> None:
    """Write `softmax(scale · q Kᵀ) V` to `out`, and each row's new key and value to its slot of the cache.

    Args:
        query: [n, Hq, D], D a power of two from 16 on.
        key: [n, Hk, D], the new tokens'; Hk divides Hq.
        value: [n, Hk, D].
        key_cache: [blocks, block size, Hk, D]; so is `value_cache`. The last dimension of all of these is contiguous.
        slots: int64 [n]: block · block size + place of the new token.
        table: int32 [n, most blocks]: of each sequence.
        lengths: int32 [n]: tokens of a sequence, the new one included; 0: nobody is there.
        scale: of the scores.
        out: [n, Hq, D].
        work: for as many sequences and heads.
    """
    rows, heads, dim = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    count = parts(rows * key_heads)
    _attend[(rows * key_heads, count)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        slots,
        table,
        lengths,
        scale * LOG2E,
        out,
        work.partial,
        work.counters,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        table.stride(0),
        *out.stride()[:2],
        HEADS=key_heads,
        GROUP=group,
        ROWS=_rows(group),
        DIM=dim,
        BLOCK=key_cache.shape[1],
        KEYS=KEYS,
        PARTS=count,
        num_warps=4,
        num_stages=2,
    )


def extend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    tiles: Tensor,
    positions: Tensor,
    scale: float,
    out: Tensor,
    work: Workspace,
) -> None:
    """Write each new token's `softmax(scale · q Kᵀ) V` over itself and those before it in its sequence to `out`.

    Args:
        query: [n, Hq, D], D a power of two from 16 on; the new tokens of a sequence are neighbours, in order.
        key_cache: [blocks, block size, Hk, D], with the new tokens' keys; so is `value_cache`. The last dimension of all of
            these is contiguous.
        table: int32 [sequences, most blocks].
        tiles: int32 [3, t] as `tiles_of` makes them for `tile_tokens(Hq / Hk)`; its last dimension is contiguous.
        positions: int64 [n] of the new tokens in their sequences.
        scale: of the scores.
        out: [n, Hq, D].
        work: for t tiles.
    """
    heads, dim = query.shape[1:]
    key_heads, count = key_cache.shape[2], tiles.shape[1]
    group = heads // key_heads
    split = parts(count * key_heads)
    _extend[(count * key_heads, split)](
        query,
        key_cache,
        value_cache,
        table,
        tiles,
        positions,
        scale * LOG2E,
        out,
        work.partial,
        work.counters,
        tiles.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        table.stride(0),
        *out.stride()[:2],
        HEADS=key_heads,
        GROUP=group,
        TILE=tile_tokens(group),
        ROWS=_rows(group * tile_tokens(group)),
        DIM=dim,
        BLOCK=key_cache.shape[1],
        KEYS=KEYS,
        PARTS=split,
        num_warps=4,
        num_stages=2,
    )


def tile_tokens(group: int) -> int:
    """Tokens of a tile: as many as fill a tensor core's rows with their `group` query heads a key head, and at least 4."""
    return max(4, QUERIES // group)


def tiles_of(counts: NDArray[np.integer[Any]], tokens: int, room: int) -> NDArray[np.int32]:
    """Tiles of up to `tokens` neighbours: of each its first row, its sequence and its number of tokens.

    Args:
        counts: new tokens of each sequence; their rows follow one another.
        room: tiles at most; those that nobody needs have no tokens.

    Returns:
        [3, room].
    """
    each = -(-counts // tokens)
    owner = np.repeat(np.arange(len(counts)), each)
    before = (np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)) * tokens
    tiles = np.zeros((3, room), dtype=np.int32)
    tiles[0, : len(owner)] = (np.cumsum(counts) - counts)[owner] + before
    tiles[1, : len(owner)] = owner
    tiles[2, : len(owner)] = np.minimum(counts[owner] - before, tokens)
    return tiles


def _rows(live: int) -> int:
    return int(max(QUERIES, triton.next_power_of_2(live)))


@triton.jit
def _join(top, mass, acc, other_top, other_mass, other_acc):
    """Two passes of the online softmax as one."""
    new = tl.maximum(top, other_top)
    one, two = tl.exp2(top - new), tl.exp2(other_top - new)
    return new, mass * one + other_mass * two, acc * one[:, None] + other_acc * two[:, None]


@triton.jit
def _attend(
    query,
    key,
    value,
    key_cache,
    value_cache,
    slots,
    table,
    lengths,
    scale,
    out,
    partial,
    counters,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    keys_block,
    keys_place,
    keys_head,
    values_block,
    values_place,
    values_head,
    table_row,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, head, part = program // HEADS, program % HEADS, tl.program_id(1)
    g, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    live = (g < GROUP)[:, None]
    length = tl.load(lengths + row)
    q = tl.load(query + row * query_row + (head * GROUP + g)[:, None] * query_head + d[None, :], mask=live, other=0.0)

    # The new token, or nothing.
    top = tl.full([ROWS], -1e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if (part == 0) & (length > 0):
        new_key = tl.load(key + row * key_row + head * key_head + d)
        new_value = tl.load(value + row * value_row + head * value_head + d)
        slot = tl.load(slots + row)
        to_key = key_cache + slot // BLOCK * keys_block + slot % BLOCK * keys_place + head * keys_head
        to_value = value_cache + slot // BLOCK * values_block + slot % BLOCK * values_place + head * values_head
        tl.store(to_key + d, new_key)
        tl.store(to_value + d, new_value)
        top = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        mass = tl.full([ROWS], 1.0, tl.float32)
        acc += new_value.to(tl.float32)[None, :]

    # Those before it.
    known = tl.maximum(length - 1, 0)
    top, mass, acc = _pass(
        q, tl.full([ROWS], 1, tl.int32) * known, known, part, top, mass, acc, table + row * table_row,
        key_cache + head * keys_head, value_cache + head * values_head, scale,
        keys_block, keys_place, values_block, values_place, DIM, BLOCK, KEYS, PARTS,
    )  # fmt: skip
    to = out + row * out_row + (head * GROUP + g)[:, None] * out_head + d[None, :]
    _settle(to, live, top, mass, acc, partial, counters, program, part, GROUP, ROWS, DIM, PARTS)


@triton.jit
def _extend(
    query,
    key_cache,
    value_cache,
    table,
    tiles,
    positions,
    scale,
    out,
    partial,
    counters,
    tiles_row,
    query_row,
    query_head,
    keys_block,
    keys_place,
    keys_head,
    values_block,
    values_place,
    values_head,
    table_row,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tile, head, part = program // HEADS, program % HEADS, tl.program_id(1)
    tokens = tl.load(tiles + 2 * tiles_row + tile)
    if tokens > 0:
        first, owner = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + tiles_row + tile).to(tl.int64)
        g, d = tl.arange(0, ROWS), tl.arange(0, DIM)
        token, of_group = g // GROUP, g % GROUP
        live = ((g < GROUP * TILE) & (token < tokens))[:, None]
        at = (first + token)[:, None]
        heads = (head * GROUP + of_group)[:, None]
        q = tl.load(query + at * query_row + heads * query_head + d[None, :], mask=live, other=0.0)
        start = tl.load(positions + first).to(tl.int32) + 1  # keys that the tile's first token sees
        top = tl.full([ROWS], -1e30, tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        top, mass, acc = _pass(
            q, start + token, start + tokens - 1, part, top, mass, acc, table + owner * table_row,
            key_cache + head * keys_head, value_cache + head * values_head, scale,
            keys_block, keys_place, values_block, values_place, DIM, BLOCK, KEYS, PARTS,
        )  # fmt: skip
        to = out + at * out_row + heads * out_head + d[None, :]
        _settle(to, live, top, mass, acc, partial, counters, program, part, GROUP * TILE, ROWS, DIM, PARTS)


@triton.jit
def _pass(
    q,
    seen,
    known,
    part,
    top,
    mass,
    acc,
    table,
    key_cache,
    value_cache,
    scale,
    keys_block,
    keys_place,
    values_block,
    values_place,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One part of `known` keys, of which each row sees the first `seen`. A row that sees none of the part's first keys comes
    out with a maximum of -1e30: whatever it has summed is worth nothing once the parts are joined."""
    d, n = tl.arange(0, DIM), tl.arange(0, KEYS)
    tiles = tl.cdiv(known, KEYS)
    each = tl.cdiv(tiles, PARTS)
    for tile in tl.range(part * each, tl.minimum((part + 1) * each, tiles)):
        at = tile * KEYS + n
        there = at < known
        block = tl.load(table + at // BLOCK, mask=there, other=0).to(tl.int64)
        from_key = key_cache + block * keys_block + at % BLOCK * keys_place
        keys = tl.load(from_key[None, :] + d[:, None], mask=there[None, :], other=0.0)
        scores = tl.where(at[None, :] < seen[:, None], tl.dot(q, keys, input_precision="ieee") * scale, -1e30)
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(top - new)
        from_value = value_cache + block * values_block + at % BLOCK * values_place
        values = tl.load(from_value[:, None] + d[None, :], mask=there[:, None], other=0.0)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new
    return top, mass, acc


@triton.jit
def _settle(
    to,
    live,
    top,
    mass,
    acc,
    partial,
    counters,
    program,
    part,
    LIVE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write a pass's result, or its part of it; the part that ends last joins them. `LIVE` rows are kept of a part."""
    g, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    if PARTS == 1:
        tl.store(to, acc / tl.maximum(mass, 1e-30)[:, None], mask=live)
    else:
        kept, parted = g < LIVE, LIVE * (DIM + 2)  # of one part: outputs, maxima, sums
        place = partial + (program * PARTS + part) * parted
        tl.store(place + g[:, None] * DIM + d[None, :], acc, mask=kept[:, None])
        tl.store(place + LIVE * DIM + g, top, mask=kept)
        tl.store(place + LIVE * (DIM + 1) + g, mass, mask=kept)
        tl.debug_barrier()  # all threads' stores come before the one thread's that counts
        if tl.atomic_add(counters + program, 1, sem="acq_rel") == PARTS - 1:
            top = tl.full([ROWS], -1e30, tl.float32)
            mass = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, DIM], tl.float32)
            for one in tl.static_range(PARTS):
                # Past the cache of this multiprocessor, which may hold an older neighbour of these bytes.
                place = partial + (program * PARTS + one) * parted
                its_acc = tl.load(
                    place + g[:, None] * DIM + d[None, :], mask=kept[:, None], other=0.0, cache_modifier=".cg"
                )
                its_top = tl.load(place + LIVE * DIM + g, mask=kept, other=-1e30, cache_modifier=".cg")
                its_mass = tl.load(place + LIVE * (DIM + 1) + g, mask=kept, other=0.0, cache_modifier=".cg")
                top, mass, acc = _join(top, mass, acc, its_top, its_mass, its_acc)
            tl.store(to, acc / tl.maximum(mass, 1e-30)[:, None], mask=live)
            tl.store(counters + program, 0)
