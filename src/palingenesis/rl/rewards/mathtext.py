"""Read a mathematical answer: LaTeX or plain text -> a `Value` with its kind. Pure, bounded, standard library only.

    "\\\\$1{,}234.50"  -> Number(2469/2, decimals=2, unit="dollar")      "(1, 2]"      -> Group("(]", 1, 2)
    "2\\\\frac{1}{2}"   -> Number(5/2)                                   "x = 5"       -> Named("x", Number(5))
    "12\\\\%"           -> Number(12, percent=True)                      "\\\\text{Monday}" -> Words("monday")
    "5 \\\\text{ cm}"   -> Number(5, unit="cm")                          "2\\\\pi"       -> Symbolic("2\\\\pi")

Whatever is not plainly one of the first kinds is `Symbolic` and needs sympy to compare. Nothing here evaluates anything
of unbounded size: texts are cut off at MAX_LENGTH, numbers at MAX_DIGITS, nesting at MAX_DEPTH.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 4000
MAX_DIGITS = 400
MAX_DEPTH = 12
MAX_ITEMS = 100
OPEN, CLOSE = "\ue000", "\ue001"  # around what stood in \text{...}


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number. `decimals` counts written decimals, None for an integer or fraction. `latex` is for sympy."""

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    unit: str = ""
    latex: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is compared as text, already folded."""

    text: str


@dataclass(frozen=True, slots=True)
class Symbolic:
    """An expression only sympy can compare."""

    latex: str


@dataclass(frozen=True, slots=True)
class Named:
    """`x = value`; `latex` is the whole equation."""

    name: str
    value: Value
    latex: str


@dataclass(frozen=True, slots=True)
class Group:
    """Several values. `kind`: `()`, `[]`, `(]`, `[)` (tuple or interval), `{}` (set), `,` (bare list), `:` (ratio),
    `u` (union of sets)."""

    kind: str
    items: tuple[Value, ...]
    latex: str


Value = Number | Words | Symbolic | Named | Group


def read_value(text: str) -> Value | None:
    """The value `text` states, or None when it states none (empty, or too long to be an answer)."""
    if len(text) > MAX_LENGTH:
        return None
    plain = clean(text)
    return _read(plain, 0) if plain else None


# ---------------------------------------------------------------------------------------------------- cleaning

_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5"}
_FRACTIONS |= {"⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅐": "1/7"}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/",
    "∙": r"\cdot ", "⁄": "/", "∕": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "√": r"\sqrt ",
    "º": "°", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "±": r"\pm ", "％": "%", "“": '"', "”": '"', "’": "'",
    "‘": "'", "＄": "$", "∖": r"\setminus ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "→": r"\to ",
}  # fmt: skip
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|emph)\s*\{([^{}]*)\}")
_OLD_TEXT = re.compile(r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}")
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|boldsymbol|bm)(?![a-zA-Z])", ""),
        (r"\\!", ""),
        (r"\\[,;:>](?![a-zA-Z])|\\ |~|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)?space(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\{\s*,\s*\}", ","),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°"),
        (r"\\(?:lbrace|\{)", "⟨"),  # a set's braces, kept apart from the grouping ones
        (r"\\(?:rbrace|\})", "⟩"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\(?:leq|leqslant|le)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])", r"\\ne "),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\\%", "%"),
        (r"\\(?:\\|newline)\s*$", ""),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\\pi)\s*", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi"),
        (r"(?<![\\a-zA-Z])(?i:infinity|infty)(?![a-zA-Z])", r"\\infty"),
        (r"(?<=[0-9} ])\s*(?i:per\s?cent(?:age)?|pct)(?![a-zA-Z])", "%"),
    )
)
_JOINER = re.compile(rf"\s*{OPEN}\s*,?\s*(and|or)\s*{CLOSE}\s*")


def clean(text: str) -> str:
    """Fold the many ways to write the same thing: Unicode, spacing, sizes, delimiters, `\\text{}` (kept as marks)."""
    text = " ".join(text.split())
    for sign, fraction in _FRACTIONS.items():
        if sign in text:
            text = text.replace(sign, f" {fraction}")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉]+", lambda m: "_{" + m.group().translate(_SUBSCRIPTS) + "}", text)
    text = _SYMBOL.sub(lambda m: _SYMBOLS[m.group()], text)
    text = unicodedata.normalize("NFKC", text)
    text = _unbox(_strip_markdown(text.strip()))
    text = _strip_math_delimiters(text)
    for _ in range(4):  # \text inside \text
        text, changed = _TEXT.subn(rf"{OPEN}\1{CLOSE}", text)
        if not changed:
            break
    text = _OLD_TEXT.sub(rf"{OPEN}\1{CLOSE}", text)
    text = _JOINER.sub(r" \1 ", text)
    for pattern, new in _REPLACEMENTS:
        text = pattern.sub(new, text)
    return _trim(" ".join(text.split()))


def _strip_markdown(text: str) -> str:
    text = text.strip("`")
    while len(text) > 4 and text[:2] == text[-2:] and text[:2] in ("**", "__"):
        text = text[2:-2].strip()
    return text


def _unbox(text: str) -> str:
    return re.sub(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r"\1", text) if "box" in text else text


def _strip_math_delimiters(text: str) -> str:
    text = re.sub(r"\\[()\[\]]", " ", text).replace("$$", "")
    text = text.replace(r"\$", "¤")
    if text.count("$") % 2:  # an odd one is a currency sign, not a delimiter
        text = re.sub(r"\$(?=\s*-?\s*[0-9.])", "¤", text, count=1)
    return text.replace("$", "").replace("¤", "$")


def _trim(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = re.sub(r"^(?:=|≈|~|\\approx(?![a-zA-Z]))\s*", "", text.strip().rstrip(".,;:").strip())
        text = text.removesuffix("\\").strip() if not text.endswith("\\\\") else text[:-2]
        if text[:1] == "{" and _closes_at_end(text):
            inner = text[1:-1]
            text = f"⟨{inner}⟩" if _split(inner, ",")[1:] else inner
    return text


# ---------------------------------------------------------------------------------------------------- reading

_OPENERS, _CLOSERS = "([{⟨", ")]}⟩"


def _read(text: str, depth: int) -> Value | None:
    text = _trim(text)
    if not text:
        return None
    if depth > MAX_DEPTH or not _balanced(text):
        return Words(fold(text))
    return (
        _read_number(text)
        or _read_group(text, depth)
        or _read_ratio(text)
        or _read_named(text, depth)
        or _read_leaf(text, depth)
    )


def _read_group(text: str, depth: int) -> Value | None:
    """Brackets, bare lists, alternatives, unions."""
    text = re.sub(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*", "", text)
    if r"\begin" in text:
        return None
    union = _split(text, r"\cup")
    if len(union) > 1:
        return _group("u", union, text, depth)
    if text[0] in "([⟨" and text[-1] in ")]⟩" and _closes_at_end(text):
        inner = text[1:-1].strip()
        parts = _split_list(inner)
        kind = "{}" if text[0] == "⟨" else text[0] + text[-1]
        if len(parts) == 1 and kind == "()":
            return _read(inner, depth + 1)
        if not inner:
            return Symbolic(r"\emptyset") if kind == "{}" else Words(fold(text))
        if re.search(r"\\mid|\||(?<![a-z]):", inner) and kind == "{}":
            return Symbolic(to_latex(text))  # set-builder notation
        return _group(kind, parts, text, depth)
    for joiner, kind in ((" or ", "{}"), (" and ", ",")):
        pieces = _split(text, joiner)
        if len(pieces) > 1:  # outside brackets: every level of reading makes the text shorter
            parts = [part for piece in pieces for part in _split_list(piece) if part.strip()]
            group = _group(kind, parts, text, depth)
            if not any(_wordy(item) for item in group.items):
                return group
    parts = _split_list(text)
    if len(parts) > 1:
        return _group(",", parts, text, depth)
    return _read_plus_minus(text, depth)


def _group(kind: str, parts: list[str], text: str, depth: int) -> Group:
    if len(parts) > MAX_ITEMS:
        return Group(kind, (Words(fold(text)),), to_latex(text))
    items = tuple(_read(part, depth + 1) or Words("") for part in parts)
    return Group(kind, items, to_latex(text))


def _wordy(value: Value) -> bool:
    return isinstance(value, Words)


def _read_plus_minus(text: str, depth: int) -> Value | None:
    if text.count(r"\pm") != 1:
        return None
    sides = [text.replace(r"\pm", sign) for sign in ("+", "-")]
    return _group("{}", [side.strip().removeprefix("+") for side in sides], text, depth)


_RATIO = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:\s*:\s*[0-9]+(?:\.[0-9]+)?)+")


def _read_ratio(text: str) -> Value | None:
    if not _RATIO.fullmatch(text):
        return None
    items = tuple(_read_number(part.strip()) or Words(part) for part in text.split(":"))
    return Group(":", items, text)


_NAME = re.compile(
    r"\\?[a-zA-Z]{1,12}'?(?:\s*_\s*\{?[a-zA-Z0-9]+\}?)?"  # x, \alpha, x_{1}
    r"|[a-zA-Z]\s*\(\s*-?[a-zA-Z0-9]+\s*\)"  # f(x)
    r"|[a-zA-Z]+(?: [a-zA-Z]+){1,3}"  # total cost
)
_EQUALS = re.compile(r"(?<![\\<>!:])=|\\approx(?![a-zA-Z])")


def _read_named(text: str, depth: int) -> Value | None:
    """`x = 5`, and `2 + 2 = 4` as its last side."""
    sides = _split_equation(text)
    if len(sides) < 2 or not all(side.strip() for side in sides):
        return None
    first, last = _unmark(sides[0]).strip(), sides[-1]
    value = _read(last, depth + 1)
    if value is None:
        return None
    if _NAME.fullmatch(first):
        return Named("".join(first.split()).replace("{", "").replace("}", ""), value, to_latex(text))
    if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", first)):
        return value
    return None


def _split_equation(text: str) -> list[str]:
    if r"\begin" in text or re.search(r"\\(?:le|ge|ne|lt|gt)(?![a-zA-Z])|[<>]", text):
        return [text]
    return _EQUALS.split(text)


_KNOWN = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "lg", "exp", "sqrt", "max", "min", "gcd", "lcm", "mod",
    "det", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "lim", "arg", "tr", "rank", "frac", "binom",
}  # fmt: skip
_REALS = {"all real numbers", "all reals", "the set of all real numbers", "real numbers", "all real values"}
_OPERATOR = re.compile(r"[0-9+*/^=<>\\_|!]|(?<![a-zA-Z])-|-(?![a-zA-Z])")


def _read_leaf(text: str, depth: int) -> Value:
    folded = fold(text)
    if folded in _REALS:
        return Symbolic(r"\mathbb{R}")
    bare = _unmark(text).strip()
    if re.fullmatch(r"\(?\s*[A-Za-z]\s*\)?", bare):
        return Symbolic(bare.strip("() "))
    option = re.fullmatch(r"\(\s*([A-J])\s*\)\s*(.+)", bare)
    if option and depth == 0:
        value = _read(option[2], depth + 1)
        if value is not None:
            return Named(f"({option[1]})", value, to_latex(text))
    if OPEN in text and re.search(rf"{OPEN}[^{CLOSE}]*[a-zA-Z]{{2,}}", text):
        return Words(folded)
    runs = re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", bare)
    runs = [run for run in runs if run not in _KNOWN and run.strip("xyz")]
    longest = max(map(len, runs), default=0)
    if longest >= 4 or (longest >= 2 and not _OPERATOR.search(bare)):
        return Words(folded)
    return Symbolic(to_latex(bare))


def to_latex(text: str) -> str:
    """Text cleaned by `clean` in the spelling sympy's LaTeX parser reads."""
    text = _unmark(text).replace("⟨", r"\{").replace("⟩", r"\}").replace("°", r"^\circ").replace("%", r"\%")
    return text.strip()


