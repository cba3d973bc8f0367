"""The `math` reward: where a completion states its answer, and whether that equals the reference.

    completion --extract--> answer ─┐
    reference  --golds----> answer ─┴─ compare: decided here in microseconds (numbers, words, tuples of them)
                                         └─ Undecided: sympy, in a worker process that can be killed

Invariants: only `serve` (in the worker) imports sympy; a comparison that ends its worker or passes its deadline is a
wrong answer; a worker that cannot be had skips the sample.

Where this differs from plain math-verify: several boxes are not a set, `1,2,3` is not `3,2,1`, `5 m` is not `5 km`,
words are not products of their letters, 1e-9 is not 2e-9, `2 1/2` is 5/2.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any
from weakref import WeakSet

from palingenesis.rl.errors import ConfigError, SkipSample
from palingenesis.rl.rewards.boxes import last_answer_line, last_box, last_match
from palingenesis.rl.rewards.mathtext import Group, Named, Number, Symbolic, Value, Words, clean, read_value
from palingenesis.rl.rewards.workers import (
    TaskCrashedError,
    TaskFailedError,
    TaskTimeoutError,
    WorkerPool,
    WorkersUnavailableError,
)
from palingenesis.rl.types import Row

MAX_WORDS = 12  # a longer reference is prose, which nothing here can compare
MAX_SYMBOLIC = 1000  # characters of one expression
WORKER_MEMORY_GIB = 3.0


class Undecided(Exception):
    """Only sympy can tell."""


class Math:
    """1.0 when the completion's final answer equals the reference, else 0.0.

    The answer is the last closed `\\boxed{}`, else the text after the last "Answer:" or `####`, else the last number.

    Args:
        field: column of the reference: a number, an expression, a worked solution (`####` or a box), or a list of
            which any may match.
        timeout: seconds one symbolic comparison may take; one that takes longer is a wrong answer.

    Raises:
        SkipSample: no worker process could be started.
    """

    def __init__(self, field: str = "answer", timeout: float = 5.0) -> None:
        if timeout <= 0:
            raise ConfigError(f"`timeout` is {timeout}; a comparison needs a positive number of seconds.")
        self.field = field
        self.columns = (field,)
        self._timeout = timeout

    async def __call__(self, completion: str, **row: Any) -> float:
        _users.add(self)
        answers = extract(completion)
        for gold in golds(row[self.field]):
            for answer in answers:
                if await equal(answer, gold, self._timeout):
                    return 1.0
        return 0.0

    def close(self) -> None:
        """End the workers, unless another Math of this process still uses them."""
        _users.discard(self)
        if not _users:
            close_workers()

    def check_reference(self, row: Row) -> str | None:
        """Why the row's reference cannot be read; None when it can."""
        value = row.columns[self.field] if self.field in row.columns else row.prompt_column[1]
        if golds(value):
            return None
        shown = repr(value)
        return f"column {self.field!r} holds {shown if len(shown) <= 60 else shown[:57] + '...'}"


# ---------------------------------------------------------------------------------------------------- extraction

_NUMBER = re.compile(
    r"(?<![0-9A-Za-z_.,])(?:(?<![)\]}])[+-])?[$€£¥₹]?"
    r"(?:(?:[0-9]+\s*)?\\[dtc]?frac\s*(?:\{\s*-?[0-9.]+\s*\}\s*\{\s*-?[0-9.]+\s*\}|[0-9]\s*[0-9])"
    r"|[0-9]+[ ][0-9]+/[0-9]+(?![0-9/])"
    r"|(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?:\s?(?:\\times|×|\*)\s?10\^\{?-?[0-9]+\}?|[eE][+-]?[0-9]+(?![0-9A-Za-z])|/[0-9]+(?:\.[0-9]+)?(?![0-9/]))?"
    r"|\.[0-9]+)"
    r"(?:\s?\\?%|\s?percent\b)?"
)
_SPAN = re.compile(r"(?<!\\)\$\$?([^$\n]{1,300}?)(?<!\\)\$\$?|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}(?![a-zA-Z])")


