"""Score rows without a policy: what `pgs rl score` does.

    completions file: {...columns, "completion": text}  |  {"messages": [..., assistant turn]} ──┐
    --gold COLUMN: data.dataset's rows, that column's text as the completion ────────────────────┴─> samples
    samples ──CHUNK at a time──> RewardSet.score ──> input row + rewards, reward, outcome[, skip_reason] ──> file, table

In a completions file `messages` beside `completion` is the prompt; alone, its last turn is scored. A prompt is not
required. `finish_reason` and `completion_ids` columns stand for what a rollout would have had. Invariant: every input
row has one output row, in order; one whose reference a reward cannot read is written as skipped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palingenesis.rl.chat.reasoning import split_reasoning
from palingenesis.rl.data.formats import convert
from palingenesis.rl.data.formats.chat import PROMPT_COLUMNS, read_message, read_reasoning_open, read_verifier, row_id
from palingenesis.rl.data.load import RawRow, load
from palingenesis.rl.errors import DataError, UsageError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.rewards.score import RewardSet, Unreadable
from palingenesis.rl.types import Message, Outcome, Row, Sample, Score

if TYPE_CHECKING:
    from rich.table import Table

    from palingenesis.rl.config.schema import DataConfig, RLConfig

CHUNK = 256  # samples a batched reward gets in one call
_SHOWN = 3  # unreadable references named in the summary


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome of `score_rows`.

    Attributes:
        rows: the input rows with `rewards`, `reward`, `outcome` and, when skipped, `skip_reason`.
        scores: one a row.
        unreadable: rows whose reference could not be read; their scores are skipped.
        seconds: wall-clock time of each reward.
        counts: what the rewards and the sandbox counted, e.g. `code/wrong`, `sandbox/timeout`.
    """

    rows: list[dict[str, Any]]
    scores: list[Score]
    unreadable: list[Unreadable]
    seconds: Mapping[str, float]
    counts: Mapping[str, float] = field(default_factory=dict)


def score_file(
    config: RLConfig, completions: str | None = None, gold: str | None = None, out: str | None = None
) -> Scored:
    """Score a completions file, or a column of `data.dataset`, print the table, and write the rows.

    Args:
        completions: a JSONL, JSON or parquet file of rows with `completion` or `messages`.
        gold: instead, a column of `data.dataset` whose text is scored as the completion.
        out: JSONL file for the scored rows; None writes none.

    Raises:
        UsageError: both or neither of `completions` and `gold`, or no reward in the config.
        DataError: a file, row or column cannot be used, or more than 5 % of the references cannot be read.
        RewardError: a reward is defective.
        SandboxError: a reward asks for a sandbox, and it cannot start.
    """
    from rich.console import Console
    from rich.text import Text

    if bool(completions) == bool(gold):
        raise UsageError("score takes either --completions FILE or --gold COLUMN.")
    if not config.rewards:
        raise UsageError("rewards: the config names no reward, so there is nothing to score with.")
    if completions:
        raws = load(completions, option="--completions")
        samples = [completion_sample(raw, config.data) for raw in raws]
    else:
        raws = load(config.data.dataset, config.data.split, option="data.dataset", **dict(config.data.args))
        samples = [gold_sample(raw, str(gold), config.data) for raw in raws]
    rewards = RewardSet.from_config(config.rewards)
    try:
        rewards.start_sandbox(config.sandbox)
        scored = score_rows(rewards, samples, [raw.values for raw in raws])
    finally:
        rewards.close()
    console = Console()
    console.print(score_table(rewards.names, scored))
    for line in _notes(scored):
        console.print(Text(line))
    if out:
        _write(out, scored.rows)
    return scored


def score_rows(rewards: RewardSet, samples: Sequence[Sample], values: Sequence[Mapping[str, Any]]) -> Scored:
    """Check the rows' references, score the samples, and put the outcomes beside their input rows."""
    rows = [sample.row for sample in samples]
    rewards.check(rows)
    _, unreadable = rewards.readable(rows)
    reasons = {id(one.row): one for one in unreadable}
    asked = [sample for sample in samples if id(sample.row) not in reasons]
    found = iter(asyncio.run(_score_all(rewards, asked)))
    scores = [_unread(rewards, reasons[id(row)]) if id(row) in reasons else next(found) for row in rows]
    lines = [dict(value) | score_fields(score) for value, score in zip(values, scores, strict=True)]
    return Scored(lines, scores, unreadable, dict(rewards.seconds), rewards.usage().metrics)


async def _score_all(rewards: RewardSet, samples: Sequence[Sample]) -> list[Score]:
    scores: list[Score] = []
    for start in range(0, len(samples), CHUNK):
        scores += await rewards.score(samples[start : start + CHUNK])
    for reward in rewards.rewards.values():
        await reward.aclose()
    return scores


def _unread(rewards: RewardSet, why: Unreadable) -> Score:
    reason = f"unreadable reference: {why.reason}"
    return Score(dict.fromkeys(rewards.names), None, Outcome.SKIPPED, why.reward, reason)


def score_fields(score: Score) -> dict[str, Any]:
    """The keys a scored row has beyond its own."""
    fields: dict[str, Any] = {
        "rewards": dict(score.rewards),
        "reward": score.reward,
        "outcome": str(score.outcome),
    }
    return fields if score.scored else fields | {"skip_reason": f"{score.skip_source}: {score.skip_reason}"}


# ---------------------------------------------------------------------------------------------------- samples