def fold(text: str) -> str:
    """Words for comparison: case, marks, quotes, full stops and spacing do not count. One letter keeps its case."""
    text = _unmark(text).replace("\\", " ").strip("\"'`.,;:!? ")
    text = " ".join(text.split())
    return text if len(text) == 1 else text.casefold()


def _unmark(text: str) -> str:
    return text.replace(OPEN, " ").replace(CLOSE, " ") if OPEN in text else text


# ---------------------------------------------------------------------------------------------------- numbers

_D = r"(?:[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_S = r"[+-]?\s*"
_FRAC = rf"\\frac\s*\{{\s*({_S}(?:{_D}))\s*\}}\s*\{{\s*({_S}(?:{_D}))\s*\}}"
_MONEY = r"[$€£¥₹]"
_BODIES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("mixed", rf"([0-9]+)\s*{_FRAC}"),
        ("mixed", r"([0-9]+)(?:\s+|\s*-\s*|\s+and\s+)([0-9]+)\s*/\s*([0-9]+)"),
        ("fraction", _FRAC),
        ("scientific", rf"({_D})\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{{?\s*({_S}[0-9]+)\s*\}}?"),
        ("scientific", rf"({_D})[eE]([+-]?[0-9]+)(?![0-9a-zA-Z])"),
        ("power", r"([0-9]+)\s*(?:\^|\*\*)\s*\{?\s*([+-]?[0-9]+)\s*\}?(?!\s*[\^!])"),
        ("fraction", rf"({_D})\s*/\s*([+-]?(?:{_D}))"),
        ("plain", rf"({_D})"),
    )
)
_HEAD = re.compile(rf"([+-]?)\s*({_MONEY}?)\s*([+-]?)\s*")
_MONEY_NAMES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}


