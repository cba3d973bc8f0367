"""Tools as the policy sees them and as they are called.

    a function: hints + docstring ──┐                  ┌─ schema: what the chat template renders
    a bare JSON schema ─────────────┴──> Tool ─────────┼─ read(arguments): checked, or BadArguments with what was wrong
                                                       └─ bound(arguments): the call

A function's arguments are validated by pydantic in its lax mode ("3" is an int) and arrive as what the hints say: models,
dataclasses, enum members. Against a bare schema they are validated by jsonschema and arrive unchanged. Invariants: an
argument that the policy cannot be told about is an error at start; a default reaches the function as Python's own.

Schemas are `{"type": "function", "function": {"name", "description", "parameters"}}`. They cost prompt tokens in every
rollout: JSON schema's `title` notes are dropped, and definitions stand where they are used, unless they are recursive.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Optional, Union

import typing_extensions
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from pydantic import BaseModel, Field, TypeAdapter, create_model
from pydantic import ValidationError as PydanticValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from referencing import Registry

from palingenesis.rl.chat.results import clean
from palingenesis.rl.data.formats.chat import read_tool
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import nearest, shown

Schema = Mapping[str, Any]

SHOWN = 5  # errors in one answer
SHOWN_CHARS = 120  # of a value in an answer
SECTIONS = "Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|See Also|Warnings?"


class BadArguments(Exception):
    """The policy's arguments do not fit; the message is what it reads."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool.

    Attributes:
        schema: in chat-template form.
        function: what runs, sync or async.
        read: the arguments to call it with, checked. Raises BadArguments.
        by_name: the function takes each argument by its name, else all of them as one mapping.
    """

    schema: Schema
    function: Callable[..., Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    by_name: bool = True

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def bound(self, arguments: dict[str, Any]) -> Callable[[], Any]:
        """The call with arguments that `read` gave."""
        return functools.partial(self.function, **arguments) if self.by_name else self._with_mapping(arguments)

    def _with_mapping(self, arguments: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(self.function, arguments)


def expose(names: Iterable[str], patterns: Sequence[str], option: str) -> list[str]:
    """The names that one of `patterns` matches, in their own order; all of them without patterns.

    Args:
        patterns: names or shell-style patterns (`search__*`); case counts.
        option: where the patterns stand, for errors.

    Raises:
        ConfigError: a pattern that matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{option}: {pattern!r} matches no tool{nearest(pattern, names)}; the tools are: "
                f"{', '.join(names) or 'none'}."
            )
    return [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


# ----------------------------------------------------------------------------------------------------------- functions


def tool_of(function: Callable[..., Any], where: str, *, is_method: bool = False) -> Tool:
    """The tool that a function or method is.

    Args:
        where: names it in errors: `env.tools: my_tools.py:search`.
        is_method: its first parameter is the object and not an argument.

    Raises:
        ConfigError: it cannot be a tool, or an argument cannot be described; names the argument.
    """
    name = getattr(function, "__name__", "")
    if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
        raise ConfigError(f"{where}: a tool needs a name of letters, digits and underscores, not {name!r}; use `def`.")
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(f"{where}: it yields; a tool returns one result.")
    description, notes = read_docstring(inspect.getdoc(function) or "")
    parameters = list(_signature(function, where).parameters.values())[1 if is_method else 0 :]
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        fields[f"p{index}"] = (_hint(parameter, inner, where), _field(parameter, notes.get(parameter.name, "")))
    # Fields have names of their own, because an argument may be called `json` or `copy`, which a model has already.
    model = create_model(name, **fields)
    schema = tidy(model.model_json_schema(schema_generator=_NoWarnings))
    body = {"name": name, "description": description, "parameters": {"type": "object", "properties": {}} | schema}
    return Tool(
        {"type": "function", "function": body}, function, functools.partial(_read_by_hints, name, model, schema)
    )


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{where}: its arguments cannot be read: {error}.") from error


def _hint(parameter: inspect.Parameter, function: Callable[..., Any], where: str) -> Any:
    """The parameter's type for pydantic."""
    argument = f"{where}: argument {parameter.name!r}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ConfigError(f"{argument} stands for any number of them; a tool's arguments each have a name and a type.")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(f"{argument} is positional-only; a call gives arguments by name.")
    if parameter.annotation is parameter.empty:
        raise ConfigError(f"{argument} has no type hint; write one, such as `{parameter.name}: str`.")
    try:
        hint = _portable(_evaluated(parameter, function))
        hint = Optional[hint] if parameter.default is None else hint  # noqa: UP045 - `limit: int = None` allows null
        TypeAdapter(hint).json_schema(schema_generator=_NoWarnings)
    except Exception as error:  # pydantic's, or of the hint's own code
        shown = parameter.annotation if isinstance(parameter.annotation, str) else _type_name(parameter.annotation)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{argument}: its type {shown} cannot be described to the policy ({reason}). Use plain types, Literal, "
            "enums, lists, dicts, TypedDicts, dataclasses or pydantic models."
        ) from error
    if isinstance(parameter.default, FieldInfo) or any(_gives_default(part) for part in typing.get_args(hint)):
        raise ConfigError(
            f"{argument}: its default stands in pydantic's Field, which is not applied when the function is called; write "
            f"`{parameter.name}: Annotated[int, Field(ge=1)] = 3`, with the default behind the hint."
        )
    return hint


