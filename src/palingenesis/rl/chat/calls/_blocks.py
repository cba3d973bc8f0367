"""What the formats share: walk the `<tool_call>` blocks of a turn, read JSON without leniency.

    text <tool_call> ...a call... </tool_call> text <tool_call> ...not a call... </tool_call> text
    ^content         ^read(): calls            ^content          ^an error, and stays content ^content

Invariants: a block that cannot be read ends at the first closing tag after it, or with the text; so an opening tag inside
another call never starts a call. Time is linear in the turn: a well-formed block is read once, and after `MOST_ERRORS`
errors or `MOST_CALLS` calls the rest of the turn is left alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palingenesis.rl.chat.calls import ParsedTurn
from palingenesis.rl.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_ERRORS = 16  # a turn with more is babble; each error costs the policy some forty tokens of context
MOST_DEPTH = 64  # lists and objects in each other; what walks over arguments later may recurse
MOST_CALLS = 32  # a turn with more is a flood: each one runs, at once with the others, and is answered
_EXCERPT = 40  # characters of a malformed call that its error quotes
_TOO_MANY = (
    f"Too many calls: only the first {MOST_CALLS} of a turn are run; write the others in your next turn, after you have "
    "read these answers."
)
_SPACE = re.compile(r"\s*")


class Malformed(ValueError):
    """What is wrong with a call, as the end of the sentence "... was not run: "."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block's calls, what was wrong with its other calls, and the position after its closing tag."""

    calls: Sequence[ToolCall]
    end: int
    problems: Sequence[str] = ()


@dataclass
class _Reading:
    """The state of one walk over a turn."""

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def parse_blocks(text: str, read: Callable[[str, int], Block], form: str, stray: Iterable[str] = ()) -> ParsedTurn:
    """Read every block of a turn.

    Args:
        read: reads the block whose content begins at a position; raises Malformed.
        form: one sentence that shows how a call is written.
        stray: further strings that make no sense outside a block.
    """
    tags = re.compile("|".join(map(re.escape, (OPEN, CLOSE, *stray))))
    turn = _Reading()
    kept = position = 0
    while found := tags.search(text, position):
        if len(turn.errors) >= MOST_ERRORS:
            turn.errors.append("Too many malformed calls: the rest of the turn was not read.")
            break
        try:
            block = _read_block(text, found, read)
        except Malformed as problem:
            turn.errors.append(_error(text, found, str(problem), form))
            position = _after_close(text, found.start()) or len(text)
            continue
        turn.errors += [_error(text, found, problem, form) for problem in block.problems]
        room = MOST_CALLS - len(turn.calls)
        if block.calls and room:
            turn.calls += block.calls[:room]
            turn.said.append(text[kept : found.start()])
            kept = block.end
        if len(block.calls) > room:
            turn.errors.append(_TOO_MANY)
            break
        position = block.end
    turn.said.append(text[kept:])
    parts = [part.strip() for part in turn.said]
    content = "\n".join(part for part in parts if part) if turn.calls else text
    return ParsedTurn(content, tuple(turn.calls), tuple(turn.errors))


def close(text: str, position: int) -> int:
    """The position after the closing tag that must come next. Raises Malformed."""
    start = skip_space(text, position)
    if not text.startswith(CLOSE, start):
        raise Malformed(f"{CLOSE} must follow the call, but {quote(text, start)} does")
    return start + len(CLOSE)


def skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """The JSON value at a position and where it ends. Keys given twice, numbers JSON cannot write and deep nesting are
    Malformed."""
    try:
        value, end = _DECODER.raw_decode(text, position)
        if _depth(value) > MOST_DEPTH:
            raise Malformed("its JSON is nested too deep")
        return value, end
    except Malformed:
        raise
    except json.JSONDecodeError as error:
        place = quote(text, error.pos) if error.pos < len(text) else "its end"
        raise Malformed(f"its JSON is not valid ({error.msg} at {place})") from None
    except RecursionError:
        raise Malformed("its JSON is nested too deep") from None
    except ValueError:  # Python refuses integers of more than 4,300 digits
        raise Malformed("its JSON holds a number with too many digits") from None


