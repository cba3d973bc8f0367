"""Rewards that compare text: exact, choice, boxed_choice, qa_match, regex.

Each is a class: its keyword arguments are the config's `args`, an instance is the reward function. `columns` names the
row columns it reads beyond its named parameters, and `check_reference(row)` says why a row's reference is unreadable
(None when it is fine), so that such rows are found at load.

Invariant: a reference that normalizes to nothing is unreadable; nothing a policy writes can match it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import regex

from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import shown
from palingenesis.rl.rewards.boxes import last_answer_line, last_box, last_match
from palingenesis.rl.types import Row


def references(value: Any) -> list[str]:
    """A reference column as the texts of which any may match: a text or number, a list of them, or the `text` or
    `aliases` and `value` of question-answering data sets. Empty when there is none."""
    if value is None or isinstance(value, bool):
        return [] if value is None else [str(value)]
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        parts = [value[key] for key in ("text", "value", "aliases") if value.get(key) is not None]
        return [text for part in parts for text in references(part)]
    if isinstance(value, Iterable):
        return [text for part in value for text in references(part)]
    return [str(value)]


class _Reference:
    """A reward that reads one column."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.columns = (field,)

    def readable(self, text: str) -> bool:
        return bool(text.strip())

    def golds(self, row: Mapping[str, Any]) -> list[str]:
        return [text for text in references(row[self.field]) if self.readable(text)]

    def check_reference(self, row: Row) -> str | None:
        value = row.columns[self.field] if self.field in row.columns else row.prompt_column[1]
        return None if self.golds({self.field: value}) else f"column {self.field!r} holds {shown(value, 60)}"


class Exact(_Reference):
    """1.0 when the stripped completion is the reference, character by character.

    Args:
        field: column of the reference: a text or number, or a list of which any may match.
    """

    def __init__(self, field: str = "answer") -> None:
        super().__init__(field)

    def __call__(self, completion: str, **row: Any) -> float:
        return float(completion.strip() in {gold.strip() for gold in self.golds(row)})


class Choice(_Reference):
    """1.0 when the last stated option letter is the reference's.

    "The answer is C", "Answer: C", "(C)", "**C**" and `\\boxed{C}` state a letter; without any, the last lone capital
    that is not the article "A" or the pronoun "I" does.

    Args:
        field: column of the right letter: "C", "(C)", "C." or "C) Paris".
    """

    def __init__(self, field: str = "answer") -> None:
        super().__init__(field)

    def readable(self, text: str) -> bool:
        return option_letter(text) is not None

    def __call__(self, completion: str, **row: Any) -> float:
        stated = stated_letter(completion)
        return float(stated is not None and stated in {option_letter(gold) for gold in self.golds(row)})


class BoxedChoice(Choice):
    """1.0 when the option letter inside the last closed `\\boxed{}` is the reference's.

    Args:
        field: column of the right letter.
    """

    def __call__(self, completion: str, **row: Any) -> float:
        box = last_box(completion).content
        letter = option_letter(box) if box is not None else None
        return float(letter is not None and letter in {option_letter(gold) for gold in self.golds(row)})


class QAMatch(_Reference):
    """Exact match or token F1 after SQuAD's normalization (case, punctuation, articles, white space), in [0, 1].

    Reads the text after the last "Answer:" or in the last box, whichever comes later, else the whole completion.

    Args:
        field: column of one or several references; the best counts.
        metric: `em` or `f1`.
    """

    def __init__(self, field: str = "answer", metric: str = "em") -> None:
        super().__init__(field)
        scorers: dict[str, Callable[[str, str], float]] = {"em": _exact_match, "f1": _token_f1}
        if metric not in scorers:
            raise ConfigError(f"`metric` is {metric!r}; use em or f1.")
        self._score = scorers[metric]

    def readable(self, text: str) -> bool:
        return bool(_squad(text))

    def __call__(self, completion: str, **row: Any) -> float:
        answer = _squad(_short_answer(completion))
        return max((self._score(answer, _squad(gold)) for gold in self.golds(row)), default=0.0)


