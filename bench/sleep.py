#!/usr/bin/env python3
"""Memory and time of the engine's sleep, over many steps of a trainer that shares the GPU with it.

    python bench/sleep.py --smollm2 models/SmolLM2-135M-Instruct [--cycles 200] [--seconds 300]

A cycle: sleep, the trainer takes 8 GiB and gives them back, load its weights, wake, generate a few tokens. Noted in each:
the device memory in use awake and asleep, the process's resident memory, seconds of sleep, load and wake. `held_asleep_gib`
is what the device has in use asleep beyond what the trainer had before there was an engine.

vLLM compiles and captures its CUDA graphs, as in a run: they stay on the GPU asleep. `--seconds` ends the cycles
early; the figures say how many there were.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from typing import Any

import torch
from shapes import keep, pick_device, random_prompts, shape, table
from transformers import AutoConfig, AutoModelForCausalLM

from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions
from palingenesis.rl.policy.weights import PolicyWeights
from palingenesis.rl.types import SamplingParams

GIB = 2**30
SETTLED = 5  # the cycle that later ones are compared with


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_use(device: torch.device) -> int:
    """Bytes of the device that anybody uses."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def drift(values: list[float], settled: int) -> float:
    """How far the last is above the settled one, in percent."""
    return round(100.0 * (values[-1] / values[settled] - 1.0), 3) if values[settled] else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="or qwen3-0.6b, with random weights")
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300.0, help="no new cycle after so long")
    parser.add_argument("--memory", type=float, default=0.2, help="share of the GPU's memory for the engine")
    parser.add_argument("--trainer-gib", type=float, default=8.0)
    parser.add_argument("--smoke", action="store_true", help="the tiny policy, 7 cycles; results are not kept")
    args = parser.parse_args()
    device = pick_device(args.device)
    gpu = device.type == "cuda"
    made = shape("tiny" if args.smoke else args.model, args.smollm2)
    cycles = 7 if args.smoke else args.cycles
    trainer_bytes = int(args.trainer_gib * GIB) if gpu else 2**24

    dtype = torch.bfloat16 if gpu else torch.float32
    if made.random:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made.folder), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=dtype)
    model.to(device)
    trainer_only = in_use(device)
    began = time.perf_counter()
    engine = VLLMEngine(
        VLLMOptions(
            model=made.folder,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            max_model_len=256,
            max_num_seqs=64,
            gpu_memory_utilization=args.memory,
            sleep=gpu,
            extra=made.vllm,
        )
    )
    start_s = time.perf_counter() - began
    asked = random_prompts(16, 40, made.config["vocab_size"], seed=1)

    async def few_tokens() -> None:
        await asyncio.gather(*(engine.generate(p, SamplingParams(8, 1.0, (), n)) for n, p in enumerate(asked)))

    seen: dict[str, list[float]] = {name: [] for name in ("sleep_s", "load_s", "wake_s", "awake", "asleep", "host")}

    def timed(name: str, work: Any) -> None:
        began = time.perf_counter()
        work()
        seen[name].append(time.perf_counter() - began)

    asyncio.run(few_tokens())
    began = time.perf_counter()
    try:
        for cycle in range(cycles):
            if time.perf_counter() - began > args.seconds:
                break
            timed("sleep_s", engine.sleep)
            seen["asleep"].append(in_use(device))
            trained = torch.empty(trainer_bytes, dtype=torch.uint8, device=device).fill_(1)
            del trained
            if gpu:
                torch.cuda.empty_cache()  # what the trainer's allocator keeps would not be there to wake into
            timed("load_s", lambda cycle=cycle: engine.load(PolicyWeights(cycle + 1, model)))
            timed("wake_s", engine.wake)
            asyncio.run(few_tokens())
            seen["awake"].append(in_use(device))
            seen["host"].append(resident())
    finally:
        done = len(seen["host"])
        if done > SETTLED:
            figures = {
                "model": made.name,
                "cycles": done,
                "held_asleep_gib": round((seen["asleep"][done - 1] - trainer_only) / GIB, 3),
                "awake_gib": round(seen["awake"][-1] / GIB, 3),
                "trainer_alone_gib": round(trainer_only / GIB, 3),
                "drift_percent": {name: drift(seen[name][:done], SETTLED) for name in ("awake", "asleep", "host")},
                "host_gib": {"cycle_5": seen["host"][SETTLED] / GIB, "last": seen["host"][-1] / GIB},
                **{name: round(statistics.median(seen[name]), 4) for name in ("sleep_s", "load_s", "wake_s")},
                "engine_start_s": round(start_s, 1),
                "every_20th": [
                    {name: round(seen[name][at] / GIB, 4) for name in ("awake", "asleep", "host")}
                    for at in range(SETTLED, done, 20)
                ],
            }
            keep("sleep", figures, smoke=args.smoke)
            drifts = {f"drift % {name}": value for name, value in figures["drift_percent"].items()}
            shown = ("cycles", "held_asleep_gib", "awake_gib", "sleep_s", "load_s", "wake_s")
            table([{name: figures[name] for name in shown} | drifts])
        else:
            print(f"only {done} cycles; nothing to compare")
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
