"""The files of a run, under `train.output_dir`.

    config.yaml              resolved options, with package versions as comments
    metrics.jsonl            one object a step
    eval.jsonl               one object an evaluation
    failures.jsonl           a few programs a step that did not pass, where a reward runs programs
    rollouts/step_<n>.jsonl  an {"kind": "engine"} line and a {"kind": "rollout"} line for each rollout

A line is written and flushed whole, so a run that dies leaves complete lines. A resumed run first drops the lines of
steps after its checkpoint: it will write them again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from palingenesis.rl.errors import UsageError
from palingenesis.rl.types import Group, Rollout, ScoredBatch, Segment

MOST_DEPTH = 100  # of a column or an argument; deeper ones are no data that anybody reads


def clean(value: Any, depth: int = 0) -> Any:
    """`value` with what JSON cannot hold made readable: NaN and infinities become null, what is nested too deep `...`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping | list | tuple) and depth > MOST_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, depth + 1) for item in value]
    return value


def dumps(value: Mapping[str, Any]) -> str:
    """One JSON line; objects JSON does not know are written as their `str`."""
    return json.dumps(clean(value), ensure_ascii=False, default=str)


class RunFiles:
    """A sink that appends to `metrics.jsonl` and `eval.jsonl`, and to a file of any other kind once there is a record.

    Args:
        folder: the run's folder; made if missing.
        resumed_at: optimizer steps done when this process starts; later lines of the files are dropped.

    Attributes:
        last_eval: the step of the last evaluation that was kept; -1 when there is none.
    """

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(folder)
        self.folder = folder
        self.last_eval = -1
        self._resumed_at = resumed_at
        there = ["failures"] if (folder / "failures.jsonl").exists() else []
        self._files = {kind: self._open(kind) for kind in ("metrics", "eval", *there)}

    def _open(self, kind: str) -> TextIO:
        path, done = self.folder / f"{kind}.jsonl", self._resumed_at
        kept = [line for line in _lines(path) if 0 <= _step(line) <= done] if done else []
        path.write_text("".join(kept), encoding="utf-8")
        if path.stem == "eval" and kept:
            self.last_eval = json.loads(kept[-1])["step"]
        return path.open("a", encoding="utf-8", errors="replace")  # half a surrogate pair is no reason to end a run

    def write_config(self, text: str) -> None:
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.record("metrics", step, values)

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind not in self._files:
            self._files[kind] = self._open(kind)
        file = self._files[kind]
        file.write(dumps({"step": step, "time": time.time(), **values}) + "\n")
        file.flush()

    def close(self) -> None:
        for file in (*self._files.values(), self._lock):
            file.close()


def lock(folder: Path) -> TextIO:
    """Take the folder for this process: two runs would mix their lines and checkpoints. Freed when the file is closed,
    and by the system when the process dies.

    Raises:
        UsageError: another process has it.
    """
    file = (folder / "run.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"train.output_dir: another run is writing to {folder}; name another folder.") from None
    return file


def set_aside_old_run(folder: Path) -> Path | None:
    """Rename a folder that already holds a run to `<folder>.<n>`, so that a new run overwrites nothing; where it went."""
    folder = folder.resolve()
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_size == 0:  # a run without a step holds nothing
        return None
    if Path.cwd().is_relative_to(folder):
        raise UsageError(f"train.output_dir: {folder} holds a run and the working directory; name another folder.")
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _step(line: str) -> int:
    """The step of a line; -1 of a damaged one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def _lines(path: Path) -> Iterable[str]:
    """Complete lines of a file that may not exist; a last line cut off by a crash is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield line


def write_rollouts(
    folder: Path,
    batch: ScoredBatch,
    advantages: Mapping[tuple[int, int], float],
    mask_reasons: Mapping[tuple[int, int], str],
) -> Path:
    """Write `rollouts/step_<n>.jsonl`.

    Args:
        advantages: of trained rollouts, by `(group number, index)`.
        mask_reasons: why a trained group's rollout gave no gradient, by the same key.
    """
    path = folder / "rollouts" / f"step_{batch.step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", errors="replace") as file:
        file.write(dumps({"kind": "engine", "step": batch.step, "timeline": batch.timeline}) + "\n")
        for group, trained in _with_fate(batch):
            for rollout in group.rollouts:
                key = (group.number, rollout.index)
                line = rollout_line(batch.step, group, rollout, trained, advantages.get(key), mask_reasons.get(key))
                file.write(dumps(line) + "\n")
    return path


def _with_fate(batch: ScoredBatch) -> Iterable[tuple[Group, bool]]:
    yield from ((group, True) for group in batch.groups)
    yield from ((group, False) for group in batch.set_aside)


def rollout_line(
    step: int, group: Group, rollout: Rollout, trained: bool, advantage: float | None, mask_reason: str | None
) -> dict[str, Any]:
    """One rollout as it is dumped; the fields are listed in docs/training.md."""
    trajectory, score = rollout.trajectory, rollout.score
    line: dict[str, Any] = {
        "kind": "rollout",
        "prompt_id": trajectory.row.id,
        "group": group.number,
        "index": rollout.index,
        "step": step,
        "row": dict(trajectory.row.columns),
        "source": trajectory.row.source,
        "turns": [_turn(segment) for segment in trajectory.segments],
        "reward": score.reward,
        "rewards": dict(score.rewards),
        "advantage": advantage,
        "outcome": score.outcome.value,
        "finish": trajectory.finish.value,
        "truncated": trajectory.finish.is_truncated,
        "informative": group.informative,
        "trained": trained and score.scored and mask_reason is None,
    }
    if not score.scored:
        line["skip_reason"] = f"{score.skip_source}: {score.skip_reason}"
    if mask_reason is not None:
        line["mask_reason"] = mask_reason
    return line


def _turn(segment: Segment) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": segment.role,
        "text": segment.text,
        "tokens": len(segment.token_ids),
        "seconds": round(segment.seconds, 4),
    }
    turn["version"] = segment.versions[0] if segment.versions else None
    if segment.sampled:
        turn["logprobs"] = [round(value, 5) for value in segment.logprobs]
    if segment.tool_calls:
        turn["tool_calls"] = [{"name": call.name, "arguments": dict(call.arguments)} for call in segment.tool_calls]
    if segment.tool_name:
        turn["tool_name"] = segment.tool_name
    if segment.tool_errors:
        turn["tool_errors"] = segment.tool_errors
    return turn
