#!/usr/bin/env python3
"""Rollout speed of our vLLM engine against the vLLM it is built on: one process, one engine, sides in both orders.

    python bench/rollout.py --models smollm2-135m,qwen3-0.6b,qwen3.5-0.8b --smollm2 models/SmolLM2-135M-Instruct
    python bench/rollout.py --models qwen3-0.6b --profile

256 sequences: 32 prompts of 100 random ids, 8 requests each, lengths log-normal (median 400, mean 500, clipped at 2048) and
forced. The sides:

    ours        VLLMEngine.generate: a log-prob and a version a token
    vllm        plain LLMEngine, add_request and step, that is asked for log-probs, as cheaply as it can: no text, only
                final outputs, `logprobs=0`, flat or not, whichever is faster
    vllm_none   the same, asked for none

`floor_share` is the decode floor's time for the whole run, tail included (shapes.Floor; 4.3 TB/s), over ours;
`floor_share_steady` the same for the steps in which all 256 run. `prefill` asks for one token each: a group of 8
against its prompt once, prompts of 100 and of 1200 tokens. `joins` is what a step costs more that 8 requests of 32 tokens
join while 192 decode. `multi_turn` has 256 episodes of 4 turns with 0.2 s of tools in between: each goes on when its own
turn ends, or all wait for the turn of all. Turns are drawn twice: `cut` (median 80, p99 4.7 times it, and none over 400) and
`spread` (as in staleness.py: median 200, p99 6 times it, clipped at 2048). `free` is what the drawn lengths allow at the
measured cost of a step by its sequences, were joining free.

Each model runs in a process of its own and is merged into bench/results/rollout.json when it is done.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import record
from shapes import Floor, Shape, keep, lengths, pick_device, plain_vllm, random_prompts, shape, table, weight_bytes

from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions
from palingenesis.rl.types import SamplingParams

MODELS = ("smollm2-135m", "qwen3-0.6b", "qwen3.5-0.8b")
SIGMA = 0.668  # mean / median = exp(σ²/2) = 1.25
TOOL_S = 0.2
_fresh = count(1)


@dataclass(frozen=True)
class Turns:
    """Tokens of a turn: log-normal."""

    median: float
    sigma: float
    clip: int


@dataclass(frozen=True)
class Sizes:
    """How much is asked; a smoke run asks for little."""

    prompts: int = 32
    group: int = 8
    prompt: int = 100
    long_prompt: int = 1200
    median: float = 400.0
    clip: int = 2048
    warm: int = 64
    turns: int = 4
    turn: Mapping[str, Turns] = field(
        default_factory=lambda: {"cut": Turns(80.0, SIGMA, 400), "spread": Turns(200.0, 0.770, 2048)}
    )
    tool_tokens: int = 16
    max_model_len: int = 4096
    slots: int = 256


SMOKE = Sizes(prompts=4, group=4, prompt=40, long_prompt=200, median=12.0, clip=40, warm=8, max_model_len=256,
              turn={"cut": Turns(6.0, SIGMA, 16)}, slots=16)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests: `prompts[i]` is continued for `tokens[i]`."""

    prompts: list[tuple[int, ...]]
    tokens: list[int]

    @classmethod
    def groups(cls, sizes: Sizes, vocabulary: int, tokens: Sequence[int], prompt: int = 0) -> Load:
        """Prompts that were never seen, so that no side finds the cache of another."""
        fresh = random_prompts(sizes.prompts, prompt or sizes.prompt, vocabulary, seed=next(_fresh))
        return cls([p for p in fresh for _ in range(sizes.group)], list(tokens))


@dataclass
class Measured:
    """One side, once. `steps` are (seconds, sequences running) of each; `short` of ours left vLLM's scheduler out."""

    tokens: int = 0
    seconds: float = 0.0
    cached: int = 0
    prompt: int = 0
    short: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)

    def steady_ms(self, batch: int) -> float:
        """Median of the steps that ran at least 95 % of the batch; the few that prefill are above it."""
        full = [seconds for seconds, running in self.steps if running >= 0.95 * batch]
        return 1e3 * statistics.median(full) if full else 0.0


