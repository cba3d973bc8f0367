"""Every shape of tests that data sets have, what a test asks of a program, and rows that cannot be read."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import zlib
from typing import Any

import pytest

from palingenesis.rl.rewards.code import Code
from palingenesis.rl.rewards.grading import tests as reader
from palingenesis.rl.rewards.grading.run import chosen
from palingenesis.rl.rewards.grading.tests import (
    PRELUDE,
    CallTest,
    SourceTest,
    StdinTest,
    UnreadableTestsError,
    read_tests,
)
from palingenesis.rl.sandbox.inside.worker import OUTPUT_CAP
from palingenesis.rl.sandbox.job import Call, Check, Program, Result, Status
from palingenesis.rl.types import Row


def read(tests: Any, prompt: str = "Solve it.", **columns: Any) -> list[Any]:
    return list(read_tests({"tests": tests, **columns}, "tests", prompt))


def packed(value: Any) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def done(value: Any = None, stdout: str = "") -> Result:
    return Result(Status.DONE, value=value, stdout=stdout)


NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
VERY_NESTED = NESTED
for _ in range(100_000):
    VERY_NESTED = [VERY_NESTED]

# -------------------------------------------------------------------------------------------------------- stdin, stdout

STDIN = {"inputs": ["3\n4\n", "1\n"], "outputs": ["7\n", "1\n"]}
CASES = [
    {"input": "3 4", "output": "7", "testtype": "stdin"},
    {"input": "1", "output": "1\n", "testtype": "stdin"},
]


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (STDIN, [("3\n4\n", "7\n"), ("1\n", "1\n")]),
        (json.dumps(STDIN), [("3\n4\n", "7\n"), ("1\n", "1\n")]),
        ("  " + json.dumps(STDIN) + "\n", [("3\n4\n", "7\n"), ("1\n", "1\n")]),
        ({**STDIN, "fn_name": None}, [("3\n4\n", "7\n"), ("1\n", "1\n")]),
        ({"inputs": [["3", "4"], []], "outputs": [["7"], ["1", "2"]]}, [("3\n4", "7"), ("", "1\n2")]),
        ({"inputs": [3], "outputs": [4.5]}, [("3", "4.5")]),
        ({"inputs": [["2\n", "1 2\n"]], "outputs": [["1\r\n", "2\n", "\n"]]}, [("2\n1 2", "1\n2\n")]),
        ({"inputs": [["a\n\n", "b"]], "outputs": ["2"]}, [("a\n\nb", "2")]),
        (CASES, [("3 4", "7"), ("1", "1\n")]),
        (json.dumps(CASES), [("3 4", "7"), ("1", "1\n")]),
        (packed(json.dumps(CASES)), [("3 4", "7"), ("1", "1\n")]),
        ([{"input": "1", "output": "2"}], [("1", "2")]),
        ([{"input": "1", "output": "2", "testtype": None}], [("1", "2")]),
        ({"inputs": ["1", "2"], "outputs": ["", "x"]}, [("1", ""), ("2", "x")]),
    ],
    ids=range(14),
)
def test_programs_that_print(tests: Any, expected: list[tuple[str, str]]) -> None:
    assert read(tests) == [StdinTest(*pair) for pair in expected]


def test_a_program_receives_its_input_only() -> None:
    (test,) = read({"inputs": ["3 4"], "outputs": ["SECRET"]})
    assert test.job("print(7)", 2.0) == Program("print(7)", stdin="3 4", prelude=PRELUDE, timeout=2.0)
    assert test.difference(done(stdout="SECRET\n")) == ""
    assert test.difference(done(stdout="7\n")) == r"input '3 4': printed '7\n', expected 'SECRET'"


def test_the_prelude_is_what_starter_code_expects() -> None:
    names: dict[str, Any] = {}
    limit, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    try:
        exec(PRELUDE, names)
        assert sys.getrecursionlimit() == 50_000
    finally:
        sys.setrecursionlimit(limit)
        sys.set_int_max_str_digits(digits)
    for name in (
        "List",
        "Optional",
        "Counter",
        "deque",
        "heappush",
        "bisect_left",
        "gcd",
        "inf",
        "lru_cache",
        "itertools",
    ):
        assert name in names
    assert names["open"] is open
    assert names["pow"] is pow


# ------------------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize(
    ("tests", "columns", "expected"),
    [
        # APPS and TACO
        ({"inputs": [[[1, 2], 3]], "outputs": [5], "fn_name": "f"}, {}, [("f", ([1, 2], 3), (5,))]),
        ({"inputs": [[1]], "outputs": [[5]], "fn_name": "f"}, {}, [("f", (1,), ([5], 5))]),
        ({"inputs": [[1]], "outputs": [[[5]]], "fn_name": "f"}, {}, [("f", (1,), ([[5]], [5]))]),
        ({"inputs": [[1]], "outputs": [[5, 6]], "fn_name": "f"}, {}, [("f", (1,), ([5, 6],))]),
        ({"inputs": [[]], "outputs": ["x"], "fn_name": "f"}, {}, [("f", (), ("x",))]),
        ({"inputs": [[{"1": 2}]], "outputs": [1], "fn_name": "f"}, {}, [("f", ({1: 2},), (1,))]),
        ({"inputs": [[{"1": 2, "a": 3}]], "outputs": [1], "fn_name": "f"}, {}, [("f", ({"1": 2, "a": 3},), (1,))]),
        ({"inputs": [[{"1": 2}, 3]], "outputs": [1], "fn_name": "f"}, {}, [("f", ({"1": 2}, 3), (1,))]),
        ({"inputs": ["[1, 2]\n3"], "outputs": ["[4]"], "fn_name": "f"}, {}, [("f", ([1, 2], 3), ([4],))]),
        ({"inputs": [[1]], "outputs": [5], "fn_name": "Solution.f"}, {}, [("f", (1,), (5,))]),
        ({"inputs": [[1]], "outputs": [5], "fn_name": "Solution().f"}, {}, [("f", (1,), (5,))]),
        # LiveCodeBench
        (
            [{"input": '[1, 2]\n"a"', "output": "true", "testtype": "functional"}],
            {"metadata": '{"func_name": "isIt"}'},
            [("isIt", ([1, 2], "a"), (True,))],
        ),
        (
            packed(json.dumps([{"input": "1\n", "output": "[1.5]", "testtype": "functional"}])),
            {"metadata": {"func_name": "g"}, "starter_code": "def h("},
            [("g", (1,), ([1.5],))],
        ),
        (
            [
                {"input": "", "output": "null", "testtype": "functional"},
                {"input": "1", "output": "2", "testtype": "functional"},
            ],
            {
                "metadata": "{}",
                "starter_code": "class Solution:\n    def __init__(self): ...\n    def count(self, n: int):\n        ",
            },
            [("count", (), (None,)), ("count", (1,), (2,))],
        ),
    ],
    ids=range(14),
)
def test_functions(tests: Any, columns: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert [(test.function, test.args, test.accepted) for test in read(tests, **columns)] == expected


def test_a_called_program_receives_arguments_only() -> None:
    (test,) = read({"inputs": [[3, [4]]], "outputs": [["SECRET"]], "fn_name": "f"})
    assert test.job("def f(): 0", None) == Call("def f(): 0", "f", (3, [4]), prelude=PRELUDE)
    assert test.difference(done(["SECRET"])) == ""
    assert test.difference(done("SECRET")) == ""
    assert test.difference(done(("SECRET",))) == ""
    assert test.difference(done(None)) == "f(3, [4]): returned None, expected ['SECRET']"


def test_both_kinds_in_one_row() -> None:
    cases = [
        {"input": "1", "output": "2", "testtype": "functional"},
        {"input": "1", "output": "2", "testtype": "stdin"},
    ]
    assert [type(test) for test in read(cases, metadata='{"func_name": "f"}')] == [CallTest, StdinTest]


def test_the_longest_inputs_run_first() -> None:
    tests = read({"inputs": ["aa", "b", "cccc", "dd"], "outputs": ["1", "2", "3", "4"]})
    assert [test.stdin for test in chosen(tests, 3)] == ["cccc", "aa", "dd"]
    calls = read({"inputs": [[1], [[1] * 9], [12]], "outputs": [1, 2, 3], "fn_name": "f"})
    assert [test.accepted[0] for test in chosen(calls, 16)] == [2, 3, 1]
    asserts = read(["assert f(1)", "assert f(1000)"])
    assert [test.source for test in chosen(asserts, 1)] == ["assert f(1000)"]


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["x" * 9] * 16 + ["1", "22"], "outputs": [""] * 16 + ["yes", "no"]},
        {"inputs": [[[1] * 9]] * 16 + [[1], [22]], "outputs": [None] * 16 + [3, 4], "fn_name": "f"},
        {"inputs": [[[1] * 9]] * 16 + [[1], [22]], "outputs": [[None]] * 16 + [3, 4], "fn_name": "f"},
    ],
    ids=["prints nothing", "returns None", "returns a wrapped None"],
)
@pytest.mark.parametrize("most", [1, 16])
def test_a_program_that_does_nothing_fails_one_of_the_tests_that_run(tests: Any, most: int) -> None:
    every = read(tests)
    run = chosen(every, most)
    assert [test.idle for test in run] == [True] * (most - 1) + [False]
    assert run[-1] == every[-1], "the longest of those that are not idle"
    assert chosen(every, 17)[:16] == every[:16]
    assert len(chosen(every, 99)) == 18


# ---------------------------------------------------------------------------------------------------------- test source

# (assert, columns, names under test, the built-in under test, helpers)
ASSERTS: list[tuple[str, dict[str, Any], tuple[str, ...], str, str]] = [
    ("assert f(1) == 2", {}, ("f",), "", ""),
    ("assert f(g(1)) == 2", {}, ("f", "g"), "", ""),
    ("assert abs(f(1) - 2) < 1e-3", {}, ("f",), "", ""),
    ("assert sorted(f([2, 1])) == [1, 2]", {}, ("f",), "", ""),
    ("assert set(f(1)) == set([x for x in range(len('ab'))])", {}, ("f",), "", ""),
    ("assert f(1) is None and not isinstance(f(2), int)", {}, ("f",), "", ""),
    ("assert (lambda x: f(x))(1) == 2", {}, ("f",), "", ""),
    ("assert {k: f(v) for k, v in {}.items()} == {}", {}, ("f",), "", ""),
    ("x = [1]\nf(x)\nassert x == [2]", {}, ("f",), "", ""),
    ("def near(a, b):\n    return abs(a - b) < h\nh = 1e-6\nassert near(f(1), 2)", {}, ("f",), "", ""),
    ("for n in range(3):\n    assert f(n) == n", {}, ("f",), "", ""),
    ("try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e)", {}, ("f",), "", ""),
    ("global y\ny = 1\nassert f(y)", {}, ("f",), "", ""),
    ("assert Stack().push(1) == Stack.empty", {}, ("Stack",), "", ""),
    ("assert f(1) == 2\r\n", {}, ("f",), "", ""),
    # modules
    ("assert math.isclose(f(1), 2)", {"test_imports": ["import math"]}, ("f",), "", "import math"),
    ("assert math.isclose(f(1), 2)", {"test_setup_code": "import math"}, ("f",), "", "import math"),
    ("assert math.isclose(f(1), 2)", {}, ("f",), "", "import math"),
    ("import math\nassert math.isclose(f(1), 2)", {}, ("f",), "", ""),
    ("assert m.isclose(f(1), 2)", {"test_imports": ["import math as m"]}, ("f",), "", "import math as m"),
    ("assert isclose(f(1), 2)", {"test_imports": "from math import isclose"}, ("f",), "", "from math import isclose"),
    ("assert calendar(2020) == 366", {}, ("calendar",), "", ""),
    # set-up that builds objects of the program's classes (MBPP 927)
    ("assert depth(root) == 2", {"test_setup_code": "root = Node(1) \r\nroot.left = Node(2)"}, ("Node", "depth"), "", ""),
    ("assert f(A)", {"test_setup_code": "import os\nA = [1]"}, ("f",), "", "import os"),
    ("assert f(1)", {"test_setup_code": "", "test_imports": []}, ("f",), "", ""),
    ("assert f(1)", {"test_setup_code": None, "test_imports": None}, ("f",), "", ""),
    # a program that is named like a built-in (MBPP 126)
    ("assert sum(10, 15) == 6", {}, (), "sum", ""),
    ("assert sum(10, 15) == 6 and sum(1, 2) == 3", {}, (), "sum", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "columns", "names", "builtin", "helpers"), ASSERTS, ids=[a[0][:40] for a in ASSERTS]
)
def test_names_under_test(
    source: str, columns: dict[str, Any], names: tuple[str, ...], builtin: str, helpers: str
) -> None:
    (test,) = read([source], **columns)
    assert (test.names, test.builtin, test.helpers) == (names, builtin, helpers)


def test_asserts_as_a_list_as_json_and_as_a_text() -> None:
    asserts = ["assert f(1) == 2", "assert f(2) == 4"]
    assert [test.source for test in read(asserts)] == asserts
    assert read(json.dumps(asserts)) == read(asserts)
    assert [test.source for test in read("\n".join(asserts))] == ["\n".join(asserts)]


def test_setup_runs_with_the_tests_and_imports_on_both_sides() -> None:
    (test,) = read(["assert f(root)"], test_setup_code="import math\nroot = Node(1)", test_imports=["import re"])
    answer = "class Node: pass\ndef f(x): return 1"
    expected = Check(
        answer,
        "root = Node(1)\nassert f(root)",
        names=("Node", "f"),
        helpers="import re\nimport math",
        prelude="import re\nimport math",
    )
    assert test.job(answer, None) == expected


@pytest.mark.parametrize(
    ("source", "answer", "names"),
    [
        ("assert sum(10, 15) == 6", "def sum(a, b):\n    return 6", ("sum",)),
        ("assert sum(10, 15) == 6", "def add(a, b):\n    return 6", None),
        ("assert sum(10, 15) == 6", "sum(1, 2)", None),
        ("assert abs(f(1)) == 1", "def f(x): return 1\ndef abs(x): return 1", ("f",)),
        (
            "assert sorted(f(1)) == len([1])",
            "def f(x): return 1\ndef sorted(x): return 1\ndef len(x): return 1",
            ("f",),
        ),
        ("assert math.ceil(f(1)) == 1", "class math:\n    def ceil(x): return 1\ndef f(x): return 1", ("f",)),
    ],
    ids=range(6),
)
def test_the_programs_own_built_ins_never_serve_the_tests(
    source: str, answer: str, names: tuple[str, ...] | None
) -> None:
    (test,) = read([source])
    job = test.job(answer, None)
    assert (job and job.names) == names


ASSERTION = "def assertion(out, exp, atol):\n    assert out == exp\n"


@pytest.mark.parametrize(
    "source",
    [
        ASSERTION + "for i, e in [(1, 2)]:\n    assertion(f(i), e, 0)",
        "def test_f():\n    assert f(1) == 2\ntest_f()",
        "def test_f():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_f()",
        "def same(a, b):\n    if a != b:\n        raise AssertionError(a)\ndef test_f():\n    same(f(1), 2)\ntest_f()",
        "class Tests:\n    def test_f(self):\n        assert f(1) == 2\nTests().test_f()",
        "def test_f():\n    assert f(1) == 2\nfor test in [test_f]:\n    test()",
        "if f(1) != 2:\n    raise AssertionError",
    ],
    ids=range(7),
)
def test_asserts_in_functions_that_the_source_calls(source: str) -> None:
    (test,) = read(source)
    assert (test.source, test.names) == (source, ("f",))
    assert [test.names for test in read([source])] == [("f",)]


def test_imports_from_the_future_come_first() -> None:
    future = "from __future__ import annotations"
    (test,) = read(["assert f(1)"], f"```python\n{future}\nimport re\ndef f(x):\n```", test_imports=["import math"])
    assert test.helpers == f"{future}\nimport math\nimport re"
    compile(test.helpers, "helpers.py", "exec", dont_inherit=True)
    (test,) = read([f"{future}\nassert f(A) == 'x'"], test_setup_code="A = 1")
    assert test.source == f"{future}\nA = 1\nassert f(A) == 'x'"
    (test,) = read(
        f"{future}\ndef check(candidate):\n    assert candidate(A)", test_setup_code="A = 1", entry_point="f"
    )
    assert test.source.startswith(f"{future}\nA = 1\n")


PROMPT = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """The area."""\n'
CHECK = "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(half(2)) == math.pi\n"


@pytest.mark.parametrize("prompt", [PROMPT, f"Complete this.\n```python\n{PROMPT}```\n"], ids=["bare", "fenced"])
def test_check_functions(prompt: str) -> None:
    (test,) = read(CHECK, prompt, entry_point="area")
    assert (test.names, test.entry_point) == (("area",), "area")
    helpers = "import math\ndef half(x):\n    return x / 2"
    assert test.helpers.replace("\n\n", "\n") == helpers
    body = "    return half(r) * 2 * r * math.pi\n"
    job = test.job(body, 3.0)
    assert job == Check(
        f"{PROMPT.rstrip()}\n{body}", CHECK, ("area",), test.helpers, "area", prelude=test.helpers, timeout=3.0
    )
    whole = "def area(r):\n    return half(r)\n"
    assert test.job(whole, None).source == whole


def test_helpers_come_from_the_prompt_and_what_it_leaves_open_is_under_test() -> None:
    prompt = PROMPT + '\n\ndef volume(r):\n    """Also to be written."""\n'
    (test,) = read("def check(candidate):\n    assert candidate(1) < volume(half(2))", prompt, entry_point="area")
    assert test.names == ("area", "volume")
    (test,) = read("def check(candidate):\n    assert candidate(1) < half(2)", "Write it.", entry_point="area")
    assert test.names == ("area", "half")


def test_a_method_as_entry_point() -> None:
    (test,) = read(CHECK, PROMPT, entry_point="Solution().area")
    assert test.entry_point == "area"


# ------------------------------------------------------------------------------------------------------------ unreadable

UNREADABLE: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "holds no tests: None"),
    ("", {}, "is empty"),
    (" \n", {}, "is empty"),
    ([], {}, "holds no tests"),
    ({}, {}, "has no lists 'inputs' and 'outputs'; its keys: none"),
    ("{}", {}, "has no lists"),
    (5, {}, "holds no tests: 5"),
    (True, {}, "holds no tests: True"),
    ("{bad", {}, "is not JSON"),
    ("[" * 100_000, {}, "is not JSON"),
    ('{"inputs": [' + "9" * 5000 + '], "outputs": [1]}', {}, "is not JSON"),
    ({"inputs": []}, {}, "its keys: inputs"),
    ({"inputs": [], "outputs": []}, {}, "has no tests"),
    ({"inputs": ["1"], "outputs": []}, {}, "has 1 inputs and 0 outputs"),
    ({"inputs": ["1"], "outputs": "2"}, {}, "has no lists"),
    ({"inputs": [{"a": 1}], "outputs": ["2"]}, {}, "where a text or a list of lines belongs"),
    ({"inputs": [None], "outputs": ["2"]}, {}, "has None where"),
    ({"inputs": [[["1"]]], "outputs": ["2"]}, {}, "where a text"),
    ({"inputs": ["1"], "outputs": [True]}, {}, "has True where"),
    ({"inputs": [1], "outputs": [1], "fn_name": "f"}, {}, "has the input 1 for f, which is no list of arguments"),
    ({"inputs": [[1]], "outputs": [1], "fn_name": "f(x)"}, {}, "calls 'f(x)', which is no function's name"),
    ({"inputs": [[1]], "outputs": [1], "fn_name": 3}, {}, "has the fn_name 3"),
    ({"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}, {}, "is not JSON"),
    ({"inputs": [[1]], "outputs": [1], "fn_name": "Other.f"}, {}, "calls 'Other.f'"),
    # values that no JSON text gives
    ({"inputs": [[10**5000]], "outputs": [1], "fn_name": "f"}, {}, "cannot be read: Exceeds the limit"),
    ({"inputs": [10**5000], "outputs": [1]}, {}, "cannot be read: Exceeds the limit"),
    ({"inputs": [[VERY_NESTED]], "outputs": [1], "fn_name": "f"}, {}, "cannot be read: maximum recursion depth"),
    (range(10**5000), {}, "holds no tests: range(0, an integer of 16610 bits, 1)"),
    # what a program that does nothing would pass
    ({"inputs": ["1", "2"], "outputs": ["", " \n"]}, {}, "expects nothing but empty output"),
    ({"inputs": [[1]], "outputs": [None], "fn_name": "f"}, {}, "expects nothing but"),
    ({"inputs": [[1]], "outputs": [[None]], "fn_name": "f"}, {}, "expects nothing but"),
    # LiveCodeBench
    ([{"input": "1"}], {}, "without 'input' or 'output'; its keys: input"),
    ([{}], {}, "its keys: none"),
    ([{"input": "1", "output": "2", "testtype": "other"}], {}, "testtype 'other'"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], {}, "neither 'metadata' nor 'starter_code'"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], {"metadata": "{"}, "is not JSON"),
    ([{"input": "x", "output": "2", "testtype": "functional"}], {"metadata": '{"func_name": "f"}'}, "is not JSON"),
    ([{"input": "1", "output": "x", "testtype": "functional"}], {"metadata": '{"func_name": "f"}'}, "is not JSON"),
    ([{"input": "1", "output": "2"}, "assert f(1)"], {}, "mixes texts and other things"),
    ([1, 2], {}, "mixes texts"),
    (packed([{"input": "1", "output": "2"}]), {}, "holds a pickle of a list instead of one JSON text"),
    (packed(json.dumps([])), {}, "holds no tests"),
    (packed("plain"), {}, "is not JSON"),
    (packed(json.dumps(CASES))[:-8], {}, "cut off"),
    ("eJw!!!", {}, "neither JSON, nor packed tests, nor Python source"),
    ("eJ//////", {}, "neither JSON"),
    (base64.b64encode(zlib.compress(b"\x80\x04nonsense")).decode(), {}, "holds a damaged pickle"),
    (base64.b64encode(zlib.compress(b"")).decode(), {}, "holds a damaged pickle"),
    # MBPP
    (["print(f(1))"], {}, "which asserts nothing"),
    (["assert f(1)", "f(2)"], {}, "has the test 'f(2)', which asserts nothing"),
    (["assert f(1"], {}, "is not Python"),
    (["return f(1)", "assert f(1)"], {}, "asserts nothing"),
    (["assert True"], {}, "calls nothing that a program could define"),
    (["assert len(sorted([1])) == 1"], {}, "calls nothing"),
    (["def test_it():\n    assert f(1)"], {}, "asserts nothing"),
    (["def test_it():\n    assert f(1)\ndef all_of_them():\n    test_it()\nf(1)"], {}, "asserts nothing"),
    (["assert f(1)"], {"test_setup_code": "x ="}, "is not Python"),
    (["assert f(1)"], {"test_imports": [1]}, "that are no text"),
    (["assert f(1)"], {"test_imports": 1}, "that are no text"),
    (["", ""], {}, "asserts nothing"),
    # HumanEval
    ("plain words", {}, "is not Python"),
    ("x = 1", {}, "asserts nothing when it runs"),
    ("def test_it():\n    assert f(1)", {}, "asserts nothing when it runs"),
    ("def check(candidate):\n    assert candidate(1)", {}, "column 'entry_point' does not say"),
    ("def check(candidate):\n    assert candidate(1)", {"entry_point": ""}, "column 'entry_point'"),
    ("def check(candidate):\n    assert candidate(1)", {"entry_point": "f(x)"}, "no function's name"),
    ("def check(candidate):\n    candidate(1)", {"entry_point": "f"}, "asserts nothing when it runs"),
    ("(" * 5000 + ")" * 5000, {}, "is not Python"),
    ("def check(candidate):\n    assert candidate(1)\nreturn", {"entry_point": "f"}, "is not Python"),
]


@pytest.mark.parametrize(("tests", "columns", "why"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_unreadable_rows(tests: Any, columns: dict[str, Any], why: str) -> None:
    with pytest.raises(UnreadableTestsError) as caught:
        read(tests, **columns)
    assert why in str(caught.value)
    row = Row("1", (), {"tests": tests, **columns})
    assert (Code().check_reference(row) or "").startswith("column 'tests' ")


FLOATS = [n + 0.123456789012345 for n in range(500_000)]  # their text is longer than what they count as values
VALUES = [[0] * 5_000_000, NESTED, [object()], FLOATS, "é" * 2_000_000]
TYPES = ["large", "deep", "object", "long as text", "long when escaped"]


def complaint(**tests: Any) -> str:
    return Code().check_reference(Row("1", (), {"tests": tests})) or ""


@pytest.mark.parametrize("value", VALUES, ids=TYPES)
def test_values_that_no_room_takes_or_gives_are_found_at_load(value: Any) -> None:
    assert "has for f " in complaint(inputs=[[value]], outputs=[1], fn_name="f")
    assert "expects of f " in complaint(inputs=[[1]], outputs=[value], fn_name="f")
    assert "expects of f " in complaint(inputs=[[1], [1]], outputs=[1, [value]], fn_name="f")


def test_what_a_room_takes_is_what_passes_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an argument of growing length, the last that passes is one the sandbox would take, and little is lost."""
    monkeypatch.setattr(reader.values, "MAX_TEXT", 10_000)
    taken = [n for n in range(9_000) if not n % 100 and not complaint(inputs=[["x" * n]], outputs=[1], fn_name="f")]
    given = [n for n in range(9_000) if not n % 100 and not complaint(inputs=[[1]], outputs=["x" * n], fn_name="f")]
    assert taken[-1] == given[-1] == 8_900


