"""Where a completion states its answer: the last closed box, the last "Answer:" or `####` line. Pure, linear time."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Counted repetitions: with `*` three runs in a row would make a page of blanks after "answer" take minutes.
_MARK = re.compile(r"####|\b(?i:answer)\b[ \t]{0,3}(?:\*\*|__)?[ \t]{0,3}(?i:is)?[ \t]{0,3}[:：]")


@dataclass(frozen=True, slots=True)
class Box:
    """The last closed box of a text, and where text that a cut-off box swallowed begins.

    Attributes:
        content: what stands between its braces; None without a closed box.
        start: where it begins; -1 without one.
        cut_at: where a box begins that the text's end cut off; the text's length when none was.
    """

    content: str | None
    start: int
    cut_at: int


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """The text after the last "Answer:" or `####`, to the end of its line (or the next line that has any)."""

    content: str
    start: int


def last_box(text: str) -> Box:
    """Find the box whose closing brace comes last; of nested ones that is the outermost."""
    content, start = None, -1
    open_at: list[tuple[int, int]] = []  # (where the box begins or -1 for a plain brace, where its content begins)
    if "\\boxed" in text or "\\fbox" in text:
        for token in _TOKEN.finditer(text):
            mark = token.group()
            if mark == "{":
                open_at.append((-1, token.end()))
            elif mark == "}":
                if open_at:
                    begin, inside = open_at.pop()
                    if begin >= 0:
                        content, start = text[inside : token.start()], begin
            elif mark.endswith("{") and len(mark) > 2:
                open_at.append((token.start(), token.end()))
    cut = next((begin for begin, _ in open_at if begin >= 0), len(text))
    return Box(content, start, cut)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of `pattern.finditer(text)`."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_answer_line(text: str) -> AnswerLine | None:
    """Find the last "Answer:" (also "answer is:", in bold) or `####`; None when there is neither."""
    mark = last_match(_MARK, text)
    if mark is None:
        return None
    line = next((line for line in text[mark.end() :].splitlines() if line.strip(" \t*_#")), "")
    return AnswerLine(line.lstrip(" \t*_").strip(), mark.start())
