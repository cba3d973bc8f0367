"""Two-digit addition, split three ways: the data of the quickstart.

    every unordered pair {a, b} of 10..99, ordered by the SHA-256 of "a + b"
      -> the first 500      held out    one row each, a and b in a hashed order
      -> the next 1000      supervised  both orders, for make_tiny_policy.py only: never written to disk
      -> the other 2595     RL          both orders

The split is over unordered pairs, so a held-out sum is met in neither order before it is asked. It depends on nothing
but the hash: no seed, no platform, no library version. Run it to write data/addition/{train,heldout}.jsonl again.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 500
SUPERVISED = 1000
DATA = Path(__file__).parent / "data" / "addition"

Pair = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """Ordered pairs (a, b), each list in hashed order. Of the sums: 500 held out, 1976 supervised, 5138 for RL."""

    held_out: list[Pair]
    supervised: list[Pair]
    rl: list[Pair]


def split_pairs() -> Split:
    unordered = sorted(((a, b) for a in range(10, 100) for b in range(a, 100)), key=_digest)
    first, second = HELD_OUT, HELD_OUT + SUPERVISED
    return Split(
        held_out=[min(_orders(pair), key=_digest) for pair in unordered[:first]],
        supervised=_both_orders(unordered[first:second]),
        rl=_both_orders(unordered[second:]),
    )


def row(pair: Pair) -> dict[str, str]:
    """{"prompt": "47 + 85 = ?", "answer": "132"}"""
    a, b = pair
    return {"prompt": f"{a} + {b} = ?", "answer": str(a + b)}


def write_rows(folder: Path, **files: Iterable[dict[str, str]]) -> None:
    """`<folder>/<name>.jsonl` for each name, a row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


def write(folder: Path) -> None:
    split = split_pairs()
    write_rows(folder, train=map(row, split.rl), heldout=map(row, split.held_out))


def _digest(pair: Pair) -> str:
    return hashlib.sha256(f"{pair[0]} + {pair[1]}".encode()).hexdigest()


def _orders(pair: Pair) -> set[Pair]:
    return {pair, pair[::-1]}


def _both_orders(pairs: list[Pair]) -> list[Pair]:
    return sorted({order for pair in pairs for order in _orders(pair)}, key=_digest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DATA, help="folder for train.jsonl and heldout.jsonl")
    write(parser.parse_args().out)
