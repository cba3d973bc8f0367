"""Three steps under way: vLLM's own scheduler with our short way, against a model that computes in the order of launches.

The model stands for GPU and runner: it writes what a position has seen into the blocks that it was given, and reads, for
each new token, the blocks of all before it. Tokens are a function of those before them, so that whatever is computed of the
wrong block, of a token that is not known yet, or twice, comes out as another answer or as an error here.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from palingenesis.rl.engines.vllm.core import UNDER_WAY
from palingenesis.rl.engines.vllm.steps import Running, Steps
from palingenesis.rl.types import Completion, Finish, SamplingParams

VOCABULARY, BLOCK, SEQS, LONGEST = 50, 4, 8, 48


def following(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % VOCABULARY  # of a tuple of ints it is the same in every process


def answer(prompt: list[int], most: int, stops: list[int]) -> tuple[tuple[int, ...], Finish]:
    made: list[int] = []
    while True:
        made.append(following(prompt + made))
        if made[-1] in stops:
            return tuple(made), Finish.STOP
        if len(made) == most or len(prompt) + len(made) == LONGEST:
            return tuple(made), Finish.LENGTH


class Model:
    """The newer runner's account of its requests, and the cache's content."""

    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        self.cache: dict[int, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def execute(self, step: Any) -> Any:
        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            known = list(new.prefill_token_ids)
            self.requests[new.req_id] = SimpleNamespace(
                tokens=known, prefill=len(known), computed=new.num_computed_tokens, blocks=list(new.block_ids[0])
            )
        cached = step.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert self.requests[name].computed == computed, name
            self.requests[name].blocks += blocks[0] if blocks else []
        for name, count in step.num_scheduled_tokens.items():  # all that is written comes before all that is read
            own = self.requests[name]
            assert own.computed + count <= len(own.tokens), f"{name}: a token that is not known"
            for at in range(own.computed, own.computed + count):
                self.cache[self.slot(own, at)] = own.tokens[: at + 1]
        return self.sampled(step.num_scheduled_tokens)

    def slot(self, own: Any, at: int) -> int:
        return int(own.blocks[at // BLOCK]) * BLOCK + at % BLOCK

    def sampled(self, counts: dict[str, int]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        tokens: list[list[int]] = []
        for name, count in counts.items():
            own = self.requests[name]
            own.computed += count
            for at in range(own.computed):
                assert self.cache[self.slot(own, at)] == own.tokens[: at + 1], f"{name}: the block of somebody else"
            tokens.append([following(own.tokens[: own.computed])] if own.computed >= own.prefill else [])
            own.tokens += tokens[-1]
            self.lengths[name] = len(own.tokens)
        return ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: row for row, name in enumerate(counts)},
            sampled_token_ids=tokens,
            logprobs=[float(sum(one)) for one in tokens],
        )


def scheduler_of(engine: Any, blocks: int, budget: int) -> Any:
    """A scheduler of a GPU's engine: asynchronous, for the newer runner."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    config = copy.deepcopy(engine.core.llm.vllm_config)
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = SEQS, budget
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, BLOCK
    config.model_config.max_model_len = LONGEST
    own = engine.core._engine.scheduler
    cache = copy.deepcopy(own.kv_cache_config)
    cache.num_blocks = blocks
    for group in cache.kv_cache_groups:
        group.kv_cache_spec = replace(group.kv_cache_spec, block_size=BLOCK)
    made = AsyncScheduler(config, cache, own.structured_output_manager, BLOCK)
    made.use_v2_model_runner = True
    return made


@pytest.mark.parametrize("seed", range(24))
def test_three_steps_under_way_make_the_same_tokens(engine: Any, seed: int) -> None:
    from vllm import SamplingParams as Sampling
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    draw = random.Random(seed)
    few = LONGEST // BLOCK + 2 + draw.randrange(LONGEST // BLOCK * SEQS // 2)  # one sequence fits, all often do not
    scheduler = scheduler_of(engine, few, draw.choice([16, 32, 100]))
    steps = Steps(scheduler, LONGEST, UNDER_WAY)
    assert steps.shortcut
    steps._piece = BLOCK
    steps.take_over()
    model, queue, hasher = Model(), deque[Any](), get_request_block_hasher(BLOCK, sha256)
    shared = [draw.randrange(VOCABULARY) for _ in range(20)]
    expected: dict[str, tuple[tuple[int, ...], Finish]] = {}
    prompts: dict[str, int] = {}
    got: dict[str, Completion] = {}
    launched = came = 0
    while came < 30 or scheduler.has_requests() or queue:
        assert launched < 3000, "it does not end"
        while came < 30 and len(steps.running) < SEQS and draw.random() < 0.4:
            prompt = shared[: draw.randrange(16)] + [draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 8))]
            most, stops = draw.randrange(1, LONGEST - len(prompt)), draw.sample(range(VOCABULARY), draw.randrange(2))
            name, came = f"p{came}", came + 1
            request = Request(name, prompt, Sampling(max_tokens=most, stop_token_ids=stops, ignore_eos=True), None,
                              block_hasher=hasher)  # fmt: skip
            expected[name], prompts[name] = answer(prompt, most, stops), len(prompt)
            scheduler.add_request(request)
            steps.running[name] = Running(
                tuple(prompt), SamplingParams(most), lambda done, name=name: got.update({name: done}), request,
                stops=frozenset(stops),
            )  # fmt: skip
        if steps.running and draw.random() < 0.03:  # an abort
            name = draw.choice(list(steps.running))
            del steps.running[name], expected[name]
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            step = scheduler.schedule()
            queue.append((step, model.execute(step)))
            launched += 1
            if len(queue) < UNDER_WAY:
                continue
        if queue:
            scheduler.update_from_output(*queue.popleft())
    assert {name: (done.token_ids, done.finish) for name, done in got.items()} == expected
    for name, done in got.items():
        if done.finish is Finish.LENGTH:  # is known in advance: nothing is launched past it
            assert model.lengths[name] == prompts[name] + len(done.token_ids), name
    assert all(done.logprobs == tuple(map(float, done.token_ids)) for done in got.values())
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == few - 1, "blocks that nobody gave back"
    assert steps.short
    assert steps.mixed
