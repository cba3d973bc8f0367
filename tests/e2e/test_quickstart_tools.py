"""The quickstart with a tool: its own config and policy. bench/quickstart_tools.py runs the whole over five seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl import RLConfig, RLTrainer
from tests.e2e.conftest import ROOT, lines


def train(folder: Path, **options: Any) -> None:
    words = [str(word) for name, value in options.items() for word in (f"--{name.replace('__', '.')}", value)]
    config = RLConfig.from_yaml("configs/rl_quickstart_tools.yaml", ["--train.output_dir", str(folder), *words])
    RLTrainer(config).train()


def test_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    train(
        tmp_path / "run",
        rollout__batch_prompts=4,
        train__steps=2,
        train__eval_every=0,
        train__eval_samples=8,
        logging__dump_trajectories=1,
    )
    for step in lines(tmp_path / "run" / "metrics.jsonl"):
        assert 0 < step["tool_calls"] < 1.5
        assert step["skipped"] == 0
        assert step["policy/abs_ratio_dev"] < 1e-4, "the trainer reads the tokens that were sampled"
    _, *rollouts = lines(tmp_path / "run" / "rollouts" / "step_1.jsonl")
    right = [line for line in rollouts if line["reward"] == 1.0]
    assert right
    for line in right:
        assert [turn["role"] for turn in line["turns"]] == ["prompt", "assistant", "tool", "assistant"]
        assert line["row"]["answer"] in line["turns"][2]["text"]


@pytest.mark.slow
def test_it_learns_to_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of its steps."""
    monkeypatch.chdir(ROOT)
    train(tmp_path / "run", train__steps=20, train__eval_every=0)
    first, last = (line["reward"] for line in lines(tmp_path / "run" / "eval.jsonl"))
    assert 0.1 < first < 0.4
    assert last > first + 0.3
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["tool_calls"] > 0.8