def completion_sample(raw: RawRow, config: DataConfig) -> Sample:
    """One row of a completions file as a sample. Raises DataError."""
    values = dict(raw.values)
    if values.get("completion") is not None:
        completion = values.pop("completion")
        if not isinstance(completion, str):
            raise DataError(f"{raw.source}: column 'completion' must be text, not {type(completion).__name__}.")
        last = Message("assistant", completion)
    else:
        values.pop("completion", None)
        last = _take_last_turn(values, raw)
    row = _row(RawRow(values, raw.source), config)
    return _sample(row, last, raw.values)


def gold_sample(raw: RawRow, column: str, config: DataConfig) -> Sample:
    """A data row with one of its columns as the completion. Raises DataError."""
    if column not in raw.values:
        raise DataError(
            f"{raw.source}: no column {column!r}, which --gold names{nearest(column, raw.values)}; "
            f"its columns: {', '.join(raw.values) or 'none'}."
        )
    value = raw.values[column]
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if value is None or isinstance(value, (list, tuple, Mapping)):
        raise DataError(f"{raw.source}: column {column!r} holds {value!r}, which is no text to score.")
    return _sample(convert(raw, config), Message("assistant", str(value)), {})


def _take_last_turn(values: dict[str, Any], raw: RawRow) -> Message:
    """Remove the last turn of `messages`, which is scored."""
    messages = values.get("messages")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(
            f"{raw.source}: no completion: write a column 'completion' with the text, or 'messages' that end with an "
            f"assistant turn. Its columns: {', '.join(raw.values) or 'none'}."
        )
    last = read_message(messages[-1], f"{raw.source}: column 'messages', turn {len(messages)}")
    if last.role != "assistant":
        raise DataError(
            f"{raw.source}: column 'messages' ends with a {last.role} turn and there is no 'completion', so nothing "
            "is there to score."
        )
    values["messages"] = list(messages[:-1])
    if not values["messages"]:
        del values["messages"]
    return last


def _row(raw: RawRow, config: DataConfig) -> Row:
    """The row by the config's format; one without a prompt is allowed here."""
    names = [config.prompt_field] if config.prompt_field else [*PROMPT_COLUMNS, "responses_create_params"]
    if any(raw.values.get(name) is not None for name in names):
        return convert(raw, config)
    return Row(
        id=row_id(raw),
        messages=(),
        columns=dict(raw.values),
        verifier=read_verifier(raw),
        source=raw.source,
        reasoning_open=read_reasoning_open(raw),
    )


def _sample(row: Row, last: Message, values: Mapping[str, Any]) -> Sample:
    """The sample whose final turn is `last`; its reasoning is split off unless it came separately."""
    if last.reasoning:
        reasoning, completion = last.reasoning, last.content
        raw = f"<think>\n{reasoning}\n</think>\n\n{completion}"
    else:
        raw = last.content
        reasoning, completion = split_reasoning(raw, row.reasoning_open)
    ids = values.get("completion_ids")
    finish = values.get("finish_reason")
    return Sample(
        row=row,
        messages=(*row.messages, replace(last, content=completion, reasoning=reasoning)),
        completion=completion,
        reasoning=reasoning,
        raw=raw,
        reasoning_open=row.reasoning_open and not last.reasoning,
        finish_reason=finish if isinstance(finish, str) else "stop",
        completion_ids=tuple(ids) if isinstance(ids, (list, tuple)) else (),
    )


# ---------------------------------------------------------------------------------------------------- output


def score_table(names: Sequence[str], scored: Scored) -> Table:
    """Mean, share of null and skipped, and seconds for each reward, and for the weighted sum."""
    from rich.table import Table

    table = Table("reward", box=None, pad_edge=False)
    for heading in ("mean", "null", "skipped", "seconds"):
        table.add_column(heading, justify="right")
    total = len(scored.scores)
    for name in names:
        values = [score.rewards.get(name) for score in scored.scores]
        skipped = sum(score.skip_source == name for score in scored.scores)
        null = sum(value is None for value in values) - skipped
        seconds = f"{scored.seconds.get(name, 0.0):.2f}"
        table.add_row(name, _mean(values), _share(null, total), _share(skipped, total), seconds)
    skipped = sum(not score.scored for score in scored.scores)
    whole = _mean([score.reward for score in scored.scores])
    table.add_row(f"all ({total} rows)", whole, "", _share(skipped, total), "", style="bold")
    return table


def _notes(scored: Scored) -> list[str]:
    lines = _count_lines(scored.counts)
    if scored.unreadable:
        shown = "; ".join(str(one) for one in scored.unreadable[:_SHOWN])
        lines.append(f"{len(scored.unreadable)} rows have a reference that cannot be read: {shown}")
    reasons = {s.skip_reason: s.skip_source for s in scored.scores if not s.scored and s.skip_source != "rewards"}
    unread = {f"unreadable reference: {one.reason}" for one in scored.unreadable}
    lines += [f"skipped by {source}: {reason}" for reason, source in reasons.items() if reason not in unread][:_SHOWN]
    return lines


def _count_lines(counts: Mapping[str, float]) -> list[str]:
    """`code: 150 passed, 9 wrong` and the like: a line for what counted, without what did not happen."""
    groups: dict[str, list[str]] = {}
    for name, count in counts.items():
        source, _, what = name.partition("/")
        if count:
            groups.setdefault(source, []).append(f"{count:,.0f} {what.replace('_', ' ')}")
    return [f"{source}: {', '.join(parts)}" for source, parts in groups.items()]


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4f}" if known else "-"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %" if total else "-"


def _write(out: str, rows: Sequence[Mapping[str, Any]]) -> None:
    path = Path(out).expanduser()
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    except OSError as error:
        raise DataError(f"--out: {out} cannot be written: {error.strerror}.") from error
