#!/usr/bin/env python3
"""The embedded engine against transformers' continuous batching, on the same prompts, in both orders.

    python bench/hf_engine.py [--policy builtin:tiny] [--prompts 32] [--group 16] [--tokens 24] [--repeats 3]

Both return a log-prob for each sampled token. Lengths are what the policy makes of them, so tokens a second are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
from record import record
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer, stop_token_ids
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.policy.model import load_policy, policy_path
from palingenesis.rl.types import Message, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="builtin:tiny")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="hf_engine")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy, _ = load_policy(args.policy, device=device, dtype=dtype)
    template = ChatTemplate(load_tokenizer(policy_path(args.policy)))
    stop = stop_token_ids(template.tokenizer, policy.model.generation_config.eos_token_id)
    questions = [f"{10 + 7 * n % 90} + {10 + 11 * n % 90} = ?" for n in range(args.prompts)]
    prompts = [template.render([Message("user", q)]).ids for q in questions for _ in range(args.group)]
    pad = template.tokenizer.pad_token_id
    engine = HFEngine(policy.model, pad)

    async def wave() -> int:
        params = (SamplingParams(args.tokens, 1.0, stop, seed) for seed in range(len(prompts)))
        done = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))
        return sum(len(c.token_ids) for c in done)

    def ours() -> int:
        return asyncio.run(wave())

    def continuous() -> int:
        config = GenerationConfig(
            max_new_tokens=args.tokens, do_sample=True, top_k=0, top_p=1.0, eos_token_id=list(stop), pad_token_id=pad
        )
        batching = ContinuousBatchingConfig(
            return_logprobs=True,
            allow_block_sharing=False,
            num_blocks=2 * len(prompts),
            max_batch_tokens=max(1024, 2 * len(prompts)),
        )
        done = policy.model.generate_batch(
            [list(p) for p in prompts],
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return sum(len(output.generated_tokens) for output in done.values())

    def rate(run: object) -> float:
        began = time.perf_counter()
        tokens = run()  # type: ignore[operator]
        return tokens / (time.perf_counter() - began)

    ours(), continuous()
    rates: dict[str, list[float]] = {"ours": [], "continuous": []}
    for repeat in range(args.repeats):
        order = [("ours", ours), ("continuous", continuous)]
        for name, run in order if repeat % 2 == 0 else reversed(order):
            rates[name].append(rate(run))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    record(
        args.name,
        {
            "sequences": len(prompts),
            "new_tokens": args.tokens,
            "generate_tokens_per_s": round(medians["ours"]),
            "continuous_batching_tokens_per_s": round(medians["continuous"]),
            "ratio": round(medians["ours"] / medians["continuous"], 2),
        },
    )
    engine.close()


if __name__ == "__main__":
    main()