class Regex:
    """1.0 when `pattern` is found in the completion; with `field`, when the last match's first group is the column.

    Args:
        pattern: a pattern of the package `regex`, e.g. `(?m)^Answer: (\\d+)$`.
        field: column to compare the first group with, both stripped; empty: finding is enough.
        timeout: seconds one completion may take. A completion that takes longer scores 0.
    """

    def __init__(self, pattern: str, field: str = "", timeout: float = 1.0) -> None:
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(f"`pattern` {pattern!r} is not a regular expression: {error}.") from error
        if field and not self._pattern.groups:
            raise ConfigError(f"`field` compares the first group of `pattern`, and {pattern!r} has none.")
        self.field = field
        self.columns = (field,) if field else ()
        self._timeout = timeout

    def check_reference(self, row: Row) -> str | None:
        if not self.field:
            return None
        return _Reference(self.field).check_reference(row)

    def __call__(self, completion: str, **row: Any) -> float:
        try:
            if not self.field:
                return float(self._pattern.search(completion, timeout=self._timeout, concurrent=True) is not None)
            found = None
            for match in self._pattern.finditer(completion, timeout=self._timeout, concurrent=True):
                found = match.group(1)
        except TimeoutError:
            return 0.0
        golds = {text.strip() for text in references(row[self.field])}
        return float(found is not None and found.strip() in golds)


_LETTER = re.compile(r"[(\[{*\s]*(?P<letter>[A-Za-z])(?:\s*[)\]}.:,*]|\s*$)")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|mathit|mbox|rm|bf)\s*\{([^{}]*)\}")
_STATED = re.compile(
    r"(?i:answer|choice|option|letter)[\"'*_]{0,4}\s{0,4}(?::|=|(?i:is|was|would be|should be|must be)\b)[:\s]{0,8}"
    r"(?:(?i:option|choice|letter)\b\s{0,4})?[\"'(\[*_$\s]{0,8}(?P<a>[A-Z])(?![A-Za-z'’])"
    r"|\b(?i:option|choice)\s+[(*]*(?P<e>[A-Z])(?![A-Za-z'’])"
    r"|\((?P<b>[A-Z])\)"
    r"|\*\*\(?(?P<c>[A-Z])(?:\*\*|[).:])"
    r"|\\boxed\s*\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?\s*\(?(?P<d>[A-Z])(?![A-Za-z])"
)
_LONE = re.compile(r"(?<![A-Za-z0-9'’])(?P<letter>[A-Z])(?![A-Za-z0-9'’])")


def option_letter(text: str) -> str | None:
    """The capital letter an option stands for: `C`, `(c)`, `C. Paris`, `\\text{C}`; None for anything else."""
    plain = _TEXT_COMMAND.sub(r"\1", text).replace("$", "")
    found = _LETTER.match(plain)
    return found["letter"].upper() if found else None


def stated_letter(text: str) -> str | None:
    """The last option letter a completion states; see Choice."""
    stated = last_match(_STATED, text)
    if stated is not None:
        return next(letter for letter in stated.groups() if letter)
    lone = [m for m in _LONE.finditer(text) if not _is_word(m, text)]
    return lone[-1]["letter"] if lone else None


def _is_word(match: re.Match[str], text: str) -> bool:
    """The letter is the article "A" or the pronoun "I": a lower-case word follows it."""
    return match["letter"] in "AI" and re.match(r"\s+[a-z]", text[match.end() : match.end() + 20]) is not None


def _short_answer(completion: str) -> str:
    box, line = last_box(completion), last_answer_line(completion)
    if box.content is not None and (line is None or box.start > line.start):
        return _TEXT_COMMAND.sub(r"\1", box.content)
    if line is not None:
        return line.content
    return completion


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _squad(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _exact_match(answer: str, gold: str) -> float:
    return float(answer == gold)


def _token_f1(answer: str, gold: str) -> float:
    said, wanted = answer.split(), gold.split()
    same = sum((Counter(said) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


__all__: Sequence[str] = ["BoxedChoice", "Choice", "Exact", "QAMatch", "Regex", "option_letter", "references"]
