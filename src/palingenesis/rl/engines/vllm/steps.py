"""What happens between two steps of the GPU: vLLM's scheduler, and a short way through steps that only decode.

    schedule ──> decoding only? ──yes──> one token for each running request; blocks at block boundaries only
        │                       └─no──> vLLM's own
        └─ the step is marked with the version of the weights it is launched with

    read     ──> a step of the short way: append, stop check, blocks at boundaries; no outputs are made
             └─> any other: vLLM's own, and its outputs are handed to the requests

Why: profiled on one H200, 256 sequences of a Qwen3-0.6B shape, the GPU works 3.8 ms a step and vLLM's scheduler takes
4 to 5 ms of Python (half of it asking for blocks that nobody needs); for Qwen3.5-0.8B it is 3.3 ms and 8 ms
(bench/results/rollout.json). With asynchronous scheduling a step costs the larger of the two.

Invariants:
- After a step of the short way the scheduler's state is what its own way would have left, so that each step may take
  either (tests/vllm: same tokens, same log-probs, same blocks).
- The short way is taken only when everything it leaves out is absent: waiting or unfinished prompts, preemption, drafts,
  grammars, adapters, connectors, requests that are not ours, too few free blocks. Whatever vLLM version lacks a name
  that it reads never takes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from palingenesis.rl.errors import EngineError
from palingenesis.rl.types import Completion, Finish, SamplingParams


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


class Steps:
    """Stands between vLLM's engine core and its scheduler.

    Args:
        scheduler: vLLM's; `schedule` and `update_from_output` are exchanged on it.
        max_model_len: a sequence ends when it is this long.

    Attributes:
        running: our requests by vLLM's id.
        version: of the weights that the next step is launched with.
        seqs: sequences in the last step that was read.
        totals: `prefill`, `cached` and `generated` tokens of requests so far.
        short: steps that took the short way.
        shortcut: the short way may be taken.
    """

    def __init__(self, scheduler: Any, max_model_len: int) -> None:
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.running: dict[str, Running] = {}
        self.version = 0
        self.seqs = 0
        self.totals: Counter[str] = Counter()
        self.short = 0
        self._preemptions = 0
        self._asynchronous = hasattr(scheduler, "_spec_token_placeholders")
        self._counts_in_flight = _counts_in_flight()
        self._unit = _block_unit(scheduler)
        # With several kinds of cache, what a block no longer needs is freed one token after its boundary.
        self._late = 1 if len(scheduler.kv_cache_config.kv_cache_groups) > 1 else 0
        self.shortcut = self._unit > 0 and _is_plain(scheduler)
        self.take_over()

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
        """What the next step computes."""
        scheduled = self._decode() if self.shortcut and self._decodes_only() else None
        if scheduled is None:
            scheduled = self._schedule(*args, **kwargs)
            scheduled.is_short = False
        scheduled.weights_version = self.version
        return scheduled

    def _decodes_only(self) -> bool:
        """Nobody can join: nobody waits, or the batch is full; and every prompt is computed."""
        s = self.scheduler
        running = len(s.running)
        closed = s.get_num_unfinished_requests() == running or running >= s.max_num_running_reqs
        return running > 0 and closed and not s._inflight_prefills

    def _decode(self) -> Any:
        """One token for every running request, or None where vLLM's own way has to decide. Nothing is changed before
        that is settled."""
        s, manager = self.scheduler, self.scheduler.kv_cache_manager
        chosen: list[Any] = []
        growing: list[Any] = []
        for request in s.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if len(request._all_token_ids) + placeholders - computed != 1 or request.request_id not in self.running:
                return None
            ends = request.num_prompt_tokens + request.max_tokens
            if (placeholders and computed + 2 - placeholders >= ends) or computed >= self.max_model_len - 1:
                continue  # the step under way is its last
            chosen.append(request)
            if computed % self._unit <= self._late:
                growing.append(request)
        if not chosen or len(chosen) > s.max_num_scheduled_tokens or s._pause_state.value:
            return None
        groups = len(s.kv_cache_config.kv_cache_groups)
        if manager.block_pool.get_num_free_blocks() < 2 * groups * len(growing):
            return None  # somebody may have to be preempted
        s.current_step += 1
        manager.new_step_starts()
        blocks = {r.request_id: manager.allocate_slots(r, 1).get_block_ids(allow_none=True) for r in growing}
        scheduled = self._scheduled(chosen, blocks)
        for request in chosen:
            request.num_computed_tokens += 1
            if self._asynchronous:
                request.num_output_placeholders += 1
                request.next_decode_eligible_step = s.current_step + 1
            if self._counts_in_flight:
                request.num_in_flight_tokens += 1
        if s.defer_block_free:
            s.sched_step_seq += 1
            for request in chosen:
                request.last_sched_seq = s.sched_step_seq
        s.finished_req_ids, s.reset_preempted_req_ids = set(), set()
        self.short += 1
        return scheduled

    def _scheduled(self, chosen: list[Any], blocks: dict[str, Any]) -> Any:
        """What the model runner is told: one more token for each of `chosen`, new blocks for some."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        s, manager = self.scheduler, self.scheduler.kv_cache_manager
        names = [request.request_id for request in chosen]
        counts = dict.fromkeys(names, 1)
        out = SchedulerOutput.make_empty()
        out.scheduled_cached_reqs = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks.get(name) for name in names],
            num_computed_tokens=[request.num_computed_tokens for request in chosen],
            num_output_tokens=[request.num_computed_tokens + 1 - request.num_prompt_tokens for request in chosen],
        )
        out.num_scheduled_tokens = counts
        out.total_num_scheduled_tokens = len(counts)
        out.finished_req_ids = s.finished_req_ids
        out.preempted_req_ids = s.reset_preempted_req_ids
        if hasattr(out, "num_common_prefix_blocks"):
            out.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(names[0])
        fresh = manager.take_new_block_ids()
        out.new_block_ids_to_zero = (fresh or None) if s.needs_kv_cache_zeroing else None
        if hasattr(manager, "take_boundary_state_offloads"):
            manager.take_boundary_state_offloads()  # offers to a connector that is not there; they would pile up
        if not s.use_v2_model_runner:
            rejoining = counts.keys() - s.prev_step_scheduled_req_ids
            out.scheduled_cached_reqs.all_token_ids = {n: s.requests[n].all_token_ids.copy() for n in rejoining}
            s.prev_step_scheduled_req_ids.clear()
            s.prev_step_scheduled_req_ids.update(counts)
        out.is_short = True
        out.preemptions = self._preemptions
        return out

    # --- reading a step ---

    def read(self, scheduled: Any, output: Any) -> Any:
        """Take a step's tokens into the scheduler and to our requests."""
        self.seqs = len(scheduled.num_scheduled_tokens)
        if scheduled.is_short and scheduled.preemptions == self._preemptions:
            self._take(scheduled, output)
            return {}
        outputs = self._update(scheduled, output)
        self._take_outputs(scheduled, output, outputs)
        return outputs

    def _take(self, scheduled: Any, output: Any) -> None:
        s = self.scheduler
        if s.defer_block_free:
            s.processed_step_seq += 1
            s._drain_deferred_frees()
        tokens, rows, logprobs = output.sampled_token_ids, output.req_id_to_index, output.logprobs
        version, unit, longest = scheduled.weights_version, self._unit, self.max_model_len
        ended: list[tuple[str, Finish]] = []
        for name in scheduled.num_scheduled_tokens:
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

    def _take_outputs(self, scheduled: Any, output: Any, outputs: Any) -> None:
        """vLLM's own way: hand its outputs on."""
        rows, logprobs = output.req_id_to_index, output.logprobs
        for of_client in outputs.values():
            for out in of_client.outputs:
                own = self.running.get(out.request_id)
                if own is None:  # aborted, or not ours
                    continue
                if out.new_token_ids:
                    own.logprobs.append(logprobs[rows[out.request_id]])
                    own.versions.append(scheduled.weights_version)
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
    "max_num_running_reqs",
    "_inflight_prefills",
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
    if not all(hasattr(scheduler, name) for name in _NAMES):
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
        or getattr(scheduler, "aux_output_connector", None) is not None
    )


def _counts_in_flight() -> bool:
    """Newer schedulers count the tokens of steps under way."""
    from vllm.v1.request import Request

    return "num_in_flight_tokens" in Request.__init__.__code__.co_names


def _block_unit(scheduler: Any) -> int:
    """Tokens between two boundaries at which any block of any cache group, or its hash, can change; 0 if unknown."""
    try:
        sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        return math.gcd(*sizes, scheduler.kv_cache_manager.block_pool.hash_block_size)
    except AttributeError:
        return 0
