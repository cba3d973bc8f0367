"""What counts as the expected output or value: one table for printed text, one for returned values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.rewards.grading.compare import same_output, same_value
from palingenesis.rl.rewards.grading.tests import CallTest, StdinTest, show
from palingenesis.rl.sandbox.job import Result, Status

# (printed, expected, equal)
PRINTED: list[tuple[str, str, bool]] = [
    # lines and blanks
    ("5\n", "5", True),
    ("5", "5\n", True),
    ("5  \n", "5", True),
    ("5\t\n", "5", True),
    ("a\r\nb\r\n", "a\nb", True),
    ("a\rb", "a\nb", True),
    ("a\nb\n\n\n", "a\nb", True),
    ("\n\na\n", "a", True),
    ("a\n", "\na\n\n", True),
    ("a\n\nb", "a\n\nb", True),
    ("a\n   \nb", "a\n\nb", True),
    ("a\n\nb", "a\nb", True),
    ("a\nb", "a\n \n\nb\n", True),
    ("a\n\nb\nc", "a\nb", False),
    ("a\nb", "a b", False),
    ("a b", "a\nb", False),
    ("a  b", "a b", True),
    ("  a b", "a b", True),
    ("a\tb", "a b", True),
    ("ab", "a b", False),
    ("", "", True),
    ("", "\n \n", True),
    ("", "0", False),
    ("0", "", False),
    ("a\nb\nc", "a\nb", False),
    ("a", "a\nb", False),
    ("5\nextra", "5", False),
    # order and text
    ("1 2", "2 1", False),
    ("b\na", "a\nb", False),
    ("YES", "yes", False),
    ("Yes.", "Yes", False),
    ("[1, 2]", "[1,2]", False),
    ("ärger", "ärger", True),
    ("a\u00a0b", "a b", False),
    ("a\u2028b", "a\nb", False),
    ("a\x1cb", "a b", False),
    ("a\x00b", "a\x00b", True),
    ("\ud800", "\ud800", True),
    ("\ud800", "\ud801", False),
    # integers
    ("7", "7", True),
    ("07", "7", True),
    ("+7", "7", True),
    ("-0", "0", True),
    ("-7", "7", False),
    ("7", "8", False),
    ("1000000000", "1000000001", False),
    ("1000000", "1000001", False),
    ("12345678901234567890", "12345678901234567891", False),
    ("1" * 5000, "1" * 5000, True),
    ("0" * 9 + "1" * 5000, "1" * 5000, True),
    ("1" * 5000, "1" * 4999 + "2", False),
    ("1_000", "1000", False),
    ("1,000", "1000", False),
    ("0x10", "16", False),
    ("True", "1", False),
    ("١", "1", False),
    ("７", "7", False),
    ("²", "2", False),
    # decimals
    ("1.0", "1", True),
    ("123456700.0", "123456789", False),  # an integer has no relative tolerance
    ("1.2345678901e17", "123456789012345678", False),
    ("123456789012345678.0", "123456789012345678", True),
    ("1.9999999999", "2", True),
    ("1.", "1", True),
    ("1", "1.000", True),
    (".5", "0.5", True),
    ("-.5", "-0.50", True),
    ("0.333333", "0.3333333333", True),
    ("0.3333", "0.3333333333", False),
    ("3.1415926", "3.1415927", True),
    ("3.14159", "3.14160", False),
    ("1e3", "1000", True),
    ("1E+3", "1000.0", True),
    ("1e-7", "0.0", True),
    ("0.00001", "0.0", False),
    ("-0.0", "0", True),
    ("1000000.4", "1000000.0", True),
    ("1000000.4", "1000010.0", False),
    ("-1.5", "1.5", False),
    ("1.5.0", "1.5", False),
    ("1e", "1", False),
    ("e5", "e5", True),
    (".", "0", False),
    ("nan", "nan", True),  # equal as text
    ("nan", "NaN", False),
    ("nan", "1.0", False),
    ("inf", "1e999", False),
    ("1e999", "2e999", False),
    ("1e999", "1e999", True),
    ("1e-999", "0.0", True),
    ("1_0.0", "10.0", False),
    ("١.٥", "1.5", False),
    ("1" * 500 + ".0", "1" * 500 + ".00", False),  # too long to be read as a number
    ("0e99999999999999999999", "3", False),  # more than a Decimal takes
    ("3", "0e-99999999999999999999", False),
    ("1e-99999999999999999999", "0", False),
    ("0e" + "9" * 390, "0.0", True),
    ("0e999999999999999999", "0", True),
    ("x 1.0000001\ny 2", "x 1\ny 2.0", True),
    ("x 1.1\ny 2", "x 1\ny 2.0", False),
]


@pytest.mark.parametrize(
    ("printed", "expected", "equal"), PRINTED, ids=[f"{a[:12]!r}-{b[:12]!r}" for a, b, _ in PRINTED]
)
def test_printed(printed: str, expected: str, equal: bool) -> None:
    assert same_output(printed, expected) is equal


NESTED: Any = [1]
OTHER: Any = [2]
for _ in range(100_000):
    NESTED, OTHER = [NESTED], [OTHER]

# (returned, expected, equal)
RETURNED: list[tuple[Any, Any, bool]] = [
    (1, 1, True),
    (1, 2, False),
    (None, None, True),
    (None, 0, False),
    (None, False, False),
    ("", None, False),
    ("a", "a", True),
    ("a", "A", False),
    ("1", 1, False),
    (1, "1", False),
    ("a ", "a", False),
    (b"a", "a", False),
    (True, True, True),
    (True, 1, True),  # as in Python
    (1, True, True),
    (False, 0, True),
    (True, 2, False),
    (True, "True", False),
    (1 + 0j, True, False),
    (False, None, False),
    (True, 1.0, True),
    (3, 3.0, True),
    (3.0, 3, True),
    (3.0000001, 3, False),
    (3, 3.0000001, False),
    (3.0000001, 3.0, True),
    (3.001, 3.0, False),
    (0.1 + 0.2, 0.3, True),
    (1e-17, 0.0, True),
    (1e-8, 0.0, False),
    (1e300, 1.0000001e300, True),
    (math.inf, math.inf, True),
    (math.inf, -math.inf, False),
    (math.inf, 1e308, False),
    (math.nan, math.nan, False),
    (math.nan, 1.0, False),
    (10**400, 1e308, False),
    (10**400, 10**400, True),
    (10**400, 10**400 + 1, False),
    (1 + 0j, 1, False),
    ([], [], True),
    ([], None, False),
    ([], {}, False),
    ([1, 2], [1, 2], True),
    ([1, 2], [2, 1], False),
    ([1, 2], [1, 2, 3], False),
    ([1, 2, 3], [1, 2], False),
    ((1, 2), [1, 2], True),
    ([(1, 2), (3,)], [[1, 2], [3]], True),
    ([True], [1], True),
    ([1.0000001], [1.0], True),
    ("ab", ["a", "b"], False),
    (["a", "b"], "ab", False),
    (range(3), [0, 1, 2], False),
    ({1, 2}, [1, 2], False),
    ([1, 2], {1, 2}, False),
    ({1, 2}, {2, 1}, True),
    ({1}, {1, 2}, False),
    ({"a": 1}, {"a": 1}, True),
    ({"a": 1}, {"a": 2}, False),
    ({"a": 1}, {"b": 1}, False),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
    ({"a": 1, "b": 2}, {"a": 1}, False),
    ({1: "x"}, {"1": "x"}, True),
    ({-1: "x"}, {"-1": "x"}, True),
    ({"1": "x"}, {"1": "x"}, True),
    ({1: "x"}, {"01": "x"}, False),
    ({True: "x"}, {"1": "x"}, True),
    ({1.0: "x"}, {"1": "x"}, True),
    ({1.5: "x"}, {"1": "x"}, False),
    ({None: "x"}, {None: "x"}, True),
    ({1: "x", "1": "x"}, {"1": "x"}, False),
    ({1: "x", "1": "y"}, {"1": "y", "2": "x"}, False),
    ({None: 1}, {"null": 1}, False),
    ({(1, 2): 1}, {"(1, 2)": 1}, False),
    ({1: {2: (3,)}}, {"1": {"2": [3]}}, True),
    ({1: [True]}, {"1": [1]}, True),
    ({1: [True]}, {"1": [0]}, False),
    (NESTED, NESTED, True),
    (NESTED, OTHER, False),
]


@pytest.mark.parametrize(("returned", "expected", "equal"), RETURNED, ids=range(len(RETURNED)))
def test_returned(returned: Any, expected: Any, equal: bool) -> None:
    assert same_value(returned, expected) is equal


@pytest.mark.parametrize(
    "work",
    [
        lambda: same_output("9" * 1_000_000, "8" * 1_000_000),
        lambda: same_output("9" * 1_000_000 + ".5", "8" * 1_000_000),
        lambda: same_output("0" * 1_000_000 + "x", "0" * 1_000_000 + "y"),
        lambda: same_output("1e" + "9" * 1_000_000, "1e5"),
        lambda: same_output("1e999999999", "1e999999998"),
        lambda: same_output("0e999999999999999999 " * 100_000, "3 " * 100_000),
        lambda: same_output("1e-999999999999999999 " * 10_000, ("9" * 400 + " ") * 10_000),
        lambda: same_output(" " * 2_000_000 + "x", "x"),
        lambda: same_output("\n" * 2_000_000, "x"),
        lambda: same_output("1.5 " * 300_000, "1.5000001 " * 300_000),
        lambda: same_value(1 << 8_000_000, 1),
        lambda: same_value([0] * 1_000_000, [0] * 1_000_000),
        lambda: show(1 << 80_000_000),
        lambda: show([[1 << 80_000_000] * 9] * 9),
        lambda: show("x" * 50_000_000),
        lambda: show({n: n for n in range(100_000)}),
        lambda: show(NESTED),
        lambda: show([range(1 << 80_000_000)] * 9),
    ],
    ids=range(18),
)
def test_hostile_sizes_are_cheap(work: Callable[[], Any]) -> None:
    began = time.perf_counter()
    work()
    assert time.perf_counter() - began < 3.0


class Unshowable:
    def __repr__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (range(1, 9, 2), "range(1, 9, 2)"),
        (range(10**5000), "range(0, an integer of 16610 bits, 1)"),
        ([range(10**5000)], "[range(0, an integer of 16610 bits, 1)]"),
        ([[range(10**5000)]], "[[range(0, an integer of 16610 bits, 1)]]"),
        ([Unshowable()], "[a Unshowable]"),
        (True, "True"),
        (1.5 + 2j, "(1.5+2j)"),
    ],
    ids=range(7),
)
def test_shown(value: Any, shown: str) -> None:
    assert show(value) == shown


huge = st.integers(14_000, 40_000).map(lambda bits: 1 << bits)  # past the digits that Python turns into text
whole = st.one_of(st.integers(), huge, huge.map(int.__neg__))
plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        whole,
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters()),
        st.binary(),
        st.builds(range, whole, whole, whole.filter(bool)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.none(), st.booleans(), whole, st.floats(), st.text(), st.tuples(whole)), inner),
        st.frozensets(st.one_of(whole, st.floats(), st.text()), max_size=3),
    ),
    max_leaves=8,
)
number = st.from_regex(r"[+-]?[0-9]{0,3}\.?[0-9]{1,30}([eE][+-]?[0-9]{1,30})?", fullmatch=True)
output = st.lists(st.one_of(number, number, st.text(st.characters(), max_size=5)), max_size=4).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(output, output)
def test_no_output_raises(printed: str, expected: str) -> None:
    assert StdinTest("1", printed).difference(Result(Status.DONE, stdout=printed)) == ""
    assert isinstance(StdinTest("1", expected).difference(Result(Status.DONE, stdout=printed)), str)


@settings(max_examples=150, deadline=None)
@given(plain, plain)
def test_no_value_raises(returned: Any, expected: Any) -> None:
    test = CallTest("f", (returned, expected), (expected,), 1)
    assert isinstance(test.difference(Result(Status.DONE, value=returned)), str)


def test_a_shown_value_is_short() -> None:
    assert show([1, (2, "x"), {"k": 1}]) == "[1, (2, 'x'), a dict of 1]"
    assert len(show([["x" * 10_000] * 100] * 100)) < 10_000
