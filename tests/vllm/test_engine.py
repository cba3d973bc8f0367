"""The vLLM engine: log-probs, versions, prefix sharing, the short way through decoding, and how it fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from palingenesis.rl.engines.vllm.decode import DecodeGraphs
from palingenesis.rl.errors import EngineError
from palingenesis.rl.policy.model import Policy
from palingenesis.rl.policy.weights import PolicyWeights
from palingenesis.rl.types import Completion, Finish, SamplingParams
from tests.vllm.conftest import DEVICE

STOP = 262
PROMPTS = [tuple(range(10 + i % 3, 40 + i)) for i in range(16)]
# The trainer and vLLM share no kernel: in float32 they differ by rounding, in bf16 by its steps.
AGREE = 1e-5 if DEVICE.type == "cpu" else 0.05


def sample(engine: Any, prompts: list[tuple[int, ...]], **params: Any) -> list[Completion]:
    options = {"max_new_tokens": 24, "stop_token_ids": (STOP,)} | params

    async def all_at_once() -> list[Completion]:
        work = (engine.generate(p, SamplingParams(**({"seed": i} | options))) for i, p in enumerate(prompts))
        return list(await asyncio.gather(*work))

    return asyncio.run(all_at_once())


def gap(policy: Policy, prompts: list[tuple[int, ...]], done: list[Completion], temperature: float = 1.0) -> float:
    """Mean absolute difference between the engine's log-probs and the trainer's."""
    differences = []
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=DEVICE)
        with torch.no_grad():
            hidden = policy.hidden_states(ids)[0, len(prompt) - 1 : -1]
            z = (hidden.double() @ policy.head.weight.double().T) / temperature
        count = torch.arange(len(completion.token_ids), device=DEVICE)
        expected = torch.log_softmax(z, -1)[count, list(completion.token_ids)].cpu()
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
    return float(torch.cat(differences).mean())


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _running(engine: Any) -> list[Any]:
    return list(engine.core.steps.running.values())


def _all_sample(engine: Any) -> bool:
    running = _running(engine)
    return len(running) == len(PROMPTS) and all(request.versions for request in running)


def shaken(policy: Policy, seed: int = 0) -> Policy:
    """The policy, moved by some 2 %."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.float().std().to(parameter.dtype))
    return policy


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_logprobs_are_the_trainers(engine: Any, policy: Policy, temperature: float) -> None:
    engine.load(PolicyWeights(0, policy.model))
    assert gap(policy, PROMPTS, sample(engine, PROMPTS, temperature=temperature), temperature) < AGREE


def test_new_weights_reach_every_layer_and_the_tied_head(engine: Any, policy: Policy) -> None:
    for version in (3, 4):  # the second load meets what the first has left
        shaken(policy, version)
        engine.load(PolicyWeights(version, policy.model))
        done = sample(engine, PROMPTS)
        assert gap(policy, PROMPTS, done) < AGREE
        assert {v for completion in done for v in completion.versions} == {version}


def test_running_requests_go_on_with_new_weights(engine: Any, policy: Policy) -> None:
    engine.load(PolicyWeights(1, policy.model))

    async def during() -> list[Completion]:
        work = [asyncio.create_task(engine.generate(p, SamplingParams(400, seed=i))) for i, p in enumerate(PROMPTS)]
        await asyncio.to_thread(wait_until, lambda: _all_sample(engine))
        await asyncio.to_thread(engine.load, PolicyWeights(2, policy.model))
        return list(await asyncio.gather(*work))

    done = asyncio.run(during())
    for completion in done:
        assert len(completion.token_ids) == 400, "no request was lost"
        assert set(completion.versions) == {1, 2}
        assert list(completion.versions) == sorted(completion.versions)


def test_a_groups_prompt_is_computed_once(engine: Any) -> None:
    prompt = tuple(i % 250 for i in range(300))
    engine.usage()
    sample(engine, [prompt] * 8, max_new_tokens=4)
    first = engine.usage()
    assert first.prefill_tokens + first.cached_tokens == 8 * 300
    whole = 300 - 300 % 32
    assert first.cached_tokens == 7 * whole, "seven siblings found every whole block of the first"


def test_no_prompt_meets_keys_of_older_weights(engine: Any, policy: Policy) -> None:
    prompt = tuple(i % 249 for i in range(300))
    engine.load(PolicyWeights(10, policy.model))
    sample(engine, [prompt], max_new_tokens=2)
    shaken(policy)
    engine.load(PolicyWeights(11, policy.model))
    engine.usage()
    done = sample(engine, [prompt] * 2, max_new_tokens=8)
    assert engine.usage().prefill_tokens >= 300, "it was computed anew"
    assert gap(policy, [prompt] * 2, done) < AGREE


