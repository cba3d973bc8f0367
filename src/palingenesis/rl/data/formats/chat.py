"""Rows of palingenesis and TRL: a prompt column, and whatever else the rewards need.

    columns ── prompt: data.prompt_field, else the first of messages, prompt, question, problem
                 text ──> one user turn        list of {role, content, ...} ──> a chat
            ── data.tools_field ──> tool schemas in chat-template form
            ── id, verifier, reasoning_open ──> fields of the Row
            ── every other column travels; so do these, all but the prompt's own

Invariants: the messages are never empty and never end with an assistant turn; `Row.columns` holds the raw values,
unchanged. Keys whose value is null are treated as absent in messages and schemas: tables fill structs with nulls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from palingenesis.rl.data.load import RawRow
from palingenesis.rl.errors import DataError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.types import Message, Row, ToolCall

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import DataConfig

PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"developer": "system"}  # newer OpenAI chats; templates know only `system`
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class ChatFormat:
    """The default format; see the module's docstring."""

    def matches(self, values: Mapping[str, Any]) -> bool:
        return any(values.get(name) is not None for name in PROMPT_COLUMNS)

    def convert(self, raw: RawRow, config: DataConfig) -> Row:
        name = prompt_column(raw, config.prompt_field)
        value = raw.values[name]
        messages = read_messages(value, name, raw.source)
        if config.system_prompt and not any(message.role == "system" for message in messages):
            messages = (Message("system", config.system_prompt), *messages)
        return Row(
            id=row_id(raw),
            messages=messages,
            columns={key: column for key, column in raw.values.items() if key != name},
            prompt_column=(name, value),
            tools=read_tools(raw, config.tools_field),
            verifier=read_verifier(raw),
            source=raw.source,
            reasoning_open=read_reasoning_open(raw),
        )


# ------------------------------------------------------------------------------------------------------------ the parts


def prompt_column(raw: RawRow, field: str = "") -> str:
    """Name of the column that holds the prompt. Raises DataError when the row has none."""
    if field:
        if field not in raw.values:
            raise DataError(
                f"{raw.source}: no column {field!r}, which data.prompt_field names{nearest(field, raw.values)}; "
                f"{_columns_seen(raw)}."
            )
        if raw.values[field] is None:
            raise DataError(f"{raw.source}: column {field!r} (data.prompt_field) is null; give every row a prompt.")
        return field
    present = [name for name in PROMPT_COLUMNS if name in raw.values]
    filled = [name for name in present if raw.values[name] is not None]
    if filled:
        return filled[0]
    if present:
        raise DataError(f"{raw.source}: column {present[0]!r} is null; give every row a prompt.")
    raise DataError(
        f"{raw.source}: no prompt: none of the columns {', '.join(PROMPT_COLUMNS)}; {_columns_seen(raw)}. "
        "Set data.prompt_field to the one that holds the prompt."
    )


def content_hash(values: Mapping[str, Any]) -> str:
    """64 hex digits of SHA-256 over the row's key-sorted JSON; equal rows have equal hashes wherever they stand."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def row_id(raw: RawRow) -> str:
    """The row's own `id`, else the first 16 hex digits of its content hash."""
    own = raw.values.get("id")
    if own is None or own == "":
        return content_hash(raw.values)[:16]
    if isinstance(own, bool) or not isinstance(own, (str, int, float)):
        raise DataError(f"{raw.source}: column 'id' must be text or a number, not {_kind(own)}; rename or convert it.")
    return str(own)


def read_verifier(raw: RawRow) -> tuple[str, ...]:
    """Names of the rewards that score this row; empty: all of them."""
    value = raw.values.get("verifier")
    names = [value] if isinstance(value, str) else value
    if names is None:
        return ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        raise DataError(
            f"{raw.source}: column 'verifier' must be a reward's name or a list of names, not {_show(value)}."
        )
    return tuple(names)


def read_reasoning_open(raw: RawRow) -> bool:
    value = raw.values.get("reasoning_open")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise DataError(f"{raw.source}: column 'reasoning_open' must be true or false, not {_show(value)}.")


# ---------------------------------------------------------------------------------------------------------- messages


def read_messages(value: Any, column: str, source: str) -> tuple[Message, ...]:
    """A prompt column as messages.

    Args:
        value: text (one user turn) or a list of `{role, content, tool_calls?, reasoning_content?, tool_call_id?}`.

    Raises:
        DataError: anything else, an empty prompt, or one that ends with an assistant turn.
    """
    where = f"{source}: column {column!r}"
    if isinstance(value, str) and column != "messages":
        if not value.strip():
            raise DataError(f"{where} is empty; give every row a prompt.")
        return (Message("user", value),)
    if not isinstance(value, (list, tuple)):
        text = "" if column == "messages" else "text or "
        example = '{"role": "user", "content": "..."}'
        raise DataError(f"{where} must be {text}a list of messages such as {example}, not {_kind(value)}.")
    if not value:
        raise DataError(f"{where} is an empty list; give every row at least one user turn.")
    messages = tuple(read_message(item, f"{where}, turn {number}") for number, item in enumerate(value, start=1))
    if messages[-1].role == "assistant":
        raise DataError(
            f"{where} ends with an assistant turn, so nothing is left for the policy to say; remove that turn "
            "(keep it in a column of its own if a reward needs it)."
        )
    if not any(message.content.strip() for message in messages):
        raise DataError(f"{where} has no text in any turn; give every row a prompt.")
    return messages