@contextmanager
def timed_steps(core: Any, into: list[tuple[float, int]]) -> Iterator[None]:
    """Note the time between the ends of the engine's steps."""
    last = [time.perf_counter()]

    def step() -> None:
        type(core).step(core)
        now = time.perf_counter()
        into.append((now - last[0], core.steps.seqs))
        last[0] = now

    core.step = step
    try:
        yield
    finally:
        del core.step


def ours(engine: VLLMEngine, load: Load) -> Measured:
    async def all_of_them() -> int:
        asked = (
            engine.generate(prompt, SamplingParams(tokens, 1.0, (), seed))
            for seed, (prompt, tokens) in enumerate(zip(load.prompts, load.tokens, strict=True))
        )
        return sum(len(completion.token_ids) for completion in await asyncio.gather(*asked))

    engine.usage()
    out = Measured(short=-engine.core.steps.short)
    with timed_steps(engine.core, out.steps):
        began = time.perf_counter()
        out.tokens = asyncio.run(all_of_them())
        out.seconds = time.perf_counter() - began
    used = engine.usage()
    out.short += engine.core.steps.short
    out.cached, out.prompt = used.cached_tokens, used.cached_tokens + used.prefill_tokens
    return out


def vllm(engine: VLLMEngine, load: Load, **asked: Any) -> Measured:
    from vllm import SamplingParams as Sampling
    from vllm.sampling_params import RequestOutputKind

    out = Measured()
    with plain_vllm(engine) as llm:
        scheduler = engine.core._engine.scheduler  # it makes a new list of running requests now and then
        began = last = time.perf_counter()
        for number, (prompt, tokens) in enumerate(zip(load.prompts, load.tokens, strict=True)):
            params = Sampling(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **asked,
            )
            llm.add_request(f"plain{number}", {"type": "token", "prompt_token_ids": list(prompt)}, params)
        while llm.has_unfinished_requests():
            for done in llm.step():
                out.tokens += len(done.outputs[0].token_ids)
                out.cached += done.num_cached_tokens or 0
            now = time.perf_counter()
            out.steps.append((now - last, len(scheduler.running)))
            last = now
        out.seconds = time.perf_counter() - began
        while engine.core.busy:  # a step that was under way for requests that are done
            llm.step()
    out.prompt = sum(map(len, load.prompts))
    return out


def driven(engine: VLLMEngine, load: Load, before_step: Callable[[int], None] = lambda step: None) -> Measured:
    """Our core on the caller's thread: the engine thread's work, without its neighbours."""
    out, answers = Measured(), []
    with engine._standing_still(), timed_steps(engine.core, out.steps):
        began = time.perf_counter()
        for seed, (prompt, tokens) in enumerate(zip(load.prompts, load.tokens, strict=True)):
            engine.core.add(prompt, SamplingParams(tokens, 1.0, (), seed), answers.append)
        step = 0
        while engine.core.busy:
            before_step(step)
            engine.core.step()
            step += 1
        out.seconds = time.perf_counter() - began
    out.tokens = sum(len(answer.token_ids) for answer in answers)
    return out