def _read_number(text: str) -> Number | None:
    """A number with its unit, or None when `text` is anything else."""
    if not any(c.isdigit() for c in text[:40]) or sum(c.isdigit() for c in text) > MAX_DIGITS:
        return None
    head = _HEAD.match(text)
    if head is None or (head[1] and head[3]):
        return None
    negative = "-" in (head[1], head[3])
    for kind, pattern in _BODIES:
        body = pattern.match(text, head.end())
        if body is None:
            continue
        size = _size(kind, body.groups())
        rest, scale = _take_scale(text[body.end() :])
        unit = _read_unit(rest)
        if size is None or unit is None:
            continue
        value, decimals = size[0] * scale, size[1]
        if decimals is not None and scale > 1:
            decimals -= len(str(scale)) - 1
        percent = unit == "%" or unit.startswith("% ")
        name = _MONEY_NAMES.get(head[2], "") or ("" if percent else unit)
        latex = _exact_latex(-value if negative else value)
        return Number(-value if negative else value, decimals, percent, name, latex)
    return None


def _size(kind: str, groups: tuple[str | None, ...]) -> tuple[Fraction, int | None] | None:
    """The magnitude and the number of written decimals (None: exact)."""
    parts = [_decimal(group) for group in groups if group is not None]
    if kind == "plain":
        return parts[0]
    values = [value for value, _ in parts]
    if kind == "mixed":
        whole, top, bottom = values
        return (whole + top / bottom, None) if bottom > 0 and top >= 0 else None
    if kind == "fraction":
        top, bottom = values
        return (top / bottom, None) if bottom else None
    base, exponent = values
    if abs(exponent) > MAX_DIGITS:
        return None
    if kind == "power":
        small = len(str(base.numerator)) * abs(exponent) <= MAX_DIGITS and (base or exponent > 0)
        return (base ** int(exponent), None) if small else None
    decimals = parts[0][1]
    scaled = None if decimals is None else decimals - int(exponent)
    return base * Fraction(10) ** int(exponent), scaled


