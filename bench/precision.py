#!/usr/bin/env python3
"""What a float32 residual stream costs the policy step: forward and backward of 32 x 512 tokens, with it and without.

    python bench/precision.py --model qwen3-0.6b
    python bench/precision.py --model smollm2-135m --smollm2 models/SmolLM2-135M-Instruct

`without` runs the same bf16 model as transformers does, every result rounded; the two take turns. Kept in
bench/results/precision.json by model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from shapes import keep, pick_device, shape, table

from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.policy.model import Policy, load_policy


@contextmanager
def rounded() -> Iterator[None]:
    """A policy that is loaded and run in here is as transformers runs it in bf16."""
    module = "palingenesis.rl.policy.model"
    with (
        patch(f"{module}.widen_residuals", lambda model: None),
        patch(f"{module}.mixed_precision", lambda m: nullcontext()),
    ):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"with": nullcontext, "without": rounded}


def step(policy: Policy, ids: torch.Tensor) -> None:
    hidden = policy.hidden_states(ids).flatten(0, 1)
    logp, _ = selected_logprobs(hidden, *policy.head_parameters, ids.flatten(), 1.0, **policy.logit_shape)
    logp.mean().backward()
    policy.model.zero_grad(set_to_none=True)


def measured(policy: Policy, ids: torch.Tensor, steps: int) -> tuple[float, float]:
    """Milliseconds a step, and GiB at most."""
    cuda = policy.device.type == "cuda"
    step(policy, ids)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        step(policy, ids)
    if cuda:
        torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - began) / steps
    return took, torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=("qwen3-0.6b", "smollm2-135m", "tiny"))
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    device = pick_device(args.device)
    made = shape(args.model, args.smollm2)
    with tempfile.TemporaryDirectory() as folder:
        if made.random:
            from transformers import AutoConfig, AutoModelForCausalLM

            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made.folder)).save_pretrained(folder)
        source = folder if made.random else made.folder
        policies = {}
        for name, way in WAYS.items():
            with way():
                policies[name], _ = load_policy(source, device=device, dtype=torch.bfloat16)
    ids = torch.randint(3, made.config["vocab_size"], (args.rows, 512), device=device)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for name in (*WAYS, *WAYS):
        with WAYS[name]():
            seen[name].append(measured(policies[name], ids, args.steps))
    figures: dict[str, Any] = {
        f"{name}_{what}": round(statistics.median(one[at] for one in of), 2)
        for name, of in seen.items()
        for at, what in enumerate(("ms", "gib"))
    }
    figures["ratio"] = round(figures["with_ms"] / figures["without_ms"], 3)
    keep("precision", {args.model: figures}, smoke=args.model == "tiny")
    table([{"model": args.model} | figures])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
