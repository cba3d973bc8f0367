"""Products that are too hard to guess, split three ways: the data of the quickstart with a tool.

    every pair of 100..999 and 10..99, ordered by the SHA-256 of "a * b"
      -> the first 300      held out
      -> the next 4000      supervised  for make_tiny_tools.py only: never written to disk
      -> the next 4000      RL

The rest is not used. The split depends on nothing but the hash: no seed, no platform, no library version. Run it to
write data/multiplication/{train,heldout}.jsonl again.
"""

import argparse
import hashlib
from pathlib import Path

from prepare_addition import Pair, Split, write_rows

HELD_OUT = 300
SUPERVISED = 4000
RL = 4000
DATA = Path(__file__).parent / "data" / "multiplication"


def split_pairs() -> Split:
    pairs = sorted(((a, b) for a in range(100, 1000) for b in range(10, 100)), key=_digest)
    first, second = HELD_OUT, HELD_OUT + SUPERVISED
    return Split(held_out=pairs[:first], supervised=pairs[first:second], rl=pairs[second : second + RL])


def row(pair: Pair) -> dict[str, str]:
    """{"prompt": "347 * 82 = ?", "answer": "28454"}"""
    a, b = pair
    return {"prompt": f"{a} * {b} = ?", "answer": str(a * b)}


def write(folder: Path) -> None:
    split = split_pairs()
    write_rows(folder, train=map(row, split.rl), heldout=map(row, split.held_out))


def _digest(pair: Pair) -> str:
    return hashlib.sha256(f"{pair[0]} * {pair[1]}".encode()).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DATA, help="folder for train.jsonl and heldout.jsonl")
    write(parser.parse_args().out)
