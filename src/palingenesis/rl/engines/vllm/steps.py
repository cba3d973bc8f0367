"""What happens between two steps of the GPU: vLLM's scheduler, and a short way for the requests that only decode.

    schedule ──> one token for each request that decodes, blocks at block boundaries only
        │    └─> prompts: vLLM's own scheduler, which sees nobody else
        └─ the step is marked with the version of the weights it is launched with

    read     ──> what decoded by the short way: append, stop check, blocks at boundaries; no outputs are made
             └─> all else: vLLM's own, and its outputs are handed to the requests

Why: profiled on one H200, 256 sequences of a Qwen3-0.6B shape, the GPU works 3.8 ms a step and vLLM's scheduler takes
4 to 5 ms of Python (half of it asking for blocks that nobody needs); for Qwen3.5-0.8B it is 3.3 ms and 8 ms
(bench/results/rollout.json). With asynchronous scheduling a step costs the larger of the two.

Invariants:
- After a step of the short way the scheduler's state is what its own way would have left, so that each step may take
  either (tests/vllm: same tokens, same log-probs, same blocks).
- The short way is taken only when everything it leaves out is absent: drafts, grammars, adapters, connectors, requests
  that are not ours, and steps in which somebody may have to be preempted for want of blocks. Whatever vLLM version lacks a
  name that it reads never takes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from palingenesis.rl.engines.vllm.graphs import changed
from palingenesis.rl.errors import EngineError
from palingenesis.rl.types import Completion, Finish, SamplingParams

MIN_PIECE = 256  # tokens of prompts: fewer a step would make a long prompt wait


@dataclass(eq=False)
class Running:
    """A request that decodes; `done` receives its completion, or the error that ended the engine.

    Attributes:
        request: vLLM's own record; its output ids are the tokens so far. Before it joins the batch, what vLLM makes the
            record of.
        logprobs, versions: one entry a token.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    done: Callable[[Completion | Exception], None]
    request: Any
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()

    def completion(self, finish: Finish) -> Completion:
        """What was sampled so far, ended by `finish`."""
        return Completion(
            token_ids=tuple(self.request.output_token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=finish,
        )


class Plan(NamedTuple):
    """Those that run. `chosen` decode, and `growing` of them may need a block; the `prompts` of others are not computed yet;
    the steps that are launched and not read make the last token of those that are `ending`."""

    chosen: list[Any]
    growing: list[Any]
    prompts: list[Any]
    ending: list[Any]


class Steps:
    """Stands between vLLM's engine core and its scheduler.

    Args:
        scheduler: vLLM's; `schedule` and `update_from_output` are exchanged on it.
        max_model_len: a sequence ends when it is this long.
        under_way: steps at most that are launched and not read.

    Attributes:
        running: our requests by vLLM's id.
        version: of the weights that the next step is launched with.
        seqs: sequences in the last step that was read.
        totals: `prefill`, `cached` and `generated` tokens of requests so far.
        short, mixed: steps that left vLLM's scheduler out, and steps that left only those who join to it.
        shortcut: the short way may be taken.
        in_graph: tokens of the largest step with prompts that a graph holds.
    """

    def __init__(self, scheduler: Any, max_model_len: int, under_way: int) -> None:
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.running: dict[str, Running] = {}
        self.version = 0
        self.seqs = 0
        self.totals: Counter[str] = Counter()
        self.short = self.mixed = 0
        self._preemptions = 0
        self._asynchronous = hasattr(scheduler, "_spec_token_placeholders")
        self._counts_in_flight = _requests_have("num_in_flight_tokens")
        self._unit = _block_unit(scheduler)
        self.in_graph = scheduler.vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._piece = max(MIN_PIECE, *_block_sizes(scheduler))  # of a hybrid's prompt nothing shorter is computed
        # With several kinds of cache, what is no longer needed is freed one token after a boundary or the prompt's end; with
        # tokens in flight counted, so many later.
        several = len(scheduler.kv_cache_config.kv_cache_groups) > 1
        in_flight = under_way - 1 if self._asynchronous and self._counts_in_flight else 0
        self._late = 1 + in_flight if several else 0
        self.shortcut = self._unit > 0 and _is_plain(scheduler)

    def take_over(self) -> None:
        """Stand in for the scheduler's own ways."""
        s = self.scheduler
        self._schedule, self._update = s.schedule, s.update_from_output
        self._preempt = s._preempt_request
        s.schedule, s.update_from_output, s._preempt_request = self.schedule, self.read, self.preempt

    def let_go(self) -> None:
        """Give the scheduler its own ways back."""
        s = self.scheduler
        del s.schedule, s.update_from_output, s._preempt_request

    def preempt(self, *args: Any, **kwargs: Any) -> Any:
        """Steps under way may now hold tokens of a request that does not run: they are read vLLM's own way."""
        self._preemptions += 1
        return self._preempt(*args, **kwargs)

    # --- launching a step ---

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """What the next step computes. `decoded`: whom `read` takes itself, None for nobody; `others`: the part of a step
        that is vLLM's own to read."""
        with self._nobody_resumes_too_early():
            plan = self._plan() if self.shortcut else None
            out = self._short_way(plan, *args, **kwargs) if plan else None
            if out is None:
                # vLLM's own rule, which allows for drafts that are refused, would launch one more step for these where two
                # are under way.
                with self._without(plan.ending if plan else []):
                    out = self._schedule(*args, **kwargs)
                out.decoded, out.others = None, out
        out.weights_version = self.version
        out.preemptions = self._preemptions
        return out

    def _nobody_resumes_too_early(self) -> AbstractContextManager[None]:
        """One that was preempted is computed anew from the tokens that are known: not before all of its own are read."""
        s = self.scheduler
        if self._preemptions and any(request.num_output_placeholders for request in s.waiting):
            return changed(s, max_num_running_reqs=len(s.running))
        return nullcontext()

    def _short_way(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        """One token for everybody who decodes, and what vLLM schedules of the others; None where its own way has to decide
        about all of them. Nothing is changed before that is settled."""
        s = self.scheduler
        chosen, growing, prompts, ending = plan
        if not chosen or len(chosen) > s.max_num_scheduled_tokens or not self._are_free(2 * len(growing)):
            return None
        joining = s.get_num_unfinished_requests() > len(s.running) and len(s.running) < s.max_num_running_reqs
        if not prompts and not joining:
            others, out = None, self._decode(chosen, growing, self._nothing_scheduled(), counted=False)
        elif not self._fits(len(chosen), len(growing), [*prompts, *s.waiting]):
            return None
        else:
            # First: a prompt must not find blocks whose content this very step computes.
            out = self._schedule_others(chosen, ending, *args, **kwargs)
            others = copy(out) if out.num_scheduled_tokens else None
            out = self._decode(chosen, growing, out, counted=others is not None)
        out.decoded, out.others = [request.request_id for request in chosen], others
        self.short += others is None
        self.mixed += others is not None
        return out

    def _plan(self) -> Plan | None:
        """Who runs; None where that is not ours to say."""
        s = self.scheduler
        plan = Plan([], [], [], [])
        chosen, growing, prompts, ending = plan
        if s._pause_state.value:
            return None
        for request in s.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if request.request_id not in self.running:
                return None
            prompt = request.num_prompt_tokens
            # One that was preempted computes its own tokens anew, and has not sampled what comes next before they end.
            again = request.is_prefill_chunk
            if computed < prompt or again or len(request._all_token_ids) + placeholders - computed != 1:
                prompts.append(request)
                continue
            if (placeholders and computed + 1 >= prompt + request.max_tokens) or computed >= self.max_model_len - 1:
                ending.append(request)
                continue
            chosen.append(request)
            if computed % self._unit <= self._late or computed - prompt < self._late:
                growing.append(request)
        return plan

    def _are_free(self, blocks: int) -> bool:
        """Nobody has to be preempted for that many blocks of every kind of cache."""
        s = self.scheduler
        return bool(
            s.kv_cache_manager.block_pool.get_num_free_blocks() >= blocks * len(s.kv_cache_config.kv_cache_groups)
        )

    def _fits(self, decoding: int, growing: int, prompts: list[Any]) -> bool:
        """There is room for `prompts` beside those that decode, and vLLM has nobody else to schedule."""
        s = self.scheduler
        if len(s.waiting) != s.get_num_unfinished_requests() - len(s.running) or decoding >= s.max_num_scheduled_tokens:
            return False  # versions differ in the queues that they have beside `waiting`
        blocks = sum((r.num_tokens - r.num_computed_tokens) // self._unit + 2 for r in prompts)
        return self._are_free(2 * growing + blocks) and all(r.request_id in self.running for r in prompts)

    def _schedule_others(self, chosen: list[Any], ending: list[Any], *args: Any, **kwargs: Any) -> Any:
        """vLLM schedules the prompts and those that wait into the places and tokens that these leave: no more tokens than
        its largest graph holds, because a larger step launches kernel by kernel."""
        s = self.scheduler
        before = set(s.prev_step_scheduled_req_ids)
        left, in_graph = s.max_num_scheduled_tokens - len(chosen), self.in_graph - len(chosen)
        budget = min(left, in_graph) if in_graph >= self._piece else left
        with changed(s, max_num_scheduled_tokens=budget), self._without([*chosen, *ending]):
            out = self._schedule(*args, **kwargs)
        s.prev_step_scheduled_req_ids.update(before)
        return out

    @contextmanager
    def _without(self, others: list[Any]) -> Iterator[None]:
        """The scheduler sees nothing of `others` meanwhile but that their places are taken."""
        s = self.scheduler
        if not others:
            yield
            return
        before, hidden = s.running, {request.request_id for request in others}
        with changed(s, max_num_running_reqs=s.max_num_running_reqs - len(others)):
            s.running = [request for request in before if request.request_id not in hidden]
            try:
                yield
            finally:  # in their order; those that were preempted are gone, and who joined comes last
                left = hidden | {request.request_id for request in s.running}
                known = {request.request_id for request in before}
                stay = [request for request in before if request.request_id in left]
                s.running = stay + [request for request in s.running if request.request_id not in known]

    def _decode(self, chosen: list[Any], growing: list[Any], out: Any, *, counted: bool) -> Any:
        """Add one token of `chosen` to what is scheduled so far, and move the scheduler's state. vLLM has `counted` the
        step already where it scheduled somebody."""
        s, manager = self.scheduler, self.scheduler.kv_cache_manager
        blocks = {r.request_id: manager.allocate_slots(r, 1).get_block_ids(allow_none=True) for r in growing}
        self._add(out, chosen, blocks)
        for request in chosen:
            request.num_computed_tokens += 1
            if self._asynchronous:
                request.num_output_placeholders += 1
                request.next_decode_eligible_step = s.current_step + 1
            if self._counts_in_flight:
                request.num_in_flight_tokens += 1
        if s.defer_block_free:
            s.sched_step_seq += not counted
            for request in chosen:
                request.last_sched_seq = s.sched_step_seq
        return out

    def _nothing_scheduled(self) -> Any:
        """The beginning of a step."""
        from vllm.v1.core.sched.output import SchedulerOutput

        s = self.scheduler
        s.current_step += 1
        s.kv_cache_manager.new_step_starts()
        out = SchedulerOutput.make_empty()
        out.finished_req_ids, s.finished_req_ids = s.finished_req_ids, set()
        out.preempted_req_ids, s.reset_preempted_req_ids = s.reset_preempted_req_ids, set()
        return out

    def _add(self, out: Any, chosen: list[Any], blocks: dict[str, Any]) -> None:
        """What the model runner is told: one more token for each of `chosen`, new blocks for some."""
        from vllm.v1.core.sched.output import CachedRequestData

        s, manager = self.scheduler, self.scheduler.kv_cache_manager
        names = [request.request_id for request in chosen]
        others, cached = list(out.num_scheduled_tokens), out.scheduled_cached_reqs
        out.scheduled_cached_reqs = CachedRequestData(
            req_ids=[*names, *cached.req_ids],
            resumed_req_ids=cached.resumed_req_ids,
            new_token_ids=[],
            all_token_ids=dict(cached.all_token_ids),
            new_block_ids=[*map(blocks.get, names), *cached.new_block_ids],
            num_computed_tokens=[*(r.num_computed_tokens for r in chosen), *cached.num_computed_tokens],
            num_output_tokens=[
                *(r.num_computed_tokens + 1 - r.num_prompt_tokens for r in chosen),
                *cached.num_output_tokens,
            ],
        )
        out.num_scheduled_tokens = dict.fromkeys(names, 1) | out.num_scheduled_tokens
        out.total_num_scheduled_tokens += len(names)
        if hasattr(out, "num_common_prefix_blocks"):
            out.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(names[0])
        fresh = manager.take_new_block_ids()
        if s.needs_kv_cache_zeroing:
            out.new_block_ids_to_zero = [*(out.new_block_ids_to_zero or ()), *(fresh or ())] or None
        if hasattr(manager, "take_boundary_state_offloads"):
            manager.take_boundary_state_offloads()  # offers to a connector that is not there; they would pile up
        if not s.use_v2_model_runner:
            for name in set(names) - s.prev_step_scheduled_req_ids:
                out.scheduled_cached_reqs.all_token_ids[name] = s.requests[name].all_token_ids.copy()
            s.prev_step_scheduled_req_ids.clear()
            s.prev_step_scheduled_req_ids.update(names, others)

    # --- reading a step ---

    def read(self, scheduled: Any, output: Any) -> Any:
        """Take a step's tokens into the scheduler and to our requests."""
        self.seqs = len(scheduled.num_scheduled_tokens)
        others = scheduled
        if scheduled.decoded is not None and scheduled.preemptions == self._preemptions:
            self._take(scheduled, output)
            others = scheduled.others
        if others is None:
            return {}
        outputs = self._update(others, output)
        self._take_outputs(output, scheduled.weights_version, outputs)
        return outputs

    def _take(self, scheduled: Any, output: Any) -> None:
        s = self.scheduler
        if s.defer_block_free and scheduled.others is None:
            s.processed_step_seq += 1
            s._drain_deferred_frees()
        tokens, rows, logprobs = output.sampled_token_ids, output.req_id_to_index, output.logprobs
        version, unit, longest = scheduled.weights_version, self._unit, self.max_model_len
        ended: list[tuple[str, Finish]] = []
        for name in scheduled.decoded:
            request = s.requests.get(name)
            if request is None:  # aborted
                continue
            row = rows[name]
            token = tokens[row][0]
            own = self.running[name]
            own.logprobs.append(logprobs[row])
            own.versions.append(version)
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            length = len(request._all_token_ids)
            if self._asynchronous:
                request.num_output_placeholders -= 1
            if self._counts_in_flight:
                request.num_in_flight_tokens -= 1
            if length % unit <= 1:
                self._at_boundary(request)
            if token in own.stops:
                ended.append((name, Finish.STOP))
            elif length - request.num_prompt_tokens >= request.max_tokens or length >= longest:
                ended.append((name, Finish.LENGTH))
        if ended:
            self._end(ended)

    def _at_boundary(self, request: Any) -> None:
        """A block was filled by this token or by the one before it: what its prefix cache entry needs."""
        request.update_block_hashes()
        if self._asynchronous:
            done = request.num_computed_tokens - request.num_output_placeholders
            self.scheduler.kv_cache_manager.cache_blocks(request, done)

    def _end(self, ended: list[tuple[str, Finish]]) -> None:
        from vllm.v1.request import RequestStatus

        s = self.scheduler
        status = {
            Finish.STOP: RequestStatus.FINISHED_STOPPED,
            Finish.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
        }
        for name, finish in ended:
            request = s.requests[name]
            request.status = status[finish]
            s._free_request(request)
        s.running = [request for request in s.running if not request.is_finished()]
        for name, finish in ended:
            self.finish(name, finish)

    def _take_outputs(self, output: Any, version: int, outputs: Any) -> None:
        """vLLM's own way: hand its outputs on."""
        rows, logprobs = output.req_id_to_index, output.logprobs
        for of_client in outputs.values():
            for out in of_client.outputs:
                own = self.running.get(out.request_id)
                if own is None:  # aborted, or not ours
                    continue
                if out.new_token_ids:
                    own.logprobs.append(logprobs[rows[out.request_id]])
                    own.versions.append(version)
                if out.prefill_stats is not None:
                    self.totals["cached"] += out.prefill_stats.num_cached_tokens
                    self.totals["prefill"] += len(own.prompt) - out.prefill_stats.num_cached_tokens
                if out.finish_reason is not None:
                    reason = str(out.finish_reason)
                    if reason not in ("stop", "length"):
                        raise EngineError(f"vLLM ended a request of {len(own.prompt)} prompt tokens with {reason!r}.")
                    self.finish(out.request_id, Finish.STOP if reason == "stop" else Finish.LENGTH)

    def finish(self, name: str, finish: Finish) -> None:
        own = self.running.pop(name)
        self.totals["generated"] += len(own.versions)
        own.done(own.completion(finish))


# What the short way reads or calls, beyond what every scheduler has.
_NAMES = (
    "running",
    "waiting",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "_pause_state",
    "current_step",
    "finished_req_ids",
    "reset_preempted_req_ids",
    "needs_kv_cache_zeroing",
    "use_v2_model_runner",
    "prev_step_scheduled_req_ids",
    "defer_block_free",
    "sched_step_seq",
    "processed_step_seq",
    "_drain_deferred_frees",
    "_preempt_request",
    "_free_request",
)


def _is_plain(scheduler: Any) -> bool:
    """Nothing is configured that the short way leaves out."""
    if not all(hasattr(scheduler, name) for name in _NAMES) or not _requests_have("is_prefill_chunk"):
        return False
    config = scheduler.vllm_config
    return not (
        scheduler.num_spec_tokens
        or scheduler.connector is not None
        or scheduler.ec_connector is not None
        or scheduler.lora_config
        or scheduler.log_stats
        or scheduler.parallel_config.pipeline_parallel_size > 1
        or getattr(config, "kv_events_config", None) is not None
        or getattr(scheduler, "enable_return_routed_experts", False)
        or getattr(scheduler, "return_sampling_mask", False)
        or getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs) != scheduler.max_num_running_reqs
        or getattr(getattr(scheduler.kv_cache_manager, "coordinator", None), "enable_partial_hash_hits", False)
        or getattr(scheduler, "aux_output_connector", None) is not None
    )


def _requests_have(name: str) -> bool:
    """Versions differ in what they keep of a request."""
    from vllm.v1.request import Request

    return name in Request.__init__.__code__.co_names


def _block_unit(scheduler: Any) -> int:
    """Tokens between two boundaries at which any block of any cache group, or its hash, can change; 0 if unknown."""
    sizes, pool = _block_sizes(scheduler), scheduler.kv_cache_manager.block_pool
    return math.gcd(*sizes, pool.hash_block_size) if all(sizes) and hasattr(pool, "hash_block_size") else 0


def _block_sizes(scheduler: Any) -> list[int]:
    """Tokens a block of each cache group; 0 where unknown."""
    return [getattr(group.kv_cache_spec, "block_size", 0) for group in scheduler.kv_cache_config.kv_cache_groups]