def read_message(item: Any, where: str) -> Message:
    """One turn of a chat. Raises DataError; `where` begins its message."""
    if not isinstance(item, Mapping):
        raise DataError(f'{where}: must be an object such as {{"role": "user", "content": "..."}}, not {_kind(item)}.')
    fields = {key: value for key, value in item.items() if value is not None}
    if "role" not in fields:
        cure = f"use one of {', '.join(ROLES)}"
        if "from" in fields:
            cure = "write ShareGPT's from/value as role/content (human is user, gpt is assistant)"
        raise DataError(f"{where}: has no role; {cure}.")
    role = _ROLE_NAMES.get(str(fields["role"]), fields["role"])
    if role not in ROLES:
        near = nearest(str(role), ROLES)
        raise DataError(f"{where}: role {_show(fields['role'])} is unknown{near}; use one of {', '.join(ROLES)}.")
    calls = _read_calls(fields.get("tool_calls") or (), where) if role == "assistant" else ()
    reasoning = next((fields[key] for key in _REASONING_KEYS if fields.get(key)), "") if role == "assistant" else ""
    if "content" not in fields and not calls and role != "tool":
        raise DataError(f'{where}: a {role} turn without content{nearest("content", fields)}; write "content".')
    return Message(
        role=role,
        content=_read_content(fields.get("content", ""), where),
        tool_calls=calls,
        name=_read_text(fields.get("name", ""), "name", where),
        reasoning=_read_text(reasoning, "reasoning_content", where),
        tool_call_id=_read_text(fields.get("tool_call_id", ""), "tool_call_id", where),
    )


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise DataError(f"{where}: content must be text or a list of text parts, not {_kind(content)}.")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise DataError(f"{where}: content holds a part of type {_show(kind)}; only text parts are supported.")
        texts.append(text)
    return "".join(texts)


def _read_text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be text, not {_kind(value)}.")
    return value


def _read_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(calls, (list, tuple)):
        raise DataError(f"{where}: tool_calls must be a list, not {_kind(calls)}.")
    return tuple(_read_call(call, f"{where}, call {number}") for number, call in enumerate(calls, start=1))


def _read_call(call: Any, where: str) -> ToolCall:
    body = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str) or not body["name"]:
        raise DataError(f'{where}: a call must look like {{"function": {{"name": "...", "arguments": {{...}}}}}}.')
    arguments = body.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: arguments of {body['name']!r} must be an object, or JSON text that holds one.")
    return ToolCall(body["name"], dict(arguments), id=_read_text(call.get("id") or "", "id", where))


# ------------------------------------------------------------------------------------------------------------- tools


def read_tools(raw: RawRow, field: str) -> tuple[Mapping[str, Any], ...]:
    """The row's tool schemas, as `{"type": "function", "function": {name, description, parameters}}`.

    Accepted in `field`: a list, or JSON text that holds one, of schemas in that form (OpenAI's chat API) or flat (its
    Responses API: name and parameters beside `type`). Null, absent and empty all mean no tools.
    """
    value = raw.values.get(field) if field else None
    where = f"{raw.source}: column {field!r}"
    if isinstance(value, str):
        value = _from_json(value) if value.strip() else None
        if value is _BROKEN:
            raise DataError(f"{where} is text that is not JSON; write a list of tool schemas, or set data.tools_field.")
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{where} must be a list of tool schemas, not {_kind(value)}; or set data.tools_field.")
    tools = tuple(read_tool(tool, f"{where}, tool {number}") for number, tool in enumerate(value, start=1))
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{where} has {names.count(name)} tools called {name!r}; give each its own name.")
    return tools


def read_tool(tool: Any, where: str) -> Mapping[str, Any]:
    """One schema in chat-template form. Raises DataError; `where` begins its message."""
    tool = _from_json(tool) if isinstance(tool, str) else tool
    if not isinstance(tool, Mapping):
        raise DataError(f'{where}: a schema must be an object such as {{"name": "...", "parameters": {{...}}}}.')
    if tool.get("type", "function") not in ("function", None):
        raise DataError(f"{where}: type {_show(tool['type'])} is not supported; only functions can be called.")
    nested = tool.get("function")
    body = nested if isinstance(nested, Mapping) else {k: v for k, v in tool.items() if k not in ("type", "strict")}
    if not isinstance(body.get("name"), str) or not body["name"]:
        example = '{"name": "...", "description": "...", "parameters": {...}}'
        raise DataError(f"{where}: the schema has no name; write {example}.")
    parameters = body.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise DataError(
            f"{where}: parameters of {body['name']!r} must be a JSON schema object, not {_kind(parameters)}."
        )
    function = {**body, "parameters": parameters or {"type": "object", "properties": {}}}
    return {"type": "function", "function": _without_nulls(function)}


def _without_nulls(value: Any) -> Any:
    """Tables give every property every other property's keys, as nulls; `default` and `const` may mean null."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in ("default", "const")}
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


# ------------------------------------------------------------------------------------------------------------- words

_BROKEN = object()


def _from_json(text: str) -> Any:
    """The value of JSON text, or `_BROKEN`, which is of no type that a caller accepts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


def _columns_seen(raw: RawRow) -> str:
    names = sorted(map(str, raw.values))
    if not names:
        return "the row has no columns"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"the row has {', '.join(names[:12])}{more}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _show(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