def extract(completion: str) -> tuple[str, ...]:
    """The texts that state the final answer: none, one, or two readings of it.

    An "Answer:" line in words is read as it stands and as its last number; so is a completion that is only an answer.
    """
    text = completion
    box = last_box(text)
    if box.content is not None:
        return (box.content,) if box.content.strip() else ()
    text = text[: box.cut_at]
    line = last_answer_line(text)
    if line is not None:
        content = line.content
        number = _last_number(content) if _PROSE.search(_without_commands(content)) else None
        return tuple(dict.fromkeys(part for part in (content, number) if part))
    number = _last_number(text)
    bare = text.strip() if box.cut_at == len(completion) and _is_bare(text.strip()) else None
    return tuple(dict.fromkeys(part for part in (bare, number) if part))


def _is_bare(text: str) -> bool:
    """The completion is nothing but an answer: one line of mathematics, or a word or two without a number."""
    if not text or "\n" in text or len(text) > 200:
        return False
    return not _PROSE.search(_without_commands(text)) or (len(text.split()) <= 3 and not re.search(r"[0-9]", text))


def _without_commands(text: str) -> str:
    return re.sub(r"\\[a-zA-Z]+", " ", text)


def _last_number(text: str) -> str | None:
    """The last number of a text; one inside `$...$` stands for the whole formula (its last side)."""
    found = last_match(_NUMBER, text)
    if found is None:
        return None
    for span in _SPAN.finditer(text):
        if span.start() < found.start() and found.end() <= span.end():
            formula = next(group for group in span.groups() if group is not None)
            if not _PROSE.search(_without_commands(formula)):
                return formula.rsplit("=", 1)[-1] if re.search(r"[^<>!\\]=", formula) else formula
    return found.group()


def golds(reference: Any) -> list[str]:
    """The readable answers a reference column states."""
    if isinstance(reference, bool) or reference is None:
        return [] if reference is None else [str(reference)]
    if isinstance(reference, str):
        return _golds_of_text(reference)
    if isinstance(reference, float) and not math.isfinite(reference):
        return []
    if isinstance(reference, Mapping):
        return []
    if isinstance(reference, Iterable):
        return [gold for part in reference for gold in golds(part)]
    return _golds_of_text(str(reference))


def _golds_of_text(text: str) -> list[str]:
    if text.lstrip().startswith('["'):
        try:
            return golds(json.loads(text))
        except ValueError:
            pass  # it only looked like a JSON list
    if len(text) < 40 and text.strip().isdecimal() and text.isascii():
        return [text.strip()]
    box = last_box(text)
    if box.content is not None:
        stated = box.content
    elif box.cut_at < len(text):
        return []
    else:
        bare = re.search(r"\\boxed\s+([^\s{}$]+)\s*\$?\.?\s*$", text)
        line = last_answer_line(text)
        stated = bare[1] if bare else line.content if line is not None else text
    return [stated] if _is_readable(stated) else []


def _is_readable(stated: str) -> bool:
    value = read_value(stated)
    if value is None or not re.search(r"\w|[∞∅]|\\[a-zA-Z]", clean(stated)):
        return False
    if isinstance(value, Words):
        return 0 < len(value.text.split()) <= MAX_WORDS and _braces_match(stated)
    return _braces_match(stated)


def _braces_match(text: str) -> bool:
    plain = re.sub(r"\\.", "", text)
    return plain.count("{") == plain.count("}")


# ---------------------------------------------------------------------------------------------------- comparison

Leaf = Callable[[Symbolic | Number | Group | Named | Words, Symbolic | Number | Group | Named | Words], bool]


def _ask(answer: Value, gold: Value) -> bool:
    raise Undecided


