"""Collect groups for the trainer: draw prompts, roll them out, score them, replace those that carry no gradient.

    draw ──> groups in flight (tasks of the loop) ──finished──┬─ informative ──> ready ──oldest first──> ScoredBatch
      ^                                             │         └─ else ──────────────────> set aside ──────────┘
      └── top up: missing / (1 - expected rate) <───┘

One algorithm for every `max_staleness` s. Expected informative groups that no step has trained yet are kept at (1 + s) x
`batch_prompts`, those the trainer is at included, and never more than the rest of the run needs. With s = 0 groups are
launched only inside `collect` and when none is in flight; with s >= 1 also whenever one finishes, a batch is handed over
or new weights are published, so that generation, tools and rewards go on while the trainer's thread trains, without its
help.

Invariants:
- Every informative group is trained exactly once; at s = 0 those beyond a full batch are set aside, at s >= 1 they wait
  for the next one. A batch waits for the groups that are due and holds them all: no group is dropped for its age.
- No trained token is older than s versions.
- At s = 0 what is launched depends on the data, the seed and the scores before it, never on timing: a resumed run draws
  what an unbroken one would have drawn.
- `state_dict` is of the last batch handed over: the prompts of groups that were under way then are drawn again first.
- The first failure of a group ends them all and is raised by the next `collect`.

Everything but `state_dict` and `exhausted` runs on the rollout loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.rl.data.sampler import Sampler
from palingenesis.rl.observe.metrics import engine_metrics, mean, relative_timeline
from palingenesis.rl.rewards.bind import gather
from palingenesis.rl.rollout.episode import Episodes, request_seed
from palingenesis.rl.rollout.outages import Outages
from palingenesis.rl.rollout.score import Scorer
from palingenesis.rl.rollout.staleness import Landed, Launch, staleness
from palingenesis.rl.types import EngineUsage, Group, Rollout, Row, ScoredBatch

RATE_MEMORY = 0.7  # weight of the past in the running zero-variance rate: a step's own rate is noisy, the drift is slow


class Collector:
    """Turns prompts into scored batches.

    Args:
        batch_prompts: informative groups a step trains on.
        group_size: rollouts of one prompt.
        max_refill: extra groups a step may launch, as a multiple of `batch_prompts`.
        max_staleness: versions a trained token may lag behind.
        steps: optimizer steps of the whole run.
        temperature: of the softmax the policy samples from.
        seed: with a group's number and a rollout's index it decides every draw.
    """

    def __init__(
        self,
        episodes: Episodes,
        scorer: Scorer,
        sampler: Sampler,
        *,
        batch_prompts: int,
        group_size: int,
        max_refill: float,
        max_staleness: int,
        steps: int,
        max_skipped: float,
        temperature: float,
        seed: int,
    ) -> None:
        self.episodes = episodes
        self.scorer = scorer
        self.sampler = sampler
        self.batch_prompts = batch_prompts
        self.group_size = group_size
        self.max_groups = batch_prompts + math.floor(max_refill * batch_prompts)
        self.max_staleness = max_staleness
        self.steps = steps
        self.temperature = temperature
        self.seed = seed
        self.outages = Outages(max_skipped)
        self._rate = 0.0
        self._number = 0
        self._version = 0
        self._handed = 0  # batches handed to the trainer, in this process or before it
        self._credit = (1 + max_staleness) * self.max_groups  # groups that may be launched
        self._flying: dict[asyncio.Task[Group], Launch] = {}
        self._landed: list[Landed] = []  # in no batch yet
        self._fates: list[bool] = []  # of the groups finished since the last batch: carried no gradient?
        self._usage = EngineUsage()  # counted and not reported yet
        self._failure: BaseException | None = None
        self._over = False
        self._state: dict[str, Any] | None = None

    @property
    def exhausted(self) -> bool:
        """Every prompt is retired and every group has been handed over."""
        return self.sampler.remaining == 0 and not self._flying and not self._landed

    async def collect(self, step: int) -> ScoredBatch:
        """The batch of optimizer step `step`; fewer than `batch_prompts` groups, even none, when refills are spent.

        Raises:
            RewardError, EngineError, DataError, OutageError: also of a group that failed since the last call.
        """
        self._version = step - 1
        self._handed = step - 1
        while True:
            if self._failure is not None:
                raise self._failure
            self._top_up(collecting=True)
            if not self._flying or self._is_complete(step):
                return self._hand_over(step)
            await asyncio.wait(self._flying, return_when=asyncio.FIRST_COMPLETED)

    def published(self, version: int) -> None:
        """The engine samples with weights `version` from here on."""
        self._version = version
        self._top_up()

    def close(self) -> None:
        """End the groups in flight; no more are launched."""
        self._over = True
        for task in self._flying:
            task.cancel()

    # --- launching ---

    def _top_up(self, collecting: bool = False) -> None:
        """Launch so many groups that about as many will be informative as are missing.

        What is launched now can be in the batches up to `version + 1 + max_staleness`. So while the trainer is at the
        batch it took last, one batch less may be under way than once the new weights are there.
        """
        if self._over or not self.sampler.remaining:
            return
        if not self.max_staleness and (self._flying or not collecting):
            return
        informative = 1.0 - min(self._rate, 0.9)
        batches = min(self._version + 1 + self.max_staleness, self.steps) - self._handed
        missing = batches * self.batch_prompts - len(self._ready()) - len(self._flying) * informative
        count = math.ceil(missing / informative) if missing > 1e-9 else 0  # a sum of rounded shares is no group
        for row in self.sampler.draw(min(count, self._credit)):
            self._launch(row)

    def _launch(self, row: Row) -> None:
        launch = Launch(row, self._number, self._version, self._handed)
        task = asyncio.get_running_loop().create_task(self._group(row, launch.number))
        self._flying[task] = launch
        self._number += 1
        self._credit -= 1
        task.add_done_callback(self._land)

    async def _group(self, row: Row, number: int) -> Group:
        seeds = [request_seed(self.seed, "train", number, index, 0) for index in range(self.group_size)]
        async with self.episodes.group(row, seeds, temperature=self.temperature) as episodes:
            return Group(row, await self.scorer.score(episodes), number)

    # --- landing ---

    def _land(self, task: asyncio.Task[Group]) -> None:
        launch = self._flying[task]
        if not task.cancelled() and not task.exception():  # before it leaves `_flying`: another thread asks `exhausted`
            self._landed.append(Landed(launch, task.result(), self._handed))
        del self._flying[task]
        if task.cancelled():
            if not self._over:
                self._fail(RuntimeError(f"group {launch.number} was cancelled, and not by its collector"))
        elif error := task.exception():
            self._fail(error)
        else:
            group = task.result()
            self._fates.append(not group.informative)
            if group.scored_rewards:
                self.sampler.observe(group.row.id, mean(group.scored_rewards))
            self._top_up()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self.close()

    # --- handing over ---

    def _ready(self) -> list[Landed]:
        """Informative groups that wait for a batch, the oldest first."""
        return sorted((one for one in self._landed if one.group.informative), key=lambda one: one.launch.number)

    def _is_complete(self, step: int) -> bool:
        """Nothing in flight is due, and the batch is full or as many groups as a step may launch have finished for it.

        A step whose refills are spent does not drain the engine for what later steps launched.
        """
        if any(launch.is_due(step, self.max_staleness) for launch in self._flying.values()):
            return False
        return len(self._ready()) >= self.batch_prompts or len(self._fates) >= self.max_groups

    def _hand_over(self, step: int) -> ScoredBatch:
        ready = self._ready()
        size = self.batch_prompts
        if self.max_staleness:  # a batch grows to hold every group that is due
            size = max(size, sum(one.launch.is_due(step, self.max_staleness) for one in ready))
        chosen, left = ready[:size], ready[size:] if self.max_staleness else []
        kept, taken = {id(one) for one in left}, {id(one) for one in chosen}
        gone = sorted((one for one in self._landed if id(one) not in kept), key=lambda one: one.launch.number)
        self._landed = left
        self._learn_rate()
        self.outages.observe([rollout for one in gone for rollout in one.group.rollouts])
        batch = self._batch(step, [o for o in gone if id(o) in taken], [o for o in gone if id(o) not in taken])
        self._handed = step
        self._credit = min(self._credit + self.max_groups, (1 + self.max_staleness) * self.max_groups)
        self._state = self._snapshot()
        self._top_up()
        return batch

    def _learn_rate(self) -> None:
        if self._fates:
            share = mean([float(dull) for dull in self._fates])
            self._rate = RATE_MEMORY * self._rate + (1.0 - RATE_MEMORY) * share
            self._fates = []

    def _batch(self, step: int, chosen: Sequence[Landed], aside: Sequence[Landed]) -> ScoredBatch:
        groups = tuple(one.group for one in chosen)
        usage = self._usage + self.episodes.engine.usage()
        self._usage = EngineUsage()
        return ScoredBatch(
            step=step,
            groups=groups,
            set_aside=tuple(one.group for one in aside),
            metrics={
                "groups/continued": float(sum(one.continued for one in (*chosen, *aside))),
                "groups/retired": float(self.sampler.retired),
                "groups/expected_zero_variance": self._rate,
                **staleness(groups, step, self.max_staleness),
                **engine_metrics(usage),
            },
            timeline=relative_timeline(usage),
        )

    # --- evaluation ---

    async def evaluate(self, rows: Sequence[Row], *, temperature: float, samples: int = 1) -> list[list[Rollout]]:
        """Roll out and score held-out rows, `samples` times each; touches no training state.

        The engine's usage until now stays the next batch's; what it does from here to the end is nobody's, the share of
        training groups in flight included.
        """

        async def one(row: Row) -> list[Rollout]:
            seeds = [request_seed(self.seed, "eval", row.id, index) for index in range(samples)]
            async with self.episodes.group(row, seeds, temperature=temperature) as episodes:
                return list(await self.scorer.score(episodes, shaped=False))

        self._usage += self.episodes.engine.usage()
        try:
            return await gather(one(row) for row in rows)
        finally:
            self.episodes.engine.usage()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state after the last batch that was handed over."""
        return self._snapshot() if self._state is None else self._state

    def _snapshot(self) -> dict[str, Any]:
        under_way = [*self._flying.values(), *(one.launch for one in self._landed)]
        under_way.sort(key=lambda launch: launch.number)
        return {
            "sampler": self.sampler.state_dict(unused=[launch.row for launch in under_way]),
            "number": self._number,
            "rate": self._rate,
            "outages": self.outages.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if this process had collected every step before.

        Raises:
            CheckpointError: the state is of another data set.
        """
        self.sampler.load_state_dict(state["sampler"])
        self._number = state["number"]
        self._rate = state["rate"]
        self.outages.load_state_dict(state["outages"])
