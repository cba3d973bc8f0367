"""Compare two expressions with sympy, by way of math-verify. Runs in a worker's main thread, without signals.

math-verify's own time-outs use `signal.alarm`, which interrupts no C code (a tower of powers is one long
multiplication); they are switched off here, and the parent kills the process instead.
"""

from __future__ import annotations

import functools
import logging
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig

from palingenesis.rl.rewards.math import decimal_agrees
from palingenesis.rl.rewards.mathtext import Number, Value, Words

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

DIGITS = 30  # decimals to which two constants are evaluated
_CONFIG = math_verify.LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last", equations=False
    ),
)


def equal(answer: Value, gold: Value) -> bool:
    """Whether two values are the same expression; False where either does not parse."""
    said, wanted = _parse(_latex(answer)), _parse(_latex(gold))
    if said is None or wanted is None:
        return False
    for number, value in ((answer, wanted), (gold, said)):
        if isinstance(number, Number) and _is_constant(value):
            return _number_agrees(number, value)
    if _is_constant(said) and _is_constant(wanted):
        return _constants_equal(said, wanted)
    return bool(math_verify.verify([wanted], [said], allow_set_relation_comp=True, timeout_seconds=None))


def warm_up() -> None:
    """Pay for sympy's lazy imports and the parser's tables before the first deadline runs."""
    from palingenesis.rl.rewards.mathtext import Symbolic

    equal(Symbolic(r"x^2+2x+1"), Symbolic(r"(x+1)^2"))
    equal(Symbolic(r"2\pi"), Symbolic(r"\frac{\sqrt{2}}{3}"))


def _latex(value: Value) -> str:
    return value.text if isinstance(value, Words) else value.latex


@functools.lru_cache(maxsize=512)
def _parse(latex: str) -> Any:
    text = f"\\boxed{{{latex}}}"
    found = math_verify.parse(text, [_CONFIG], "no_fallback", "first_match", parsing_timeout=None)
    return found[0] if found else None


def _is_constant(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not value.free_symbols and value.is_number is not False


def _number_agrees(number: Number, value: Any) -> bool:
    """A written number against a constant such as `2\\pi`: to six digits, a percentage as its hundredth too."""
    exact = sympy.N(value.doit(), DIGITS)
    if not exact.is_real or not exact.is_finite:
        return False
    other = Fraction(str(sympy.Rational(str(exact))))
    targets = [(number.value, number.decimals)]
    if number.percent:
        targets.append((number.value / 100, None if number.decimals is None else number.decimals + 2))
    return any(_one_agrees(written, decimals, other) for written, decimals in targets)


def _one_agrees(written: Fraction, decimals: int | None, exact: Fraction) -> bool:
    if decimals is None:
        return abs(written - exact) <= abs(exact) / 10**20 if exact else written == 0
    return bool(exact) and decimal_agrees(written, decimals, exact, terminates=False)


def _constants_equal(said: Any, wanted: Any) -> bool:
    """Relative agreement to 20 digits: an absolute bound would call `e^{-50}` and `e^{-60}` equal."""
    a, b = sympy.N(said.doit(), DIGITS), sympy.N(wanted.doit(), DIGITS)
    if a == b:
        return True
    if not (a.is_finite and b.is_finite):
        return False
    scale = max(abs(a), abs(b))
    digits = 5e-7 if said.has(sympy.Float) or wanted.has(sympy.Float) else 1e-20
    return bool(abs(a - b) <= digits * min(scale, 1) if digits > 1e-10 else abs(a - b) <= digits * scale)