def _decimal(text: str) -> tuple[Fraction, int | None]:
    text = text.replace(",", "").replace(" ", "")
    whole, point, rest = text.partition(".")
    value = Fraction(f"{whole or '0'}.{rest}" if rest else (whole if whole not in ("", "+", "-") else whole + "0"))
    return value, len(rest) if point and rest else None


def _exact_latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return ("-" if value < 0 else "") + rf"\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


# ---------------------------------------------------------------------------------------------------- units

_LETTER_UNITS = set("mgslLhKNJWVAFCT")
_NOT_UNITS = {
    "or", "and", "mod", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "if", "when", "where", "is", "are",
    "choose", "factorial", "for", "with", "not", "but", "plus", "minus", "times", "divided", "over", "than", "infinity",
    "more", "less", "fewer", "half", "halves", "third", "thirds", "fourth", "fourths", "fifth", "fifths", "sixth",
    "sixths", "eighth", "eighths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "root",
    "power", "x", "y", "z", "e", "i",
}  # fmt: skip
_SYNONYMS = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km",
    "kilometre": "km", "meter": "m", "metre": "m", "gram": "g", "kilogram": "kg", "milligram": "mg", "liter": "l",
    "litre": "l", "milliliter": "ml", "millilitre": "ml", "second": "s", "sec": "s", "minute": "min", "hour": "h",
    "hr": "h", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "pound": "lb",
    "ounce": "oz", "usd": "dollar", "buck": "dollar", "$": "dollar", "°": "degree", "deg": "degree", "dollar": "dollar",
    "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "eur": "euro", "gbp": "pound", "percent": "%",
}  # fmt: skip
_UNIT = re.compile(
    r"(?:[A-Za-z°µ$][A-Za-z°µ$.]*|%)"  # each repetition starts with a separator, so nothing can match in two ways
    r"(?:(?:[\s/·*-]|\\cdot)+[A-Za-z°µ][A-Za-z°µ.]*|\s?\^\s?\{?\s?-?[0-9]\s?\}?)*"
)
_VARIABLES = re.compile(r"[a-zA-Z](?:\s*\^\s*\{?[0-9]\}?)?(?:\s+[a-zA-Z](?:\s*\^\s*\{?[0-9]\}?)?)*")  # "3 x y^2"
_BASE = re.compile(r"_\s*\{?\s*([0-9]{1,2})\s*\}?")


