#!/usr/bin/env python3
"""Score GSM8K's worked solutions with `math`: against their own number, and against another row's.

    python bench/gsm8k_score.py GSM8K/test.jsonl

Rows are made by examples/rl/prepare_gsm8k.py and scored by `pgs rl score`, as a user would.
"""

from __future__ import annotations

import sys

from record import record
from scoring import prepared, score

REWARDS = "rewards: {correct: {fn: math}}\n"


def main() -> None:
    rows = prepared("prepare_gsm8k.py", sys.argv[1])
    own = [{**row, "completion": row["solution"]} for row in rows]
    # The next row whose number differs lends its solution.
    other = []
    for index, row in enumerate(rows):
        turned = rows[index + 1 :] + rows[:index]
        other.append({**row, "completion": next(r["solution"] for r in turned if r["answer"] != row["answer"])})
    right, seconds = score(own, REWARDS)
    wrong, _ = score(other, REWARDS)
    record(
        "gsm8k_score",
        {
            "rows": len(rows),
            "own_number_scored_1": sum(value == 1.0 for value in right),
            "other_number_scored_0": sum(value == 0.0 for value in wrong),
            "seconds": round(seconds, 2),
        },
    )


if __name__ == "__main__":
    main()
