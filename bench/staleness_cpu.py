#!/usr/bin/env python3
"""Samples to 0.9 at staleness 1 and 0: the quickstart's own config over five seeds, on a CPU.

    python bench/staleness_cpu.py [--seeds 5] [--section.option value ...]

Counted are trained samples (rollouts of informative groups) until the greedy accuracy on the 500 held-out pairs reaches
0.9. It is measured every 3 steps, with a spread of some 0.02, so the mean of three measurements in a row has to reach it;
between two means the count is interpolated. A run ends there.

Set at both: at most 16 sequences are decoded at once, so that a step takes many waves, and `max_refill` is 1, so that a
step trains on 32 groups. At staleness 1 groups are then under way when a batch is handed over and go on with new weights;
`continued_steps` counts the steps whose batch held a group that an earlier step had left unfinished. `ratios` are (samples
at staleness 1) / (samples at staleness 0) of each seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from record import record

from palingenesis.rl import RLConfig, RLTrainer
from palingenesis.rl.trainer import Run

CONFIG = Path(__file__).parents[1] / "configs" / "rl_quickstart.yaml"
GOAL = 0.9
EVERY = 3
SET = ["--rollout.max_num_seqs", "16", "--rollout.max_refill", "1.0"]


class Reached(Exception):
    """The run is at the goal; the rest of it is not needed."""


def end_at_the_goal() -> None:
    """Have runs end with `Reached`; the schedule of the learning rate stays that of the whole run."""
    original = Run.evaluate

    def evaluate(self: Run, interrupted: Callable[[], None]) -> None:
        original(self, interrupted)
        if crossing(self.folder) is not None:
            raise Reached

    Run.evaluate = evaluate  # type: ignore[method-assign]


@dataclass(frozen=True)
class Curve:
    """One run: `samples` and `steps` to the goal, None when it was not reached."""

    samples: float | None
    step: float | None
    continued_steps: int
    mean_staleness: float
    seconds: float


def run(folder: Path, overrides: list[str]) -> Curve:
    fixed = ["--train.eval_every", str(EVERY), "--train.output_dir", str(folder)]
    config = RLConfig.from_yaml(CONFIG, [*SET, *fixed, *overrides])
    began = time.perf_counter()
    with suppress(Reached):
        RLTrainer(config).train()
    seconds = time.perf_counter() - began
    steps = lines(folder / "metrics.jsonl")
    trained = [0.0]
    for step in steps:
        trained.append(trained[-1] + step.get("groups/trained", 0.0) * config.rollout.group_size)
    found = crossing(folder)
    whole = int(found or 0)
    part = (found or 0.0) - whole
    return Curve(
        samples=found and trained[whole] + part * (trained[min(whole + 1, len(steps))] - trained[whole]),
        step=found,
        continued_steps=sum(step["groups/continued"] > 0 for step in steps),
        mean_staleness=statistics.fmean(step["staleness/mean"] for step in steps),
        seconds=seconds,
    )


def crossing(folder: Path) -> float | None:
    """The step, interpolated, at which the mean accuracy of three evaluations first reaches the goal."""
    evals = [(line["step"], line["reward"]) for line in lines(folder / "eval.jsonl")]
    threes = zip(evals, evals[1:], evals[2:], strict=False)
    means = [
        (middle[0], statistics.fmean(accuracy for _, accuracy in (one, middle, last))) for one, middle, last in threes
    ]
    for (before, low), (after, high) in itertools.pairwise(means):
        if high >= GOAL:
            return before + (after - before) * (GOAL - low) / (high - low)
    return None


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    args, overrides = parser.parse_known_args()
    end_at_the_goal()
    sync: list[Curve] = []
    stale: list[Curve] = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seeds):
            both = [(0, sync), (1, stale)]
            for staleness, curves in both if seed % 2 == 0 else reversed(both):
                own = ["--train.seed", str(seed), "--data.seed", str(seed), "--rollout.max_staleness", str(staleness)]
                curves.append(run(Path(scratch) / f"seed{seed}_{staleness}", [*overrides, *own]))
    ratios = [b.samples / a.samples for a, b in zip(sync, stale, strict=True) if a.samples and b.samples]
    reached = len(ratios) == args.seeds
    record(
        "staleness_cpu",
        {
            "samples_ratio_stale_sync": round(statistics.fmean(ratios), 4) if reached else None,
            "ratios": [round(ratio, 4) for ratio in ratios],
            **{
                f"{name}_{side}": [rounded(getattr(curve, name)) for curve in curves]
                for side, curves in (("sync", sync), ("stale", stale))
                for name in ("samples", "step", "seconds")
            },
            "continued_steps": [curve.continued_steps for curve in stale],
            "mean_staleness": [rounded(curve.mean_staleness) for curve in stale],
        },
    )


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    main()
