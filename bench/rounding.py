#!/usr/bin/env python3
"""Where sampler and trainer part: SmolLM2's log-probs with some results rounded, against none rounded.

    python bench/rounding.py --smollm2 models/SmolLM2-135M-Instruct --gsm8k GSM8K/test.jsonl

A forward pass of the Llama architecture that rounds at named places. Weights are the checkpoint's in bf16, the tokens are
sampled from it at temperature 1, 120 a question. A row of the table is mean |difference| of a sampled token's log-prob and
k3, both against arithmetic that rounds nothing:

    bf16        every place at once, each place alone, and what is left as places are taken out:
                rounded          transformers' model in bf16: every result is rounded
                float32 stream   the same, but for the sums of the residual stream
                trainer          kernels.precision: under autocast, embeddings in float32
                sampler          engines.vllm: fused norms and a float32 stream
    fp8         weights a channel, inputs of matrix products a token, keys and values unscaled; e4m3

The distance of two sides is about the root of the sum of their squares. Kept in bench/results/rounding.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import record
import torch
from shapes import table
from torch import Tensor
from torch.nn import functional

PLACES = frozenset(
    {
        "embedding", "norm", "norm-before-weight", "cosines", "qkv", "rotated", "probabilities", "attention", "o", "gate-up",
        "silu", "product", "down", "stream", "last-norm",
    }
)  # fmt: skip
TRAINER = PLACES - {"embedding", "norm-before-weight", "cosines", "stream"}
SAMPLER = TRAINER - {"silu"}
FP8 = {"fp8 weights": {"weights8"}, "fp8 inputs": {"inputs8"}, "fp8 keys and values": {"cache8"}}
FP8["fp8 weights and inputs"] = FP8["fp8 weights"] | FP8["fp8 inputs"]


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fp8(x: Tensor, scaled: bool = True) -> Tensor:
    """e4m3, with a scale a row so that its largest is 448, or without."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0 if scaled else torch.ones(())
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class Llama:
    """A transformers Llama in float32, computed here so that any result can be rounded on its way."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.width = self.config.hidden_size // self.config.num_attention_heads

    @torch.no_grad()
    def logprobs(self, ids: Tensor, mask: Tensor, first: int, places: Iterable[str]) -> Tensor:
        """Of ids[:, first:], with what `places` names rounded. Rows are left-padded; `mask` is 0 on padding."""
        places = frozenset(places)
        unknown = places - PLACES - set().union(*FP8.values())
        if unknown:
            raise ValueError(f"no such places: {sorted(unknown)}")

        def at(place: str, x: Tensor) -> Tensor:
            return bf16(x) if place in places else x

        def product(layer: Any, x: Tensor) -> Tensor:
            weight = fp8(layer.weight) if "weights8" in places else layer.weight
            return (fp8(x) if "inputs8" in places else x) @ weight.T

        def norm(layer: Any, x: Tensor, place: str) -> Tensor:
            unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
            return at(place, at("norm-before-weight", unit) * layer.weight)

        body, heads = self.model.model, self.config.num_attention_heads
        rows, tokens = ids.shape
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        stream = at("embedding", body.embed_tokens(ids))
        cos, sin = (at("cosines", x)[:, None] for x in body.rotary_emb(stream, positions))
        sees = mask[:, None, None, :].bool() & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        sees = sees | torch.eye(tokens, dtype=torch.bool)  # padding sees itself

        def split(x: Tensor) -> Tensor:
            return x.view(rows, tokens, -1, self.width).transpose(1, 2)

        def rotated(x: Tensor) -> Tensor:
            half = self.width // 2
            turned = torch.cat((-x[..., half:], x[..., :half]), -1)
            return at("rotated", x * cos + turned * sin)

        for layer in body.layers:
            own = layer.self_attn
            x = norm(layer.input_layernorm, stream, "norm")
            q, k, v = (split(at("qkv", product(p, x))) for p in (own.q_proj, own.k_proj, own.v_proj))
            q, k = rotated(q), rotated(k)
            if "cache8" in places:
                k, v = fp8(k, scaled=False), fp8(v, scaled=False)
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
            scores = (q @ k.transpose(-1, -2) / self.width**0.5).masked_fill(~sees, -torch.inf)
            mixed = at("attention", at("probabilities", scores.softmax(-1)) @ v)
            mixed = mixed.transpose(1, 2).reshape(rows, tokens, -1)
            stream = at("stream", stream + at("o", product(own.o_proj, mixed)))
            x = norm(layer.post_attention_layernorm, stream, "norm")
            gate, up = (at("gate-up", product(p, x)) for p in (layer.mlp.gate_proj, layer.mlp.up_proj))
            inner = at("product", at("silu", functional.silu(gate)) * up)
            stream = at("stream", stream + at("down", product(layer.mlp.down_proj, inner)))
        hidden = norm(body.norm, stream[:, first - 1 : -1], "last-norm")
        logits = hidden @ self.model.lm_head.weight.T
        return logits.log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]


def sampled(model: Any, tokenizer: Any, questions: list[str], tokens: int) -> tuple[Tensor, Tensor, int]:
    """Left-padded prompts with `tokens` sampled ones each, their mask, and where the sampled ones begin."""
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in questions
    ]
    first = max(map(len, asked))
    ids = torch.tensor([[0] * (first - len(p)) + p for p in asked])
    mask = torch.tensor([[0] * (first - len(p)) + [1] * len(p) for p in asked])
    torch.manual_seed(0)
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0,
    )  # fmt: skip
    return out, torch.cat([mask, torch.ones(len(asked), tokens, dtype=torch.long)], 1), first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--gsm8k", required=True, metavar="FILE", help="questions, a JSON line each")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=120)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.smollm2, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = bf16(parameter.data)
    lines = Path(args.gsm8k).read_text(encoding="utf-8").splitlines()[: args.questions]
    ids, mask, first = sampled(
        model, AutoTokenizer.from_pretrained(args.smollm2), [json.loads(x)["question"] for x in lines], args.tokens
    )
    llama = Llama(model)
    exact = llama.logprobs(ids, mask, first, ())
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        own = model(ids, attention_mask=mask, position_ids=positions).logits[:, first - 1 : -1].log_softmax(-1)
    assert torch.allclose(own.gather(-1, ids[:, first:, None])[..., 0], exact, atol=1e-3), (
        "this is not the model's own pass"
    )

    cases: dict[str, Iterable[str]] = {"rounded": PLACES, "float32 stream": PLACES - {"stream"}, "trainer": TRAINER,
                                       "sampler": SAMPLER, **FP8}  # fmt: skip
    cases |= {f"only {place}": {place} for place in sorted(PLACES)}
    rows = []
    for name, places in cases.items():
        d = (llama.logprobs(ids, mask, first, places) - exact).double()
        rows.append({"rounded": name, "mean_abs": round(float(d.abs().mean()), 4),
                     "k3": float(f"{float((d.exp() - 1 - d).mean()):.2e}")})  # fmt: skip
    # Also the trainer in FP8 would not follow the sampler: a rounding that falls the other way is as large as any.
    both = FP8["fp8 weights and inputs"]
    d = llama.logprobs(ids, mask, first, both | SAMPLER) - llama.logprobs(ids, mask, first, both)
    rows.append({"rounded": "fp8 on both sides, bf16 on one", "mean_abs": round(float(d.abs().mean()), 4)})
    record.record("rounding", {"tokens": exact.numel(), "rows": rows})
    table([row for row in rows if "k3" in row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