def _depth(value: Any) -> int:
    """How many lists and objects stand in each other; past MOST_DEPTH it is not counted."""
    depth, level = 0, [value]
    while depth <= MOST_DEPTH:
        level = [part for part in level if isinstance(part, (dict, list))]
        if not level:
            break
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth


def read_whole_json(text: str) -> Any:
    """The JSON value that `text` is, white space around it aside. Raises Malformed."""
    value, end = read_json(text, skip_space(text, 0))
    if (rest := skip_space(text, end)) < len(text):
        raise Malformed(f"its JSON is followed by {quote(text, rest)}")
    return value


def call_from_json(value: Any) -> ToolCall:
    """The call that `{"name": ..., "arguments": {...}}` stands for. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed(f"it must be a JSON object, not {kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Malformed('it has no "name", which must be the name of a tool')
    if unknown := sorted(set(value) - {"name", "arguments", "parameters", "id"}):
        raise Malformed(f'it has the key {quote(unknown[0])}; parameters of the tool belong inside "arguments"')
    identity = value.get("id", "")
    if not isinstance(identity, str):
        raise Malformed(f'its "id" must be a string, not {kind(identity)}')
    return checked(ToolCall(name, _arguments(value), identity))


def checked(call: ToolCall) -> ToolCall:
    """The call, if its texts can be written as UTF-8: JSON can spell half of a surrogate pair. Raises Malformed."""
    try:
        json.dumps([call.name, call.arguments, call.id], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("it holds half of a surrogate pair, which is no character") from None
    return call


def listed(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The schemas as a system message shows them."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You have access to the following tools, one JSON schema a line:\n<tools>\n{lines}\n</tools>\n\n"


def quote(text: str, start: int = 0) -> str:
    """A short excerpt of text, on one line."""
    rest = text[start : start + _EXCERPT + 1]
    return repr(rest if len(rest) <= _EXCERPT else rest[: _EXCERPT - 3] + "...")


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    return _KINDS[type(value)]


def _read_block(text: str, tag: re.Match[str], read: Callable[[str, int], Block]) -> Block:
    if tag.group() != OPEN:
        raise Malformed(f"{tag.group()} stands without {OPEN} before it")
    try:
        return read(text, tag.end())
    except Malformed:
        if not _after_close(text, tag.end()):
            raise Malformed(f"it is not closed with {CLOSE}") from None
        raise


def _after_close(text: str, position: int) -> int:
    """The position after the next closing tag, 0 if there is none."""
    found = text.find(CLOSE, position)
    return found + len(CLOSE) if found >= 0 else 0


def _error(text: str, tag: re.Match[str], problem: str, form: str) -> str:
    return f"The tool call that begins {quote(text, tag.start())} was not run: {problem}. {form}"


def _arguments(value: Mapping[str, Any]) -> Mapping[str, Any]:
    keys = [key for key in ("arguments", "parameters") if key in value]
    if not keys:
        raise Malformed('it has no "arguments"; for a tool without parameters write {}')
    if len(keys) > 1:
        raise Malformed('it has both "arguments" and "parameters"; give one object')
    arguments = value[keys[0]]
    if isinstance(arguments, str):
        try:
            arguments = read_whole_json(arguments)
        except Malformed as problem:
            raise Malformed(f'its "{keys[0]}" must be a JSON object; read as text, {problem}') from None
    if not isinstance(arguments, dict):
        raise Malformed(f'its "{keys[0]}" must be a JSON object, not {kind(arguments)}')
    return arguments


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise Malformed(f"the key {quote(key)} is given twice")
        seen[key] = value
    return seen


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Malformed(f"{quote(digits)} is too large a number")
    return number


def _no_constant(name: str) -> Any:
    raise Malformed(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_float=_finite, parse_constant=_no_constant)
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
