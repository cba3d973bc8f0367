"""Environment classes and function tools: what is a tool, what the hooks receive, and whose failure is what."""

from __future__ import annotations

import abc
import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from palingenesis.rl.config.schema import EnvConfig
from palingenesis.rl.envs import Environments, EnvSession, ToolAnswer, build, wants_sandbox
from palingenesis.rl.envs.classes import ClassEnvironment, public_methods
from palingenesis.rl.envs.session import as_text
from palingenesis.rl.errors import ConfigError, DataError, RewardError, SkipSample, StopRun
from palingenesis.rl.types import Message, Row, ToolCall

ROW = Row(
    "r1", (Message("user", "why?"),), {"answer": "5", "tests": ["a"]}, ("question", "why?"), source="rows.jsonl:1"
)


def environments(cls: Any, args: Mapping[str, Any] | None = None, sandbox: Any = None, **options: Any) -> Environments:
    config = EnvConfig(type="m:C", args=dict(args or {}), **options)
    return Environments(ClassEnvironment(cls, config.args, sandbox, config.allowed_tools), config)


def use(cls: Any, what: Callable[[EnvSession], Awaitable[Any]], row: Row = ROW, **options: Any) -> Any:
    """What `what` gives for a session of `cls`, which is closed afterwards."""

    async def main() -> Any:
        session = await environments(cls, **options).open(row)
        try:
            return await what(session)
        finally:
            await session.close()

    return asyncio.run(main())


def called(cls: Any, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> ToolAnswer:
    answer = use(cls, lambda session: session.call(ToolCall(name, arguments or {})), **options)
    assert isinstance(answer, ToolAnswer)
    return answer


def rewarded(cls: Any, messages: Sequence[Message] = ()) -> Any:
    return use(cls, lambda session: session.reward(messages))


def names(session: EnvSession) -> list[str]:
    return [schema["function"]["name"] for schema in session.schemas]


async def _names(session: EnvSession) -> list[str]:
    return names(session)


# ------------------------------------------------------------------------------------------------------ what is a tool


class Base:
    def inherited(self) -> str:
        """Inherited."""
        return "base"


class Room(Base):
    """A class with everything that is no tool beside what is one."""

    limit = 3
    Nested = dict
    helper: ClassVar[Any] = functools.partial(print)

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.done = False
        self.log: list[str] = []
        self.attribute = lambda: 1

    def reset(self, **row: Any) -> str:
        return f"answer is {row['answer']}"

    def look(self, far: bool = False) -> str:
        """Look around."""
        return f"size {self.size}"

    async def leave(self) -> None:
        self.done = True

    @staticmethod
    def rules(topic: str) -> str:
        return topic

    @classmethod
    def kind(cls, short: bool = True) -> str:
        return cls.__name__

    @property
    def secret(self) -> str:
        raise AssertionError

    @functools.cached_property
    def other_secret(self) -> str:
        raise AssertionError

    def _private(self) -> None: ...

    def get_reward(self) -> float:
        return 1

    def close(self) -> None:
        self.log.append("closed")


def test_public_methods_are_the_tools() -> None:
    assert public_methods(Room) == ["inherited", "look", "leave", "rules", "kind"]
    envs = environments(Room)
    assert envs.schemas is not None
    assert [schema["function"]["name"] for schema in envs.schemas] == public_methods(Room)
    assert envs.listing == "inherited, look, leave, rules, kind (Room)"
    assert use(Room, _names) == public_methods(Room)


def test_calls_and_done() -> None:
    async def play(session: EnvSession) -> None:
        assert session.opening == "answer is 5"
        assert session.env.size == 4
        call = lambda name, **arguments: session.call(ToolCall(name, arguments))  # noqa: E731
        assert await call("look", far="true") == ToolAnswer("size 4")
        assert await call("inherited") == ToolAnswer("base")
        assert await call("rules", topic="t") == ToolAnswer("t")
        assert await call("kind") == ToolAnswer("Room")
        assert not session.done
        assert await call("leave") == ToolAnswer("")
        assert session.done
        assert await session.reward([]) == {"reward": 1.0}

    use(Room, play, args={"size": 4})


@pytest.mark.parametrize(
    "name",
    ["reset", "get_reward", "close", "_private", "secret", "limit", "Nested", "helper", "attribute", "__init__", ""],
)
def test_anything_else_is_unknown_before_it_reaches_the_environment(name: str) -> None:
    answer = called(Room, name)
    assert answer.is_error
    assert answer.text.startswith(f"Error: unknown tool {name!r}")
    assert answer.text.endswith("; the tools are: inherited, look, leave, rules, kind")


def test_an_unknown_tool_is_answered_with_the_nearest() -> None:
    assert called(Room, "lok").text.startswith("Error: unknown tool 'lok' (did you mean 'look'?); the tools are: ")


def test_the_class_pins_its_tools() -> None:
    class Pinned(Room):
        tools = ("look", "leave")

    class Undescribable(Room):
        tools = ("look",)

        def grade(self, what: Any, *rest: Any) -> None: ...

    assert use(Pinned, _names) == ["look", "leave"]
    assert use(Undescribable, _names) == ["look"]
    assert "unknown tool 'grade'" in called(Undescribable, "grade").text
    assert use(Room, _names, allowed_tools=["l*", "kind"]) == ["look", "leave", "kind"]
    assert use(Pinned, _names, allowed_tools=["look"]) == ["look"]


@pytest.mark.parametrize(
    ("pinned", "says"),
    [
        (("look", "lok"), r"env.type: Bad.tools: 'lok' matches no tool \(did you mean 'look'\?\); the tools are: "),
        (("reset",), "env.type: Bad.tools: 'reset' matches no tool"),
        ("look", "env.type: Bad.tools is 'look'; it names the tools, such as"),
        ((), "env.type: Bad.tools is"),
        ((1,), "env.type: Bad.tools is"),
    ],
)
def test_bad_pins(pinned: Any, says: str) -> None:
    class Bad(Room):
        tools = pinned

    with pytest.raises(ConfigError, match=f"^{says}"):
        environments(Bad)


def test_a_pattern_that_matches_nothing_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match=r"^env.allowed_tools: 'search__\*' matches no tool"):
        environments(Room, allowed_tools=["look", "search__*"])


