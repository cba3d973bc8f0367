"""The user's screen during a run.

On a terminal: a header, a live bar with the time left, and a table row for every logged step. Elsewhere (a file, a
batch system) the same rows without the bar, so that a log reads like the screen did.

    step   reward   Δ64     length   zero-var   skipped   |r-1|     tok/s     rollout   train
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# (heading, metric, format); a metric a step does not have prints as a dash.
COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("length", "length/mean", "{:.0f}"),
    ("cut", "truncated", "{:.0%}"),
    ("no var", "groups/zero_variance", "{:.0%}"),
    ("skip", "skipped", "{:.0%}"),
    ("|r-1|", "policy/abs_ratio_dev", "{:.4f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad", "grad_norm", "{:.3f}"),
    ("tok/s", "tokens/s", "{:,.0f}"),
    ("rollout", "time/rollout", "{:.2f}s"),
    ("train", "time/train", "{:.2f}s"),
)
WIDTH = 8


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
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, note="")

    def start(self, facts: Mapping[str, str]) -> None:
        """Print what is about to run."""
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[bold]{name}[/]", value)
        self.console.print(table)
        self._progress.start()

    def say(self, text: str) -> None:
        """One line of plain text above the bar."""
        self.console.print(text, markup=False)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._recent.append(values.get("reward", 0.0))
        note = f"reward {sum(self._recent) / len(self._recent):.3f} over {len(self._recent)} steps"
        self._progress.update(self._task, completed=step, note=note)
        if step % self.every:
            return
        if not self._headed:
            self._headed = True
            self.say("  step" + "".join(f"{heading:>{WIDTH + 1}}" for heading, _, _ in COLUMNS))
        cells = (form.format(values[name]) if name in values else "-" for _, name, form in COLUMNS)
        self.say(f"{step:>6}" + "".join(f"{cell:>{WIDTH + 1}}" for cell in cells))

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind != "eval":
            return
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if name.startswith("reward"))
        self.say(f"  held out after step {step}: {rewards}  ({values['rows']:.0f} rows)")

    def close(self) -> None:
        self._progress.stop()