@pytest.mark.parametrize("text", ["x" * (61 << 20), "\1" * (21 << 20)], ids=["long", "long when escaped"])
def test_an_input_that_no_room_takes_is_found_at_load(text: str) -> None:
    assert "60 MiB" in complaint(inputs=[text], outputs=["1"])


def test_an_output_that_no_program_may_print_is_found_at_load() -> None:
    assert OUTPUT_CAP == reader.MAX_STDOUT
    assert "an output of more than 8 MiB" in complaint(inputs=["1"], outputs=["é" * (5 << 20)])
    assert complaint(inputs=["\ud800"], outputs=["x" * (8 << 20) + "\n"]) == ""


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was_run",)


@pytest.mark.parametrize(
    "value",
    [Runs(), [Runs()], {"a": print}, os.path.join, Row],
    ids=["call", "nested", "builtin", "function", "class"],
)
def test_a_pickle_loads_no_globals(value: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableTestsError, match="is a pickle that asks for "):
        read(packed(value))
    assert not (tmp_path / "was_run").exists()


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_UNPACKED", 1 << 20)
    bomb = packed("x" * (2 << 20))
    assert len(bomb) < 10_000
    with pytest.raises(UnreadableTestsError, match="unpacks to more than"):
        read(bomb)


def test_a_readable_row_has_no_complaint() -> None:
    row = Row("1", (), {"tests": json.dumps(STDIN)})
    assert Code().check_reference(row) is None
    assert isinstance(read(CHECK, PROMPT, entry_point="area")[0], SourceTest)
    raw = Row("1", (), {"test": CHECK, "entry_point": "area"}, prompt_column=("prompt", PROMPT))
    assert Code(field="test").check_reference(raw) is None
