#!/usr/bin/env python3
"""Train SmolLM2-135M-Instruct on GSM8K by configs/rl_smollm2.yaml and keep the curve.

    python bench/smollm2.py cpu --train.steps 3                       three steps on a CPU
    python bench/smollm2.py gpu --rollout.batch_prompts 16 ...        thirty on a GPU

The first argument names the result (`bench/results/smollm2_<name>.json`), the others override the config. The export is
loaded again: its parameters must be those of the last checkpoint's float32 masters, rounded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import record
from transformers import AutoModelForCausalLM

from palingenesis.rl import RLConfig, RLTrainer

CONFIG = Path(__file__).parents[1] / "configs" / "rl_smollm2.yaml"
CURVE = (
    *("reward", "rewards/correct", "rewards/format", "groups/zero_variance", "grad_norm", "length/mean", "truncated"),
    *("policy/abs_ratio_dev", "policy/mismatch_k3", "policy/entropy", "tokens/s", "time/rollout", "time/train", "mfu"),
)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def export_is_the_policy(folder: Path, steps: int) -> bool:
    """Whether `final/` holds the masters of the last checkpoint, rounded to its own dtype."""
    final, masters = (
        AutoModelForCausalLM.from_pretrained(folder / part, dtype="auto").state_dict()
        for part in ("final", f"checkpoints/step_{steps}/policy")
    )
    return all(torch.equal(value, masters[name].to(value.dtype)) for name, value in final.items())


def main() -> None:
    name, overrides = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as scratch:
        config = RLConfig.from_yaml(CONFIG, ["--train.output_dir", f"{scratch}/run", *overrides])
        config.train.save_steps = config.train.steps
        began = time.perf_counter()
        RLTrainer(config).train()
        seconds = time.perf_counter() - began
        folder = Path(config.train.output_dir)
        reloads = export_is_the_policy(folder, config.train.steps)
        steps, evals = (read(folder / f"{kind}.jsonl") for kind in ("metrics", "eval"))
    record(
        f"smollm2_{name}",
        {
            "rollouts_a_step": config.rollout.batch_prompts * config.rollout.group_size,
            "seconds": round(seconds, 1),
            "export_reloads_as_the_policy": reloads,
            "steps_with_a_gradient": sum(step.get("grad_norm", 0.0) > 0 for step in steps),
            "mixed_groups": [step["groups/trained"] for step in steps],
            "eval": [
                {key: e[key] for key in ("step", "rows", "reward", "rewards/correct", "truncated")} for e in evals
            ],
            "steps": [{key: round(step[key], 5) for key in CURVE if key in step} for step in steps],
        },
    )


if __name__ == "__main__":
    main()
