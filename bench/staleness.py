#!/usr/bin/env python3
"""Seconds a trained token at staleness 0 and 1, where the longest rollouts are many times the median.

    python bench/staleness.py --model qwen3-0.6b                   one H200, vLLM
    python bench/staleness.py --device cpu --backend hf --smoke    the path, on a CPU

The real trainer, with a random reward (every group carries a gradient) and lengths forced by a draw from each request's
seed: log-normal, p99 = 6 x median, no stop tokens. `qwen3-0.6b` and `tiny-random` are shapes with random weights and the
packaged policy's tokenizer; `smollm2-135m` is read from --smollm2. All runs are on one engine that does not sleep, staleness
0 included: the baseline pays for no wake. The first steps warm up and the last overlaps with nothing; neither counts.

`engine` compares the engine's steps while the trainer computes with those while it does not, at the same number of
sequences: what the engine's thread loses to the trainer's Python, and its kernels to the trainer's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from shapes import DATA, hardware, keep, one_engine, one_length, table

from palingenesis.rl import RLConfig, RLTrainer
from palingenesis.rl.policy.model import policy_path
from palingenesis.rl.types import Completion, Finish, SamplingParams

SIGMA = 0.770  # exp(2.326 σ) = 6
BUCKET = 32  # sequences: engine steps of one bucket are compared


def noise(completion: str) -> float:
    """A reward that is random, the same for the same text, and different within every group."""
    return int.from_bytes(hashlib.sha256(completion.encode()).digest()[:4], "big") / 2**32


@dataclass
class EngineSteps:
    """The engine's steps: (seconds, sequences, whether the trainer was computing)."""

    seen: list[tuple[float, int, bool]] = field(default_factory=list)
    training: bool = False

    def watch(self, engine: Any) -> None:
        """Note the time between the ends of two successive steps of a vLLM engine."""
        core = getattr(engine, "core", None)
        if core is None:
            return
        last = [0.0]

        def step() -> None:
            began = time.perf_counter()
            type(core).step(core)
            now = time.perf_counter()
            idle = began - last[0] > 0.1 or not last[0]
            self.seen.append((now - (began if idle else last[0]), core.steps.seqs, self.training))
            last[0] = now

        core.step = step

    def compared(self) -> dict[str, Any]:
        """Medians by bucket where both kinds occurred often enough, and their mean ratio weighted by occurrence."""
        buckets: dict[int, dict[bool, list[float]]] = defaultdict(lambda: {True: [], False: []})
        for seconds, seqs, training in self.seen:
            buckets[seqs // BUCKET][training].append(seconds)
        rows, ratios = [], []
        for bucket, kinds in sorted(buckets.items()):
            if min(map(len, kinds.values())) >= 10:
                alone, beside = (1e3 * statistics.median(kinds[kind]) for kind in (False, True))
                rows.append({"seqs": f"{bucket * BUCKET}-{(bucket + 1) * BUCKET - 1}", "alone_ms": round(alone, 2),
                             "training_ms": round(beside, 2), "steps": len(kinds[True])})  # fmt: skip
                ratios.append((beside / alone, len(kinds[True])))
        weight = sum(count for _, count in ratios)
        slower = sum(ratio * count for ratio, count in ratios) / weight if weight else None
        return {"training_over_alone": slower and round(slower, 3), "by_sequences": rows}


def force_lengths(engine: Any, median: float, clip: int) -> None:
    """Each request is as long as its seed says, and counts as ended by the policy."""
    generate = engine.generate

    async def forced(prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        length = one_length(random.Random(params.seed), median, SIGMA, clip)
        asked = replace(params, max_new_tokens=min(length, params.max_new_tokens), stop_token_ids=())
        return replace(await generate(prompt_ids, asked), finish=Finish.STOP)

    engine.generate = forced


def random_policy(into: Path, tiny: bool) -> Path:
    """A checkpoint of random weights with the packaged policy's tokenizer and template."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    source = Path(policy_path("builtin:tiny"))
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "generation_config.json"):
            shutil.copy(file, into / file.name)
    values = json.loads((DATA / "qwen3_0.6b.json").read_text(encoding="utf-8"))
    values |= {"eos_token_id": 262, "pad_token_id": 260, "bos_token_id": None}
    if tiny:
        values |= {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
    (into / "config.json").write_text(json.dumps(values), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(into), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=262, pad_token_id=260)
    model.save_pretrained(into)
    return into


def config(args: argparse.Namespace, scratch: Path, policy: str, staleness: int, name: str) -> RLConfig:
    rows = scratch / "rows.jsonl"
    if not rows.exists():
        lines = (json.dumps({"prompt": f"{n % 97} + {n % 89} + {n} = ?"}) + "\n" for n in range(4096))
        rows.write_text("".join(lines), encoding="utf-8")
    values: dict[str, Any] = {
        "model": {"policy": policy},
        "data": {"dataset": str(rows)},
        "rollout": {
            "backend": args.backend,
            "batch_prompts": args.prompts,
            "group_size": args.group,
            "max_new_tokens": args.clip,
            "max_model_len": args.clip + 128,
            "max_staleness": staleness,
            "max_refill": 0,
        },
        "train": {
            "output_dir": str(scratch / name),
            "steps": args.warm + args.steps + 1,
            "learning_rate": 1e-7,
            "micro_tokens": args.micro_tokens,
            "save_final": False,
        },
        "loss": {"seq_mask": 0},
    }
    if args.backend == "vllm":
        values["rollout"] |= {"gpu_memory_utilization": args.memory} | ({} if staleness else {"sleep": False})
        most = 1 + max(map(int, args.order.split(",")))  # one engine for all runs: what the stalest would get
        values["rollout"]["max_num_seqs"] = args.max_num_seqs or max(256, most * args.prompts * args.group)
        if extra := json.loads(args.vllm_args):
            values["rollout"]["vllm_args"] = extra
    return RLConfig.from_dict(values)


@contextmanager
def marked_training(steps: EngineSteps) -> Iterator[None]:
    """Tell when the policy step runs."""
    from palingenesis.rl.policy.step import PolicyStep

    run = PolicyStep.run

    def marked(self: Any, batch: Any) -> Any:
        steps.training = True
        try:
            return run(self, batch)
        finally:
            steps.training = False

    PolicyStep.run = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        PolicyStep.run = run  # type: ignore[method-assign]


def read_run(folder: Path, warm: int, steps: int) -> dict[str, Any]:
    """The measured steps of a run: from the end of the last warm one to the end of the last but one."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    counted = lines[warm : warm + steps]
    seconds = counted[-1]["time"] - lines[warm - 1]["time"]
    trained = sum(line["tokens/trained"] for line in counted)

    def mean_of(name: str) -> float:
        return round(statistics.mean(line.get(name, 0.0) for line in counted), 4)

    return {
        "seconds_per_trained_token": seconds / trained,
        "trained_tokens_per_s": round(trained / seconds),
        "step_s": round(seconds / len(counted), 3),
        "tokens_trained": round(trained),
        "length_mean": mean_of("length/mean"),
        "length_max": max(line["length/max"] for line in counted),
        "groups_continued": mean_of("groups/continued"),
        "seqs_mean": mean_of("engine/seqs_mean"),
        "time": {name: mean_of(f"time/{name}") for name in ("rollout", "train", "weights", "log")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=("qwen3-0.6b", "smollm2-135m", "tiny-random"))
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--backend", default="vllm", choices=("vllm", "hf"))
    parser.add_argument(
        "--device", default="auto", help="cpu: make the default sizes a CPU's; the trainer picks its own"
    )
    parser.add_argument("--order", default="0,1", help="staleness of the runs, e.g. 0,1,1,0")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--median", type=float, default=200.0)
    parser.add_argument("--clip", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--max-num-seqs", type=int, default=0)
    parser.add_argument("--memory", type=float, default=0.35, help="share of the GPU's memory for the engine")
    parser.add_argument("--vllm-args", default="{}", metavar="JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, 4 x 4 short rollouts; results are not kept")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.prompts, args.group, args.median, args.clip = "tiny-random", 4, 4, 10.0, 80
        args.warm, args.steps, args.micro_tokens = 1, 2, 4096
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    engine_steps: dict[int, EngineSteps] = {0: EngineSteps(), 1: EngineSteps()}
    watched = EngineSteps()

    def prepare(engine: Any) -> None:
        force_lengths(engine, args.median, args.clip)
        watched.watch(engine)

    with tempfile.TemporaryDirectory() as folder, one_engine(prepare), marked_training(watched):
        scratch = Path(folder)
        if args.model == "smollm2-135m":
            policy = args.smollm2
        else:
            (scratch / "policy").mkdir()
            policy = str(random_policy(scratch / "policy", tiny=args.model == "tiny-random"))
        for number, staleness in enumerate(map(int, args.order.split(","))):
            name = f"run{number}"
            RLTrainer(config(args, scratch, policy, staleness, name), [noise]).train()
            runs[staleness].append(read_run(scratch / name, args.warm, args.steps))
            engine_steps[staleness].seen += watched.seen
            watched.seen.clear()
            note(args, runs, engine_steps)
    return 0


def note(args: argparse.Namespace, runs: dict[int, list[dict[str, Any]]], engine: dict[int, EngineSteps]) -> None:
    """Keep what there is so far."""
    cost = {s: statistics.mean(run["seconds_per_trained_token"] for run in of) for s, of in runs.items()}
    figures: dict[str, Any] = {
        "backend": args.backend,
        "hardware": hardware(),
        "rollouts_a_step": args.prompts * args.group,
        "runs": {f"staleness{s}": of for s, of in runs.items()},
        "engine": {f"staleness{s}": of.compared() for s, of in engine.items() if of.seen},
    }
    if {0, 1} <= cost.keys():
        figures = {"seconds_per_trained_token_ratio": round(cost[1] / cost[0], 3), **figures}
        figures["order"] = args.order
    headline = {k: v for k, v in figures.items() if k == "seconds_per_trained_token_ratio"}
    keep("staleness", {**headline, "models": {args.model: figures}}, smoke=args.smoke)
    shown = ("step_s", "trained_tokens_per_s", "length_mean", "length_max", "groups_continued", "seqs_mean")
    table([{"staleness": s, **{n: run[n] for n in shown}, **run["time"]} for s, of in runs.items() for run in of])
    for s, of in engine.items():
        table([{"engine at staleness": s, **row} for row in of.compared()["by_sequences"]])
    print("seconds_per_trained_token_ratio", figures.get("seconds_per_trained_token_ratio"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
