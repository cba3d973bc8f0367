"""What the policy is told of a tool, and what it is told when it calls one wrongly."""

from __future__ import annotations

import enum
import functools
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from pydantic import BaseModel, Field

from palingenesis.rl.envs.schema import BadArguments, Tool, expose, read_docstring, tidy, tool_of, tools_of
from palingenesis.rl.errors import ConfigError, DataError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    """A place."""

    x: float
    title: str = "here"


@dataclass
class Box:
    low: Point
    high: Point | None = None


class Filter(TypedDict):
    field: str
    value: NotRequired[int]


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class Opaque:
    pass


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    schema = tool_of(function, "t.py:f").schema
    json.dumps(schema)
    assert schema["type"] == "function"
    return dict(schema["function"]["parameters"])


def test_the_form_that_chat_templates_read() -> None:
    def search(query: str, limit: int = 5, kind: Literal["web", "news"] = "web") -> str:
        """Search the web.

        Goes on here.

        Args:
            query: What to look for,
                in plain words.
            limit (int, optional): Most results.

        Returns:
            The results.
        """
        return query

    assert tool_of(search, "t.py:search").schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\n\nGoes on here.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in plain words."},
                    "limit": {"type": "integer", "description": "Most results.", "default": 5},
                    "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
                },
                "required": ["query"],
            },
        },
    }


def test_without_arguments_and_docstring() -> None:
    def ping() -> None:
        pass

    assert tool_of(ping, "x").schema["function"] == {
        "name": "ping",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


def test_types() -> None:
    def f(
        a: str | None,
        b: list[int],
        c: dict[str, float],
        d: Colour,
        e: int | str,
        g: Annotated[int, Field(ge=1, description="at least one")],
        h: tuple[int, str],
        i: Any,
        j: typing.Optional[bool] = None,  # noqa: UP045
        k: int = None,  # type: ignore[assignment]  # noqa: RUF013
        m: Colour = Colour.BLUE,
        n: Opaque = Opaque(),  # type: ignore[assignment]
    ) -> None: ...

    f.__annotations__["n"] = "int"  # a default that JSON cannot hold is left out
    got = parameters(f)
    text, null = {"type": "string"}, {"type": "null"}
    assert got["properties"] == {
        "a": {"anyOf": [text, null]},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"type": "object", "additionalProperties": {"type": "number"}},
        "d": {"type": "string", "enum": ["red", "blue"]},
        "e": {"anyOf": [{"type": "integer"}, text]},
        "g": {"type": "integer", "minimum": 1, "description": "at least one"},
        "h": {"type": "array", "prefixItems": [{"type": "integer"}, text], "minItems": 2, "maxItems": 2},
        "i": {},
        "j": {"anyOf": [{"type": "boolean"}, null], "default": None},
        "k": {"anyOf": [{"type": "integer"}, null], "default": None},
        "m": {"type": "string", "enum": ["red", "blue"], "default": "blue"},
        "n": {"type": "integer"},
    }
    assert got["required"] == list("abcdeghi")


def test_nested_types_stand_where_they_are_used_without_titles() -> None:
    def f(box: Box, filters: list[Filter] | None = None, point: Point = Point(x=1)) -> None:
        """F.

        Args:
            point: Where to start.
        """

    got = parameters(f)
    assert "$defs" not in json.dumps(got)
    point = got["properties"]["point"]
    assert point["description"] == "Where to start."
    assert point["default"] == {"x": 1.0, "title": "here"}
    low = got["properties"]["box"]["properties"]["low"]
    assert low == {  # the property `title` stays, the notes of that name go
        "type": "object",
        "description": "A place.",
        "properties": {"x": {"type": "number"}, "title": {"type": "string", "default": "here"}},
        "required": ["x"],
    }
    items = got["properties"]["filters"]["anyOf"][0]["items"]
    assert items["required"] == ["field"]
    assert items["properties"] == {"field": {"type": "string"}, "value": {"type": "integer"}}


