"""Score samples with every reward of a run.

    samples ──┬─ reward a ─┐
              ├─ reward b ─┼─ per sample: weighted sum of what applies ── Score (scored | skipped)
              └─ extra ────┘  (an environment's own components, weight 1)

All rewards run at once. A row whose `verifier` names rewards is scored only by those. Invariants: one Score a sample,
in order; `reward` is None exactly when the sample is skipped; a defect of a reward raises and never becomes a number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from palingenesis.rl.data import check_verifiers
from palingenesis.rl.errors import ConfigError, DataError, SkipSample
from palingenesis.rl.rewards.bind import BoundReward, Cell, Usage, bind, clock, gather
from palingenesis.rl.rewards.threads import Threads
from palingenesis.rl.sandbox.job import Sandbox, Status
from palingenesis.rl.types import Outcome, Row, Sample, Score, where

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import RewardConfig, SandboxConfig

MAX_THREADS = 64  # synchronous reward functions running at once
SANDBOX_COUNTS = (*map(str, Status), "retried", "replaced")
SANDBOX_EXAMPLES = 3  # of the sandbox's programs that did not end well, between two calls of `usage`
MAX_UNREADABLE = 0.05  # share of rows whose reference cannot be read


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row that was dropped because `reward` cannot read its reference."""

    row: Row
    reward: str
    reason: str

    def __str__(self) -> str:
        return f"{where(self.row)}: {self.reason}, which reward {self.reward!r} cannot read"


