"""Weights that the trainer and an FP8 engine have in common."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from palingenesis.rl.engines.vllm.core import VLLMOptions, fp8_groups
from palingenesis.rl.policy.fp8 import FP8Weights, round_to_fp8
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.model import load_policy

CPU = torch.device("cpu")
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()


def as_vllm_does(weights: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """`ops.scaled_fp8_quant` of the fused matrix: FP8 values and the scale that multiplies them."""
    scale = torch.cat([w.flatten() for w in weights]).abs().max().float() / 448.0
    return [(w.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for w in weights], scale


@given(
    seed=st.integers(0, 10_000),
    size=st.floats(-12.0, 4.0),
    count=st.integers(1, 3),
    dtype=st.sampled_from(["bf16", "f32"]),
)
def test_what_the_engine_makes_of_rounded_weights_is_those_weights(
    seed: int, size: float, count: int, dtype: str
) -> None:
    draw = torch.Generator().manual_seed(seed)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = [(10**size * torch.randn(5, 40, generator=draw) ** 3).to(kind) for _ in range(count)]
    before = [w.clone() for w in weights]
    round_to_fp8(weights)
    again = [w.clone() for w in weights]
    round_to_fp8(again)
    assert all(map(torch.equal, weights, again))
    values, scale = as_vllm_does(weights)
    for w, value in zip(weights, values, strict=True):
        assert torch.equal((value.float() * scale).to(kind), w)
    exact = torch.cat([b.flatten() for b in before]).abs().max().double() / 448.0
    for w, b in zip(weights, before, strict=True):  # the nearest there is, but for the last bits of what holds it
        nearest = (b.double()[..., None] / exact - E4M3).abs().amin(-1) * exact
        slack = torch.maximum(w.abs(), b.abs()).double() * (2.0**-8 if dtype == "bf16" else 2.0**-22)
        assert ((w.double() - b.double()).abs() <= nearest + slack).all()


def test_zeros_stay_zero() -> None:
    weights = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.bfloat16)]
    round_to_fp8(weights)
    assert not any(w.any() for w in weights)


def test_published_weights_are_rounded_and_masters_are_not() -> None:
    policy, values = load_policy("builtin:tiny", device=CPU, dtype=torch.bfloat16)
    own = dict(policy.model.named_parameters())
    together = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    alone = ("model.layers.0.mlp.down_proj.weight",)
    fp8 = FP8Weights(policy.model, [together, alone, ("model.layers.0.self_attn.not_there.weight",)])
    assert [len(group) for group in fp8.groups] == [3, 1]
    untouched = {name: p.clone() for name, p in own.items() if name not in together + alone}
    masters = Masters(policy.model, values, fp8)
    kept = {name: master.detach().clone() for name, (_, master) in masters.pairs.items()}
    masters.publish()
    found, scale = as_vllm_does([own[name].detach() for name in together])
    for name, value in zip(together, found, strict=True):
        assert torch.equal((value.float() * scale).bfloat16(), own[name].detach())
        assert float((own[name] - kept[name]).detach().abs().max()) > 1e-4
    assert all(torch.equal(own[name], before) for name, before in untouched.items())
    assert all(torch.equal(master.detach(), kept[name]) for name, (_, master) in masters.pairs.items())

    # Straight through: a gradient moves the master, and the weight once the master is nearer to another FP8 value.
    param, master = masters.pairs[alone[0]]
    before = param.detach().clone()
    at = (0, int(master[0].abs().argmax()))
    to_next = 0.07 * float(master.detach()[at])  # values are a sixteenth to an eighth apart
    param.grad = torch.zeros_like(param)
    param.grad[at] = 1.0
    masters.collect()
    assert float(master.grad.norm()) == 1.0
    moved = []
    for share in (0.001, 0.999):
        with torch.no_grad():
            master[at] -= share * 2 * to_next * float(master.grad[at])
        masters.publish()
        moved.append(not torch.equal(param.detach(), before))
    assert moved == [False, True]


def module(**children: torch.nn.Module) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def quantized(kind: str) -> torch.nn.Module:
    made = torch.nn.Module()
    made.quant_method = type(kind, (), {})()
    return made


def test_groups_are_those_that_vllm_makes_one_matrix_of() -> None:
    rounded = "Fp8PerTensorOnlineLinearMethod"
    attention = module(qkv_proj=quantized(rounded), o_proj=quantized(rounded), attn=quantized("Fp8KVCacheMethod"))
    mlp = module(gate=quantized("UnquantizedLinearMethod"), down_proj=quantized(rounded))
    model = module(language_model=module(model=module(layer=module(self_attn=attention, mlp=mlp))))
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert fp8_groups(model) == [
        tuple(f"model.layer.self_attn.{part}_proj.weight" for part in "qkv"),
        ("model.layer.self_attn.o_proj.weight",),
        ("model.layer.mlp.down_proj.weight",),
    ]
    assert fp8_groups(module(lm_head=quantized("UnquantizedEmbeddingMethod"))) == []


@pytest.mark.parametrize(("quantization", "asked"), [("fp8", "1"), ("fp8_per_channel", None), ("", None)])
def test_weights_alone_is_asked_for_with_fp8(
    quantization: str, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palingenesis.rl.engines.vllm import core

    environ: dict[str, str] = {}
    monkeypatch.setattr(core, "os", SimpleNamespace(environ=environ))
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)  # not imported: what is asked for is asked for before
    with pytest.raises(core.EngineError, match="cannot be imported"):
        core._start(VLLMOptions("m", "bfloat16", "cuda", 64, quantization=quantization), None)
    assert environ.get("VLLM_TEST_FORCE_FP8_MARLIN") == asked
