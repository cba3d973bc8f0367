"""Attention of new tokens, one a sequence or several, against its definition in float64 (on a GPU, or interpreted)."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

KERNEL = """
import torch
from palingenesis.rl.kernels import attend_triton
import numpy as np
from palingenesis.rl.kernels.attend_triton import Workspace, attend, extend, tile_tokens, tiles_of

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
torch.manual_seed(0)


def check(heads, key_heads, dim, block, lengths, places=0):
    rows, most = len(lengths), max(lengths) // block + 2
    blocks = rows * most + 1
    pages = torch.randn(blocks, 2, block, key_heads, dim).to(device, dtype)
    table = (torch.randperm(blocks - 1) + 1).view(rows, most).to(device, torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    last = (lengths.long() - 1).clamp(min=0)
    slots = table.long().gather(1, (last // block)[:, None])[:, 0] * block + last % block
    made = torch.randn(rows, heads + 2 * key_heads, dim).to(device, dtype)
    query, key, value = made.split([heads, key_heads, key_heads], 1)
    work = Workspace.of(places or rows, heads, key_heads, dim, device)
    before = pages.clone()
    for turn in range(2):  # the second finds what the first has left of its counters
        out = torch.full_like(query, torch.nan)
        attend(query, key, value, pages[:, 0], pages[:, 1], slots, table, lengths, dim**-0.5, out, work)
        assert not work.counters.any()
        for row, length in enumerate(lengths.tolist()):
            known = pages[table[row].long()].transpose(0, 1).flatten(1, 2)[:, :length].double()
            keys, values = known.repeat_interleave(heads // key_heads, 2)
            weights = torch.einsum("hd,nhd->hn", query[row].double(), keys * dim**-0.5).softmax(-1)
            expected = torch.einsum("hn,nhd->hd", weights, values)
            assert (out[row] - expected).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-5), (row, length)
    for row, length in enumerate(lengths.tolist()):
        if length:
            before.view(blocks, 2, block, -1)[slots[row] // block, :, slots[row] % block] = torch.stack(
                (key[row].reshape(-1), value[row].reshape(-1))
            )
    assert torch.equal(before, pages)  # the new tokens' places, and no other


def check_several(heads, key_heads, dim, block, steps, padding=3):
    # steps: (tokens before, new tokens) of each sequence
    counts, most = np.array([new for _, new in steps]), max(map(sum, steps)) // block + 1
    rows, room = int(counts.sum()) + padding, int(counts.sum()) + padding
    pages = torch.randn(len(steps) * most + 1, 2, block, key_heads, dim).to(device, dtype)
    table = (torch.randperm(len(steps) * most) + 1).view(len(steps), most).to(device, torch.int32)
    for owner, known in enumerate(map(sum, steps)):  # nobody looks behind a sequence's end, nor into another's blocks
        ours = pages[table[owner].long()].transpose(0, 1).flatten(1, 2)
        ours[:, known:] = torch.nan
        pages[table[owner].long()] = ours.unflatten(1, (most, block)).transpose(0, 1)
    pages[0] = torch.nan
    values = pages[:, 1].transpose(1, 2).contiguous().transpose(1, 2)  # of other strides than the keys
    query = torch.randn(rows, heads + 8, dim).to(device, dtype)[:, :heads]
    positions = torch.tensor([before + i for before, new in steps for i in range(new)] + [7] * padding, device=device)
    tokens = tile_tokens(heads // key_heads)
    tiles = torch.from_numpy(tiles_of(counts, tokens, room + 5)).to(device)[:, :room]
    assert tiles[2].sum() == counts.sum() and tiles[2].max() <= tokens
    work = Workspace.of(room, heads, key_heads, dim, device, tokens)
    before = pages.nan_to_num(7.0)
    for turn in range(2):
        out = torch.full((rows, heads, dim), torch.nan, device=device, dtype=dtype)
        extend(query, pages[:, 0], values, table, tiles, positions, dim**-0.5, out, work)
        assert not work.counters.any()
        row = 0
        for owner, (old, new) in enumerate(steps):
            known = pages[table[owner].long()].transpose(0, 1).flatten(1, 2)[:, : old + new].double()
            keys, its = known.repeat_interleave(heads // key_heads, 2)
            scores = torch.einsum("mhd,nhd->mhn", query[row : row + new].double(), keys * dim**-0.5)
            later = torch.ones(new, old + new, dtype=torch.bool, device=device).triu(old + 1)
            weights = scores.masked_fill(later[:, None], -torch.inf).softmax(-1)
            expected = torch.einsum("mhn,nhd->mhd", weights, its)
            apart = (out[row : row + new] - expected).abs().amax((1, 2))
            assert (apart < (0.02 if dtype == torch.bfloat16 else 1e-5)).all(), (owner, old, new, apart)
            row += new
        assert out[row:].isnan().all()  # rows that nobody has stay as they were
    assert torch.equal(before, pages.nan_to_num(7.0))


# One that decodes, prompts that end in a tile's midst, after cached tokens, at and across the edges of tiles of keys.
STEPS = [(0, 1), (70, 1), (0, 5), (16, 4), (62, 5), (63, 9), (64, 3), (127, 2), (0, 66)]
LENGTHS = [1, 2, 64, 65, 66, 0, 129, 200]
check(4, 2, 32, 16, LENGTHS)  # in 16 parts, most of them empty
check(3, 1, 64, 32, LENGTHS, places=64)  # of which most are empty
check_several(4, 2, 32, 16, STEPS[:5])
attend_triton.PROGRAMS = 40
check(9, 3, 64, 16, LENGTHS)  # in two
attend_triton.PROGRAMS = 1
check(4, 2, 32, 16, LENGTHS)  # in one
check_several(9, 3, 64, 16, STEPS)
check_several(8, 1, 32, 32, STEPS)
if device.type == "cuda":
    attend_triton.PROGRAMS = 1056
    for rows in (1, 3, 16, 100, 256):
        check(16, 8, 128, 16, torch.randint(1, 900, (rows,)).tolist())
        check(40, 2, 256, 64, torch.randint(1, 400, (rows,)).tolist())
        joining = [(0, 100), (900, 16), (0, 1), (37, 300)]
        check_several(16, 8, 128, 16, [(n, 1) for n in torch.randint(0, 900, (rows,)).tolist()] + joining)
        check_several(40, 2, 256, 64, [(n, 1) for n in torch.randint(0, 400, (rows,)).tolist()] + joining)
print("ok")
"""


def test_the_kernel_is_the_definition() -> None:
    pytest.importorskip("triton")
    env = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], capture_output=True, text=True, env=env, timeout=600, check=False
    )
    assert done.stdout.strip().endswith("ok"), done.stderr[-2000:]


def layer(**own: Any) -> SimpleNamespace:
    plain = {"kv_sharing_target_layer_name": None, "attn_type": "decoder", "alibi_slopes": None, "sinks": None}
    return SimpleNamespace(**plain | {"logits_soft_cap": 0, "sliding_window": (-1, -1)} | own)


def step(**metadata: Any) -> SimpleNamespace:
    plain = {"sliding_window": (-1, -1), "max_query_len": 1, "seq_lens": torch.ones(3)}
    return SimpleNamespace(**plain | metadata)


def tensors(dim: int = 32) -> list[torch.Tensor]:
    return [torch.zeros(3, 4, dim), torch.zeros(3, 2, dim), torch.zeros(3, 2, dim), torch.zeros(8, 2, 16, 2, dim)]


def test_a_layer_it_does_not_compute_is_vllms() -> None:
    pytest.importorskip("triton")
    from palingenesis.rl.engines.vllm.attention import covered

    assert covered(layer(), *tensors(), step())
    assert covered(layer(), *tensors(), step(sliding_window=None))
    for own in (
        {"sliding_window": (1023, 0)},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.zeros(4)},
        {"alibi_slopes": torch.zeros(4)},
        {"attn_type": "encoder_only"},
        {"kv_sharing_target_layer_name": "model.layers.3"},
    ):
        assert not covered(layer(**own), *tensors(), step()), own
    assert not covered(layer(), *tensors(), step(sliding_window=[511, 0]))
    for dim in (8, 80, 512):
        assert not covered(layer(), *tensors(dim), step()), dim
    query, key, value, cache = tensors()
    assert not covered(layer(), query, key, value[..., :16], cache, step())
    assert not covered(layer(), query, key, value, cache.to(torch.float8_e4m3fn), step())


@pytest.mark.parametrize("places", [1, 7, 100, 131, 256, 300])
def test_fewer_sequences_in_more_parts_fit_into_the_workspace(places: int) -> None:
    pytest.importorskip("triton")
    from palingenesis.rl.kernels.attend_triton import Workspace, parts

    for heads, key_heads, dim, tokens in ((16, 8, 128, 1), (16, 8, 128, 8), (9, 3, 64, 5), (8, 1, 256, 4)):
        work = Workspace.of(places, heads, key_heads, dim, torch.device("cpu"), tokens)
        for rows in range(1, places + 1):
            split = parts(rows * key_heads)
            assert split == 1 or rows * split * tokens * heads * (dim + 2) <= work.partial.numel()


def test_a_layer_that_is_vllms_writes_first_and_everything_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from palingenesis.rl.engines.vllm.attention import DecodeAttention

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", lambda *args: seen.append(("update", *args)))
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *args: seen.append(("forward", *args)))
    before = FlashAttentionImpl.forward, FlashAttentionImpl.do_kv_cache_update
    query, key, value, cache = tensors()
    out, slots = torch.zeros_like(query), torch.arange(3)
    for own, of_step in (
        (layer(sliding_window=(7, 0)), {}),
        (layer(kv_sharing_target_layer_name="model.layers.3"), {}),
        (layer(), {"max_query_len": 2}),
        (layer(), {"seq_lens": torch.ones(2)}),
    ):
        metadata = step(slot_mapping=slots, **of_step)
        with DecodeAttention(3, torch.device("cpu")).in_place():
            FlashAttentionImpl.do_kv_cache_update(own, "layer", key, value, cache, slots)
            assert FlashAttentionImpl.forward(own, "layer", query, key, value, cache, metadata, output=out) is out
        shared = own.kv_sharing_target_layer_name is not None
        written = [] if shared else [("update", own, "layer", key, value, cache, slots)]
        attended = ("forward", own, "layer", query, key, value, cache, metadata, out)
        assert [tuple(map(id, call[1:])) for call in seen] == [tuple(map(id, c[1:])) for c in (*written, attended)]
        assert [call[0] for call in seen] == ["update"] * len(written) + ["forward"]
        seen.clear()
    assert (FlashAttentionImpl.forward, FlashAttentionImpl.do_kv_cache_update) == before


def test_in_a_step_with_prompts_what_we_do_not_compute_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from palingenesis.rl.engines.vllm import attention

    seen: list[Any] = []
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda own, *args: seen.append(own))
    monkeypatch.setattr(attention, "extend", lambda *args: seen.append(args))
    joins = attention.JoinAttention(64, torch.zeros(64, dtype=torch.int64), group=2)
    query, key, value = torch.zeros(20, 4, 32), torch.zeros(20, 2, 32), torch.zeros(20, 2, 32)
    cache, out = torch.zeros(8, 2, 16, 2, 32), torch.zeros(20, 4, 32)
    metadata = step(causal=True, block_table=torch.zeros(3, 4), seq_lens=torch.ones(3), max_query_len=20)
    ours, windows, others = layer(scale=0.5), layer(sliding_window=(7, 0)), layer()
    with joins.in_place():
        forward = FlashAttentionImpl.forward
        assert forward(ours, "layer", query, key, value, cache, metadata, output=out) is out
        forward(windows, "layer", query, key, value, cache, metadata, output=out)
        forward(others, "layer", query, key[:, :1], value[:, :1], cache, metadata, output=out)  # another group
        metadata.causal = False
        forward(others, "layer", query, key, value, cache, metadata, output=out)
    assert joins.layers == {id(ours)}
    (asked, keys, values, table, tiles, *_), *left = seen
    assert left == [windows, others, others]
    assert asked is query
    assert table is metadata.block_table
    assert (keys.data_ptr(), values.data_ptr()) == (cache[:, 0].data_ptr(), cache[:, 1].data_ptr())
    # Of 3 sequences with 20 new tokens together no more tiles of 8 can be than when every last one is almost empty.
    assert tiles.shape == (3, 5)
    assert max(attention.tiles_of(np.array(counts), 8, 9)[2].astype(bool).sum() for counts in splits(20, 3)) <= 5


def splits(total: int, count: int) -> list[tuple[int, ...]]:
    """Ways to make `total` of `count` numbers from 1 on."""
    if count == 1:
        return [(total,)]
    return [(first, *rest) for first in range(1, total - count + 2) for rest in splits(total - first, count - 1)]