def test_defective_classes() -> None:
    class Done:
        def done(self) -> None: ...

    class Untyped:
        def tool(self, x): ...  # type: ignore[no-untyped-def]

    class Half:
        def tool_schemas(self) -> None: ...

    class Wants:
        def get_reward(self, answer: str) -> float:
            return 0

    with pytest.raises(ConfigError, match=r"Done.done is a method; `done` is the flag"):
        environments(Done)
    with pytest.raises(ConfigError, match=r"^env.type: Untyped.tool: argument 'x' has no type hint"):
        environments(Untyped)
    with pytest.raises(ConfigError, match=r"^env.type: Half has tool_schemas but no call_tool"):
        environments(Half)
    with pytest.raises(ConfigError, match=r"^env.type: Wants.get_reward asks for 'answer'"):
        environments(Wants)

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def tool(self) -> str: ...

    with pytest.raises(ConfigError, match="is not a class"):
        environments(print)
    with pytest.raises(ConfigError, match=r"^env.type: Abstract is abstract; name a class"):
        environments(Abstract)


# --------------------------------------------------------------------------------------------------------- constructor


def test_constructor_arguments_are_checked_at_start() -> None:
    class Server:
        def __init__(self, base_url: str, sandbox: Any, *, retries: int = 2) -> None:
            self.given = (base_url, sandbox, retries)

    class Anything:
        def __init__(self, **options: Any) -> None:
            self.options = options

    async def given(session: EnvSession) -> Any:
        return session.env.given

    assert use(Server, given, args={"base_url": "u"}, sandbox="BOX") == ("u", "BOX", 2)
    assert use(Server, given, args={"base_url": "u"}) == ("u", None, 2)
    environments(Anything, {"a": 1})
    with pytest.raises(ConfigError, match=r"env.args.base_url is missing: Server needs it"):
        environments(Server)
    with pytest.raises(
        ConfigError,
        match=r"env.args.retires: Server takes no 'retires' \(did you mean 'retries'\?\); it takes: base_url, r",
    ):
        environments(Server, {"base_url": "u", "retires": 1})
    with pytest.raises(ConfigError, match=r"env.args.sandbox: it comes from the trainer"):
        environments(Server, {"base_url": "u", "sandbox": 1})