def test_recursive_types_keep_their_definitions() -> None:
    def f(tree: Tree) -> None: ...

    got = parameters(f)
    assert got["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert got["$defs"]["Tree"]["properties"]["name"] == {"type": "string"}


def test_arguments_arrive_as_the_hints_say() -> None:
    def f(
        box: Box, colour: Colour, when: Filter, n: int, json: str, copy: bool = False, model_config: int = 3
    ) -> None: ...

    tool = tool_of(f, "x")
    given = {
        "box": {"low": {"x": "1.5"}},
        "colour": "red",
        "when": {"field": "a"},
        "n": "7",
        "json": "{}",
        "copy": "true",
    }
    assert tool.read(given) == {
        "box": Box(Point(x=1.5)),
        "colour": Colour.RED,
        "when": {"field": "a"},
        "n": 7,
        "json": "{}",
        "copy": True,
    }  # what was not given is Python's own default


def refused(tool: Tool, arguments: dict[str, Any]) -> str:
    with pytest.raises(BadArguments) as caught:
        tool.read(arguments)
    return str(caught.value)


def test_wrong_arguments_are_explained() -> None:
    def search(query: str, limit: int = 5, where: Point | None = None, colour: Colour = Colour.RED) -> None: ...

    tool = tool_of(search, "x")
    takes = (
        'It takes query (string), limit (integer, optional), where (object or null, optional), colour (one of "red", '
        '"blue", optional).'
    )
    assert refused(tool, {}) == f"wrong arguments for 'search': argument 'query' is missing. {takes}"
    wrong = refused(tool, {"query": "a", "limit": "many", "qeury": 1})
    assert "argument 'limit': Input should be a valid integer" in wrong
    assert "(got 'many')" in wrong
    assert "there is no argument 'qeury' (did you mean 'query'?)" in wrong
    assert "argument 'where.x': Input should be a valid number" in refused(tool, {"query": "", "where": {"x": "a"}})
    assert "'red' or 'blue'" in refused(tool, {"query": "", "colour": "green"})
    assert len(refused(tool, {"query": ["x" * 5000]})) < 600
    assert "and 20 more" in refused(tool, {"query": "", **{f"k{n}": n for n in range(25)}})
    assert refused(tool_of(lambda_of(), "x"), {"a": 1}).endswith("It takes no arguments.")


def lambda_of() -> Callable[[], None]:
    def nothing() -> None: ...

    return nothing


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(x): ...", "argument 'x' has no type hint; write one, such as `x: str`"),
        ("def f(x: Opaque): ...", "argument 'x': its type Opaque cannot be described"),
        ("def f(x: Annotated[str, Field(pattern='(?!x)a')]): ...", "argument 'x': its type "),
        ("def f(x: Annotated[int, Field(ge='x')]): ...", "argument 'x': its type "),
        ("def f(x: '1/0'): ...", "argument 'x': its type '1/0' cannot be described"),
        ("def f(x: Annotated[int, Field(default=5)]): ...", "argument 'x': its default stands in pydantic's Field"),
        ("def f(x: int = Field(default=3, ge=1)): ...", "argument 'x': its default stands in pydantic's Field"),
        ("def f(y: int, x: list[Opaque]): ...", "argument 'x': its type"),
        ("def f(x: Callable[[int], int]): ...", "argument 'x': its type"),
        (
            "def f(x: Missing): ...",
            "argument 'x': its type Missing cannot be described to the policy (name 'Missing'",
        ),
        ("def f(x: int, /): ...", "argument 'x' is positional-only"),
        ("def f(*x: int): ...", "argument 'x' stands for any number"),
        ("def f(**x: int): ...", "argument 'x' stands for any number"),
        ("def f(x: int):\n    yield x", "it yields; a tool returns one result"),
        ("f = lambda x: x", "a tool needs a name of letters, digits and underscores, not '<lambda>'"),
    ],
)
def test_what_cannot_be_described_is_an_error(source: str, says: str) -> None:
    names: dict[str, Any] = {"Opaque": Opaque, "Callable": Callable, "Annotated": Annotated, "Field": Field}
    exec(source, names)
    with pytest.raises(ConfigError) as caught:
        tool_of(names["f"], "env.tools: t.py:f")
    assert str(caught.value).startswith("env.tools: t.py:f: ")
    assert says in str(caught.value)


def test_hints_as_text_and_wrapped_functions() -> None:
    def inner(point: Point, opaque: int = 1) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        """Inner."""

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    schema = tool_of(outer, "x").schema["function"]
    assert schema["name"] == "inner"
    assert schema["description"] == "Inner."
    assert list(schema["parameters"]["properties"]) == ["point", "opaque"]


