#!/usr/bin/env python3
"""Make rows of chain_sum: sums and differences of a few small numbers.

    python examples/rl/prepare_chain_sum.py                   data/chain_sum/{train,eval}.jsonl

A row is

    {"question": "State the final answer to the following arithmetic problem: 12 + 5 - 7 =", "answer": "10"}

the task `chain_sum` of reasoning-gym (Apache-2.0), drawn as it draws: the number of terms, the number of digits all terms
of a row have, the terms, the signs. The defaults, 2 or 3 terms of 1 or 2 digits, are within sight of a model of 135 M
parameters. No expression occurs twice, so none of the held-out ones is trained on.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

QUESTION = "State the final answer to the following arithmetic problem: {} ="
DRAWS = 1_000  # repeats in a row after which there is taken to be no further expression


@dataclass(frozen=True)
class Task:
    """The range of what is asked: terms of a sum, and digits of its terms; both ends are in it."""

    terms: tuple[int, int] = (2, 3)
    digits: tuple[int, int] = (1, 2)

    def draw(self, rng: random.Random) -> tuple[str, int]:
        """An expression and its value."""
        terms, digits = rng.randint(*self.terms), rng.randint(*self.digits)
        low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        numbers = [rng.randint(low, high) for _ in range(terms)]
        signs = [rng.choice("+-") for _ in range(terms - 1)]
        value = numbers[0] + sum(n if sign == "+" else -n for sign, n in zip(signs, numbers[1:], strict=True))
        rest = "".join(f" {sign} {n}" for sign, n in zip(signs, numbers[1:], strict=True))
        return f"{numbers[0]}{rest}", value


def rows(task: Task, seed: int) -> Iterator[dict[str, str]]:
    """Rows without end, none twice. Raises ValueError where the task has no more."""
    rng, seen = random.Random(seed), set[str]()
    while True:
        for _ in range(DRAWS):
            expression, value = task.draw(rng)
            if expression not in seen:
                break
        else:
            raise ValueError(f"there are only some {len(seen)} expressions of this kind; ask for fewer rows")
        seen.add(expression)
        yield {"question": QUESTION.format(expression), "answer": str(value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/chain_sum"), help="folder to write")
    parser.add_argument("--train", type=int, default=8192, help="rows to train on")
    parser.add_argument("--eval", type=int, default=256, help="rows held out")
    parser.add_argument("--terms", type=int, nargs=2, default=Task.terms, metavar=("MIN", "MAX"))
    parser.add_argument("--digits", type=int, nargs=2, default=Task.digits, metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    drawn = rows(Task(tuple(args.terms), tuple(args.digits)), args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, count in (("eval", args.eval), ("train", args.train)):
        lines = [json.dumps(row) + "\n" for row in islice(drawn, count)]
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{count} rows written to {args.out / name}.jsonl")


if __name__ == "__main__":
    main()