def test_each_episode_has_arguments_of_its_own() -> None:
    class Env:
        def __init__(self, items: list[int]) -> None:
            items.append(1)
            self.items = items

    async def main() -> None:
        envs = environments(Env, {"items": []})
        sessions = [await envs.open(ROW) for _ in range(2)]
        assert [session.env.items for session in sessions] == [[1], [1]]
        await envs.aclose()

    asyncio.run(main())


# --------------------------------------------------------------------------------------------------------------- reset


def test_reset_receives_the_columns_it_asks_for() -> None:
    seen: list[Any] = []

    class Named:
        def reset(self, answer: str, question: str, missing: int = 3) -> None:
            seen.append((answer, question, missing))

    class Rest:
        async def reset(self, answer: str, **row: Any) -> None:
            row["tests"].append("changed")
            seen.append((answer, row))

    for cls in (Named, Rest):
        assert use(cls, _names) == []
    assert seen == [("5", "why?", 3), ("5", {"tests": ["a", "changed"]})]
    assert ROW.columns["tests"] == ["a"]


def test_a_column_that_is_not_there_stops_the_run() -> None:
    class Env:
        def reset(self, anser: str) -> None: ...

    says = (
        r"row r1 \(rows.jsonl:1\): there is no column 'anser' \(did you mean 'answer'\?\), which Env.reset asks for. The "
        r"row's columns: answer, tests, question\."
    )
    with pytest.raises(DataError, match=says):
        environments(Env).check_columns(ROW)
    with pytest.raises(DataError, match=says):
        use(Env, _names)


@pytest.mark.parametrize(
    "error", [RuntimeError("no room"), TypeError("defect"), SystemExit(3), asyncio.CancelledError()]
)
@pytest.mark.parametrize("place", ["constructor", "reset", "reset_async", "tool_schemas"])
def test_an_environment_that_fails_to_start_skips_the_sample(place: str, error: BaseException) -> None:
    closed: list[Any] = []

    def fail(here: str) -> None:
        if here == place:
            raise error

    class Env:
        def __init__(self) -> None:
            fail("constructor")

        async def reset(self) -> None:
            await asyncio.to_thread(fail, "reset")
            fail("reset_async")

        def tool_schemas(self) -> list[Any]:
            fail("tool_schemas")
            return []

        def call_tool(self, name: str, arguments: Any) -> None: ...

        def close(self) -> None:
            closed.append(self)

    told = {"constructor": "the constructor", "tool_schemas": "tool_schemas"}.get(place, "reset")
    with pytest.raises(
        SkipSample, match=rf"^{told} of Env failed: {type(error).__name__}: .* \(.*test_env_classes.py:\d+\)"
    ):
        use(Env, _names)
    assert len(closed) == (place != "constructor")


def test_what_is_raised_on_purpose_goes_through() -> None:
    class Env:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        async def tool(self) -> None:
            raise self.error

        def sync(self) -> None:
            raise self.error

        def get_reward(self) -> float:
            raise self.error

    for error in (SkipSample("no room"), ConfigError("env.args: wrong"), StopRun()):
        args = {"error": error}
        for name in ("tool", "sync"):
            with pytest.raises(type(error)):
                called(Env, name, args=args)
        with pytest.raises(type(error)):
            use(Env, lambda session: session.reward([]), args=args)


def test_reset_returns_text_or_nothing() -> None:
    class Env:
        def reset(self) -> Any:
            return ("observation", {})

    with pytest.raises(ConfigError, match=r"reset of Env returned \('observation', \{\}\); it returns text"):
        use(Env, _names)


# --------------------------------------------------------------------------------------------------------------- tools


