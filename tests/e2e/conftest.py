"""A small run of the packaged policy: seconds a step, through the same code as every other run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl import RLConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RLConfig]:
    """`small(train={"steps": 2}, ...)`: sections are merged into the small run's own."""

    def make(**sections: Mapping[str, Any]) -> RLConfig:
        base: dict[str, dict[str, Any]] = {
            "model": {"policy": "builtin:tiny"},
            "data": {
                "dataset": str(ROOT / "examples/rl/data/addition/train.jsonl"),
                "eval_dataset": str(ROOT / "examples/rl/data/addition/heldout.jsonl"),
            },
            "rollout": {"batch_prompts": 4, "group_size": 4, "max_new_tokens": 24, "max_model_len": 128},
            "rewards": {"correct": {"fn": "math", "args": {"field": "answer"}}},
            "train": {
                "output_dir": str(tmp_path / "run"),
                "steps": 3,
                "learning_rate": 1e-4,
                "warmup_steps": 2,
                "eval_samples": 16,
            },
        }
        for name, values in sections.items():
            base[name] = {**base.get(name, {}), **values}
        return RLConfig.from_dict(base)

    return make


def lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
