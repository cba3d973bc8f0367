"""Hermes: one JSON object a block. Qwen2.5, Qwen3, Hermes 2 and 3.

<tool_call>
{"name": "search", "arguments": {"query": "Etna"}}
</tool_call>

A closing tag inside a JSON string is text. `arguments` may be a string that holds a JSON object, `parameters` is read as
`arguments`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.rl.chat.calls import ParsedTurn
from palingenesis.rl.chat.calls._blocks import (
    CLOSE,
    OPEN,
    Block,
    call_from_json,
    close,
    listed,
    parse_blocks,
    read_json,
    skip_space,
)

FORM = 'Write each call as <tool_call>\n{"name": "the tool", "arguments": {"parameter": "value"}}\n</tool_call>'
_ARGUMENTS = re.compile(r'\\?"arguments\\?": ')  # in a template the quotes may stand escaped


class Hermes:
    """The Hermes format."""

    marks = (OPEN, CLOSE)

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        return parse_blocks(text, _read, FORM)

    def matches(self, template: str) -> bool:
        return OPEN in template and "<function=" not in template and _ARGUMENTS.search(template) is not None

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return listed(schemas) + FORM


def _read(text: str, position: int) -> Block:
    value, end = read_json(text, skip_space(text, position))
    end = close(text, end)
    return Block([call_from_json(value)], end)


PARSER = Hermes()
