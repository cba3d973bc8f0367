#!/usr/bin/env python3
"""The sampler against the trainer: log-probs of the same sampled tokens, from the engine and from the policy.

    python bench/agreement.py --smollm2 models/SmolLM2-135M-Instruct              every case this machine can run
    python bench/agreement.py --cases vllm/bfloat16,vllm/fp8                      some of them

With d = log-prob of the policy − log-prob of the sampler, over every sampled token:

    mean |d|      k3 = mean(exp d − 1 − d), the estimate of KL(sampler || policy)      max |d|

A case is `backend/precision`. `vllm` cases sample after the first load of the policy's weights and after the twentieth;
between two loads every parameter gets noise of `--noise` times its own standard deviation, so that a load that is missed
shows: `stale` is what the first load's tokens look like under the twentieth's weights. `bf16_head` is the same engine with
vLLM's own head, whose logits are rounded to bf16. `float32_policy` scores the first load's tokens with the policy in
float32: what remains is the sampler's own rounding.

Each case runs in a process of its own (one vLLM engine a process) and is kept in bench/results/agreement.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from shapes import hardware, keep, pick_device, shape, table

from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer, stop_token_ids
from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.objective import TrainSequence
from palingenesis.rl.policy.fp8 import FP8Weights
from palingenesis.rl.policy.model import Policy, load_policy
from palingenesis.rl.policy.step import pad
from palingenesis.rl.policy.weights import PolicyWeights
from palingenesis.rl.types import Completion, Finish, Message, SamplingParams

QUESTIONS = (
    "Tom has {a} apples and buys {b} more. He gives half of them away. How many are left?",
    "A train travels {a} km in one hour. How far does it travel in {b} hours? Explain each step.",
    "What is {a} + {b} - 7?",
    "Anna reads {a} pages a day. Her book has {a}0 pages and she has read {b}. How many days does she still need?",
    "Write a short story about a shop that sells {a} hats and {b} umbrellas.",
)
CASES = {
    "cpu": ("hf/float32-tiny", "vllm/float32-tiny", "vllm/float32"),
    "cuda": ("vllm/bfloat16", "vllm/fp8", "vllm/fp8_per_channel"),
}
ROWS = 8  # sequences the policy scores at once


def prompts(template: ChatTemplate, count: int, tiny: bool) -> list[tuple[int, ...]]:
    asked = []
    for n in range(count):
        a, b = 11 + 7 * n % 80, 3 + 5 * n % 60
        question = f"{a} + {b} = ?" if tiny else QUESTIONS[n % len(QUESTIONS)].format(a=a, b=b)
        asked.append(template.render([Message("user", question)]).ids)
    return asked


def sample(engine: Any, asked: Sequence[tuple[int, ...]], tokens: int, stop: tuple[int, ...]) -> list[Completion]:
    async def wave() -> list[Completion]:
        params = (SamplingParams(tokens, 1.0, stop, seed) for seed in range(len(asked)))
        return list(await asyncio.gather(*(engine.generate(p, s) for p, s in zip(asked, params, strict=True))))

    return asyncio.run(wave())


def difference(policy: Policy, asked: Sequence[tuple[int, ...]], got: Sequence[Completion]) -> dict[str, float]:
    """As the policy step computes it: whole sequences side by side, the head a slice at a time."""
    sequences = [
        TrainSequence(
            input_ids=torch.tensor([*prompt, *completion.token_ids]),
            sampled=torch.tensor([False] * len(prompt) + [True] * len(completion.token_ids)),
            sampler_logprobs=torch.tensor([0.0] * len(prompt) + list(completion.logprobs)),
            group=0,
            rollout=number,
            reward=0.0,
            finish=Finish.LENGTH,
            sampled_tokens=len(completion.token_ids),
        )
        for number, (prompt, completion) in enumerate(zip(asked, got, strict=True))
    ]
    found = []
    for at in range(0, len(sequences), ROWS):
        rows = pad(sequences[at : at + ROWS], policy.device)
        with torch.no_grad():
            hidden = policy.hidden_states(rows.input_ids).flatten(0, 1)
            logp, _ = selected_logprobs(
                hidden.index_select(0, rows.predicts), *policy.head_parameters, rows.targets, 1.0, **policy.logit_shape
            )
        found.append((logp - rows.mu).double().cpu())
    d = torch.cat(found)
    return {
        "mean_abs": float(d.abs().mean()),
        "k3": float((d.exp() - 1.0 - d).mean()),
        "max_abs": float(d.abs().max()),
        "tokens": d.numel(),
    }


def disturb(policy: Policy, noise: float, seed: int) -> None:
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for p in policy.model.parameters():
            draw = torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32)
            p.add_(draw.mul_(noise * float(p.float().std())).to(p.dtype))


@contextmanager
def vllm_head(engine: Any) -> Iterator[None]:
    """vLLM's own head under our sampler. Captured steps hold the head they were captured with, so none are taken."""
    from palingenesis.rl.engines.vllm.sampler import _WideHead

    modules = engine.core._runner.model.modules()
    wide = [(m, m.quant_method) for m in modules if isinstance(getattr(m, "quant_method", None), _WideHead)]
    graphs = engine.core._graphs
    for module, method in wide:
        module.quant_method = method.inner
    for one in graphs:
        one.let_go()
    try:
        yield
    finally:
        for one in graphs:
            one.take_over()
        for module, method in wide:
            module.quant_method = method


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    backend, _, precision = case.partition("/")
    tiny = precision.endswith("-tiny") or args.smoke
    device = pick_device(args.device)
    dtype = torch.float32 if precision.startswith("float32") else torch.bfloat16
    made = shape("tiny" if tiny else "smollm2-135m", args.smollm2)
    policy, _ = load_policy(made.folder, device=device, dtype=dtype)
    policy.model.eval()
    template = ChatTemplate(load_tokenizer(made.folder))
    stop = stop_token_ids(template.tokenizer, policy.model.generation_config.eos_token_id)
    asked = prompts(template, args.completions, tiny)
    tokens = min(args.tokens, 24) if tiny else args.tokens
    out: dict[str, Any] = {"hardware": hardware(), "model": made.name}
    if backend == "hf":
        from palingenesis.rl.engines.hf import HFEngine

        engine: Any = HFEngine(policy.model, template.tokenizer.pad_token_id)
        out["first_load"] = difference(policy, asked, sample(engine, asked, tokens, stop))
        engine.close()
        return out

    from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions

    began = time.perf_counter()
    engine = VLLMEngine(
        VLLMOptions(
            model=made.folder,
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            max_model_len=tokens + max(map(len, asked)) + 1,
            max_num_seqs=max(args.completions, 64),
            quantization=precision if precision.startswith("fp8") else "",
            extra={"enforce_eager": True} if args.eager else {},
        )
    )
    out["engine_start_s"] = round(time.perf_counter() - began, 1)
    fp8 = FP8Weights(policy.model, engine.fp8_groups)  # as a run does
    seconds = []
    for load in range(1, args.loads + 1):
        if load > 1:
            disturb(policy, args.noise, seed=load)
        fp8.round()
        began = time.perf_counter()
        engine.load(PolicyWeights(load, policy.model))
        seconds.append(time.perf_counter() - began)
        if load == 1:
            first = sample(engine, asked, tokens, stop)
            out["first_load"] = difference(policy, asked, first)
            out["answer"] = template.decode(first[0].token_ids)[:200]
            if dtype != torch.float32:
                with vllm_head(engine):
                    out["bf16_head"] = difference(policy, asked, sample(engine, asked, tokens, stop))
                exact, _ = load_policy(made.folder, device=device, dtype=torch.float32)
                exact.model.eval()
                FP8Weights(exact.model, engine.fp8_groups).round()
                out["float32_policy"] = difference(exact, asked, first)
                del exact
    last = sample(engine, asked, tokens, stop)
    out["last_load"] = difference(policy, asked, last)
    out["stale"] = difference(policy, asked, first)
    out["loads"], out["load_s"] = args.loads, round(sorted(seconds)[len(seconds) // 2], 4)
    out["noise"] = args.noise
    engine.close()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="separated by commas; left out, all that fit the device")
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--completions", type=int, default=0, help="64, on a GPU 256")
    parser.add_argument("--tokens", type=int, default=0, help="most of a completion: 96, on a GPU 256")
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.003)
    parser.add_argument("--eager", action="store_true", help="no compiling in vLLM: a fast start, other kernels")
    parser.add_argument("--smoke", action="store_true", help="the tiny policy, two loads; results are not kept")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # one case, its figures into this file
    args = parser.parse_args()
    gpu = pick_device(args.device).type == "cuda"
    args.completions = args.completions or (8 if args.smoke else 256 if gpu else 64)
    args.tokens = args.tokens or (256 if gpu else 96)
    if args.smoke:
        args.loads = 2
    if args.into:
        args.into.write_text(json.dumps(run_case(args.cases, args)), encoding="utf-8")
        return 0
    cases = args.cases.split(",") if args.cases else list(CASES["cuda" if gpu else "cpu"])
    if args.smoke and not args.cases:
        cases = cases[:2]
    rows, failed = [], []
    for case in cases:
        with tempfile.TemporaryDirectory() as scratch:
            into = Path(scratch) / "case.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--cases", case, "--into", str(into)]
            if subprocess.run(command, check=False).returncode:
                failed.append(case)
                continue
            got = json.loads(into.read_text(encoding="utf-8"))
        keep("agreement", {case: got["first_load"]["mean_abs"], "details": {case: got}}, smoke=args.smoke)
        for when in ("first_load", "last_load", "bf16_head", "float32_policy", "stale"):
            if when in got:
                rows.append({"case": case, "when": when, **{k: f"{v:.3g}" for k, v in got[when].items()}})
    table(rows)
    for case in failed:
        print(f"{case} failed; the others are kept")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
