#!/usr/bin/env python3
"""Train SmolLM2-135M-Instruct on GSM8K by configs/rl_smollm2.yaml and keep the curve.

    python bench/smollm2.py cpu                                       three steps on a CPU
    python bench/smollm2.py gpu --rollout.batch_prompts 32 ...        thirty on a GPU

The first argument names the result (`bench/results/smollm2_<name>.json`), the others override the config. The export is
loaded again and must give the logits of the policy it was written from.
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


def main() -> None:
    name, overrides = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as scratch:
        config = RLConfig.from_yaml(CONFIG, ["--train.output_dir", f"{scratch}/run", *overrides])
        began = time.perf_counter()
        final = RLTrainer(config).train()
        seconds = time.perf_counter() - began
        assert final is not None
        model = AutoModelForCausalLM.from_pretrained(final)
        steps, evals = (read(Path(config.train.output_dir) / f"{kind}.jsonl") for kind in ("metrics", "eval"))
    rounded = [{key: round(step[key], 5) for key in CURVE if key in step} for step in steps]
    groups = config.rollout.batch_prompts * config.rollout.group_size
    record(
        f"smollm2_{name}",
        {
            "rollouts_a_step": groups,
            "seconds": round(seconds, 1),
            "export_parameters": sum(p.numel() for p in model.parameters()),
            "export_finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
            "eval": [
                {key: e[key] for key in ("step", "rows", "reward", "rewards/correct", "truncated")} for e in evals
            ],
            "steps": rounded,
        },
    )


if __name__ == "__main__":
    main()
