"""The user's screen during a run.

On a terminal: a header, a live bar with the time left, and a table row for every logged step. Elsewhere (a file, a
batch system) the same rows without the bar, so that a log reads like the screen did.

    step  reward  length   cut  no-var  skip   |r-1|    grad    tok/s  rollout   train

`length` is sampled tokens, `cut` the share of rollouts a budget ended, `no-var` the share of groups without a gradient,
`|r-1|` how far the trainer's probabilities are from the sampler's. Columns that do not fit the screen are left out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from palingenesis.rl.observe.metrics import mean

# (heading, metric, format, width); a metric a step does not have prints as a dash.
COLUMNS = (
    ("reward", "reward", "{:.3f}", 8),
    ("length", "length/mean", "{:.0f}", 8),
    ("cut", "truncated", "{:.0%}", 6),
    ("no-var", "groups/zero_variance", "{:.0%}", 8),
    ("skip", "skipped", "{:.0%}", 6),
    ("|r-1|", "policy/abs_ratio_dev", "{:.4f}", 8),
    ("grad", "grad_norm", "{:.3f}", 8),
    ("tok/s", "tokens/s", "{:,.0f}", 9),
    ("rollout", "time/rollout", "{:.1f}s", 9),
    ("train", "time/train", "{:.1f}s", 8),
    ("entropy", "policy/entropy", "{:.3f}", 9),
)


class Log:
    """A sink that prints.

    Args:
        steps: optimizer steps of the whole run.
        done: steps already done when this process starts.
        every: print a row each `every` steps.
    """

    def __init__(self, steps: int, done: int = 0, every: int = 1, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.every = every
        self._recent: deque[float] = deque(maxlen=10)
        self._headed = False
        self._idle = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, note="")

    def start(self, facts: Mapping[str, str]) -> None:
        """Print what is about to run."""
        for name, value in facts.items():
            self.console.print(f"[bold]{name:<8}[/]{escape(value)}", soft_wrap=True)
        self._progress.start()

    def say(self, text: str) -> None:
        """One line of plain text above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "reward" in values:
            self._recent.append(values["reward"])
        note = f"reward {mean(list(self._recent)):.3f} over {len(self._recent)} steps"
        self._progress.update(self._task, completed=step, note=note)
        if step % self.every:
            return
        if not self._headed:
            self._headed = True
            self.say("  step" + "".join(f"{heading:>{width}}" for heading, _, _, width in self._columns()))
        self.say(f"{step:>6}" + "".join(_cell(values, *column) for column in self._columns()))

    def _columns(self) -> list[tuple[str, str, str, int]]:
        """The columns that fit; a file has room for all."""
        room = self.console.width - 6 if self.console.is_terminal else 10_000
        ends = itertools.accumulate(width for *_, width in COLUMNS)
        return [column for column, end in zip(COLUMNS, ends, strict=True) if end <= room]

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind != "eval":
            return
        shown = {name: value for name, value in values.items() if name.startswith(("reward", "env/"))}
        if len(set(shown.values())) == 1:  # one reward of weight 1 is the sum
            shown = dict(list(shown.items())[:1])
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in shown.items()) or "nothing could be scored"
        self.say(f"  held out after step {step} ({values['rows']} rows): {rewards}")

    def no_step(self, step: int, rollouts: int, skipped: int, why: str) -> None:
        """Say that the optimizer did not step: why once, and later only where a row is printed.

        Args:
            rollouts: of this step; `skipped` of them could not be scored, most of them for `why`.
        """
        if skipped:
            self.say(f"  step {step}: no optimizer step: {skipped} of {rollouts} rollouts were skipped, most by {why}")
        elif not self._idle:
            self.say(
                f"  step {step}: no group had two different rewards, so there was nothing to learn and no optimizer "
                "step.\n  If this goes on, the task is too hard or too easy for this policy."
            )
        elif step % self.every == 0:
            self.say(f"  step {step}: no optimizer step ({self._idle + 1} so far)")
        self._idle += 1

    def close(self) -> None:
        self._progress.stop()


def _cell(values: Mapping[str, float], _: str, name: str, form: str, width: int) -> str:
    return f"{form.format(values[name]) if name in values else '-':>{width}}"