def test_typed_dicts_of_typing_inside_other_types() -> None:
    """Before Python 3.12 pydantic does not read them by itself."""

    def f(a: Annotated[list[Filter], "note"], b: dict[str, Filter | None]) -> None: ...

    assert tool_of(f, "x").read({"a": [{"field": "q"}], "b": {"k": None}}) == {"a": [{"field": "q"}], "b": {"k": None}}


def test_docstrings() -> None:
    assert read_docstring("") == ("", {})
    assert read_docstring("One.\n\n- a\n- b\n\nReturns:\n    x") == ("One.\n\n- a\n- b", {})
    text = "F.\n\nArguments:\n  a: first: with a colon\n     more\n\n     on\n  b (dict[str, int]): second\nOther:\n  c: no"
    assert read_docstring(text) == ("F.", {"a": "first: with a colon more on", "b": "second"})


def test_tidy_leaves_values_alone() -> None:
    schema = {
        "title": "T",
        "properties": {"title": {"title": "Title", "const": {"title": "x"}}, "p": {"$ref": "#/$defs/P"}},
        "required": ["title"],
        "$defs": {"P": {"title": "P", "enum": [{"title": 1}]}},
    }
    assert tidy(schema) == {
        "properties": {"title": {"const": {"title": "x"}}, "p": {"enum": [{"title": 1}]}},
        "required": ["title"],
    }
    foreign = {"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"title": "A", "type": "string"}}}
    assert tidy(foreign) == {"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"type": "string"}}}


def test_patterns() -> None:
    names = ["search__web", "search__news", "python"]
    assert expose(names, (), "o") == names
    assert expose(names, ["python", "search__*"], "o") == names
    assert expose(names, ["*news"], "o") == ["search__news"]
    with pytest.raises(ConfigError, match=r"^o: 'pyhton' matches no tool \(did you mean 'python'\?\); the tools are: "):
        expose(names, ["python", "pyhton"], "o")


# -------------------------------------------------------------------------------------------------------- bare schemas


def listed(*schemas: Any) -> tuple[Tool, ...]:
    return tools_of(list(schemas), lambda name, arguments: (name, arguments), "Env.tool_schemas")


BARE = {
    "type": "object",
    "title": "searchArguments",
    "properties": {"q": {"type": "string", "title": "Q"}, "n": {"type": ["integer", "null"]}},
    "required": ["q"],
}


def test_bare_schemas_in_both_forms() -> None:
    chat = {"type": "function", "function": {"name": "search", "description": "D", "parameters": BARE}}
    flat = {"type": "function", "name": "search", "description": "D", "parameters": BARE, "strict": True}
    (one,), (other,) = listed(chat), listed(flat)
    assert one.schema == other.schema
    assert one.schema["function"]["parameters"]["properties"]["q"] == {"type": "string"}
    assert one.bound({"q": "x"})() == ("search", {"q": "x"})


def test_bare_schemas_convert_nothing() -> None:
    (tool,) = listed({"name": "search", "parameters": BARE})
    assert tool.read({"q": "x", "n": None, "else": 1}) == {"q": "x", "n": None, "else": 1}
    wrong = refused(tool, {"q": "x", "n": "3"})
    assert wrong == (
        "wrong arguments for 'search': argument 'n': '3' is not of type 'integer', 'null'. It takes q (string), n (integer "
        "or null, optional)."
    )
    assert "'q' is a required property" in refused(tool, {})


def test_a_reference_to_another_host_is_not_fetched() -> None:
    (tool,) = listed({"name": "f", "parameters": {"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}})
    with pytest.raises(Exception, match="Unresolvable"):
        tool.read({"a": 1})


def test_defective_listings() -> None:
    with pytest.raises(ConfigError, match="returned None; it returns a list of tool schemas"):
        tools_of(None, print, "Env.tool_schemas")
    with pytest.raises(ConfigError, match="lists 2 tools called 'a'"):
        listed({"name": "a"}, {"name": "a"})
    with pytest.raises(DataError, match=r"Env.tool_schemas, tool 1: the schema has no name"):
        listed({"description": "a"})
