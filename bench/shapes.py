"""What the benches of the rollout half share: model shapes, length spreads, the decode floor, results kept in parts.

shape(name) ──> Shape: folder for vLLM or transformers, dtype, vLLM arguments
lengths(...) ──> a log-normal spread, forced by `max_new_tokens` and no stop token
Floor        ──> bytes a decode must move / bandwidth
one_engine() ──> successive runs of RLTrainer on one vLLM engine, whose start takes a minute
keep(...)    ──> bench/results/<name>.json, merged into what is there: a bench writes after each of its parts
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record as records
import torch

# Before vllm is imported: its engine lives in this process (palingenesis.rl.engines.vllm.core says why).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

DATA = Path(__file__).parent / "shapes"
BANDWIDTH = 4.3e12  # bytes a second, measured as a copy on one H200


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Attributes:
        folder: of a config, with weights when `random` is false.
        random: there are no weights; vLLM makes them up.
        vllm: further arguments of vLLM's engine.
    """

    name: str
    folder: str
    random: bool
    vllm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The language model's part of the config."""
        whole = json.loads((Path(self.folder) / "config.json").read_text(encoding="utf-8"))
        return dict(whole.get("text_config", whole))


def shape(name: str, smollm2: str = "") -> Shape:
    """`tiny`, `smollm2-135m` (its folder is `smollm2`), `qwen3-0.6b` or `qwen3.5-0.8b`."""
    if name == "tiny":
        from palingenesis.rl.policy.model import policy_path

        return Shape(name, policy_path("builtin:tiny"), random=False)
    if name == "smollm2-135m":
        if not Path(smollm2, "config.json").is_file():
            raise SystemExit(f"--smollm2: no model in {smollm2!r}; examples/rl/prepare_smollm2.py makes one")
        return Shape(name, smollm2, random=False)
    file = {"qwen3-0.6b": "qwen3_0.6b.json", "qwen3.5-0.8b": "qwen3_5_0.8b.json"}[name]
    folder = Path(tempfile.gettempdir()) / "palingenesis-shapes" / name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DATA / file, folder / "config.json")
    return Shape(name, str(folder), random=True, vllm={"load_format": "dummy"})


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    """Ids that no other seed gives: nothing is in a prefix cache."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, vocabulary - 3) for _ in range(tokens)) for _ in range(count)]


def lengths(count: int, *, median: float, sigma: float, clip: int, seed: int = 0) -> list[int]:
    """Log-normal: mean = median · exp(σ²/2), p99 = median · exp(2.33 σ)."""
    draw = random.Random(seed)
    return [one_length(draw, median, sigma, clip) for _ in range(count)]


def one_length(draw: random.Random, median: float, sigma: float, clip: int) -> int:
    return max(1, min(clip, round(draw.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True)
class Floor:
    """The bytes that decoding cannot avoid, against the memory's bandwidth.

        step of B sequences = weights + B · (kv · context + 2 · state + 3 · 4 · vocabulary)

    `kv` is bytes a token over the full-attention layers, `state` the float32 state of the linear-attention layers (read
    and written), and the last term three passes over float32 logits. The head of a tied model is read with the weights.
    """

    weights: int
    kv: int
    state: int
    logits: int

    @classmethod
    def of(cls, config: Mapping[str, Any], weights: int) -> Floor:
        layers = config["num_hidden_layers"]
        linear = 0
        if "linear_num_value_heads" in config:
            linear = layers - layers // config.get("full_attention_interval", 4)
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        state = 0
        if linear:
            size = config["linear_key_head_dim"] * config["linear_value_head_dim"]
            state = 4 * linear * config["linear_num_value_heads"] * size
        return cls(weights, 2 * 2 * heads * width * (layers - linear), state, 3 * 4 * config["vocab_size"])

    def step_s(self, batch: float, context: float) -> float:
        return (self.weights + batch * (self.kv * context + 2 * self.state + self.logits)) / BANDWIDTH

    def run_s(self, prompt: int, sampled: Sequence[int], slots: int) -> float:
        """Each to its own length, `slots` at once: at least as many steps as the longest takes. The step's bytes are
        linear in batch and context, so this is the floor at the run's mean of both, times its steps."""
        tokens = sum(sampled)
        steps = max(max(sampled), math.ceil(tokens / slots))
        contexts = sum(n * prompt + n * (n + 1) / 2 for n in sampled)
        return steps * self.step_s(tokens / steps, contexts / tokens)


def weight_bytes(model: Any) -> int:
    """Of a module, tied parameters once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def plain_vllm(engine: Any) -> Iterator[Any]:
    """vLLM's own LLMEngine inside `engine`, without anything of ours: sampler, head and scheduler as vLLM made them. The
    engine's thread stands still; the caller's drives."""
    core = engine.core
    with engine._standing_still():
        core.restore()
        try:
            with core.on_stream():
                yield core.llm
        finally:
            core.exchange()


@contextmanager
def one_engine(prepare: Callable[[Any], None] = lambda engine: None) -> Iterator[None]:
    """Runs of RLTrainer in here share the first one's vLLM engine; each starts it from its own policy.

    Args:
        prepare: called once with each engine that is built.
    """
    from palingenesis.rl import trainer
    from palingenesis.rl.policy.weights import PolicyWeights

    build, held = trainer.build_engine, []

    def shared(config: Any, policy: Any, *args: Any, **kwargs: Any) -> Any:
        if held:
            engine = held[0][0]
            engine.load(PolicyWeights(0, policy.model))
            engine.usage()
            return engine
        engine = build(config, policy, *args, **kwargs)
        prepare(engine)
        if type(engine).__name__ == "VLLMEngine":
            held.append((engine, engine.close))
            engine.close = lambda: None
        return engine

    trainer.build_engine = shared
    try:
        yield
    finally:
        trainer.build_engine = build
        for _, close in held:
            close()


def keep(name: str, figures: Mapping[str, Any], *, smoke: bool = False) -> Path:
    """Merge `figures` into the result `name`; a smoke run's go to a folder of their own."""
    if smoke:
        records.RESULTS = Path(tempfile.gettempdir()) / "palingenesis-smoke"
    path = records.RESULTS / f"{name}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else {}
    with contextlib.redirect_stdout(io.StringIO()):
        return records.record(name, merged(old, figures))


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        inner = out.get(key)
        out[key] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return out


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys, aligned."""
    if not rows:
        return
    cells = [list(rows[0]), *([show(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def hardware() -> str:
    return records.hardware()


def pick_device(asked: str) -> torch.device:
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)
