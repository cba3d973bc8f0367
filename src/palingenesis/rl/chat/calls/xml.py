"""XML: parameters as raw text between tags. Qwen3-Coder, Qwen3.5 and later, Nemotron 3.

<tool_call>
<function=search>
<parameter=query>
Etna
</parameter>
</function>
</tool_call>

A value is what stands between its tags without one newline at each end: code keeps its indentation. It ends at the first
`</parameter>` that another parameter or `</function>` follows, so one quoted in a line of code is text; `<parameter=`
inside a value means that the value was not closed, and is an error. The schema says what a value is: of the types it
allows, the first that reads it, null before integer, number, boolean, object, array, string. A tool or parameter without
a schema keeps text, and the session says that there is no such thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from palingenesis.rl.chat.calls import ParsedTurn
from palingenesis.rl.chat.calls._blocks import (
    CLOSE,
    OPEN,
    Block,
    Malformed,
    checked,
    listed,
    parse_blocks,
    quote,
    read_whole_json,
    skip_space,
)
from palingenesis.rl.types import ToolCall

FORM = (
    "Write each call as <tool_call>\n<function=the tool>\n<parameter=its parameter>\nvalue\n</parameter>\n"
    "</function>\n</tool_call>"
)
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_END = re.compile(r"\s*</function>\s*</tool_call>")


class Xml:
    """The XML format."""

    marks = (OPEN, CLOSE)

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        return parse_blocks(text, partial(_read, _parameters(schemas)), FORM, stray=("<function=",))

    def matches(self, template: str) -> bool:
        return all(mark in template for mark in (OPEN, "<function=", "<parameter="))

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return listed(schemas) + FORM


def _parameters(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters' schema of each tool by its name."""
    functions = [schema.get("function", schema) for schema in schemas]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _read(parameters: Mapping[str, Mapping[str, Any]], text: str, position: int) -> Block:
    function = _FUNCTION.match(text, position)
    if not function:
        raise Malformed(f"<function=NAME> must come first, but {_next(text, position)} does")
    name, position = function[1], function.end()
    schema = parameters.get(name, {})
    arguments: dict[str, Any] = {}
    while parameter := _PARAMETER.match(text, position):
        key = parameter[1]
        if key in arguments:
            raise Malformed(f"the parameter {quote(key)} is given twice")
        value, position = _value(text, parameter.end(), key)
        arguments[key] = _typed(value, key, schema)
    end = _END.match(text, position)
    if not end:
        raise Malformed(
            f"<parameter=NAME>, or </function> and </tool_call>, must come next, but {_next(text, position)} does"
        )
    return Block([checked(ToolCall(name, arguments))], end.end())


def _value(text: str, position: int, key: str) -> tuple[str, int]:
    """The raw value that begins at a position, and the position after its closing tag."""
    end = _END_OF_VALUE.search(text, position)
    if not end:
        raise Malformed(f"the parameter {quote(key)} is not closed with </parameter>")
    if text.find("<parameter=", position, end.start()) >= 0:
        raise Malformed(f"the parameter {quote(key)} is not closed with </parameter> before the next <parameter=")
    return text[position : end.start()].removeprefix("\n").removesuffix("\n"), end.end()


def _next(text: str, position: int) -> str:
    start = skip_space(text, position)
    return quote(text, start) if start < len(text) else "nothing"


# ------------------------------------------------------------------------------------------------------------- types


def _typed(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """A value as the first type that its schema allows and that reads it. Raises Malformed."""
    properties = schema.get("properties") or {}
    if key not in properties:
        return text
    allowed = _types(properties[key], schema)
    for name, read in _READ.items():
        if name in allowed:
            try:
                return read(text)
            except ValueError:
                continue
    wanted = " or ".join(_WORDS[name] for name in _READ if name in allowed)
    raise Malformed(f"the parameter {quote(key)} must be {wanted}, not {quote(text)}")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ALL
    if "$ref" in schema:
        return _types(_target(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        names = schema["type"]
        found = frozenset([names] if isinstance(names, str) else names)
        return found if found <= _ALL else _ALL  # `float`, `dict`: not JSON schema, but data sets hold them
    if "enum" in schema or "const" in schema:
        return frozenset(_NAMES[type(value)] for value in schema.get("enum", [schema.get("const")]))
    found = _ALL
    for union in (schema[key] for key in ("anyOf", "oneOf") if key in schema):
        found &= frozenset(name for part in union for name in _types(part, root, depth + 1))
    for part in schema.get("allOf", ()):
        found &= _types(part, root, depth + 1)
    return found


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/$defs/Name` refers to in the parameters' schema; None when it is not there."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _null(text: str) -> None:
    if text.strip().lower() not in ("null", "none"):  # templates write Python's None
        raise ValueError


def _integer(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ValueError
    return int(text)


def _number(text: str) -> int | float:
    if not re.fullmatch(r"\s*[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*", text):
        raise ValueError
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError
    return int(text) if text.strip().lstrip("+-").isdigit() else number


def _boolean(text: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
    except KeyError:
        raise ValueError from None


def _of(kind: type, text: str) -> Any:
    value = read_whole_json(text)
    if not isinstance(value, kind):
        raise ValueError
    return value


# In the order they are tried.
_READ: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": partial(_of, dict),
    "array": partial(_of, list),
    "string": str,
}
_WORDS = {
    "null": "null",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "a JSON object",
    "array": "a JSON array",
    "string": "text",
}
_ALL = frozenset(_READ)
_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
}
_DEEPEST = 16  # of nested and circular references

PARSER = Xml()