class Tools:
    def text(self) -> str:
        return "ä\n"

    def nothing(self) -> None: ...

    def number(self) -> float:
        return 0.5

    def flag(self) -> bool:
        return True

    def data(self) -> dict[str, Any]:
        return {"a": [1, None], "b": "ä", "when": Path("x")}

    def keys(self) -> dict[Any, int]:
        return {(1, 2): 3}

    def raw(self) -> bytes:
        return b"x"

    async def slow(self) -> list[int]:
        return [1, 2]

    def hidden(self) -> Any:
        return self.slow()

    def fails(self) -> None:
        raise KeyError("missing")

    def exits(self) -> None:
        raise SystemExit(1)

    async def exits_async(self) -> None:
        raise SystemExit(1)

    async def cancels(self) -> None:
        raise asyncio.CancelledError

    def stops(self) -> None:
        raise StopIteration("x")

    def huge(self) -> int:
        return 10**5000

    def cycle(self) -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    def where(self) -> str:
        return "main" if threading.current_thread() is threading.main_thread() else "thread"

    async def where_async(self) -> str:
        return "main" if threading.current_thread() is threading.main_thread() else "thread"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text", "ä\n"),
        ("nothing", ""),
        ("number", "0.5"),
        ("flag", "true"),
        ("data", '{"a": [1, null], "b": "ä", "when": "x"}'),
        ("keys", "{(1, 2): 3}"),
        ("raw", "b'x'"),
        ("slow", "[1, 2]"),
        ("hidden", "[1, 2]"),
        ("where", "thread"),
        ("where_async", "main"),
    ],
)
def test_results_as_text(name: str, text: str) -> None:
    assert called(Tools, name) == ToolAnswer(text)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "Error: KeyError: 'missing'"),
        ("exits", "Error: SystemExit: 1"),
        ("exits_async", "Error: SystemExit: 1"),
        ("cancels", "Error: CancelledError: "),
        ("stops", "Error: StopIteration: x"),
        ("huge", "Error: ValueError: Exceeds the limit"),
        ("cycle", "Error: ValueError: Circular reference"),
    ],
)
def test_a_tool_that_fails_is_its_answer(name: str, says: str) -> None:
    answer = called(Tools, name)
    assert answer.is_error
    assert answer.text.startswith(says)