def test_a_prompt_that_waits_through_a_load_is_computed_with_the_new_weights(engine: Any, policy: Policy) -> None:
    """The batch has 64 places: the last request waits, and its siblings' blocks are of the weights before."""
    prompt = tuple(i % 247 for i in range(300))
    engine.load(PolicyWeights(20, policy.model))

    async def during() -> Completion:
        work = [asyncio.create_task(engine.generate(prompt, SamplingParams(600, seed=i))) for i in range(65)]
        await asyncio.to_thread(wait_until, lambda: sum(bool(r.versions) for r in _running(engine)) == 64)
        assert engine.core.requests == 65
        shaken(policy)
        await asyncio.to_thread(engine.load, PolicyWeights(21, policy.model))
        return (await asyncio.gather(*work))[-1]

    last = asyncio.run(during())
    assert set(last.versions) == {21}
    assert gap(policy, [prompt], [last]) < AGREE


def test_a_prompt_that_vllm_lets_wait_through_a_load_too(
    engine: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has room for one prompt only: the second has joined and waits in vLLM's own queue."""
    prompt = tuple(i % 243 for i in range(300))
    engine.load(PolicyWeights(30, policy.model))
    done: list[Any] = []
    with engine._standing_still():
        core = engine.core
        monkeypatch.setattr(core._engine.scheduler, "max_num_scheduled_tokens", 300)
        for seed in range(2):
            core.add(prompt, SamplingParams(80, seed=seed), done.append)
        core.step()
        assert not core.held
        assert len(core._engine.scheduler.waiting) == 1
        shaken(policy)
        core.load(PolicyWeights(31, policy.model))
        while core.busy:
            core.step()
    assert set(done[-1].versions) == {31}
    assert gap(policy, [prompt], [done[-1]]) < AGREE


def test_requests_that_come_one_by_one_join_together(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step that somebody joins is dear: 40 join a batch of 20 in a few steps."""
    monkeypatch.setattr(engine.core, "patience", 0.05)
    engine.core.steps.short = 0

    async def arriving() -> None:
        first = [engine.generate(PROMPTS[0], SamplingParams(300, seed=i)) for i in range(20)]
        running = [asyncio.create_task(request) for request in first]
        for i in range(40):
            await asyncio.sleep(0.004)
            running.append(asyncio.create_task(engine.generate(PROMPTS[1], SamplingParams(20, seed=i))))
        await asyncio.gather(*running)

    asyncio.run(arriving())
    assert engine.core.steps.short > 280


def test_prompts_that_join_those_that_decode_are_computed_whole(engine: Any, policy: Policy) -> None:
    """In one step with them, and on a GPU in one graph."""
    engine.load(PolicyWeights(0, policy.model))
    engine.core.steps.mixed = 0
    prompts = [tuple((7 * i + k) % 250 for k in range(n)) for i, n in enumerate([*range(20, 280, 23), 500, 700])]

    async def joining() -> list[Completion]:
        decoding = [
            asyncio.create_task(engine.generate(PROMPTS[i % 16], SamplingParams(900, seed=i))) for i in range(40)
        ]
        await asyncio.to_thread(wait_until, lambda: sum(bool(r.versions) for r in _running(engine)) == 40)
        joined = []
        for i, prompt in enumerate(prompts):
            joined.append(asyncio.create_task(engine.generate(prompt, SamplingParams(24, seed=i))))
            await asyncio.sleep(0.02)
        done = await asyncio.gather(*joined)
        for task in decoding:
            task.cancel()
        return list(done)

    done = asyncio.run(joining())
    assert engine.core.steps.mixed > 3
    gaps = {len(prompt): gap(policy, [prompt], [completion]) for prompt, completion in zip(prompts, done, strict=True)}
    assert max(gaps.values()) < 2 * AGREE, gaps
    assert sum(gaps.values()) / len(gaps) < AGREE, gaps
    wait_until(lambda: not engine.core.steps.running)


def agree(policy: Policy, asked: dict[int, tuple[tuple[int, ...], float]], done: dict[int, Completion]) -> None:
    """Every completion has the trainer's log-probs, whatever it shared its steps with. Greedy ones have those at 1."""
    gaps = {i: gap(policy, [asked[i][0]], [completion], asked[i][1] or 1.0) for i, completion in done.items()}
    tokens = {i: len(completion.token_ids) for i, completion in done.items()}
    assert max(gaps.values()) < 10 * AGREE, gaps
    assert max(gaps[i] for i in gaps if tokens[i] >= 20) < 3 * AGREE, gaps
    assert sum(gaps[i] * tokens[i] for i in gaps) < AGREE * sum(tokens.values()), gaps


def mixed_load(core: Any, seed: int) -> tuple[dict[int, Completion], int, dict[int, tuple[tuple[int, ...], float]]]:
    """A hundred requests that come, go, stop and are aborted, stepped by hand: what they got, how many blocks are free
    after them, and prompt and temperature of each."""
    rng = random.Random(seed)
    done: dict[int, Completion] = {}
    names: dict[int, str] = {}
    asked: dict[int, tuple[tuple[int, ...], float]] = {}
    todo = list(range(100))
    while todo or core.busy:
        while todo and rng.random() < 0.4:
            i = todo.pop()
            prompt = tuple((i % 7 + k) % 250 for k in range(rng.randrange(5, 300)))
            stops = (STOP,) if i % 2 else ()
            params = SamplingParams(rng.randrange(1, 200), rng.choice([0.0, 0.7, 1.0]), stops, seed=i)
            asked[i] = (prompt, params.temperature)
            names[i] = core.add(prompt, params, lambda result, i=i: done.__setitem__(i, result))
        if names and rng.random() < 0.02:
            core.abort(names[rng.choice(list(names))])
        core.step()
    free = core._engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return done, free, asked


@pytest.mark.parametrize("blocks", [400, 70])
def test_the_short_way_leaves_what_vllms_own_would(
    engine: Any, policy: Policy, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same requests in the same order: same tokens, same log-probs, same blocks; with few blocks requests are preempted.
    On a GPU the two ways' attention differs in its last bits: there each is held against the trainer."""
    engine.load(PolicyWeights(0, policy.model))
    with engine._standing_still():
        core = engine.core
        monkeypatch.setattr(core, "patience", 0.0)  # who joins when is the same both times
        pool = core._engine.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - blocks + 1) if blocks < 400 else []
        assert core.steps.shortcut, "this vLLM has what the short way reads"
        outcome = []
        for shortcut in (True, False):
            core.steps.shortcut, core.steps.short, core.steps.mixed = shortcut, 0, 0
            core._loads += 1  # neither finds the other's blocks in the prefix cache
            outcome.append(mixed_load(core, seed=blocks))
            assert (core.steps.short > 100) is shortcut
            assert (core.steps.mixed > blocks // 20) is shortcut
        core.steps.shortcut = True
        pool.free_blocks(held)
    (ours, free, asked), (own, free_own, asked_own) = outcome
    assert free == free_own
    assert len(ours) > 80
    agree(policy, asked, ours)
    agree(policy, asked_own, own)
    if DEVICE.type == "cpu":
        assert {i: (c.token_ids, c.logprobs) for i, c in ours.items()} == {
            i: (c.token_ids, c.logprobs) for i, c in own.items()
        }


@pytest.mark.parametrize("blocks", [400, 60])
def test_prompts_in_pieces_leave_those_that_decode_to_the_short_way(
    engine: Any, policy: Policy, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has room for 100 tokens, so most prompts take several; vLLM's own way lets decoding wait for them, ours does
    not, so the batches differ and the sums with them. With few blocks requests are preempted and computed anew in pieces,
    of which the last may be a single token."""
    engine.load(PolicyWeights(0, policy.model))
    with engine._standing_still():
        core = engine.core
        monkeypatch.setattr(core, "patience", 0.0)
        monkeypatch.setattr(core._engine.scheduler, "max_num_scheduled_tokens", 100)
        pool = core._engine.scheduler.kv_cache_manager.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - blocks + 1) if blocks < 400 else []
        outcome = []
        for shortcut in (True, False):
            core.steps.shortcut, core.steps.mixed = shortcut, 0
            core._loads += 1
            outcome.append(mixed_load(core, seed=1))
            assert (core.steps.mixed > blocks // 8) is shortcut
        core.steps.shortcut = True
        pool.free_blocks(held)
    (ours, free, asked), (own, free_own, _) = outcome
    assert free == free_own
    assert all(len(a.logprobs) == len(a.token_ids) == len(a.versions) for a in ours.values())
    agree(policy, asked, ours)
    both = [(ours[i], own[i]) for i in ours.keys() & own.keys()]  # who is aborted depends on who is there
    assert len(both) > 80
    if DEVICE.type == "cpu":
        same = [(a, b) for a, b in both if a.token_ids == b.token_ids]
        assert len(same) > 0.95 * len(both)
        for a, b in same:
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=AGREE, rtol=1e-4)


def test_one_that_was_preempted_decodes_when_all_it_knew_is_computed_again(
    engine: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sampled last is not the runner's last sample any more: the step before the last leaves one token of those it
    knew, which is not sampled but read."""
    engine.load(PolicyWeights(0, policy.model))
    asked, done = {0: (PROMPTS[0][:20], 1.0), 1: (PROMPTS[1], 1.0)}, {}
    with engine._standing_still():
        core = engine.core
        monkeypatch.setattr(core, "patience", 0.0)
        scheduler, decode, preempt = core._engine.scheduler, core.steps._decode, core.steps._preempt
        pool, known, decoded = scheduler.kv_cache_manager.block_pool, {}, []

        def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
            known[request.request_id] = len(request._all_token_ids)
            return preempt(request, *args, **kwargs)

        def decoding(chosen: list[Any], *args: Any, **kwargs: Any) -> Any:
            decoded.extend((request.request_id, request.num_computed_tokens) for request in chosen)
            return decode(chosen, *args, **kwargs)

        monkeypatch.setattr(core.steps, "_preempt", preempting)
        monkeypatch.setattr(core.steps, "_decode", decoding)
        for i, (prompt, _) in asked.items():
            core.add(prompt, SamplingParams(200, seed=i), lambda result, i=i: done.__setitem__(i, result))
            for _ in range(20):
                core.step()
        held = pool.get_new_blocks(pool.get_num_free_blocks())
        while not known:
            core.step()
        pool.free_blocks(held)
        ((name, tokens),) = known.items()
        cached = (tokens - 1) // scheduler.block_size * scheduler.block_size
        monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", tokens - cached)  # one decodes: one is left over
        decoded.clear()
        while core.busy:
            core.step()
    first = min(computed for who, computed in decoded if who == name)
    assert first >= tokens
    assert first == tokens or DEVICE.type == "cuda"  # with two steps in flight vLLM's own way takes one more
    assert [len(completion.token_ids) for completion in done.values()] == [200, 200]
    agree(policy, asked, done)


def test_a_cancelled_request_leaves_the_engine(engine: Any) -> None:
    async def cancelled() -> None:
        work = asyncio.create_task(engine.generate(PROMPTS[0], SamplingParams(900)))
        await asyncio.to_thread(wait_until, lambda: engine.core.steps.running)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    wait_until(lambda: not engine.core.steps.running)


def test_a_prompt_that_does_not_fit_fails_alone(engine: Any) -> None:
    async def both() -> list[Any]:
        work = [engine.generate((1,) * 2000, SamplingParams(4)), engine.generate(PROMPTS[0], SamplingParams(4))]
        return await asyncio.gather(*work, return_exceptions=True)

    refused, fine = asyncio.run(both())
    assert isinstance(refused, EngineError)
    assert "2000 tokens" in str(refused)
    assert fine.finish is Finish.LENGTH


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are a CUDA engine's")
def test_everybody_decodes_in_our_graphs_with_our_attention(engine: Any) -> None:
    (graphs,) = (one for one in engine.core._graphs if isinstance(one, DecodeGraphs))
    assert graphs._attention._work


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="sleeping is a CUDA engine's")
def test_asleep_it_holds_nothing_and_awake_it_is_right(engine: Any, policy: Policy) -> None:
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] > awake
    with pytest.raises(EngineError, match="before weights were loaded"):
        engine.wake()
    shaken(policy)
    engine.load(PolicyWeights(5, policy.model))
    engine.wake()
    assert gap(policy, PROMPTS, sample(engine, PROMPTS)) < AGREE


# --- the last test of the module ends the engine ---


def test_a_step_that_raises_reaches_every_request_and_everything_later(engine: Any, policy: Policy) -> None:
    def broken() -> None:
        raise ZeroDivisionError("in a kernel")

    own = engine.core._engine.step_fn
    engine.core._engine.step_fn = broken

    async def both() -> list[Any]:
        work = (engine.generate(p, SamplingParams(4)) for p in PROMPTS[:2])
        return await asyncio.gather(*work, return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is second, "one failure, one exception"
    assert "ZeroDivisionError: in a kernel" in str(first)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.load(PolicyWeights(6, policy.model))
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        sample(engine, PROMPTS[:1])
    engine.core._engine.step_fn = own