def _gives_default(part: Any) -> bool:
    return isinstance(part, FieldInfo) and not part.is_required()


def _evaluated(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """The hint, of a string its value; one at a time, so that a name which only another hint needs is not missed."""
    holder = types.SimpleNamespace(__annotations__={"hint": parameter.annotation})
    names = getattr(function, "__globals__", {})
    return typing.get_type_hints(holder, globalns=names, include_extras=True)["hint"]


def _portable(hint: Any) -> Any:
    """The hint with typing's TypedDicts made typing_extensions' own: before Python 3.12 pydantic reads only those."""
    if sys.version_info >= (3, 12):
        return hint
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        return _extended(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return Annotated[(_portable(hint.__origin__), *hint.__metadata__)]
    changed = tuple(_portable(arg) for arg in args)
    if origin is None or changed == args:
        return hint
    return Union[changed] if origin is types.UnionType else origin[changed]  # noqa: UP007 - of a tuple


def _extended(hint: Any) -> Any:
    fields = {}
    for key, value in typing.get_type_hints(hint, include_extras=True).items():
        # `__required_keys__` misses what is said in hints that are text.
        is_needed = _REQUIRED.get(typing.get_origin(value), key in hint.__required_keys__)
        presence = typing_extensions.Required if is_needed else typing_extensions.NotRequired
        inner = typing.get_args(value)[0] if typing.get_origin(value) in _REQUIRED else value
        fields[key] = presence[_portable(inner)]
    made = typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[misc]
    made.__doc__ = hint.__doc__
    return made


_REQUIRED: Mapping[Any, bool] = {typing.Required: True, typing.NotRequired: False}


def _field(parameter: inspect.Parameter, note: str) -> Any:
    kwargs: dict[str, Any] = {"alias": parameter.name}
    if note:
        kwargs["description"] = note
    if parameter.default is not parameter.empty:
        kwargs["default"] = parameter.default
    return Field(**kwargs)


class _NoWarnings(GenerateJsonSchema):
    """A default that JSON cannot hold is left out of the schema without a word: the function has it anyway."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012 - as pydantic declares it


def _read_by_hints(name: str, model: type[BaseModel], schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = schema.get("properties", {})
    problems = [
        f"there is no argument {shown(key, SHOWN_CHARS)}{nearest(key, known)}" for key in arguments if key not in known
    ]
    try:
        read = model.model_validate(dict(arguments))
    except PydanticValidationError as error:
        problems += [_hint_problem(one) for one in error.errors(include_url=False)]
    if problems:
        raise BadArguments(_wrong(name, schema, problems))
    fields = type(read).model_fields
    return {str(fields[field].alias): getattr(read, field) for field in fields if field in read.model_fields_set}


def _hint_problem(error: Mapping[str, Any]) -> str:
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"argument {place!r} is missing"
    return f"argument {place!r}: {error['msg']} (got {shown(error['input'], SHOWN_CHARS)})"


# -------------------------------------------------------------------------------------------------------- bare schemas


def tools_of(schemas: Any, call_tool: Callable[..., Any], where: str) -> tuple[Tool, ...]:
    """The tools that `tool_schemas()` lists and `call_tool(name, arguments)` runs.

    Args:
        schemas: a list of schemas, of OpenAI's chat form or flat as in its Responses API.
        where: names the method in errors.

    Raises:
        ConfigError: it is not a list.
        DataError: an entry is not a schema of a function.
    """
    if isinstance(schemas, (str, bytes, Mapping)) or not isinstance(schemas, Iterable):
        raise ConfigError(f"{where} returned {shown(schemas, SHOWN_CHARS)}; it returns a list of tool schemas.")
    tools = []
    for number, raw in enumerate(schemas, start=1):
        name, body = _plain_tool(raw, f"{where}, tool {number}")
        read = functools.partial(read_by_schema, name, body["parameters"])
        run = functools.partial(call_tool, name)
        tools.append(Tool({"type": "function", "function": body}, run, read, by_name=False))
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where} lists {names.count(name)} tools called {name!r}; give each its own name.")
    return tuple(tools)


def _plain_tool(raw: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The name by which the environment knows a tool, and the tool as it is shown: what JSON holds, in whole characters."""
    body = read_tool(raw, where)["function"]
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: the schema of {body['name']!r} holds what JSON cannot: {error}.") from error
    shown = json.loads(clean(text))
    return body["name"], {
        **shown,
        "description": shown.get("description") or "",
        "parameters": tidy(shown["parameters"]),
    }


def check_parameters(tool: Tool, where: str) -> None:
    """Raise ConfigError when the tool's parameters are not a JSON schema."""
    parameters = tool.schema["function"]["parameters"]
    try:
        _validator(json.dumps(parameters, sort_keys=True))
    except SchemaError as error:
        raise ConfigError(f"{where}: the parameters of {tool.name!r} are no JSON schema: {error.message}.") from error


def read_by_schema(name: str, parameters: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as they are, if a bare JSON schema allows them; nothing is converted. Raises BadArguments."""
    validator = _validator(json.dumps(parameters, sort_keys=True))
    errors = sorted(validator.iter_errors(dict(arguments)), key=lambda error: [str(key) for key in error.path])
    if errors:
        raise BadArguments(_wrong(name, parameters, [_schema_problem(error) for error in errors]))
    return dict(arguments)


@functools.lru_cache(maxsize=4096)
def _validator(parameters: str) -> Validator:
    """Of a schema as JSON text: episodes of one environment list the same tools, and checking a schema takes a while.

    The empty registry keeps a `$ref` to another host from being fetched.
    """
    schema = json.loads(parameters)
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())


def _schema_problem(error: ValidationError) -> str:
    place = ".".join(map(str, error.path))
    message = error.message if len(error.message) <= 2 * SHOWN_CHARS else error.message[: 2 * SHOWN_CHARS] + "..."
    return f"argument {place!r}: {message}" if place else message


# ------------------------------------------------------------------------------------------------------------- answers


def _wrong(name: str, parameters: Schema, problems: Sequence[str]) -> str:
    """What was wrong, and what the tool takes."""
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"wrong arguments for {name!r}: {'; '.join(problems[:SHOWN])}{more}. {_takes(parameters)}"


def _takes(parameters: Schema) -> str:
    required = parameters.get("required", ())
    listed = [
        f"{name} ({', '.join([*_kinds(schema), *(() if name in required else ('optional',))])})"
        for name, schema in parameters.get("properties", {}).items()
    ]
    return f"It takes {', '.join(listed)}." if listed else "It takes no arguments."


def _kinds(schema: Any) -> Iterator[str]:
    """Words for a schema's type: `integer`, `string or null`, `one of "a", "b"`."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("enum"), list):
        yield f"one of {', '.join(map(json.dumps, schema['enum']))}"
    elif isinstance(schema.get("anyOf"), list):
        yield " or ".join(word for option in schema["anyOf"] for word in _kinds(option)) or "any"
    elif "type" in schema:
        kinds = schema["type"]
        yield kinds if isinstance(kinds, str) else " or ".join(map(str, kinds))


def _type_name(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)


# ---------------------------------------------------------------------------------------------------------- docstrings


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """`(description, {argument: what it is})` of a Google-style docstring, given without its indent.

    The description is what stands above the first section, as it is; the lines of an argument are joined.
    """
    head, *sections = re.split(rf"^({SECTIONS}):[ \t]*$", text, flags=re.MULTILINE)
    notes: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            notes |= _read_arguments(body)
    return head.strip(), notes


def _read_arguments(body: str) -> dict[str, str]:
    """`name: text` and `name (type): text` at the section's indent; deeper lines go on."""
    notes: dict[str, list[str]] = {}
    indented = itertools.takewhile(lambda line: not line or line[0].isspace(), body.strip("\n").splitlines())
    current: list[str] = []
    for line in textwrap.dedent("\n".join(indented)).splitlines():
        start = re.match(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:(.*)", line)
        if start:
            current = notes.setdefault(start[1], [])
            current.append(start[2])
        else:
            current.append(line)
    return {name: " ".join(" ".join(parts).split()) for name, parts in notes.items()}


# ------------------------------------------------------------------------------------------------------ tidy JSON schema

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # map names to schemas
_DATA = ("default", "const", "enum", "examples", "required")  # hold values


class _Recursive(Exception):
    """A definition uses itself."""


def tidy(schema: Schema) -> dict[str, Any]:
    """A JSON schema without `title` notes, its definitions put where they are used; recursive ones stay apart."""
    try:
        inlined = _tidy({key: value for key, value in schema.items() if key != "$defs"}, schema.get("$defs", {}), ())
    except (_Recursive, KeyError):  # KeyError: a reference of another form, which a validator may know
        inlined = _tidy(schema, None, ())
    return dict(inlined)


def _tidy(node: Any, definitions: Schema | None, within: tuple[str, ...]) -> Any:
    """`definitions` None leaves references alone; `within` are the definitions being put in place."""
    if isinstance(node, list):
        return [_tidy(item, definitions, within) for item in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node and definitions is not None:
        name = str(node["$ref"]).removeprefix("#/$defs/")
        if name in within:
            raise _Recursive(name)
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _tidy(definitions[name], definitions, (*within, name)) | _tidy(rest, definitions, within)
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in _NAMED and isinstance(value, Mapping):
            out[key] = {name: _tidy(item, definitions, within) for name, item in value.items()}
        elif key in _DATA:
            out[key] = value
        elif not (key == "title" and isinstance(value, str)) and key != "discriminator":
            out[key] = _tidy(value, definitions, within)
    return out
