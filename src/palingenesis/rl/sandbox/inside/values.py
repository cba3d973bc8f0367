"""Plain Python values as JSON: how arguments go into a room and returned values come out.

    None, bool, int, float, str, list     as they are
    {"t": [...]} tuple    {"s": [...]} set    {"z": [...]} frozenset    {"d": [[key, value], ...]} dict
    {"i": "-0x1f"} int past 2**53    {"f": "nan"} float    {"c": [re, im]} complex    {"b": hex} bytes
    {"r": [start, stop, step]} range    {"u": hex} str with lone surrogates    {"h": [...]} what `other` makes of it

Only exactly these types are plain (and Counter, defaultdict and OrderedDict, as dicts): a subclass could lie about `==`.
Nothing is ever unpickled. What comes out of a room is hostile: depth, size and colliding keys are bounded, and whatever is
odd is a `NotPlainError`.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

MAX_DEPTH = 200
MAX_SIZE = 4 * 2**20  # of one value: characters and bytes, and ITEM for each of its parts
ITEM = 4
MOST_PARTS = 2 * MAX_SIZE // ITEM  # of what is decoded: its items, and the lists and objects that hold them
MAX_TEXT = 8 * 2**20  # bytes of a value's JSON text
MAX_COLLISIONS = 64  # keys of one set or dict with the same hash; more would make building it quadratic
SMALL = 2**53  # larger integers travel as hexadecimal: no limit of digits, no quadratic conversion

Other = Callable[[Any], Any]

_dumps = json.JSONEncoder(ensure_ascii=True, check_circular=False, separators=(",", ":")).encode
_loads = json.JSONDecoder().decode


class NotPlainError(Exception):
    """The value is not plain, too large or too deep; or the text is no value. Says which, as `a Foo, not a plain value`."""


def refuse(value: Any) -> NoReturn:
    name = type(value).__name__
    article = "an" if name[:1].lower() in "aeiou" else "a"
    raise NotPlainError(f"{article} {name}, not a plain value")


def encode(value: Any, other: Other = refuse) -> Any:
    """`value` as something JSON can hold.

    Args:
        other: called with a value that is not plain; returns something JSON can hold, which becomes `{"h": ...}`.

    Raises:
        NotPlainError: it cannot be encoded.
    """
    left = MAX_SIZE

    def spend(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise NotPlainError("a value that is too large")

    def walk(x: Any, depth: int) -> Any:
        kind = type(x)
        spend(ITEM)
        if x is None or kind is bool:
            return x
        if kind is int:
            if -SMALL < x < SMALL:
                return x
            spend(x.bit_length() // 4)
            return {"i": hex(x)}
        if kind is float:
            return x if x - x == 0 else {"f": repr(x)}
        if kind is str:
            spend(len(x))
            return x if x.isascii() or _is_utf8(x) else {"u": x.encode("utf-8", "surrogatepass").hex()}
        if kind is complex:
            return {"c": [walk(x.real, depth), walk(x.imag, depth)]}
        if kind is bytes:
            spend(2 * len(x))
            return {"b": x.hex()}
        if kind is range:
            return {"r": [walk(n, depth) for n in (x.start, x.stop, x.step)]}
        if depth >= MAX_DEPTH:
            raise NotPlainError("a value that is nested too deeply")
        if kind in _DICTS:
            return {"d": [[walk(k, depth + 1), walk(v, depth + 1)] for k, v in x.items()]}
        if kind in _TAGS:
            items = [walk(item, depth + 1) for item in x]
            tag = _TAGS[kind]
            return {tag: items} if tag else items
        return {"h": other(x)}

    return walk(value, 0)


def decode(data: Any, other: Other = refuse) -> Any:
    """The value that `encode` made `data` of. `other` gets what stands in `{"h": ...}`.

    Raises:
        NotPlainError: `data` is not what `encode` makes.
    """

    left = MOST_PARTS

    def walk(x: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise NotPlainError("a value that is too large")
        kind = type(x)
        if x is None or kind in (bool, int, float, str):
            return x
        if depth > MAX_DEPTH:
            raise NotPlainError("a value that is nested too deeply")
        if kind is list:
            return [walk(item, depth + 1) for item in x]
        if kind is not dict or len(x) != 1:
            raise NotPlainError("something that is no encoded value")
        ((tag, inner),) = x.items()
        if tag == "h":
            return other(inner)
        if tag in _TEXTS and type(inner) is str:
            return _TEXTS[tag](inner)
        if tag not in _PARTS or type(inner) is not list:
            raise NotPlainError("something that is no encoded value")
        return _PARTS[tag]([walk(item, depth + 1) for item in inner])

    try:
        return walk(data, 0)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise NotPlainError(f"something that is no encoded value ({error})") from error


def dumps(data: Any) -> bytes:
    """JSON text of something that JSON can hold."""
    text: bytes = _dumps(data).encode("ascii")
    if len(text) > MAX_TEXT:
        raise NotPlainError("a value that is too large")
    return text


def loads(text: str) -> Any:
    """What JSON text says. Raises NotPlainError where it is not JSON, or nested beyond reason."""
    if text.count("[") + text.count("{") > MOST_PARTS:
        raise NotPlainError("a value that is too large")
    try:
        return _loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotPlainError(f"something that is not JSON ({error})") from error


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _special(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"no special number: {text[:20]!r}")
    return float(text)


def _distinct(keys: list[Any]) -> list[Any]:
    """The keys, when building a table of them takes linear time."""
    if len(keys) > MAX_COLLISIONS and Counter(map(hash, keys)).most_common(1)[0][1] > MAX_COLLISIONS:
        raise NotPlainError("a value whose keys collide")
    return keys


def _dict(pairs: list[Any]) -> dict[Any, Any]:
    keys = _distinct([key for key, _ in pairs])
    return {key: pair[1] for key, pair in zip(keys, pairs)}  # noqa: B905 (Python 3.9)


def _exactly(kind: type, count: int, parts: list[Any]) -> list[Any]:
    if len(parts) != count or any(type(part) is not kind for part in parts):
        raise ValueError("other parts than it has")
    return parts


# The standard library's own: their contents count as a plain dict's, as `==` has it.
_DICTS = frozenset({dict, defaultdict, OrderedDict, Counter})
_TAGS: dict[type, str] = {list: "", tuple: "t", set: "s", frozenset: "z"}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "i": lambda text: int(text, 16),
    "f": _special,
    "b": bytes.fromhex,
    "u": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
}
_PARTS: dict[str, Callable[[list[Any]], Any]] = {
    "t": tuple,
    "s": lambda items: set(_distinct(items)),
    "z": lambda items: frozenset(_distinct(items)),
    "d": _dict,
    "c": lambda parts: complex(*_exactly(float, 2, parts)),
    "r": lambda parts: range(*_exactly(int, 3, parts)),
}