def test_text_of_a_subclass() -> None:
    class Name(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "other"

    assert as_text(Name("x")) == "x"


def test_wrong_arguments_do_not_run_the_tool() -> None:
    ran: list[Any] = []

    class Env:
        def tool(self, n: int) -> None:
            ran.append(n)

    for arguments in ({}, {"n": "x"}, {"n": 1, "m": 2}):
        answer = called(Env, "tool", arguments)
        assert answer.is_error
        assert answer.text.startswith("Error: wrong arguments for 'tool': ")
    assert not ran


# ---------------------------------------------------------------------------------------------------------- listed tools


class Listed:
    """As a server's client: tools of its own for each row, under names that are no methods."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tools = ["an argument of the object's own"]

    def reset(self, answer: str) -> None:
        self.answer = answer

    async def tool_schemas(self) -> list[Any]:
        number = {"type": "object", "properties": {"n": {"type": "integer", "title": "N"}}, "required": ["n"]}
        return [{"name": f"search__{self.answer}", "parameters": number}, {"name": "python"}]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((name, arguments))
        if name == "python":
            raise RuntimeError("no python")
        return {"got": arguments}

    def helper(self) -> None: ...


def test_listed_tools_are_read_after_reset() -> None:
    async def play(session: EnvSession) -> None:
        assert names(session) == ["search__5", "python"]
        search = session.schemas[0]["function"]
        assert search["parameters"]["properties"] == {"n": {"type": "integer"}}
        assert await session.call(ToolCall("search__5", {"n": 1})) == ToolAnswer('{"got": {"n": 1}}')
        wrong = await session.call(ToolCall("search__5", {"n": "1"}))
        assert wrong.text.startswith(
            "Error: wrong arguments for 'search__5': argument 'n': '1' is not of type 'integer'"
        )
        assert (await session.call(ToolCall("python", {}))).text == "Error: RuntimeError: no python"
        for name in ("helper", "search__6", "call_tool"):
            assert "unknown tool" in (await session.call(ToolCall(name, {}))).text
        assert session.env.calls == [("search__5", {"n": 1}), ("python", {})]

    assert environments(Listed).schemas is None
    assert environments(Listed).listing == "Listed lists its tools after each reset"
    use(Listed, play)
    assert use(Listed, _names, allowed_tools=["search__*"]) == ["search__5"]


def test_errors_that_show_only_after_reset() -> None:
    with pytest.raises(
        ConfigError, match=r"^env.allowed_tools: 'shell' matches no tool; the tools are: search__5, python"
    ):
        use(Listed, _names, allowed_tools=["shell"])

    class Bad(Listed):
        async def tool_schemas(self) -> list[Any]:
            return [{"name": "x", "parameters": {"type": "nonsense"}}]

    with pytest.raises(ConfigError, match=r"^env.type: Bad.tool_schemas: the parameters of 'x' are no JSON schema"):
        use(Bad, _names)


def test_the_class_pins_listed_tools_too() -> None:
    class Pinned(Listed):
        tools = ("python",)

        def __init__(self) -> None:
            self.calls = []

    assert use(Pinned, _names) == ["python"]


# -------------------------------------------------------------------------------------------------------------- rewards


def scores(value: Any) -> type:
    class Env:
        def get_reward(self) -> Any:
            if isinstance(value, BaseException):
                raise value
            return value

    return Env


def test_rewards() -> None:
    import numpy as np

    class Reads:
        async def get_reward(self, messages: list[dict[str, Any]]) -> dict[str, float]:
            return {"turns": len(messages), "right": messages[-1]["content"] == "5"}

    class Nothing:
        pass

    assert rewarded(scores(0.5)) == {"reward": 0.5}
    assert rewarded(scores(True)) == {"reward": 1.0}
    assert rewarded(scores(np.float32(0.5))) == {"reward": 0.5}
    assert rewarded(scores({"format": 0.1, "correct": 1})) == {"format": 0.1, "correct": 1.0}
    assert rewarded(scores(None)) is None
    assert rewarded(Nothing) is None
    assert rewarded(Reads, [Message("user", "2+3?"), Message("assistant", "5")]) == {"turns": 2.0, "right": 1.0}
    assert environments(Reads).has_reward
    assert not environments(Nothing).has_reward


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "is nan; it must be a finite number"),
        (float("inf"), "is inf; it must be a finite number"),
        ("1", "is '1'; it must be a finite number"),
        ([1.0], r"is \[1.0\]; it must be a finite number"),
        ({"a": None}, "component 'a', is None; it must be a finite number"),
        ({"a": {"b": 1}}, "component 'a', is"),
        ({1: 1.0}, "has a component called 1; names are text"),
        (ValueError("x"), r"failed on row r1 \(rows.jsonl:1\): ValueError: x \(.*test_env_classes.py:\d+\)"),
    ],
)
def test_a_defective_reward_stops_the_run(value: Any, says: str) -> None:
    with pytest.raises(RewardError, match=rf"^get_reward of environment Env .*{says}"):
        rewarded(scores(value))


# ------------------------------------------------------------------------------------------------------------ functions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(
        "import asyncio\n"
        "def double(n: int) -> int:\n"
        '    """Twice a number.\n\n    Args:\n        n: The number.\n    """\n'
        "    return 2 * n\n"
        "async def wait(seconds: float = 0.0) -> str:\n    await asyncio.sleep(seconds)\n    return 'waited'\n"
        "def bad(x): return x\n"
        "class Env:\n    def __init__(self, sandbox, n=1): pass\n    def tool(self) -> str: return 'ok'\n",
        encoding="utf-8",
    )
    (tmp_path / "more_tools.py").write_text("def double(n: int) -> int: return n\n", encoding="utf-8")
    return tmp_path


def config(*tools: str, **options: Any) -> EnvConfig:
    return EnvConfig(type="tools", tools=list(tools), **options)


def test_function_tools(folder: Path) -> None:
    async def main() -> None:
        envs = build(config("my_tools.py:double", "my_tools.py:wait"))
        assert envs.listing == "double, wait (env.tools)"
        session = await envs.open(ROW)
        assert session.schemas == envs.schemas
        assert session.env is None
        assert session.opening == ""
        assert await session.call(ToolCall("double", {"n": "21"})) == ToolAnswer("42")
        assert await session.call(ToolCall("wait", {})) == ToolAnswer("waited")
        assert (await session.call(ToolCall("bad", {"x": 1}))).text.startswith("Error: unknown tool 'bad'")
        assert not session.done
        assert await session.reward([]) is None
        await session.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tools", "options", "says"),
    [
        (["my_tools.py:bad"], {}, r"env.tools: my_tools.py:bad: argument 'x' has no type hint"),
        (["my_tools.py:doubel"], {}, r"env.tools: my_tools.py has no 'doubel' \(did you mean 'double'\?\)"),
        (["my_tools.py:Env"], {}, r"env.tools: my_tools.py:Env is a class; a tool is a function"),
        (
            ["my_tools.py:double", "more_tools.py:double"],
            {},
            r"env.tools: more_tools.py:double and env.tools: my_tools.py",
        ),
        (["my_tools.py:double"], {"allowed_tools": ["x*"]}, r"env.allowed_tools: 'x\*' matches no tool"),
    ],
)
def test_defective_function_tools(folder: Path, tools: list[str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        build(config(*tools, **options))


def test_allowed_functions(folder: Path) -> None:
    envs = build(config("my_tools.py:double", "my_tools.py:wait", allowed_tools=["d*"]))
    assert envs.listing == "double (env.tools)"


def test_classes_by_name(folder: Path) -> None:
    one = EnvConfig(type="my_tools.py:Env")
    assert build(one, sandbox="BOX").listing == "tool (Env)"
    assert wants_sandbox(one)
    assert not wants_sandbox(config("my_tools.py:double"))
    with pytest.raises(ConfigError, match=r"env.type: <function double"):
        build(EnvConfig(type="my_tools.py:double"))


# -------------------------------------------------------------------------------------- code of the user's, everywhere


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Odd:
    """Each hook and tool does what nobody expects of it."""

    def go(self, x: int = 1) -> str:
        raise Unspeakable


class OddNew:
    def __new__(cls) -> Any:
        return None

    def go(self) -> str:
        return ""


class OddAttributes(Odd):
    def __getattribute__(self, name: str) -> Any:
        if name in ("go", "get_reward"):
            raise SystemExit(4)
        return super().__getattribute__(name)


class OddNumber:
    def __float__(self) -> float:
        raise SystemExit(5)


class OddReward(Odd):
    def get_reward(self) -> Any:
        return {"a": OddNumber()}


class LateSchemas:
    def tool_schemas(self) -> Any:
        yield {"name": "go", "parameters": {"type": "object"}}
        raise ConnectionError("gone")

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        return name


class NoJSON(LateSchemas):
    def tool_schemas(self) -> Any:
        return [{"name": "go", "parameters": {"type": "object", "properties": {"a": {"default": b"x"}}}}]


def test_an_exception_that_cannot_be_shown_is_named() -> None:
    answer = called(Odd, "go")
    assert (answer.is_error, answer.text) == (True, "Error: Unspeakable, whose text cannot be shown")


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (OddNew, ConfigError, r"OddNew\(\.\.\.\) makes a NoneType and no OddNew"),
        (OddAttributes, SkipSample, "the tools of OddAttributes failed: SystemExit: 4"),
        (LateSchemas, SkipSample, "tool_schemas of LateSchemas failed: ConnectionError: gone"),
        (NoJSON, ConfigError, "the schema of 'go' holds what JSON cannot: Object of type bytes"),
    ],
)
def test_whatever_a_hook_does_the_loop_goes_on(cls: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use(cls, _names)


def test_what_a_reward_is_made_of_is_not_trusted_either() -> None:
    with pytest.raises(RewardError, match=r"get_reward of environment OddReward failed .*SystemExit: 5"):
        rewarded(OddReward)


def test_halves_of_surrogate_pairs_reach_no_tokenizer() -> None:
    class Torn:
        def reset(self) -> str:
            return "a \udce9 room"

        def tool_schemas(self) -> list[Any]:
            return [{"name": "go", "description": "go \udce9", "parameters": {"type": "object"}}]

        def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
            return "\udce9"

        def get_reward(self) -> dict[str, float]:
            return {"a\udce9": 1.0}

    async def look(session: EnvSession) -> Any:
        return session.opening, session.schemas[0]["function"]["description"], await session.reward(())

    assert use(Torn, look) == ("a ? room", "go ?", {"a?": 1.0})


def test_methods_without_self_are_refused_at_start() -> None:
    class Tool:
        def go() -> str:  # type: ignore[misc]
            return ""

    class Reward(Odd):
        def get_reward() -> float:  # type: ignore[misc]
            return 1.0

    for cls, name in ((Tool, "go"), (Reward, "get_reward")):
        with pytest.raises(ConfigError, match=rf"{name} takes no `self`; write `def {name}\(self, \.\.\.\)`"):
            environments(cls)