def compare(answer: str, gold: str, leaf: Leaf = _ask) -> bool:
    """Whether two answers are equal.

    Args:
        answer: what the policy stated.
        gold: what the reference states; where the two differ in form, its form decides.
        leaf: compares two expressions with sympy.

    Raises:
        Undecided: with the default `leaf`, when only sympy can tell.
    """
    said, wanted = read_value(answer), read_value(gold)
    if said is None or wanted is None:
        return False
    said, wanted = _option(said, wanted)
    if said == wanted or _same_text(answer, gold):
        return True
    return _equal(said, wanted, leaf)


def _option(said: Value, wanted: Value) -> tuple[Value, Value]:
    """`(B) 5` is the letter where the other side is a letter, else what stands behind it."""
    if isinstance(said, Named) and said.name.startswith("("):
        said = Symbolic(said.name[1]) if _is_letter(wanted) else said.value
    if isinstance(wanted, Named) and wanted.name.startswith("("):
        wanted = Symbolic(wanted.name[1]) if _is_letter(said) else wanted.value
    return said, wanted


def _is_letter(value: Value) -> bool:
    return isinstance(value, Symbolic) and len(value.latex) == 1 and value.latex.isupper()


def _same_text(a: str, b: str) -> bool:
    a, b = "".join(clean(a).split()), "".join(clean(b).split())
    return bool(a) and (a == b) and not a.isalpha()


def _equal(said: Value, wanted: Value, leaf: Leaf) -> bool:
    if isinstance(said, Named) or isinstance(wanted, Named):
        return _equal_named(said, wanted, leaf)
    if isinstance(said, Number) and isinstance(wanted, Number):
        return numbers_equal(said, wanted)
    if isinstance(said, Group) and isinstance(wanted, Group):
        return _equal_groups(said, wanted, leaf)
    if isinstance(said, Words) or isinstance(wanted, Words):
        return _equal_words(said, wanted, leaf)
    if isinstance(said, Group) or isinstance(wanted, Group):
        return _equal_group_and_expression(said, wanted, leaf)
    if isinstance(said, Symbolic) and isinstance(wanted, Symbolic):
        a, b = "".join(said.latex.split()), "".join(wanted.latex.split())
        if a == b:
            return True
        if len(a) == 1 and len(b) == 1:
            return False
    return leaf(said, wanted)


def _equal_named(said: Value, wanted: Value, leaf: Leaf) -> bool:
    if isinstance(said, Named) and isinstance(wanted, Named):
        if said.name == wanted.name:
            return _equal(said.value, wanted.value, leaf)
        if isinstance(said.value, Number) and isinstance(wanted.value, Number):
            return False
        return leaf(said, wanted)
    named, other = (said, wanted) if isinstance(said, Named) else (wanted, said)
    assert isinstance(named, Named)
    if isinstance(other, Symbolic) and re.search(r"=|<|>|\\(?:le|ge)\b", other.latex):
        return leaf(said, wanted)
    return _equal(named.value, wanted, leaf) if named is said else _equal(said, named.value, leaf)


def _equal_words(said: Value, wanted: Value, leaf: Leaf) -> bool:
    """Words equal words; a word of two or three letters may also be the product another side writes out."""
    if isinstance(said, Words) and isinstance(wanted, Words):
        return bool(said.text) and _squeeze(said.text) == _squeeze(wanted.text)
    words, other = (said, wanted) if isinstance(said, Words) else (wanted, said)
    if not isinstance(words, Words) or not isinstance(other, Symbolic):
        return False
    if not re.fullmatch(r"[a-z]{2,3}", words.text) or other.latex.isalpha():
        return False
    product = Symbolic(words.text)
    return leaf(product, other) if words is said else leaf(other, product)


def _squeeze(text: str) -> str:
    return re.sub(r"[\s.,'\"-]+", "", text)


_ORDERED = {"()", "[]", "(]", "[)", ",", ":"}


