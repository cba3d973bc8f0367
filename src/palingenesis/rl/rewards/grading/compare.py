"""Decide whether what a program printed or returned is what a test expects.

    printed  --lines that hold anything-------> equal? --else, line by line--> tokens: text, integers, decimals
    returned --plain built-in values----------> the same structure; floats within a tolerance

Invariant: time and memory are linear in both sides, whatever they hold, and nothing raises. No integer is built from text
of unbounded length and nothing recurses: the values come from a program that may mean harm, and this is the trainer's
process.

Where this differs from the public harnesses: they compare every token as a number of any length, and accept the first
element of any expected list; here integers are compared digit by digit, and only a list of one may be a wrapped result.
Empty lines count for nothing, as in APPS' harness and for most judges; LiveCodeBench's counts those inside.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6  # of decimals: relative for returned floats, relative or absolute for printed ones
NEAR_ZERO = 1e-9  # absolute tolerance of returned floats, so that 1e-17 is 0.0
MAX_DECIMAL = 400  # characters of a number compared by value; a longer one must be equal as text

_BLANKS = " \t\r\f\v"
_INTEGER = re.compile(rb"([+-]?)([0-9]+)")
_DECIMAL = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
INT_TEXT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # how JSON writes a dict's integer key

# ---------------------------------------------------------------------------------------------------- printed text


def same_output(printed: str, expected: str) -> bool:
    """The printed text is the expected one.

    Line endings, blanks at the ends of lines and empty lines do not count. Lines that are not equal are compared token
    by token: integers by value, decimals within 1e-6 where at least one of the two has a point or an exponent,
    everything else as text. Tokens keep their order and their line.
    """
    left, right = _lines(printed), _lines(expected)
    return len(left) == len(right) and all(a == b or _same_tokens(a, b) for a, b in zip(left, right, strict=True))


def _lines(text: str) -> list[str]:
    """The lines that hold anything, without trailing blanks."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [full for line in lines if (full := line.rstrip(_BLANKS))]


def _same_tokens(a: str, b: str) -> bool:
    """As bytes, because there only ASCII blanks separate and only ASCII digits are digits."""
    left, right = (line.encode("utf-8", "surrogatepass").split() for line in (a, b))
    return len(left) == len(right) and all(x == y or _same_number(x, y) for x, y in zip(left, right, strict=True))


def _same_number(a: bytes, b: bytes) -> bool:
    left, right = _integer(a), _integer(b)
    if left is not None and right is not None:
        return left == right
    if max(len(a), len(b)) > MAX_DECIMAL or not (_DECIMAL.fullmatch(a) and _DECIMAL.fullmatch(b)):
        return False
    x, y = float(a), float(b)
    if not (math.isfinite(x) and math.isfinite(y)):
        return False
    if left is None and right is None:
        return math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    # Beside an integer no relative tolerance: 123456700.0 is not 123456789, and a float holds no 18 digits.
    try:
        return abs(Decimal(a.decode()) - Decimal(b.decode())) <= TOLERANCE
    except ArithmeticError:  # an exponent of twenty digits
        return False


def _integer(token: bytes) -> bytes | None:
    """An integer's digits without leading zeros and plus; None for anything else."""
    match = _INTEGER.fullmatch(token)
    if match is None:
        return None
    digits = match[2].lstrip(b"0")
    return (b"-" if match[1] == b"-" and digits else b"") + digits


# ---------------------------------------------------------------------------------------------------- returned values


def same_value(returned: Any, expected: Any) -> bool:
    """The returned value is the expected one.

    A tuple equals a list, a set only a set, True is 1 as in Python, an integer equals a float of exactly its value, two
    floats agree within 1e-6 relative, and an integer key of a dict equals the text JSON made of it.

    Args:
        returned: plain built-in values, of any depth.
        expected: what the test's JSON holds.
    """
    pairs = [(returned, expected)]
    while pairs:
        parts = _compare(*pairs.pop())
        if parts is None:
            return False
        pairs += parts
    return True


def _compare(a: Any, b: Any) -> list[tuple[Any, Any]] | None:
    """The pairs of parts that must be equal for `a` and `b` to be; None when they differ already."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(zip(a, b, strict=True)) if len(a) == len(b) else None
    if isinstance(a, dict) and isinstance(b, dict):
        return _compare_dicts(a, b)
    return [] if _same_scalar(a, b) else None


def _compare_dicts(a: dict[Any, Any], b: dict[Any, Any]) -> list[tuple[Any, Any]] | None:
    if len(a) != len(b):
        return None
    left = dict(a)
    pairs = []
    for key, value in b.items():
        keys = [key, int(key)] if isinstance(key, str) and INT_TEXT.fullmatch(key) else [key]
        found = [k for k in keys if k in left]
        if not found:
            return None
        pairs.append((left.pop(found[0]), value))
    return pairs


def _same_scalar(a: Any, b: Any) -> bool:
    if type(a) is float and type(b) is float:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=NEAR_ZERO)
    return bool(a == b) and (type(a) is type(b) or {type(a), type(b)} <= {bool, int, float})
