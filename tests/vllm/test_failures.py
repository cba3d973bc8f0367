"""What keeps vLLM from starting or from going on ends in one clear message, within its deadline."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.errors import ConfigError, EngineError, StallError
from palingenesis.rl.policy.model import Policy, policy_path
from palingenesis.rl.policy.weights import PolicyWeights
from tests.vllm.conftest import DEVICE, DTYPE


def start(**changes: Any) -> Any:
    from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions

    options: dict[str, Any] = {
        "model": policy_path("builtin:tiny"),
        "dtype": str(DTYPE).removeprefix("torch."),
        "device": DEVICE.type,
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.1,
        "extra": {"enforce_eager": True},
    }
    return VLLMEngine(VLLMOptions(**(options | changes)))


def test_an_argument_vllm_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"rollout.vllm_args: .*'max_num_sequences'"):
        start(extra={"max_num_sequences": 3})


def test_a_quantization_vllm_does_not_know() -> None:
    with pytest.raises(EngineError, match=r"set rollout.quantization to a method that this vLLM knows"):
        start(quantization="nonsense")


def test_a_model_vllm_does_not_know(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(policy_path("builtin:tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["OddForCausalLM"], "model_type": "odd"}))
    with pytest.raises(EngineError, match="did not start with"):
        start(model=str(folder))


def test_too_little_memory_for_one_sequence() -> None:
    with pytest.raises(EngineError, match=r"raise rollout.gpu_memory_utilization, or lower rollout.max_model_len"):
        start(extra={"num_gpu_blocks_override": 2, "block_size": 32, "enforce_eager": True})


def test_a_step_that_never_returns(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    from palingenesis.rl.engines.vllm import engine as module

    monkeypatch.setattr(module, "STILL_S", 1.0)
    engine = start()
    hanging, go_on = threading.Event(), threading.Event()

    def hangs() -> None:
        hanging.set()
        go_on.wait()

    engine.core._engine.step_fn = hangs
    engine._inbox.put(lambda: engine.core.add((1, 2, 3), module.SamplingParams(4), lambda _: None))
    assert hanging.wait(10)
    with pytest.raises(StallError, match="stand still"):
        engine.load(PolicyWeights(1, policy.model))
    go_on.set()
