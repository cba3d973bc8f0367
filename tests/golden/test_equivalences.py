"""Runs that must be equal, through the real trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from palingenesis.rl import RLConfig, RLTrainer
from tests.e2e.conftest import lines, small

Small = Callable[..., RLConfig]
__all__ = ["small"]


def test_a_resumed_run_is_the_unbroken_one(small: Small, tmp_path: Path) -> None:
    """Weights, optimizer, metrics and draws, bit for bit."""
    straight = small(train={"steps": 4, "save_steps": 4, "output_dir": str(tmp_path / "straight")})
    RLTrainer(straight).train()
    broken = {"save_steps": 2, "output_dir": str(tmp_path / "broken"), "keep_checkpoints": 3}
    RLTrainer(small(train={"steps": 2, **broken})).train()
    RLTrainer(small(train={"steps": 4, "resume_from": "auto", **broken})).train()

    one, other = (tmp_path / name / "checkpoints" / "step_4" for name in ("straight", "broken"))
    a, b = (load_file(folder / "policy" / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    a, b = (torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in (one, other))
    assert all(torch.equal(a[key][name], b[key][name]) for key in a for name in a[key])
    timed = {"time", "tokens/s", "engine/tail_s", "engine/seqs_mean"}
    for mine, theirs in zip(*(lines(tmp_path / n / "metrics.jsonl") for n in ("straight", "broken")), strict=True):
        keep = [name for name in mine if name not in timed and not name.startswith("time/")]
        assert {name: mine[name] for name in keep} == {name: theirs[name] for name in keep}


def test_micro_tokens_change_memory_and_not_the_run(small: Small, tmp_path: Path) -> None:
    """The same draws and, up to the order of float32 sums, the same gradients."""
    runs = []
    for micro_tokens in (50, 100_000):
        folder = tmp_path / str(micro_tokens)
        RLTrainer(small(train={"steps": 2, "micro_tokens": micro_tokens, "output_dir": str(folder)})).train()
        runs.append(lines(folder / "metrics.jsonl"))
    for one, other in zip(*runs, strict=True):
        assert one["tokens/trained"] == other["tokens/trained"]
        for name in ("reward", "grad_norm", "policy/entropy", "length/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4)
