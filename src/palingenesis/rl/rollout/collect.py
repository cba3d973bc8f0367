"""Collect one step's groups: draw prompts, roll them out, score them, replace those that carry no gradient.

    draw ──> a round of groups, all at once ──> informative? ──enough──> ScoredBatch
      ^                                             │ missing
      └────────── missing / (1 - expected rate) ────┘   at most max_refill x batch_prompts extra groups a step

Invariants:
- What a round launches depends on the data, the seed and the scores before it, never on timing: a resumed run draws what
  an unbroken one would have drawn.
- Every group drawn is in the batch it was drawn for, either to be trained or set aside.
- `state_dict` is read between steps: a step that was cut short is drawn again from the state before it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.rl.data.sampler import Sampler
from palingenesis.rl.errors import OutageError
from palingenesis.rl.observe.metrics import engine_metrics, mean, relative_timeline
from palingenesis.rl.rollout.episode import Episodes, request_seed
from palingenesis.rl.rollout.score import Scorer
from palingenesis.rl.types import Group, Rollout, Row, ScoredBatch

RATE_MEMORY = 0.7  # weight of the past in the running zero-variance rate: a step's own rate is noisy, the drift is slow
OUTAGE_BATCHES = 3  # batches over which `train.max_skipped` is judged


class Outages:
    """Stops a run whose samples cannot be scored, before it passes for training.

    Args:
        limit: share of skipped rollouts over the last `OUTAGE_BATCHES` batches that ends the run.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._recent: deque[tuple[int, int]] = deque(maxlen=OUTAGE_BATCHES)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Count a batch.

        Raises:
            OutageError: naming the source that skipped most and its last reason.
        """
        skipped = [r.score for r in rollouts if not r.score.scored]
        self._recent.append((len(skipped), len(rollouts)))
        share = sum(s for s, _ in self._recent) / max(1, sum(n for _, n in self._recent))
        if len(self._recent) < OUTAGE_BATCHES or share <= self.limit or not skipped:
            return
        source, count = Counter(score.skip_source for score in skipped).most_common(1)[0]
        reason = next(score.skip_reason for score in reversed(skipped) if score.skip_source == source)
        raise OutageError(
            f"{share:.0%} of the rollouts of the last {OUTAGE_BATCHES} batches could not be scored "
            f"(train.max_skipped is {self.limit:g}). Most were skipped by {source!r} ({count} in this batch): {reason}"
        )

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in self._recent]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        self._recent = deque(((s, n) for s, n in state), maxlen=OUTAGE_BATCHES)


class Collector:
    """Turns prompts into scored batches.

    Args:
        batch_prompts: informative groups a step trains on.
        group_size: rollouts of one prompt.
        max_refill: extra groups a step may launch, as a multiple of `batch_prompts`.
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
        self.temperature = temperature
        self.seed = seed
        self.outages = Outages(max_skipped)
        self._rate = 0.0
        self._number = 0

    @property
    def exhausted(self) -> bool:
        """Every prompt is retired."""
        return self.sampler.remaining == 0

    async def collect(self, step: int) -> ScoredBatch:
        """The batch of optimizer step `step`; fewer than `batch_prompts` groups, even none, when refills are spent.

        Raises:
            RewardError, EngineError, DataError, OutageError.
        """
        groups: list[Group] = []
        while not self.exhausted:
            missing = self.batch_prompts - sum(group.informative for group in groups)
            launch = min(self._needed(missing), self.max_groups - len(groups))
            if launch <= 0:
                break
            groups += await self._round(launch)
        self._learn_rate(groups)
        self.outages.observe([rollout for group in groups for rollout in group.rollouts])
        return self._batch(step, groups)

    def _needed(self, missing: int) -> int:
        """Groups to launch so that about `missing` will be informative."""
        return math.ceil(missing / (1.0 - min(self._rate, 0.9))) if missing > 0 else 0

    async def _round(self, count: int) -> list[Group]:
        rows = self.sampler.draw(count)
        numbers = range(self._number, self._number + len(rows))
        self._number += len(rows)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._group(row, n)) for row, n in zip(rows, numbers, strict=True)]
        groups = [task.result() for task in running]
        for group in groups:
            if group.scored_rewards:
                self.sampler.observe(group.row.id, mean(group.scored_rewards))
        return groups

    async def _group(self, row: Row, number: int) -> Group:
        prompt = self.episodes.render(row)
        seeds = [request_seed(self.seed, "train", number, index, 0) for index in range(self.group_size)]
        trajectories = await asyncio.gather(
            *(self.episodes.run(row, prompt, temperature=self.temperature, seed=seed) for seed in seeds)
        )
        return Group(row, await self.scorer.score(trajectories), number)

    def _learn_rate(self, groups: Sequence[Group]) -> None:
        share = mean([float(not group.informative) for group in groups])
        self._rate = RATE_MEMORY * self._rate + (1.0 - RATE_MEMORY) * share

    def _batch(self, step: int, groups: Sequence[Group]) -> ScoredBatch:
        chosen = [group for group in groups if group.informative][: self.batch_prompts]
        numbers = {group.number for group in chosen}
        usage = self.episodes.engine.usage()
        return ScoredBatch(
            step=step,
            groups=tuple(chosen),
            set_aside=tuple(group for group in groups if group.number not in numbers),
            metrics={
                "groups/continued": 0.0,
                "groups/retired": float(self.sampler.retired),
                "groups/expected_zero_variance": self._rate,
                **engine_metrics(usage),
            },
            timeline=relative_timeline(usage),
        )

    async def evaluate(self, rows: Sequence[Row], *, temperature: float, samples: int = 1) -> list[list[Rollout]]:
        """Roll out and score held-out rows, `samples` times each; touches no training state."""

        async def one(row: Row) -> list[Rollout]:
            prompt = self.episodes.render(row)
            seeds = [request_seed(self.seed, "eval", row.id, index) for index in range(samples)]
            trajectories = await asyncio.gather(
                *(self.episodes.run(row, prompt, temperature=temperature, seed=seed) for seed in seeds)
            )
            return list(await self.scorer.score(trajectories, shaped=False))

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(row)) for row in rows]
        self.episodes.engine.usage()  # an evaluation's work is not the next step's
        return [task.result() for task in running]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state between two steps."""
        return {
            "sampler": self.sampler.state_dict(),
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