def _equal_groups(said: Group, wanted: Group, leaf: Leaf) -> bool:
    kinds = {said.kind, wanted.kind}
    if (len(kinds) == 1 and said.kind in _ORDERED) or kinds == {",", "()"}:
        return len(said.items) == len(wanted.items) and _all(
            partial(_equal, a, b, leaf) for a, b in zip(said.items, wanted.items, strict=True)
        )
    if kinds in ({"{}"}, {"{}", ","}, {"u"}):
        return _equal_sets(said.items, wanted.items, leaf)
    if "u" in kinds and kinds & {"()", "[]", "(]", "[)"}:
        return leaf(said, wanted)
    return False


def _equal_sets(said: tuple[Value, ...], wanted: tuple[Value, ...], leaf: Leaf) -> bool:
    """Each element of one has an equal in the other."""
    forth = [partial(_any, [partial(_equal, a, b, leaf) for b in wanted]) for a in said]
    back = [partial(_any, [partial(_equal, a, b, leaf) for a in said]) for b in wanted]
    return _all([*forth, *back])


def _all(tests: Iterable[Callable[[], bool]]) -> bool:
    """All true; one that is false decides even where another is undecided."""
    undecided = False
    for test in tests:
        try:
            if not test():
                return False
        except Undecided:
            undecided = True
    if undecided:
        raise Undecided
    return True


def _any(tests: Iterable[Callable[[], bool]]) -> bool:
    undecided = False
    for test in tests:
        try:
            if test():
                return True
        except Undecided:
            undecided = True
    if undecided:
        raise Undecided
    return False


def _equal_group_and_expression(said: Value, wanted: Value, leaf: Leaf) -> bool:
    """An interval or union may equal an inequality or a named set; nothing else changes its kind."""
    group, other = (said, wanted) if isinstance(said, Group) else (wanted, said)
    if not isinstance(group, Group) or not isinstance(other, Symbolic):
        return False
    interval = group.kind == "u" or (group.kind in {"()", "[]", "(]", "[)"} and len(group.items) == 2)
    if interval and re.search(r"[<>]|\\(?:le|ge|lt|gt|cup|cap|setminus|mathbb|ne)(?![a-zA-Z])", other.latex):
        return leaf(said, wanted)
    if group.kind in ("{}", "u") and re.search(r"\\(?:setminus|cap|emptyset)(?![a-zA-Z])", other.latex):
        return leaf(said, wanted)
    return False