_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALE = re.compile(rf"[\s{OPEN}-]*({'|'.join(_SCALES)})(?![a-zA-Z])", re.IGNORECASE)


def _take_scale(rest: str) -> tuple[str, int]:
    """The rest without a word such as "million", and what it multiplies by."""
    word = _SCALE.match(rest)
    if word is None:
        return rest, 1
    return (OPEN if OPEN in word.group() else "") + rest[word.end() :], _SCALES[word[1].lower()]


def _read_unit(rest: str) -> str | None:
    """The canonical unit behind a number: "" for none, None when the rest is not a unit at all."""
    if not rest.strip():
        return ""
    base = _BASE.fullmatch(rest.strip())
    if base:
        return f"base {int(base[1])}"
    marked = OPEN in rest
    plain = _unmark(rest)
    spaced = plain[:1].isspace() or plain[:1] in "°%$-"
    plain = " ".join(plain.split()).strip("-. ")
    if not plain or len(plain) > 60 or not _UNIT.fullmatch(plain):
        return None
    names = re.findall(r"[A-Za-zµ]+", plain)
    if len(names) > 5 or any(name.lower() in _NOT_UNITS for name in names) or names[:1] in (["squared"], ["cubed"]):
        return None
    if len(plain) == 1 and plain.isalpha() and not marked and not (spaced and plain in _LETTER_UNITS):
        return None
    if not marked and not spaced and plain.isalpha() and _canonical(plain) not in _SYNONYMS.values():
        return None
    if not marked and plain[:1] not in _LETTER_UNITS and _VARIABLES.fullmatch(plain):
        return None
    return _canonical(plain)


def _canonical(unit: str) -> str:
    unit = re.sub(r"\s*\^\s*", "^", re.sub(r"[{}.]", "", unit.replace(r"\cdot", "*")))
    unit = re.sub(r"\b(?:square|sq)\s+([A-Za-z]+)", r"\1^2", unit)
    unit = re.sub(r"\b(?:cubic|cu)\s+([A-Za-z]+)", r"\1^3", unit)
    unit = re.sub(r"\s+squared\b", "^2", re.sub(r"\s+cubed\b", "^3", unit))
    unit = re.sub(r"\s*(?:\bper\b|/)\s*", "/", unit)
    names = re.split(r"([\s/^*-]+)", unit)
    return "".join(" " if name.isspace() else _singular(name) for name in names)


def _singular(name: str) -> str:
    if len(name) == 1:
        return "l" if name == "L" else _SYNONYMS.get(name, name)
    name = name.lower()
    if name in _SYNONYMS:
        return _SYNONYMS[name]
    stem = name[:-1] if len(name) > 2 and name.endswith("s") and not name.endswith("ss") else name
    return _SYNONYMS.get(stem, stem)


# ---------------------------------------------------------------------------------------------------- brackets


def _balanced(text: str) -> bool:
    depth = 0
    for char in text:
        if char in _OPENERS:
            depth += 1
        elif char in _CLOSERS:
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def _closes_at_end(text: str) -> bool:
    """The bracket that opens `text` is closed by its last character."""
    depth = 0
    for place, char in enumerate(text):
        if char in _OPENERS:
            depth += 1
        elif char in _CLOSERS:
            depth -= 1
            if depth <= 0:
                return depth == 0 and place == len(text) - 1
    return False


def _split(text: str, separator: str) -> list[str]:
    """Split outside brackets."""
    if separator not in text:
        return [text]
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        char = text[place]
        if char in _OPENERS:
            depth += 1
        elif char in _CLOSERS:
            depth -= 1
        elif depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            place += len(separator)
            start = place
            continue
        place += 1
    return [*parts, text[start:]]


_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


def _split_list(text: str) -> list[str]:
    """Split at commas and semicolons. "1,000, 2,000" holds thousands: its separators are followed by a space."""
    if re.search(r"[,;]\s", text):
        text = _THOUSANDS.sub("", text)
    parts = [part for piece in _split(text, ";") for part in _split(piece, ",")]
    return parts if all(part.strip() for part in parts) else [text]
