"""Weights that the trainer and an FP8 engine have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from palingenesis.rl.chat.template import load_tokenizer
from palingenesis.rl.engines.vllm import core
from palingenesis.rl.engines.vllm.core import Core, VLLMOptions, fp8_groups
from palingenesis.rl.errors import EngineError
from palingenesis.rl.policy.checkpoint import export
from palingenesis.rl.policy.fp8 import FP8Weights, round_to_fp8
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.model import load_policy, policy_path

CPU = torch.device("cpu")
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()


def as_vllm_multiplies(weights: list[Tensor]) -> list[Tensor]:
    """`ops.scaled_fp8_quant` of the fused matrix, and the scale as Marlin's kernels have it: in bf16."""
    scale = torch.cat([w.flatten() for w in weights]).abs().max().float() / 448.0
    values = [(w.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn) for w in weights]
    return [value.double() * scale.bfloat16().double() for value in values]


@given(
    seed=st.integers(0, 10_000),
    size=st.floats(-12.0, 4.0),
    count=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_what_the_engine_makes_of_rounded_weights_is_those_weights(
    seed: int, size: float, count: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weights = [(10**size * torch.randn(5, 40, generator=draw) ** 3).to(dtype) for _ in range(count)]
    before = [w.clone() for w in weights]
    round_to_fp8(weights)
    again = [w.clone() for w in weights]
    round_to_fp8(again)
    assert all(map(torch.equal, weights, again))
    assert all(torch.equal(w.double(), seen) for w, seen in zip(weights, as_vllm_multiplies(weights), strict=True))
    largest = torch.cat([b.flatten() for b in before]).abs().max().double()
    scale = torch.cat([w.flatten() for w in weights]).abs().max().double() / 448.0
    assert 432.0 <= largest / scale < 432.0 * 9 / 8
    for w, b in zip(weights, before, strict=True):  # the nearest there is under this scale
        value, nearest = w.double() / scale, (b.double()[..., None] / scale - E4M3).abs().amin(-1)
        assert ((value - b.double() / scale).abs() <= nearest + 1e-9).all()


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
    assert fp8.left_out == ["model.layers.0.self_attn.not_there.weight"]
    untouched = {name: p.clone() for name, p in own.items() if name not in together + alone}
    masters = Masters(policy.model, values, fp8)
    kept = {name: master.detach().clone() for name, (_, master) in masters.pairs.items()}
    masters.publish()
    for name, seen in zip(together, as_vllm_multiplies([own[name].detach() for name in together]), strict=True):
        assert torch.equal(own[name].detach().double(), seen)
        assert float((own[name] - kept[name]).detach().abs().max()) > 1e-4
    assert all(torch.equal(own[name], before) for name, before in untouched.items())
    assert all(torch.equal(master.detach(), kept[name]) for name, (_, master) in masters.pairs.items())

    # Straight through: a gradient moves the master, and the weight once the master is nearer to another FP8 value.
    param, master = masters.pairs[alone[0]]
    before = param.detach().clone()
    at = (0, int(before[0].abs().argmax()))
    param.grad = torch.zeros_like(param)
    param.grad[at] = 1.0
    masters.collect()
    assert float(master.grad[at]) == float(master.grad.norm()) == 1.0
    moved = []
    for share in (0.01, 0.1):  # of the weight; FP8 values are a sixteenth to an eighth apart
        with torch.no_grad():
            master[at] = before[at].float() * (1 - share)
        masters.publish()
        moved.append(not torch.equal(param.detach(), before))
    assert moved == [False, True]


def test_the_final_policy_is_the_one_that_was_trained_and_a_checkpoint_keeps_the_masters(tmp_path: Path) -> None:
    policy, values = load_policy("builtin:tiny", device=CPU, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.down_proj.weight"
    masters = Masters(policy.model, values, FP8Weights(policy.model, [(name,)]))
    masters.publish()
    tokenizer = load_tokenizer(policy_path("builtin:tiny"))
    final = export(tmp_path / "final", policy, masters, tokenizer, torch.bfloat16)
    saved = export(tmp_path / "saved", policy, masters, tokenizer, torch.float32, resumable=True)
    param, master = masters.pairs[name]
    assert torch.equal(load_file(final / "model.safetensors")[name], param.detach())
    assert torch.equal(load_file(saved / "model.safetensors")[name], master.detach())


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
    mlp.add_module("experts", quantized("Fp8PerTensorOnlineMoEMethod"))
    model = module(language_model=module(model=module(layer=module(self_attn=attention, mlp=mlp))))
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert fp8_groups(model) == [
        tuple(f"model.layer.self_attn.{part}_proj.weight" for part in "qkv"),
        ("model.layer.self_attn.o_proj.weight",),
        ("model.layer.mlp.down_proj.weight",),
        ("model.layer.mlp.experts",),
    ]
    assert fp8_groups(module(lm_head=quantized("UnquantizedEmbeddingMethod"))) == []


def options(quantization: str, extra: str = "") -> VLLMOptions:
    args = {"quantization": extra} if extra else {}
    return VLLMOptions("m", "bfloat16", "cuda", 64, quantization=quantization, extra=args)


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        (options("fp8"), True),
        (options("", "fp8"), True),
        (options("fp8", "fp8_per_tensor"), False),
        (options("fp8_per_channel"), False),
        (options(""), False),
    ],
)
def test_weights_alone_are_asked_for_with_fp8(asked: VLLMOptions, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(core, "os", SimpleNamespace(environ=environ))
    monkeypatch.setitem(sys.modules, "vllm", None)  # what is asked for is asked for before it is imported
    with pytest.raises(EngineError, match="cannot be imported"):
        core._start(asked, None)
    assert ("VLLM_TEST_FORCE_FP8_MARLIN" in environ) is alone
    assert (asked.engine_args().get("linear_backend") == "marlin") is alone


def test_kernels_that_round_inputs_are_refused_with_fp8() -> None:
    def checked(quantization: str, kernel: str) -> None:
        layer = torch.nn.Module()
        layer.quant_method = SimpleNamespace(fp8_linear=type(kernel, (), {})())
        runner = SimpleNamespace(model=module(layer=layer, norm=torch.nn.Module()))
        Core._check_weights_alone(SimpleNamespace(options=options(quantization), _runner=runner))

    checked("fp8", "MarlinFP8ScaledMMLinearKernel")
    checked("fp8_per_tensor", "CutlassFP8ScaledMMLinearKernel")
    with pytest.raises(EngineError, match=r"CutlassFP8ScaledMMLinearKernel.*of the weights alone"):
        checked("fp8", "CutlassFP8ScaledMMLinearKernel")


def test_a_reload_leaves_the_workspaces_that_graphs_have_captured() -> None:
    layer = torch.nn.Module()
    layer.workspace = captured = torch.ones(4, dtype=torch.int32)
    with core._same_workspaces(module(layer=layer, norm=torch.nn.Module())):
        layer.workspace = torch.zeros(4, dtype=torch.int32)
    assert layer.workspace is captured
    assert not captured.any()