class RewardSet:
    """The rewards of a run, by name.

    Attributes:
        rewards: in the order of the config, then of `functions`.
        seconds: wall-clock time spent in each reward, summed over calls of `score`.
    """

    def __init__(self, rewards: Sequence[BoundReward], sandbox: Sandbox | None = None) -> None:
        self.rewards = {reward.name: reward for reward in rewards}
        self.seconds = dict.fromkeys(self.rewards, 0.0)
        self._sandbox: Sandbox | None = sandbox
        self._opened: Sandbox | None = None  # ours to close
        self._threads = Threads(MAX_THREADS, "pgs-reward")

    @classmethod
    def from_config(
        cls,
        rewards: Mapping[str, RewardConfig],
        functions: Sequence[Callable[..., Any]] = (),
        sandbox: Sandbox | None = None,
    ) -> RewardSet:
        """Bind the config's rewards and the functions given in Python, which go by their own names.

        Args:
            rewards: the section `rewards`.
            functions: what `RLTrainer(rewards=[...])` was given; weight 1, plain style.
            sandbox: what functions receive that ask for `sandbox`; left out, `start_sandbox` opens one.

        Raises:
            ConfigError: a function, an argument or a name cannot be used.
            RewardError: a signature cannot be served.
        """
        bound: list[BoundReward] = []
        try:
            for name, config in rewards.items():
                bound.append(bind(name, config.fn, weight=config.weight, args=config.args, style=config.style))
            for function in functions:
                name = _own_name(function)
                if name in {reward.name for reward in bound}:
                    raise ConfigError(f"rewards.{name} is in the config and in RLTrainer(rewards=[...]); rename one.")
                bound.append(bind(name, function))
        except BaseException:
            for reward in bound:
                reward.close()
            raise
        return cls(bound, sandbox)

    @property
    def sandbox(self) -> Sandbox | None:
        """What samples receive that ask for it; None until it is started."""
        return self._sandbox

    def start_sandbox(self, config: SandboxConfig, needed: bool = False) -> None:
        """Open and start the sandbox that a reward asks for; nothing happens when none does, or when one is there.

        Args:
            needed: something else asks for it: an environment.

        Raises:
            SandboxError: it cannot start, with the cure.
        """
        needed = needed or any(reward.asks_sandbox for reward in self.rewards.values())
        if self._sandbox is None and needed:
            from palingenesis.rl.sandbox import open_sandbox

            self._sandbox = self._opened = open_sandbox(config)
            self._opened.start()

    def usage(self) -> Usage:
        """What the rewards and the sandbox counted since the last call, held-out rows included."""
        total = Usage()
        for reward in self.rewards.values():
            total += reward.usage()
        if self._sandbox is not None:
            used = self._sandbox.usage()
            counts = dict.fromkeys(SANDBOX_COUNTS, 0) | dict(used.counts)
            total += Usage(
                {f"sandbox/{name}": float(count) for name, count in counts.items()}, used.examples[-SANDBOX_EXAMPLES:]
            )
        return total

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.rewards)

    @property
    def listing(self) -> str:
        """For the header of a run: names, and the weights that are not 1."""
        return ", ".join(f"{r.weight:g} x {r.name}" if r.weight != 1 else r.name for r in self.rewards.values())

    async def score(
        self, samples: Sequence[Sample], extra: Sequence[Mapping[str, float] | None] | None = None
    ) -> list[Score]:
        """Score `samples` (a group, or any others) with all rewards at once.

        Args:
            samples: a batched function receives all of them that it applies to in one call.
            extra: for each sample an environment's own components by their logged names (`env/correct`); they are
                added with weight 1.

        Returns:
            One score a sample, in order.

        Raises:
            RewardError: a reward raised, or returned something that is not a number or None.
        """
        if self._sandbox is not None:
            samples = [s if s.sandbox is not None else replace(s, sandbox=self._sandbox) for s in samples]
        columns = await gather(self._column(reward, samples) for reward in self.rewards.values())
        scores = []
        for place, _ in enumerate(samples):
            cells = {name: column[place] for name, column in zip(self.rewards, columns, strict=True)}
            scores.append(self._total(cells, (extra[place] or {}) if extra else {}))
        return scores

    async def _column(self, reward: BoundReward, samples: Sequence[Sample]) -> list[Cell]:
        """One reward's cells for all samples; None where a row's verifier leaves it out."""
        places = [i for i, s in enumerate(samples) if not s.row.verifier or reward.name in s.row.verifier]
        cells: list[Cell] = [None] * len(samples)
        if not places:
            return cells
        began = clock()
        try:
            found = await reward.evaluate([samples[i] for i in places], self._threads)
        finally:
            self.seconds[reward.name] += clock() - began
        for place, cell in zip(places, found, strict=True):
            cells[place] = cell
        return cells

    def _total(self, cells: Mapping[str, Cell], extra: Mapping[str, float]) -> Score:
        values = {name: None if isinstance(cell, SkipSample) else cell for name, cell in cells.items()} | dict(extra)
        for name, cell in cells.items():
            if isinstance(cell, SkipSample):
                return Score(values, None, Outcome.SKIPPED, name, str(cell) or "SkipSample without a reason")
        weights = {name: reward.weight for name, reward in self.rewards.items()}
        parts = [weights.get(name, 1.0) * value for name, value in values.items() if value is not None]
        if not parts:
            return Score(values, None, Outcome.SKIPPED, "rewards", "no reward applies: every one returned None")
        return Score(values, sum(parts), Outcome.SCORED)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise DataError for an unknown `verifier` name or a missing reference column, RewardError for an argument
        that no row has."""
        check_verifiers(rows, self.rewards)
        for row in rows:
            for reward in self._of(row):
                reward.check_columns(row)

    def readable(self, rows: Sequence[Row]) -> tuple[list[Row], list[Unreadable]]:
        """Split rows into those whose references every reward can read, and the others with the reason.

        Raises:
            DataError: more than 5 % are unreadable; names examples.
        """
        kept: list[Row] = []
        dropped: list[Unreadable] = []
        for row in rows:
            why = next(((r.name, why) for r in self._of(row) if (why := r.check_reference(row)) is not None), None)
            if why is None:
                kept.append(row)
            else:
                dropped.append(Unreadable(row, *why))
        if len(dropped) > MAX_UNREADABLE * len(rows):
            examples = "; ".join(str(one) for one in dropped[:3])
            raise DataError(
                f"{len(dropped)} of {len(rows)} rows have a reference that cannot be read: {examples}. "
                "Name the right column with the reward's `args.field`, or repair the rows."
            )
        return kept, dropped

    def _of(self, row: Row) -> list[BoundReward]:
        return [r for r in self.rewards.values() if not row.verifier or r.name in row.verifier]

    async def aclose(self) -> None:
        """Close what belongs to the running loop (a judge's connections), then everything else."""
        for reward in self.rewards.values():
            await reward.aclose()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End worker processes, threads and the sandbox. Math workers serve the whole process and end with their last
        user."""
        for reward in self.rewards.values():
            reward.close()
        self._threads.close()
        if self._opened is not None:
            self._opened.close()


def _own_name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(inner, "__name__", type(inner).__name__)
    if not str(name).isidentifier():
        raise ConfigError(f"a reward function needs a name to be logged under; {name!r} is none. Use `def`.")
    return str(name)
