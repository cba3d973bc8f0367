"""The codec between a room and its host: what goes in comes out, and nothing else does."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palingenesis.rl.sandbox.inside import values
from palingenesis.rl.sandbox.inside.values import NotPlainError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**53 - 2, max_value=2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text(st.characters(categories=["Cs", "Ll"]))  # lone surrogates
    | st.binary()
    | st.builds(range, st.integers(-9, 9), st.integers(-(2**70), 2**70), st.integers(1, 9))
)
hashable = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
plain = st.recursive(
    hashable,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(hashable) | st.dictionaries(hashable, inner),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    return values.decode(values.loads(values.dumps(values.encode(value)).decode("ascii")))


def shown(value: Any) -> Any:
    """Something that is equal only for equal values of the same types."""
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(shown, value)))
    if isinstance(value, dict):
        return dict, [(shown(key), shown(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shown(item) for item in value]
    return type(value), value if isinstance(value, int) else repr(value)


@given(plain)
def test_every_plain_value_survives(value: Any) -> None:
    assert shown(there_and_back(value)) == shown(value)


@given(plain)
def test_the_text_is_ascii_and_stable(value: Any) -> None:
    text = values.dumps(values.encode(value))
    assert text.isascii()
    assert values.dumps(values.encode(value)) == text


def test_not_a_number_and_large_integers() -> None:
    nan = there_and_back(float("nan"))
    assert nan != nan
    assert there_and_back(-(7**9000)) == -(7**9000)  # past the limit of decimal digits
    assert there_and_back([2**53, 2**53 - 1, -(2**53)]) == [2**53, 2**53 - 1, -(2**53)]


Pair = namedtuple("Pair", "a b")


class Small(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        deque([1]), Pair(1, 2), Small.ONE, Decimal(1), Fraction(1, 2),
        bytearray(b"x"), memoryview(b"x"), object(), len, int, iter([1]), {}.keys(), slice(1), ..., NotImplemented, json,
        type("Text", (str,), {})("x"), type("List", (list,), {})([1]), ValueError("x"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"key": (x,)}], ids=["bare", "list", "dict"])
def test_what_is_not_plain_is_named(value: Any, wrap: Any) -> None:
    with pytest.raises(NotPlainError, match=rf"an? {type(value).__name__}, not a plain value"):
        values.encode(wrap(value))


def test_depth_and_size_are_bounded() -> None:
    deep: list[Any] = []
    for _ in range(values.MAX_DEPTH - 1):
        deep = [deep]
    assert there_and_back(deep) == deep
    with pytest.raises(NotPlainError, match="nested too deeply"):
        values.encode([[deep]])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlainError, match="nested too deeply"):
        values.encode(loop)
    wide: list[Any] = []
    for _ in range(100):
        wide = [wide, wide]
    for large in (
        wide,
        "x" * values.MAX_SIZE,
        b"x" * values.MAX_SIZE,
        [0] * values.MAX_SIZE,
        1 << (16 * values.MAX_SIZE),
    ):
        with pytest.raises(NotPlainError, match="too large"):
            values.encode(large)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "nul", "[1,]", "'x'", "\x00", '{"q": 1}', "{}", '{"t": 1}', '{"t": [1], "s": [2]}', '{"s": [[1]]}',
        '{"d": [1]}', '{"d": [[1]]}', '{"d": [[1, 2, 3]]}', '{"d": [[[], 1]]}', '{"i": "zz"}', '{"i": 1}',
        '{"i": ["0x1"]}', '{"f": "1"}', '{"f": "infinity"}', '{"b": "0"}', '{"b": "zz"}', '{"u": "ff"}',
        '{"c": [1.0]}', '{"c": [1.0, 2.0, 3.0]}', '{"c": ["a", "b"]}', '{"c": [1, 2]}', '{"r": [1, 2]}',
        '{"r": [0, 1, 0]}', '{"r": ["a", 1, 1]}', '{"h": [0, "A"]}', '{"z": [{"s": []}]}', "9" * 10_000,
        "[" * 100_000, "[" * 500 + "]" * 500, '{"t":[' * 300 + "]}" * 300,
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(NotPlainError):
        values.decode(values.loads(text))


def test_what_is_not_plain_may_stand_for_something() -> None:
    thing = object()
    data = values.encode([thing, {"a": thing}], lambda value: [3, type(value).__name__])
    assert values.decode(data, tuple) == [(3, "object"), {"a": (3, "object")}]


@pytest.mark.parametrize("form", ['{"s":[%s]}', '{"z":[%s]}', '{"d":[%s]}'])
def test_colliding_keys_are_refused_in_linear_time(form: str) -> None:
    """Integers a multiple of the hash's modulus apart all hash alike: a set of n of them would take n² / 2 steps."""
    keys = ['{"i":"%s"}' % hex(n * (2**61 - 1)) for n in range(1, 60_000)]  # noqa: UP031
    items = [f"[{key},0]" for key in keys] if "d" in form else keys
    began = time.perf_counter()
    with pytest.raises(NotPlainError, match="collide"):
        values.decode(values.loads(form % ",".join(items)))
    assert time.perf_counter() - began < 10
    assert len(values.decode(values.loads('{"s":[%s]}' % ",".join(map(str, range(60_000)))))) == 60_000  # noqa: UP031


def test_the_standard_librarys_dicts_are_their_contents() -> None:
    for made in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        back = values.decode(values.encode(made))
        assert type(back) is dict
        assert back == {"a": 2, "b": 1}


def test_a_subclass_of_them_is_not_plain() -> None:
    class Sly(Counter[str]):
        pass

    with pytest.raises(values.NotPlainError):
        values.encode(Sly("a"))
