#!/usr/bin/env python3
"""The quickstart over five seeds, and once with the rewards' answers shuffled across rows.

    python bench/quickstart.py [--seeds 5] [--section.option value ...]

Accuracy is greedy, on the 500 held-out pairs. Seconds are those of `RLTrainer.train()`, loading and evaluations included.
A policy that improves as much on shuffled answers would have learnt something other than sums.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

from palingenesis.rl import RLConfig, RLTrainer

CONFIG = Path(__file__).parents[1] / "configs" / "rl_quickstart.yaml"

Evaluation = dict[str, Any]  # a line of eval.jsonl


def run(config: Path, folder: Path, overrides: list[str]) -> tuple[Evaluation, Evaluation, float]:
    """The evaluations before the first step and after the last one, and seconds."""
    options = RLConfig.from_yaml(config, [*overrides, "--train.output_dir", str(folder)])
    began = time.perf_counter()
    RLTrainer(options).train()
    seconds = time.perf_counter() - began
    evals = [json.loads(line) for line in (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    return evals[0], evals[-1], seconds


def seeded(overrides: list[str], seed: int) -> list[str]:
    return [*overrides, "--train.seed", str(seed), "--data.seed", str(seed)]


def arguments(description: str | None) -> tuple[int, list[str]]:
    """The number of seeds, and overrides of the config."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    args, overrides = parser.parse_known_args()
    return args.seeds, overrides


def shuffled(source: str, target: Path) -> None:
    """The training rows with their answers dealt to other rows."""
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    random.Random(0).shuffle(answers)
    lines = (json.dumps({**row, "answer": answer}) + "\n" for row, answer in zip(rows, answers, strict=True))
    target.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    seeds, overrides = arguments(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results = [run(CONFIG, folder / f"seed{seed}", seeded(overrides, seed)) for seed in range(seeds)]
        rows = folder / "shuffled.jsonl"
        shuffled(RLConfig.from_yaml(CONFIG).data.dataset, rows)
        _, after_shuffled, _ = run(CONFIG, folder / "shuffled", [*overrides, "--data.dataset", str(rows)])
    before, after, seconds = zip(*results, strict=True)
    record(
        "quickstart",
        {
            "accuracy_before": [evaluation["reward"] for evaluation in before],
            "accuracy_after": [evaluation["reward"] for evaluation in after],
            "train_seconds": [round(s, 1) for s in seconds],
            "accuracy_after_shuffled_rewards": after_shuffled["reward"],
        },
    )


if __name__ == "__main__":
    main()
