#!/usr/bin/env python3
"""SmolLM2-135M-Instruct learns: chain_sum at staleness 0 and 1, and GSM8K for as long as there is time.

    python bench/learning.py --smollm2 models/SmolLM2-135M-Instruct --gsm8k data/gsm8k
    python bench/learning.py --only chain_sum --seconds 120 --train.learning_rate 5e-6

    chain_sum         configs/rl_chain_sum.yaml; its rows are made here by examples/rl/prepare_chain_sum.py
    chain_sum_stale   the same with rollout.max_staleness 1
    gsm8k             configs/rl_smollm2.yaml with vLLM, on --gsm8k DIR/{train,test}.jsonl

Accuracy is greedy on held-out rows, before the first step and after the last. `--seconds` ends each run early, with an
evaluation. Further options go to every run's config. All runs share one vLLM engine, and each starts from the same weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shapes import hardware, keep, one_engine, table

from palingenesis.rl import RLConfig, RLTrainer
from palingenesis.rl.errors import StopRun
from palingenesis.rl.policy.model import policy_path

ROOT = Path(__file__).parents[1]
RUNS = ("chain_sum", "chain_sum_stale", "gsm8k")
CURVE = ("reward", "rewards/correct", "groups/zero_variance", "grad_norm", "length/mean", "policy/mismatch_k3",
         "policy/abs_ratio_dev", "policy/entropy", "groups/continued", "tokens/s", "time/rollout", "time/train")  # fmt: skip


class OutOfTimeError(StopRun):
    """The run's seconds are spent."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End a run after the step in which its time is up, counted from its first step, with an evaluation."""
    from palingenesis.rl.trainer import Run

    report, began = Run.report, []

    def reported(self: Run, *args: Any, **kwargs: Any) -> None:
        report(self, *args, **kwargs)
        began.append(time.monotonic())
        if began[-1] > began[0] + seconds:
            self.evaluate(lambda: None)
            raise OutOfTimeError(f"{seconds:.0f} s are over")

    Run.report = reported  # type: ignore[method-assign]
    try:
        yield
    except OutOfTimeError as stopped:
        print(f"  {stopped}", flush=True)
    finally:
        Run.report = report  # type: ignore[method-assign]


def config(name: str, args: argparse.Namespace, scratch: Path, overrides: list[str]) -> RLConfig:
    rows = scratch / "rows"
    own = {"train.output_dir": scratch / name, "model.policy": args.smollm2, "rollout.max_model_len": 512,
           "train.save_final": "false", "train.eval_every": args.eval_every, "logging.log_every": 5,
           "logging.dump_trajectories": 0}  # fmt: skip
    if args.backend == "vllm":
        own |= {"rollout.max_num_seqs": 512} | (
            {} if name.endswith("stale") else {"rollout.sleep": "false"}
        )  # one engine
    if name == "gsm8k":
        file = "rl_smollm2.yaml"
        own |= {"data.dataset": args.gsm8k / "train.jsonl", "data.eval_dataset": args.gsm8k / "test.jsonl",
                "rollout.batch_prompts": 64, "train.steps": 1000, "train.warmup_steps": 5, "train.eval_samples": 256,
                "train.micro_tokens": 32768, "rollout.max_refill": 1}  # fmt: skip
    else:
        file = "rl_chain_sum.yaml"
        own |= {"data.dataset": rows / "train.jsonl", "data.eval_dataset": rows / "eval.jsonl"}
    if name == "chain_sum_stale":
        own |= {"rollout.max_staleness": 1}
    if args.smoke:
        own |= {"rollout.batch_prompts": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 12, "train.steps": 3,
                "train.eval_samples": 8, "train.eval_every": 0, "train.micro_tokens": 2048, "rollout.max_refill": 0,
                "data.system_prompt": "''", "data.max_prompt_tokens": 0,
                "rewards.correct.fn": "regex", "rewards.correct.args": "{pattern: '[02468]'}"}  # fmt: skip
    own |= {"rollout.backend": args.backend}
    flat = [part for option, value in own.items() for part in (f"--{option}", str(value))]
    return RLConfig.from_yaml(ROOT / "configs" / file, [*flat, *overrides])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def learn(name: str, args: argparse.Namespace, scratch: Path, overrides: list[str]) -> dict[str, Any]:
    chosen = config(name, args, scratch, overrides)
    print(f"{name}:", flush=True)
    began = time.perf_counter()
    with at_most(args.seconds):
        RLTrainer(chosen).train()
    seconds = time.perf_counter() - began
    folder = Path(chosen.train.output_dir)
    steps, evals = read(folder / "metrics.jsonl"), read(folder / "eval.jsonl")
    return {
        "before": evals[0]["rewards/correct"],
        "after": evals[-1]["rewards/correct"],
        "rows": evals[0]["rows"],
        "steps": len(steps),
        "rollouts_a_step": chosen.rollout.batch_prompts * chosen.rollout.group_size,
        "seconds": round(seconds, 1),
        "learning_rate": chosen.train.learning_rate,
        "max_staleness": chosen.rollout.max_staleness,
        "hardware": hardware(),
        "evals": [{"step": e["step"], "correct": e["rewards/correct"], "truncated": e["truncated"]} for e in evals],
        "curve": [{"step": s["step"]} | {key: round(s[key], 5) for key in CURVE if key in s} for s in steps],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNS), help="which runs, separated by commas")
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--gsm8k", type=Path, default=Path("data/gsm8k"), metavar="DIR")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each run")
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--terms", nargs=2, default=("2", "3"), metavar=("MIN", "MAX"), help="of chain_sum")
    parser.add_argument("--digits", nargs=2, default=("1", "2"), metavar=("MIN", "MAX"), help="of chain_sum")
    parser.add_argument("--backend", default="vllm", choices=("vllm", "hf"))
    parser.add_argument("--smoke", action="store_true", help="the tiny policy, three steps; results are not kept")
    args, overrides = parser.parse_known_args()
    if args.smoke:
        args.smollm2 = policy_path("builtin:tiny")
    failed = []
    rows = []
    with tempfile.TemporaryDirectory() as folder, one_engine():
        scratch = Path(folder)
        script = ROOT / "examples" / "rl" / "prepare_chain_sum.py"
        ranges = ["--terms", *args.terms, "--digits", *args.digits]
        counts = ["--train", "4096", "--eval", "256"]
        subprocess.run([sys.executable, script, "--out", scratch / "rows", *ranges, *counts], check=True)
        for name in args.only.split(","):
            try:
                got = learn(name, args, scratch, overrides)
            except Exception as error:  # noqa: BLE001 - the other runs' figures are worth having
                print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append(name)
                continue
            if name == "chain_sum_stale":
                keep("learning_smollm2", {"chain_sum": {"staleness1": got}}, smoke=args.smoke)
            else:
                keep("learning_smollm2", {name: got}, smoke=args.smoke)
            evals = " ".join(f"{e['step']}:{e['correct']:.3f}" for e in got["evals"])
            shown = ("before", "after", "steps", "seconds", "learning_rate")
            rows.append({"run": name, **{key: got[key] for key in shown}, "evals": evals})
    table(rows)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
