"""Rows as people and programs see them: what `pgs rl data` prints.

    show_data(config) ──> build, check, print: the command
    summary(rowset) ──> counts, drops, notices, columns      show(rowset, n) ──> the summary and n rows
    to_json(row)    ──> {"id", "messages", "tools", "columns"}, one object a row

Invariant: what is shown is what the policy meets (messages after `data.system_prompt`, tools in chat-template form);
row text is printed as it is, never read as markup.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from palingenesis.rl.data.prompts import RowSet, build, check_verifiers
from palingenesis.rl.types import Message, Row

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import RLConfig

_LONGEST = 2000  # characters of a turn
_WIDEST = 200  # characters of a column's value
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}

CountTokens = Callable[[Row], int]
ToolsOf = Callable[[Row], Sequence[Mapping[str, Any]]]


def show_data(
    config: RLConfig,
    *,
    count: int | None = None,
    as_json: bool = False,
    count_tokens: CountTokens | None = None,
    tools_of: ToolsOf | None = None,
    notices: Sequence[str] = (),
) -> None:
    """Print a run's rows: for people, or one JSON object a line with what was dropped on standard error.

    Args:
        count: rows to print, training rows first; None prints 3 to people and all as JSON.
        count_tokens: tokens of a row's rendered prompt; with it, prompts over the run's limit are dropped as there.
        tools_of: the tools in a row's prompt, in chat-template form; None takes the row's own.
        notices: further sentences for the summary.

    Raises:
        DataError: a file, row or column cannot be used.
    """
    fits = config.rollout.max_model_len - 1
    longest = min(config.data.max_prompt_tokens or fits, fits)
    rowset = build(config.data, count_tokens=count_tokens, max_prompt_tokens=longest)
    if config.rewards:
        check_verifiers(rowset.rows, config.rewards)
    if not count_tokens and config.data.max_prompt_tokens:
        notices = (*notices, "prompts were not measured against data.max_prompt_tokens; --tokens does so.")
    rowset = replace(rowset, notices=(*rowset.notices, *notices))
    if tools_of:
        rowset = replace(rowset, train=_with(rowset.train, tools_of), held_out=_with(rowset.held_out, tools_of))
    if not as_json:
        Console().print(show(rowset, 3 if count is None else count, count_tokens=count_tokens))
        return
    for line in (*rowset.dropped, *rowset.notices):
        print(line, file=sys.stderr)
    for row in rowset.rows[:count]:
        print(json.dumps(to_json(row, count_tokens=count_tokens), ensure_ascii=False))


def _with(rows: Sequence[Row], tools_of: ToolsOf) -> tuple[Row, ...]:
    return tuple(replace(row, tools=tuple(tools_of(row))) for row in rows)


def to_json(row: Row, *, split: str = "", count_tokens: CountTokens | None = None) -> dict[str, Any]:
    """`{"id", "messages", "tools", "columns"}` of a row, ready for `json.dumps`.

    `split` and `tokens` are added when `split` is given and `count_tokens` is. Values that JSON has no form for (dates,
    bytes, NaN of a parquet file) become text or null.
    """
    out: dict[str, Any] = {
        "id": row.id,
        "messages": [message.to_dict() for message in row.messages],
        "tools": list(row.tools),
        "columns": dict(row.columns),
    }
    if split:
        out["split"] = split
    if count_tokens:
        out["tokens"] = count_tokens(row)
    plain: dict[str, Any] = _plain(out)
    return plain


def show(rowset: RowSet, n: int = 3, *, count_tokens: CountTokens | None = None) -> RenderableType:
    """The summary and the first `n` rows, training rows first, for a rich console."""
    labelled = [(row, "train") for row in rowset.train] + [(row, "held out") for row in rowset.held_out]
    panels = [_panel(row, split, count_tokens) for row, split in labelled[:n]]
    return Group(summary(rowset, count_tokens=count_tokens), *panels)


def summary(rowset: RowSet, *, count_tokens: CountTokens | None = None) -> RenderableType:
    """Counts, prompt lengths, what was dropped and why, and the columns with their types."""
    lines = [f"{len(rowset.train)} training rows, {len(rowset.held_out)} held out"]
    if count_tokens:
        lengths = sorted(count_tokens(row) for row in rowset.rows)
        middle = lengths[len(lengths) // 2]
        lines.append(f"prompt tokens: {lengths[0]} least, {middle} median, {lengths[-1]} most")
    lines += [str(dropped) for dropped in rowset.dropped]
    lines += rowset.notices
    return Group(*(Text(line) for line in lines), _columns(rowset.rows))


def _columns(rows: Sequence[Row]) -> Table:
    counts: Counter[str] = Counter()
    kinds: dict[str, set[str]] = {}
    prompts = Counter(row.prompt_column[0] for row in rows)
    for row in rows:
        for name, value in row.columns.items():
            counts[name] += value is not None
            kinds.setdefault(name, set()).add(type(value).__name__)
    table = Table("column", "types", "filled", box=None, pad_edge=False)
    for name, count in prompts.items():
        table.add_row(Text(f"{name} (the prompt)"), "", f"{count} of {len(rows)}")
    for name in sorted(kinds):
        types = ", ".join(sorted(kinds[name] - {"NoneType"})) or "null"
        table.add_row(Text(name), types, f"{counts[name]} of {len(rows)}")
    return table


def _panel(row: Row, split: str, count_tokens: CountTokens | None) -> Panel:
    title = f"{row.id}  {split}"
    if count_tokens:
        title += f"  {count_tokens(row)} tokens"
    parts: list[RenderableType] = [Text(row.source, style="dim"), *map(_turn, row.messages)]
    if row.tools:
        parts.append(Text(f"tools: {', '.join(tool['function']['name'] for tool in row.tools)}", style="bold"))
    if row.verifier:
        parts.append(Text(f"scored by: {', '.join(row.verifier)}", style="bold"))
    parts += [Text(f"{name}: {_short(value)}", style="dim") for name, value in row.columns.items()]
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _turn(message: Message) -> Text:
    text = Text(f"{message.role}  ", style=f"bold {_ROLE_STYLES.get(message.role, 'white')}")
    if message.reasoning:
        text.append(f"(reasoning) {_cut(message.reasoning, _LONGEST)}\n", style="italic not bold")
    text.append(_cut(message.content, _LONGEST), style="default not bold")
    for call in message.tool_calls:
        text.append(f"\n-> {call.name}({_short(call.arguments)})", style="default not bold")
    return text


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    return _cut(" ".join(text.split()), _WIDEST)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
