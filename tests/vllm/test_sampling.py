"""The draw: the torch definition against float64, the fused kernel against the definition (on a GPU, or interpreted)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

KERNEL = """
import torch
from palingenesis.rl.kernels.sample import sample_reference, uniform
from palingenesis.rl.kernels.sample_triton import sample

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for vocabulary in (7, 300, 4096, 10001) + ((151936,) if device == "cuda" else ()):
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(64, vocabulary) * 4).to(device, dtype)
        logits[:, vocabulary // 3 : vocabulary // 2] = -torch.inf
        temperature = torch.tensor([0.0, 0.6, 1.0, 1.7] * 16, device=device)
        seeds = torch.randint(-(2**62), 2**62, (64,)).to(device)
        positions = torch.randint(0, 5000, (64,), dtype=torch.int32).to(device)
        token, logprob = sample(logits, temperature, seeds, positions)
        expected, expected_logprob = sample_reference(logits, temperature, uniform(seeds, positions))
        same = token == expected
        assert same.float().mean() >= 0.98, (vocabulary, dtype, same)  # a draw on the border of two tokens may fall aside
        assert (logprob - expected_logprob)[same].abs().max() < 1e-4
        assert torch.isfinite(logprob).all()
        if device == "cuda":  # the interpreter refuses an argmax of NaN
            token, logprob = sample(torch.full_like(logits, torch.nan), temperature, seeds, positions)
            assert token.min() >= 0 and token.max() < vocabulary
            assert logprob.isnan().all()
print("ok")
"""


def test_the_fused_kernel_is_the_definition() -> None:
    pytest.importorskip("triton")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    import os

    env = os.environ | interpreted
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip().endswith("ok"), done.stderr[-2000:]
