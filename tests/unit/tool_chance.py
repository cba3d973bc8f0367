"""Random conversations of a family's policy, its tools and its users."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from palingenesis.rl.types import Message, ToolCall
from tests.unit.tool_families import Family, Model, Turn

WORDS = ["the cat", " ", "\n", "7", "é", "日本", "{}", '{"a": 1}', "}\n", "  x", "<b>", "|", "\\n", "😀", "don't"]
MARKS = ["</tool_response>", "<tool_response>", "</tool_call>", "<think>", "</think>", "\n\n", "<|im_end|>\n", "\u200b"]


def strings(family: Family) -> list[str]:
    """Ordinary pieces, control tokens, their halves, and marks that templates write."""
    control = [*family.special, *family.plain]
    halves = [half for string in control for half in (string[: len(string) // 2], string[len(string) // 2 :])]
    return [*WORDS * 3, *control, *halves, *MARKS]


class Chance(random.Random):
    """Draws the parts of a conversation."""

    def said(self, words: Sequence[str], most: int) -> str:
        return "".join(self.choices(words, k=self.randint(0, most)))

    def arguments(self) -> dict[str, Any]:
        drawn = {
            "s": self.said([*WORDS, "null", "</think>x", "    indented\n", "5"], 4),
            "i": self.choice([0, -7, 10**20, self.randint(-999, 999)]),
            "b": self.random() < 0.5,
            "o": {key: self.choice([1, None, self.said(WORDS, 2)]) for key in "xyz"[: self.randint(0, 3)]},
            "a": [self.choice([0.5, -1e-9, self.said(WORDS, 2)]) for _ in range(self.randint(0, 2))],
        }
        return {key: drawn[key] for key in self.sample(sorted(drawn), self.randint(0, 5))}

    def turn(self, family: Family, *, calls: bool) -> Turn:
        return Turn(
            self.said(WORDS, 4).strip() if family.thinks else "",
            self.said(WORDS, 4).strip(),
            tuple(
                ToolCall(self.choice(["search", "python"]), self.arguments())
                for _ in range(self.randint(1, 1 if family.one_call else 3) if calls else 0)
            ),
        )

    def prompt(self, family: Family) -> list[Message]:
        messages = [Message("system", self.said(WORDS, 3) + "s")] if self.random() < 0.5 else []
        if self.random() < 0.5:
            messages += [Message("user", "a"), Message("assistant", "b", reasoning="c" if family.thinks else "")]
        return [*messages, Message("user", "q" + self.said([*WORDS, *family.special], 4) + "?")]


def sampled(model: Model, turn: Turn, chance: Chance) -> tuple[int, ...]:
    """The turn as a policy might sample it: its text split at random places, which no tokenizer would choose."""
    ids: list[int] = []
    for piece in re.split(r"(</?tool_call>|</?think>)", model.family.writes(turn)):
        start = 0
        while start < len(piece):
            size = len(piece) if piece.startswith(("<t", "</t")) else chance.randint(1, 8)
            ids += model.encode(piece[start : start + size])
            start += size
    return (*ids, model.stop)
