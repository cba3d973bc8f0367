"""JSON list: all calls of a turn as one list. SmolLM2, whose template never reads `tools`.

<tool_call>[{"name": "search", "arguments": {"query": "Etna"}}, {"name": "now", "arguments": {}}]</tool_call>

A malformed entry is answered, the others run. An empty list calls nothing: it is how SmolLM2 says that no tool fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.rl.chat.calls import ParsedTurn
from palingenesis.rl.chat.calls._blocks import (
    CLOSE,
    MOST_ERRORS,
    OPEN,
    Block,
    Malformed,
    call_from_json,
    close,
    kind,
    listed,
    parse_blocks,
    read_json,
    skip_space,
)

FORM = 'Write calls as <tool_call>[{"name": "the tool", "arguments": {"parameter": "value"}}]</tool_call>'


class JsonList:
    """The JSON list format."""

    marks = (OPEN, CLOSE)

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        return parse_blocks(text, _read, FORM)

    def matches(self, template: str) -> bool:
        return False  # no template writes it; `auto` takes it where the template never reads `tools`

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return listed(schemas) + FORM


def _read(text: str, position: int) -> Block:
    value, end = read_json(text, skip_space(text, position))
    end = close(text, end)
    if not isinstance(value, list):
        raise Malformed(f"it must be a JSON list of calls, not {kind(value)}")
    calls, problems = [], []
    for number, entry in enumerate(value, start=1):
        try:
            calls.append(call_from_json(entry))
        except Malformed as problem:
            problems.append(f"in entry {number} of the list, {problem}")
    return Block(calls, end, problems[:MOST_ERRORS])


PARSER = JsonList()