def compare(
    engine: VLLMEngine, made: Shape, sizes: Sizes, repeats: int, note: Callable[[dict[str, Any]], None]
) -> None:
    """The three sides, `repeats` times back and forth; noted after each pass."""
    vocabulary = made.config["vocab_size"]
    batch = sizes.prompts * sizes.group
    flat: dict[bool, float] = {}
    for _ in range(2):  # the first warms up
        for choice in (True, False):
            warm = Load.groups(sizes, vocabulary, [sizes.warm] * batch)
            flat[choice] = vllm(engine, warm, logprobs=0, flat_logprobs=choice).seconds
        vllm(engine, Load.groups(sizes, vocabulary, [sizes.warm] * batch))
        ours(engine, Load.groups(sizes, vocabulary, [sizes.warm] * batch))
    fastest = min(flat, key=flat.__getitem__)
    sides: dict[str, Callable[[Load], Measured]] = {
        "vllm": lambda load: vllm(engine, load, logprobs=0, flat_logprobs=fastest),
        "vllm_none": lambda load: vllm(engine, load),
        "ours": lambda load: ours(engine, load),
    }
    tokens = lengths(batch, median=sizes.median, sigma=SIGMA, clip=sizes.clip)
    runs: dict[str, list[Measured]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            runs[side].append(sides[side](Load.groups(sizes, vocabulary, tokens)))
        note(speeds(engine, made, sizes, tokens, runs) | {"flat_logprobs": fastest})


def speeds(
    engine: VLLMEngine, made: Shape, sizes: Sizes, tokens: list[int], runs: dict[str, list[Measured]]
) -> dict[str, Any]:
    batch = min(len(tokens), sizes.slots)
    rate = {side: sum(m.tokens for m in of) / sum(m.seconds for m in of) for side, of in runs.items()}
    steady = {side: statistics.median(m.steady_ms(batch) for m in of) for side, of in runs.items()}
    floor = Floor.of(made.config, weight_bytes(engine.core._runner.model))
    floor_s = floor.run_s(sizes.prompt, tokens, sizes.slots)
    first = runs["ours"][0]
    return {
        "tokens_per_s": round(rate["ours"]),
        "vllm_tokens_per_s": round(rate["vllm"]),
        "vllm_none_tokens_per_s": round(rate["vllm_none"]),
        "ratio": round(rate["ours"] / rate["vllm"], 3),
        "ratio_none": round(rate["ours"] / rate["vllm_none"], 3),
        "floor_share": round(floor_s / statistics.mean(m.seconds for m in runs["ours"]), 3),
        "floor_share_steady": round(1e3 * floor.step_s(batch, sizes.prompt + min(tokens) / 2) / steady["ours"], 3),
        "floor_tokens_per_s": round(sum(tokens) / floor_s),
        "floor_tokens_per_s_at_256": round(256 / floor.step_s(256, 500)),
        "floor_step_ms_at_256": round(1e3 * floor.step_s(256, 500), 3),
        "cached_share": round(first.cached / first.prompt, 4),
        "short_step_share": round(first.short / len(first.steps), 4),
        "steady_ms": {side: round(value, 3) for side, value in steady.items()},
        "sequences": len(tokens),
        "mean_running": {
            side: round(statistics.mean(m.tokens / len(m.steps) for m in of), 1) for side, of in runs.items()
        },
        "tokens": {"sum": sum(tokens), "median": statistics.median(tokens), "max": max(tokens)},
        "seconds": {side: [round(m.seconds, 3) for m in of] for side, of in runs.items()},
        "repeats": len(runs["ours"]),
    }


def prefill(engine: VLLMEngine, made: Shape, sizes: Sizes) -> dict[str, Any]:
    """What sharing a group's prompt is worth: all of a group against one of it, for one token each."""
    vocabulary = made.config["vocab_size"]
    figures = {}
    for name, prompt in (("short", sizes.prompt), ("long", sizes.long_prompt)):
        for _ in range(2):  # the first warms up
            whole = ours(engine, Load.groups(sizes, vocabulary, [1] * sizes.prompts * sizes.group, prompt))
            single = replace(sizes, group=1)
            once = ours(engine, Load.groups(single, vocabulary, [1] * sizes.prompts, prompt))
        figures[name] = {
            "prompt_tokens": prompt,
            "cached_share": round(whole.cached / whole.prompt, 4),
            "group_s": round(whole.seconds, 4),
            "once_s": round(once.seconds, 4),
        }
    return {"prefill": figures}


def multi_turn(engine: VLLMEngine, made: Shape, sizes: Sizes, repeats: int) -> dict[str, Any]:
    return {"multi_turn": {name: paces(engine, made, sizes, of, repeats) for name, of in sizes.turn.items()}}


def paces(engine: VLLMEngine, made: Shape, sizes: Sizes, of: Turns, repeats: int) -> dict[str, Any]:
    """Episodes of several turns with tools between them: each at its own pace, or turn by turn together."""
    vocabulary = made.config["vocab_size"]
    episodes = sizes.prompts * sizes.group
    drawn = lengths(episodes * sizes.turns, median=of.median, sigma=of.sigma, clip=of.clip, seed=1)
    tokens = [drawn[i::episodes] for i in range(episodes)]

    async def turn(context: list[int], number: int, at: int) -> None:
        params = SamplingParams(tokens[number][at], 1.0, (), number * sizes.turns + at)
        context += (await engine.generate(context, params)).token_ids

    async def tool(context: list[int]) -> None:
        await asyncio.sleep(TOOL_S)
        context += context[: sizes.tool_tokens]

    async def own_pace(contexts: list[list[int]]) -> None:
        async def episode(number: int) -> None:
            for at in range(sizes.turns):
                await turn(contexts[number], number, at)
                if at + 1 < sizes.turns:
                    await tool(contexts[number])

        await asyncio.gather(*map(episode, range(episodes)))

    async def blocking(contexts: list[list[int]]) -> None:
        for at in range(sizes.turns):
            await asyncio.gather(*(turn(contexts[n], n, at) for n in range(episodes)))
            if at + 1 < sizes.turns:
                await asyncio.gather(*map(tool, contexts))

    seconds: dict[str, list[float]] = {"own_pace": [], "blocking": []}
    steps: list[tuple[float, int]] = []
    ways = {"own_pace": own_pace, "blocking": blocking}
    for repeat in range(-1, repeats):
        for name in ways if repeat % 2 == 0 else reversed(ways):
            contexts = [list(p) for p in Load.groups(sizes, vocabulary, []).prompts]
            with timed_steps(engine.core, steps):
                began = time.perf_counter()
                asyncio.run(ways[name](contexts))
            if repeat >= 0:  # the first pass meets shapes whose kernels are not made yet
                seconds[name].append(time.perf_counter() - began)
        if repeat < 0:
            steps.clear()
    return {
        "ratio": round(sum(seconds["blocking"]) / sum(seconds["own_pace"]), 3),
        "free": round(pace_ratio(tokens, step_costs(steps, episodes)), 3),
        "seconds": {k: [round(s, 3) for s in v] for k, v in seconds.items()},
        "tokens": {"median": statistics.median(drawn), "max": max(drawn), "longest_episode": max(map(sum, tokens))},
    }


def step_costs(steps: Sequence[tuple[float, int]], most: int, width: int = 16) -> list[float]:
    """Median seconds of a step by its number of sequences, 0 to `most`, in buckets of `width`; an empty one takes the next
    larger one's, or the last there is."""
    buckets: dict[int, list[float]] = {}
    for seconds, running in steps:
        buckets.setdefault(running // width, []).append(seconds)
    medians = {bucket: statistics.median(of) for bucket, of in buckets.items() if len(of) >= 3}
    known = sorted(medians)
    return [medians[next((b for b in known if b >= n // width), known[-1])] for n in range(most + 1)]


def pace_ratio(tokens: Sequence[Sequence[int]], cost: Sequence[float]) -> float:
    """Blocking turns' time over that of episodes at their own pace, were joining free: what the lengths themselves allow.

    Args:
        tokens: by episode and turn.
        cost: seconds of a step by the number of sequences in it.
    """
    turns = len(tokens[0])
    blocking = (turns - 1) * TOOL_S
    for at in range(turns):
        left = sorted(of[at] for of in tokens)
        blocking += sum(cost[len(left) - bisect_right(left, step)] for step in range(left[-1]))
    now, waiting, running = 0.0, [(0.0, number, 0) for number in range(len(tokens))], {}
    while waiting or running:
        if not running:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, number, at = heappop(waiting)
            running[number] = (tokens[number][at], at)
        now += cost[len(running)]
        for number, (left, at) in list(running.items()):
            if left > 1:
                running[number] = (left - 1, at)
                continue
            del running[number]
            if at + 1 < turns:
                heappush(waiting, (now + TOOL_S, number, at + 1))
    return blocking / now


def joins(engine: VLLMEngine, made: Shape, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds that a step takes longer when a group joins it: steps with a join at every sixteenth, less as many
    without one."""
    vocabulary, running = made.config["vocab_size"], sizes.prompts * sizes.group * 3 // 4
    every, steps = 16, 2 * sizes.warm

    def seconds(joining: int) -> float:
        def join(step: int) -> None:
            if step % every == 0 and every <= step < every + steps:
                for seed, prompt in enumerate(random_prompts(joining, 32, vocabulary, next(_fresh))):
                    engine.core.add(prompt, SamplingParams(4, 1.0, (), seed), [].append)

        beside = Load(random_prompts(running, 20, vocabulary, next(_fresh)), [2 * steps] * running)
        return sum(took for took, _ in driven(engine, beside, join).steps[every : every + steps])

    extra = []
    for _ in range(4):  # the first warms up
        alone, joined = seconds(0), seconds(sizes.group)
        extra.append(1e3 * (joined - alone) / (steps / every))
    return {"join_extra_ms": round(statistics.median(extra[1:]), 2), "joining": sizes.group, "beside": running}


def profile(engine: VLLMEngine, made: Shape, sizes: Sizes, device: str) -> tuple[dict[str, Any], str]:
    """Where a steady step's time goes: Python by function, the GPU by kernel, there also of the fewer sequences and longer
    contexts of a tail. Our core, driven by this thread."""
    vocabulary, batch = made.config["vocab_size"], sizes.prompts * sizes.group
    tokens = [min(sizes.clip, 3 * sizes.warm)] * batch

    def load() -> Load:
        return Load.groups(sizes, vocabulary, tokens)

    alone = driven(engine, load()).steady_ms(batch)
    python = cProfile.Profile()

    def from_the_third(step: int) -> None:
        if step == min(10, sizes.warm):
            python.enable()

    profiled = driven(engine, load(), from_the_third).steady_ms(batch)
    python.disable()
    text = io.StringIO()
    print(f"{made.name}, {batch} sequences, our core driven by one thread\n", file=text)
    print(f"steady step: {alone:.3f} ms; under cProfile {profiled:.3f} ms\n", file=text)
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(40)
    shares = {}
    for part in (1, 4, 16):
        few = replace(sizes, prompts=max(1, sizes.prompts // part))
        context, count = min(part * sizes.prompt, sizes.long_prompt), few.prompts * few.group
        if count in shares:
            continue
        fewer = Load.groups(few, vocabulary, tokens[:count], context)
        shares[count], kernels = gpu_share(engine, fewer, sizes, device)
        print(f"\n{count} sequences, prompts of {context}: GPU busy {shares[count]:.1%} of the wall time\n", file=text)
        total = sum(kernels.values()) or 1.0
        for name, seconds in kernels.most_common(20):
            print(f"{seconds / total:7.2%} {1e6 * seconds:10.1f} us a step  {name[:140]}", file=text)
    return {
        "driven_steady_ms": round(alone, 3),
        "gpu_busy_share": {str(count): round(share, 3) for count, share in shares.items()},
    }, text.getvalue()


def gpu_share(engine: VLLMEngine, load: Load, sizes: Sizes, device: str) -> tuple[float, Counter[str]]:
    """`(share of the wall time a kernel ran, seconds a step by kernel)` of about 30 steady steps."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    first = min(sizes.warm // 2, 40)
    steps = min(30, sizes.warm)
    trace = torch_profile(activities=[activity])
    clock: dict[str, float] = {}

    def window(step: int) -> None:
        if step == first:
            trace.start()
            clock["began"] = time.perf_counter()
        if step == first + steps:
            clock["ended"] = time.perf_counter()
            trace.stop()

    driven(engine, load, window)
    kernels: Counter[str] = Counter()
    spans = []
    for event in trace.events():
        if event.device_type == (DeviceType.CUDA if device == "cuda" else DeviceType.CPU):
            spans.append((event.time_range.start, event.time_range.end))
            kernels[event.name] += (event.time_range.end - event.time_range.start) / 1e6 / steps
    busy, reached = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6 / (clock["ended"] - clock["began"]), kernels


def start(made: Shape, args: argparse.Namespace, sizes: Sizes) -> VLLMEngine:
    cpu = args.device == "cpu"
    return VLLMEngine(
        VLLMOptions(
            model=made.folder,
            dtype="float32" if cpu else "bfloat16",
            device=args.device,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.slots,
            gpu_memory_utilization=args.memory,
            extra={"logprobs_mode": "processed_logprobs", **made.vllm, **json.loads(args.vllm_args)},
        )
    )


def measure(made: Shape, args: argparse.Namespace, sizes: Sizes) -> None:
    def note(figures: dict[str, Any]) -> None:
        keep("rollout", {"models": {made.name: figures}}, smoke=args.smoke)

    began = time.perf_counter()
    engine = start(made, args, sizes)
    print(f"{made.name}: engine up in {time.perf_counter() - began:.0f} s", flush=True)
    runner = f"{type(engine.core._runner).__module__}"
    note({"engine_start_s": round(time.perf_counter() - began, 1), "runner": runner})
    parts: list[Callable[[], None]] = []
    if "compare" in args.parts:
        parts.append(lambda: compare(engine, made, sizes, args.repeats, note))
    if "prefill" in args.parts:
        parts.append(lambda: note(prefill(engine, made, sizes)))
    if "turns" in args.parts and made.name != "qwen3.5-0.8b":
        parts.append(lambda: note(multi_turn(engine, made, sizes, args.repeats)))
    if "joins" in args.parts:
        parts.append(lambda: note(joins(engine, made, sizes)))
    if args.profile:

        def write_profile() -> None:
            figures, text = profile(engine, made, sizes, args.device)
            note(figures)
            path = record.RESULTS / f"rollout_profile_{made.name}.txt"
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")

        parts.append(write_profile)
    for part in parts:
        part()
    engine.close()


def report(smoke: bool, names: Sequence[str]) -> None:
    figures = json.loads(keep("rollout", {}, smoke=smoke).read_text(encoding="utf-8"))["figures"]
    columns = (
        "tokens_per_s",
        "vllm_tokens_per_s",
        "vllm_none_tokens_per_s",
        "ratio",
        "ratio_none",
        "floor_share",
        "floor_share_steady",
    )
    models = [(name, figures["models"].get(name, {})) for name in names]
    table(
        [
            {"model": name}
            | {c.removesuffix("_tokens_per_s") or c: of.get(c, "-") for c in columns}
            | {f"ms {side}": ms for side, ms in of.get("steady_ms", {}).items()}
            | {"cached": of.get("cached_share", "-")}
            for name, of in models
            if of
        ]
    )
    table(
        [
            {"model": name, "turns": k, "ratio": v["ratio"], "free": v["free"], **v["seconds"]}
            for name, of in models
            for k, v in of.get("multi_turn", {}).items()
        ]
    )
    table([{"model": n, "prompt": k, **v} for n, of in models for k, v in of.get("prefill", {}).items()])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas; also: tiny")
    parser.add_argument("--smollm2", default="models/SmolLM2-135M-Instruct", metavar="DIR")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=2, help="passes over the sides, every other one backwards")
    parser.add_argument("--prompts", type=int, default=0, help="instead of 32; over 32, they queue for 256 places")
    parser.add_argument("--parts", default="compare,prefill,turns,joins", help="which to run")
    parser.add_argument("--profile", action="store_true", help="also write rollout_profile_<model>.txt")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory for the engine")
    parser.add_argument("--vllm-args", default="{}", metavar="JSON", help="further arguments of vLLM's engine")
    parser.add_argument("--smoke", action="store_true", help="the tiny policy and few tokens; results are not kept")
    args = parser.parse_args()
    args.device = pick_device(args.device).type
    names = ["tiny"] if args.smoke and args.models == ",".join(MODELS) else args.models.split(",")
    if len(names) == 1:
        sizes = SMOKE if args.smoke else Sizes()
        if args.prompts:
            sizes = replace(sizes, prompts=args.prompts)
        measure(shape(names[0], args.smollm2), args, sizes)
        failed = []
    else:  # one engine a process: vLLM leaves memory and a process group behind
        rest = sys.argv[1:]
        failed = [
            n for n in names if subprocess.run([sys.executable, __file__, *rest, "--models", n], check=False).returncode
        ]
    report(args.smoke, names)
    for name in failed:
        print(f"{name} failed; the other figures are kept")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
