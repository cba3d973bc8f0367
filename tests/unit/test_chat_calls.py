"""Calls are read exactly as the model's form writes them; whatever else is an answer in words, and never a call."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from palingenesis.rl.chat import ChatTemplate, ParsedTurn, parser_for, split_reasoning
from palingenesis.rl.chat.calls import formats
from palingenesis.rl.chat.calls._blocks import MOST_CALLS
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.types import ToolCall
from tests.unit.tokenizer_zoo import tokenizer

TYPED = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "text_or_null": {"type": ["string", "null"]},
    "text_or_int": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "enum": {"enum": [1, 2]},
    "color": {"$ref": "#/$defs/Color"},
    "inner": {"allOf": [{"$ref": "#/$defs/Inner"}]},
    "any": {},
    "float": {"type": "float"},
    "lost": {"$ref": "#/$defs/Nowhere"},
    "circle": {"$ref": "#/$defs/Circle"},
}
DEFINITIONS = {
    "Color": {"type": "string", "enum": ["red", "3"]},
    "Inner": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Circle": {"$ref": "#/$defs/Circle"},
}
PARAMETERS = {"type": "object", "properties": TYPED, "$defs": DEFINITIONS}
SCHEMAS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g", "description": "no parameters"}},
]


def parse(form: str, text: str) -> ParsedTurn:
    return formats()[form].parse(text, SCHEMAS)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def xml(parameters: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def parameter(value: str, key: str = "s") -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


# -------------------------------------------------------------------------------------------------------------- good

F_CALL = ToolCall("f", {"s": "x"})
GOOD: list[tuple[str, str, str, list[ToolCall]]] = [
    ("hermes", hermes('{"name": "f", "arguments": {"s": "x"}}'), "", [F_CALL]),
    ("hermes", '<tool_call>{"arguments": {"s": "x"}, "name": "f"}</tool_call>', "", [F_CALL]),
    ("hermes", 'I look.\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', "I look.", [ToolCall("g", {})]),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}'), "", [F_CALL]),
    ("hermes", hermes('{"name": "g", "arguments": " {} "}'), "", [ToolCall("g", {})]),
    ("hermes", hermes('{"name": "f", "parameters": {"s": "x"}}'), "", [F_CALL]),
    ("hermes", hermes('{"id": "c1", "name": "g", "arguments": {}}'), "", [ToolCall("g", {}, "c1")]),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "a </tool_call> <tool_call> b"}}'), "",
     [ToolCall("f", {"s": "a </tool_call> <tool_call> b"})]),
    ("hermes", hermes('{"name": "f", "arguments": {"i": "5", "x": [1, 2.5, null, true]}}'), "",
     [ToolCall("f", {"i": "5", "x": [1, 2.5, None, True]})]),
    ("hermes", 'a <tool_call>{"name": "g", "arguments": {}}</tool_call>\n b \n'
     '<tool_call>{"name": "f", "arguments": {"s": "x"}}</tool_call> c',
     "a\nb\nc", [ToolCall("g", {}), F_CALL]),
    ("hermes", hermes('{"name": "unknown", "arguments": {"é": "\\ud83d\\ude00"}}'), "", [ToolCall("unknown", {"é": "😀"})]),
    ("json_list", '<tool_call>[{"name": "f", "arguments": {"s": "x"}}, {"name": "g", "arguments": {}}]</tool_call>', "",
     [F_CALL, ToolCall("g", {})]),
    ("json_list", 'Hm.\n<tool_call>\n[{"name": "g", "parameters": "{}"}]\n</tool_call>', "Hm.", [ToolCall("g", {})]),
    ("json_list", '<tool_call>[{"name": "f", "arguments": {"s": "]</tool_call>"}}]</tool_call>', "",
     [ToolCall("f", {"s": "]</tool_call>"})]),
    ("xml", xml(parameter("x")), "", [F_CALL]),
    ("xml", "I look.\n\n" + xml("", "g"), "I look.", [ToolCall("g", {})]),
    ("xml", xml(parameter("x")) + "\n" + xml("", "g"), "", [F_CALL, ToolCall("g", {})]),
    ("xml", xml(parameter("7", "free"), "unknown"), "", [ToolCall("unknown", {"free": "7"})]),
    ("xml", xml(parameter("7", "undeclared")), "", [ToolCall("f", {"undeclared": "7"})]),
    ("xml", xml(parameter("print('</parameter>')")), "", [ToolCall("f", {"s": "print('</parameter>')"})]),
    ("xml", xml(parameter("</function>\n</tool_call>")), "", [ToolCall("f", {"s": "</function>\n</tool_call>"})]),
    ("xml", xml(parameter(xml("", "g"))), "", [ToolCall("f", {"s": xml("", "g")})]),
    ("xml", "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>", "", [F_CALL]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_good_calls_are_read(form: str, text: str, content: str, calls: list[ToolCall]) -> None:
    assert parse(form, text) == ParsedTurn(content, tuple(calls), ())


@pytest.mark.parametrize("form", ["hermes", "xml", "json_list"])
@pytest.mark.parametrize("text", ["", "42", "  a\n\nb ", '{"name": "f", "arguments": {}}', "a < b <tool_calls> c"])
def test_a_turn_without_a_call_is_unchanged(form: str, text: str) -> None:
    assert parse(form, text) == ParsedTurn(text, (), ())


def test_an_empty_list_calls_nothing() -> None:
    assert parse("json_list", "<tool_call>[]</tool_call>") == ParsedTurn("<tool_call>[]</tool_call>", (), ())


# ------------------------------------------------------------------------------------------------- values of XML calls


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("\nx\n", "x"),
        ("x", "x"),
        ("\n\nx\n\n", "\nx\n"),
        ("\n    def f():\n        pass\n", "    def f():\n        pass"),
        ("\n x \n", " x "),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
        ("\n\n\n", "\n"),
        ("\r\nx\r\n", "\r\nx\r"),
        ("\n\tx\t\n", "\tx\t"),
    ],
)
def test_exactly_one_newline_goes_at_each_end_of_a_value(raw: str, value: str) -> None:
    turn = parse("xml", xml(f"<parameter=s>{raw}</parameter>\n"))
    assert turn.calls == (ToolCall("f", {"s": value}),)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "5", "5"),
        ("s", "null", "null"),
        ("s", "true", "true"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("i", "5", 5),
        ("i", " -07 ", -7),
        ("n", "5", 5),
        ("n", "5.0", 5.0),
        ("n", "-1.5e3", -1500.0),
        ("n", ".5", 0.5),
        ("b", "true", True),
        ("b", "True", True),
        ("b", "1", True),
        ("b", "false", False),
        ("b", "0", False),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("a", "[1, null]", [1, None]),
        ("a", "\n[]\n", []),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "3", 3),
        ("text_or_null", "null", None),
        ("text_or_null", "nullable", "nullable"),
        ("text_or_int", "12", 12),
        ("text_or_int", "12 apples", "12 apples"),
        ("enum", "2", 2),
        ("color", "3", "3"),
        ("inner", '{"x": 1}', {"x": 1}),
        ("any", "null", None),
        ("any", "1.5", 1.5),
        ("any", "false", False),
        ("any", "[1]", [1]),
        ("any", "hello", "hello"),
        ("float", "0.25", 0.25),
        ("lost", "a", "a"),
        ("circle", "a", "a"),
    ],
)
def test_the_schema_says_what_a_value_is(key: str, text: str, value: Any) -> None:
    turn = parse("xml", xml(parameter(text, key)))
    assert turn.errors == ()
    read = turn.calls[0].arguments[key]
    assert (read, type(read)) == (value, type(value))


# --------------------------------------------------------------------------------------------------------- malformed

NOT_CLOSED = "not closed with </tool_call>"
MALFORMED: list[tuple[str, str, str]] = [
    # cut off in the middle
    ("hermes", "<tool_call>", NOT_CLOSED),
    ("hermes", '<tool_call>\n{"name": "f", "argum', NOT_CLOSED),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}', NOT_CLOSED),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_ca', NOT_CLOSED),
    ("xml", "<tool_call>\n<function=f>\n<parameter=s>\nab", NOT_CLOSED),
    ("xml", "<tool_call>\n<function=f>\n" + parameter("x") + "</function>\n", NOT_CLOSED),
    ("xml", "<tool_call>\n<func", NOT_CLOSED),
    ("json_list", '<tool_call>[{"name": "f", "arguments": {"s": "x"}}, {"na', NOT_CLOSED),
    ("json_list", '<tool_call>[{"name": "f", "arguments": {"s": "x"}}]', NOT_CLOSED),
    # JSON
    ("hermes", hermes("{'name': 'f', 'arguments': {}}"), "not valid (Expecting property name"),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "x"}'), "not valid (Expecting ',' delimiter at '</tool_call>')"),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "x",}}'), "not valid"),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "a\nb"}}'), "Invalid control character"),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "\\x"}}'), "Invalid \\escape"),
    ("hermes", hermes('{"name": "f", "arguments": {"n": NaN}}'), "NaN is not JSON"),
    ("hermes", hermes('{"name": "f", "arguments": {"n": 1e999}}'), "too large a number"),
    ("hermes", hermes('{"name": "f", "arguments": {"i": %s}}' % ("9" * 5000)), "too many digits"),
    ("hermes", hermes('{"name": "f", "arguments": {"a": %s}}' % ("[" * 100_000)), "nested too deep"),
    *(
        ("hermes", hermes('{"name": "f", "arguments": {"a": %s}}' % ("[" * n + "]" * n)), "nested too deep")
        for n in (70, 500, *range(975, 995))  # where some of what walks over arguments recurses too far
    ),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "x", "s": "y"}}'), "'s' is given twice"),
    ("hermes", hermes('{"name": "f", "name": "g", "arguments": {}}'), "'name' is given twice"),
    ("hermes", hermes('{"name": "f", "arguments": {"s": "\\ud800"}}'), "surrogate"),
    ("hermes", hermes(""), "not valid (Expecting value"),
    ("hermes", hermes('```json\n{"name": "f", "arguments": {}}\n```'), "not valid (Expecting value"),
    ("hermes", hermes('f(s="x")'), "not valid (Expecting value"),
    # the form of the call
    ("hermes", hermes('"f"'), "must be a JSON object, not text"),
    ("hermes", hermes('[{"name": "f", "arguments": {}}]'), "must be a JSON object, not a list"),
    ("hermes", hermes("null"), "must be a JSON object, not null"),
    ("hermes", hermes('{"arguments": {}}'), 'no "name"'),
    ("hermes", hermes('{"name": "", "arguments": {}}'), 'no "name"'),
    ("hermes", hermes('{"name": 5, "arguments": {}}'), 'no "name"'),
    ("hermes", hermes('{"name": "f"}'), 'no "arguments"'),
    ("hermes", hermes('{"name": "f", "arguments": null}'), '"arguments" must be a JSON object, not null'),
    ("hermes", hermes('{"name": "f", "arguments": ["x"]}'), '"arguments" must be a JSON object, not a list'),
    ("hermes", hermes('{"name": "f", "arguments": "x"}'), '"arguments" must be a JSON object; read as text'),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"s\\": 1} x"}'), "followed by 'x'"),
    ("hermes", hermes('{"name": "f", "arguments": "[1]"}'), '"arguments" must be a JSON object, not a list'),
    ("hermes", hermes('{"name": "f", "arguments": {}, "parameters": {}}'), 'both "arguments" and "parameters"'),
    ("hermes", hermes('{"name": "f", "s": "x", "arguments": {}}'), "'s'; parameters of the tool belong inside"),
    ("hermes", hermes('{"function": {"name": "f", "arguments": {}}}'), 'no "name"'),
    ("hermes", hermes('{"name": "f", "arguments": {}, "id": 5}'), '"id" must be a string'),
    ("hermes", hermes('{"name": "f", "arguments": {}}}'), "must follow the call, but '}\\n</tool_call>' does"),
    ("hermes", hermes('{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}'), "must follow the call"),
    ("hermes", xml(parameter("x")), "not valid (Expecting value"),
    # tags
    ("hermes", '{"name": "f", "arguments": {}}\n</tool_call>', "</tool_call> stands without <tool_call>"),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "not valid"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
     "</tool_call> must follow the call"),
    # JSON lists
    ("json_list", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "must be a JSON list of calls, not an object"),
    ("json_list", '<tool_call>[["f"]]</tool_call>', "in entry 1 of the list, it must be a JSON object, not a list"),
    ("json_list", '<tool_call>[{"name": "f"}]</tool_call>', 'in entry 1 of the list, it has no "arguments"'),
    ("json_list", '<tool_call>[{"name": "f", "arguments": {}}</tool_call>', "not valid"),
    # XML
    ("xml", hermes('{"name": "f", "arguments": {}}'), "<function=NAME> must come first, but '{\"name\""),
    ("xml", "<tool_call></tool_call>", "<function=NAME> must come first, but '</tool_call>' does"),
    ("xml", "<function=f>\n" + parameter("x") + "</function>\n</tool_call>", "<function= stands without <tool_call>"),
    ("xml", "<function=f>\n" + parameter("x") + "</function>", "<function= stands without <tool_call>"),
    ("xml", "<tool_call>\n<function=>\n</function>\n</tool_call>", "<function=NAME> must come first"),
    ("xml", "<tool_call>\n<function=f\n</function>\n</tool_call>", "<function=NAME> must come first"),
    ("xml", xml(parameter("x") + parameter("y")), "'s' is given twice"),
    ("xml", xml("<parameter=s>\nx\n"), "'s' is not closed with </parameter>"),
    ("xml", xml("<parameter=s>\nx\n" + parameter("1", "i")), "'s' is not closed with </parameter> before the next"),
    ("xml", xml("s = x\n"), "must come next, but 's = x"),
    ("xml", xml(parameter("x") + "and then\n"), "'s' is not closed"),
    ("xml", xml(parameter("x") + "and then\n" + parameter("1", "i")), "'s' is not closed with </parameter> before"),
    ("xml", "<tool_call>\n<function=f>\n" + parameter("x") + "</tool_call>", "'s' is not closed"),
    ("xml", "<tool_call>\n<function=f>\n</function>\nand more\n</tool_call>", "must come next, but '</function>"),
    ("xml", "<tool_call>\n<function=f>\n</function>\n<function=g>\n</function>\n</tool_call>", "must come next"),
    ("xml", xml(parameter("five", "i")), "'i' must be an integer, not 'five'"),
    ("xml", xml(parameter("5.5", "i")), "'i' must be an integer"),
    ("xml", xml(parameter("1_000", "i")), "'i' must be an integer"),
    ("xml", xml(parameter("null", "i")), "'i' must be an integer"),
    ("xml", xml(parameter("9" * 5000, "i")), "'i' must be an integer"),
    ("xml", xml(parameter("", "i")), "'i' must be an integer, not ''"),
    ("xml", xml(parameter("inf", "n")), "'n' must be a number"),
    ("xml", xml(parameter("1e999", "n")), "'n' must be a number"),
    ("xml", xml(parameter("yes", "b")), "'b' must be true or false, not 'yes'"),
    ("xml", xml(parameter("[1]", "o")), "'o' must be a JSON object, not '[1]'"),
    ("xml", xml(parameter("{'a': 1}", "o")), "'o' must be a JSON object"),
    ("xml", xml(parameter("[1", "a")), "'a' must be a JSON array"),
    ("xml", xml(parameter("x", "maybe")), "'maybe' must be null or an integer, not 'x'"),
    ("xml", xml(parameter("x", "enum")), "'enum' must be an integer"),
    ("xml", xml(parameter('["\\udc00"]', "a")), "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "reason"), MALFORMED)
def test_a_malformed_call_is_answered_and_not_run(form: str, text: str, reason: str) -> None:
    turn = parse(form, text)
    assert turn.calls == ()
    assert turn.content == text  # it stays readable where the conversation is kept
    assert len(turn.errors) == 1
    assert reason in turn.errors[0]
    assert "was not run" in turn.errors[0]
    assert "Write" in turn.errors[0]  # and shows the form
    assert len(turn.errors[0]) < 500


@pytest.mark.parametrize("form", ["hermes", "xml"])
def test_good_calls_run_beside_malformed_ones(form: str) -> None:
    good, bad = {
        "hermes": (hermes('{"name": "g", "arguments": {}}'), hermes('{"name": g}')),
        "xml": (xml("", "g"), xml(parameter("x", "i"))),
    }[form]
    turn = parse(form, f"a {good} b {bad} c {good} d")
    assert turn.calls == (ToolCall("g", {}),) * 2
    assert len(turn.errors) == 1
    assert turn.content == f"a\nb {bad} c\nd"


def test_a_value_that_is_not_closed_does_not_take_the_next_call_in() -> None:
    turn = parse("xml", xml("<parameter=s>\nx\n") + "\n" + xml(parameter("y")))
    assert turn.calls == (ToolCall("f", {"s": "y"}),)
    assert len(turn.errors) == 1


def test_good_entries_of_a_list_run_beside_malformed_ones() -> None:
    turn = parse(
        "json_list", '<tool_call>[{"name": "g", "arguments": {}}, 5, {"name": "f", "arguments": 1}]</tool_call>'
    )
    assert turn.calls == (ToolCall("g", {}),)
    assert ["entry 2" in error or "entry 3" in error for error in turn.errors] == [True, True]


@pytest.mark.parametrize("form", ["hermes", "xml", "json_list"])
def test_every_beginning_of_a_call_is_answered_and_not_run(form: str) -> None:
    """A turn cut off anywhere: a prefix of a call is never a call, and of several only the whole ones are."""
    one = {
        "hermes": hermes('{"name": "f", "arguments": {"s": "x"}}'),
        "xml": xml(parameter("x")),
        "json_list": '<tool_call>[{"name": "f", "arguments": {"s": "x"}}]</tool_call>',
    }[form]
    for length in range(len("<tool_call>"), len(one)):
        turn = parse(form, one[:length])
        assert (turn.calls, len(turn.errors)) == ((), 1), one[:length]
        turn = parse(form, one + "\n" + one[:length])
        assert (turn.calls, len(turn.errors)) == ((F_CALL,), 1), one[:length]


@pytest.mark.parametrize("form", ["hermes", "xml", "json_list"])
@pytest.mark.parametrize("opened", [True, False])
def test_calls_inside_reasoning_do_not_run(form: str, opened: bool) -> None:
    calls = {
        "hermes": hermes('{"name": "g", "arguments": {}}'),
        "xml": xml("", "g"),
        "json_list": '<tool_call>[{"name": "g", "arguments": {}}]</tool_call>',
    }[form]
    start = "" if opened else "<think>"
    assert parse(form, split_reasoning(f"{start}I could {calls}", opened)[1]).calls == ()
    turn = parse(form, split_reasoning(f"{start}I could {calls}</think>\n\n{calls}", opened)[1])
    assert turn == ParsedTurn("", (ToolCall("g", {}),), ())


# ----------------------------------------------------------------------------------------------------- hostile length

MANY = 1_000_000
FLOODS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_call>{",
    '<tool_call>{"',
    '<tool_call>["a",',
    "<tool_call>{}</tool_call>",
    '<tool_call>\n{"name": "g", "arguments": {}}\n',
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "<tool_call>\n",
    "<tool_call>" + " " * 1000,
    "<function=",
    "<tool_call><function=",
    "<tool_call><function=f>",
    "<tool_call><function=f><parameter=s>",
    "<tool_call><function=f><parameter=s></parameter>",
    "<tool_call><function=g></function></tool_call>",
    "<tool_call><function=f><parameter=s></tool_call>",
    "</parameter>" + " " * 1000,
]
STARTS = [
    "",
    "<tool_call>",
    "<tool_call><function=f>",
    "<tool_call><function=f><parameter=s>",
    "<tool_call><function=f><parameter=n>",
    '<tool_call>{"name": "',
]


@pytest.mark.parametrize("form", ["hermes", "xml", "json_list"])
def test_no_flood_takes_more_than_linear_time(form: str) -> None:
    for start in STARTS:
        for unit in [*FLOODS, "1", " ", "\\", '"', "[", "{", "\n"]:
            text = start + unit * (MANY // len(unit))
            before = time.process_time()
            turn = parse(form, text)
            assert time.process_time() - before < 1.0, (start, unit)
            assert len(turn.errors) <= 34
            assert len(turn.calls) <= MOST_CALLS


def test_a_value_of_many_digits_takes_no_quadratic_time() -> None:
    before = time.process_time()
    for value in ("1" * MANY + "x", "1" * MANY + ".x", " " * MANY + "x", "1." * (MANY // 2)):
        assert parse("xml", xml(parameter(value, "n"))).calls == ()
    assert time.process_time() - before < 1.0


def test_babble_is_answered_in_a_few_words() -> None:
    turn = parse("hermes", "<tool_call>{}</tool_call>" * 100)
    assert len(turn.errors) == 17
    assert "the rest of the turn was not read" in turn.errors[-1]


@pytest.mark.parametrize("form", ["hermes", "xml", "json_list"])
def test_of_very_many_calls_the_first_ones_run_and_the_policy_is_told(form: str) -> None:
    one = {
        "hermes": hermes('{"name": "g", "arguments": {}}'),
        "xml": xml("", "g"),
        "json_list": '<tool_call>[{"name": "g", "arguments": {}}]</tool_call>',
    }[form]
    most = parse(form, one * MOST_CALLS + "done")
    assert most == ParsedTurn("done", (ToolCall("g", {}),) * MOST_CALLS, ())
    more = parse(form, one * (MOST_CALLS + 3))
    assert more.calls == most.calls
    assert more.content == one * 3  # it stays readable
    assert more.errors == (
        "Too many calls: only the first 32 of a turn are run; write the others in your next turn, after you have read "
        "these answers.",
    )
    entries = ", ".join(['{"name": "g", "arguments": {}}'] * 100)
    if form == "json_list":
        assert parse(form, f"<tool_call>[{entries}]</tool_call>") == ParsedTurn("", more.calls, more.errors)


# -------------------------------------------------------------------------------------------------------- any argument

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        st.sampled_from(["</tool_call>", "<tool_call>", "</parameter>", "\n", "{", '"', "\\", "</think>"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("ab é", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.text("abcxyz_1", min_size=1, max_size=5)
calls = st.lists(st.tuples(keys, st.dictionaries(keys, json_values, max_size=3)), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(calls=calls, ascii_only=st.booleans())
def test_whatever_json_can_say_arrives(calls: list[tuple[str, dict[str, Any]]], ascii_only: bool) -> None:
    expected = tuple(ToolCall(name, arguments) for name, arguments in calls)
    objects = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only) for name, arguments in calls]
    assert parse("hermes", "\n".join(map(hermes, objects))).calls == expected
    assert parse("json_list", f"<tool_call>[{', '.join(objects)}]</tool_call>").calls == expected


@settings(max_examples=300, deadline=None)
@given(value=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n</>")), max_size=30))
def test_whatever_text_arrives_in_xml(value: str) -> None:
    assume("<parameter=" not in value)  # reads as a value that was not closed
    assert parse("xml", xml(parameter(value))).calls == (ToolCall("f", {"s": value}),)


# -------------------------------------------------------------------------------------------------- which format it is


def chat_template(source: str) -> ChatTemplate:
    tok = tokenizer.__wrapped__("byte-level")  # type: ignore[attr-defined]
    tok.chat_template = source
    return ChatTemplate(tok)


def trl_template(name: str) -> ChatTemplate:
    trl = pytest.importorskip("trl", reason="TRL's collection of chat templates is not installed")
    return chat_template((Path(trl.__file__).parent / "chat_templates" / name).read_text(encoding="utf-8"))


PLAIN = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{# the word tools in a comment #} tools"
FAMILIES = {
    "qwen2_5.jinja": "hermes",
    "qwen3.jinja": "hermes",
    "qwen3_instruct_2507.jinja": "hermes",
    "qwen3_vl.jinja": "hermes",
    "qwen3_5_think.jinja": "xml",
    "qwen3_5_nothink.jinja": "xml",
    "qwen3_6.jinja": "xml",
    "qwen3_8.jinja": "xml",
    "nemotron_3_nano.jinja": "xml",
    "llama3.jinja": "json_list",
}


@pytest.mark.parametrize(("template", "form"), FAMILIES.items())
def test_auto_reads_the_template(template: str, form: str) -> None:
    found = parser_for("auto", trl_template(template))
    assert found.parser is formats()[form]
    assert (found.how(SCHEMAS) == "") is (form != "json_list")


@pytest.mark.parametrize(
    "template", ["glm4moe.jinja", "llama3_1.jinja", "gptoss.jinja", "lfm2_2_5.jinja", "gemma4.jinja"]
)
def test_a_form_that_nothing_reads_is_an_error_that_names_the_option(template: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.tool_parser: auto does not recognise .* hermes, json_list, xml"):
        parser_for("auto", trl_template(template))


def test_the_packaged_policy_is_recognised() -> None:
    path = Path(__file__).parents[2] / "src/palingenesis/rl/policy/builtin/tiny/chat_template.jinja"
    found = parser_for("auto", chat_template(path.read_text(encoding="utf-8")))
    assert found.parser is formats()["hermes"]


@pytest.mark.parametrize("form", ["auto", "hermes", "xml", "json_list"])
def test_tools_that_the_template_never_reads_end_the_system_message(form: str) -> None:
    found = parser_for(form, chat_template(PLAIN))
    text = found.how(SCHEMAS)
    assert all(json.dumps(schema) in text for schema in SCHEMAS)
    assert "<tool_call>" in text.splitlines()[-1] or "</tool_call>" in text.splitlines()[-1]
    assert found.how([]) == ""
    shown = text[text.rindex("Write ") :]
    assert parse({"auto": "json_list"}.get(form, form), shown).errors == ()  # the example is in the form it asks for


def test_a_format_is_chosen_by_name_or_by_path(tmp_path: Path) -> None:
    template = trl_template("qwen3.jinja")
    assert parser_for("xml", template).parser is formats()["xml"]
    file = tmp_path / "mine.py"
    file.write_text(
        "from palingenesis.rl.chat.calls import hermes\n"
        "class Mine(type(hermes.PARSER)):\n    marks = ('<call>',)\n"
        "    def parse(self, text, schemas):\n        return 'mine'\n"
        "PARSER = Mine()\nclass Half:\n    marks = how = None\n"
    )
    mine = parser_for(f"{file}:PARSER", template)
    assert (mine.parse("", []), mine.marks) == ("mine", ("<call>",))
    with pytest.raises(
        ConfigError, match=r"env\.tool_parser: .*mine\.py:Half has no parse, no matches; a parser has all"
    ):
        parser_for(f"{file}:Half", template)
    with pytest.raises(ConfigError, match=r"env\.tool_parser: 'hermess' .*did you mean 'hermes'"):
        parser_for("hermess", template)