def numbers_equal(a: Number, b: Number) -> bool:
    """Exactly, or to six digits where one is a decimal; a percentage equals its number and its hundredth."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.percent == b.percent:
        return _agree(a, b)
    if a.percent:
        a, b = b, a
    hundredth = None if b.decimals is None else b.decimals + 2
    return _agree(a, b) or _agree(a, replace(b, value=b.value / 100, decimals=hundredth))


def _agree(a: Number, b: Number) -> bool:
    if a.value == b.value:
        return True
    decimals = [n.decimals for n in (a, b) if n.decimals is not None]
    if not decimals or a.value == 0 or b.value == 0:
        return False
    coarse = min((n for n in (a, b) if n.decimals is not None), key=lambda n: n.decimals or 0)
    exact = b if coarse is a else a
    return decimal_agrees(coarse.value, coarse.decimals or 0, exact.value, terminates=_terminates(exact))


def _terminates(number: Number) -> bool:
    """Its decimals end, so that writing it down needs no rounding."""
    if number.decimals is not None:
        return True
    rest = number.value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def decimal_agrees(written: Fraction, decimals: int, exact: Fraction, terminates: bool) -> bool:
    """A decimal written with `decimals` places stands for `exact`: at least six digits, and they agree.

    Six decimals agree for numbers of 1 and more, six significant digits below 1: 0.0000001 is not 0.0000002. A decimal
    of six or more significant digits may also be the rounding of a number whose decimals do not end (66.6667 of 200/3).
    """
    difference = abs(written - exact)
    if difference <= Fraction(1, 2_000_000) * min(Fraction(1), abs(exact)):
        return True
    size = _exponent(exact)
    if size + 1 + decimals < 6:
        return False
    if difference <= Fraction(10) ** -decimals / 2:
        return True
    return not terminates and difference <= Fraction(10) ** (size - 5) / 2


def _exponent(value: Fraction) -> int:
    """floor(log10|value|)."""
    value = abs(value)
    guess = len(str(value.numerator)) - len(str(value.denominator))
    return guess if Fraction(10) ** guess <= value else guess - 1


# ---------------------------------------------------------------------------------------------------- parent side


async def equal(answer: str, gold: str, seconds: float) -> bool:
    """`compare`, with undecided cases sent to a worker. Raises SkipSample when no worker can be had."""
    try:
        return compare(answer, gold)
    except (Undecided, RecursionError):
        pass
    if not has_math_verify() or max(len(answer), len(gold)) > MAX_SYMBOLIC:
        return False
    return await _verdicts().get(answer, gold, seconds)


@functools.cache
def has_math_verify() -> bool:
    """The `rl` extra is installed. Without it, expressions that are not written alike are unequal."""
    return importlib.util.find_spec("math_verify") is not None


class Verdicts:
    """Symbolic comparisons: one pool for the process, each pair compared once.

    A group's rollouts often state the same answer, so a hostile one costs its time-out once and not eight times.
    """

    def __init__(self, size: int) -> None:
        self.pool = WorkerPool("palingenesis.rl.rewards.math:serve", size)
        self._known: dict[tuple[str, str], Future[Any]] = {}
        self._lock = threading.Lock()

    async def get(self, answer: str, gold: str, seconds: float) -> bool:
        key = (answer, gold)
        with self._lock:
            future = self._known.get(key)
            if future is None:
                if len(self._known) > 8192:
                    self._known.clear()
                future = self._known[key] = self.pool.submit([answer, gold], seconds)
        try:
            return bool(await asyncio.wrap_future(_shielded(future)))
        except (TaskTimeoutError, TaskCrashedError):
            return False
        except (WorkersUnavailableError, TaskFailedError) as error:
            with self._lock:
                self._known.pop(key, None)
            raise SkipSample(f"the math workers are unavailable: {error}") from error


def _shielded(future: Future[Any]) -> Future[Any]:
    """A copy of `future`, so that cancelling one waiter does not cancel the comparison for the others."""
    copy: Future[Any] = Future()

    def done(source: Future[Any]) -> None:
        if not copy.set_running_or_notify_cancel():
            return
        error = source.exception()
        if error is not None:
            copy.set_exception(error)
        else:
            copy.set_result(source.result())

    future.add_done_callback(done)
    return copy


_shared: dict[int, Verdicts] = {}  # by process id: a fork must not speak to its parent's workers
_shared_lock = threading.Lock()
_users: WeakSet[Math] = WeakSet()


def _verdicts() -> Verdicts:
    with _shared_lock:
        pid = os.getpid()
        if pid not in _shared:
            _shared[pid] = Verdicts(min(4, os.cpu_count() or 1))
        return _shared[pid]


def close_workers() -> None:
    """End this process's math workers; the next symbolic comparison starts new ones."""
    with _shared_lock:
        verdicts = _shared.pop(os.getpid(), None)
    if verdicts is not None:
        verdicts.pool.close()


# ---------------------------------------------------------------------------------------------------- worker side


def serve(init: Any) -> Callable[[list[str]], bool]:
    """The worker's task: import sympy once, then answer `[answer, gold]` with whether they are equal."""
    from palingenesis.rl.rewards import symbolic
    from palingenesis.rl.rewards.worker_main import limit_memory

    limit_memory(WORKER_MEMORY_GIB)
    symbolic.warm_up()

    def handle(pair: list[str]) -> bool:
        try:
            return compare(pair[0], pair[1], symbolic.equal)
        except (Exception, RecursionError, MemoryError):  # noqa: BLE001 - the text's fault: sympy raises anything at all
            return False

    return handle
