#!/usr/bin/env python3
"""Score GSM8K's worked solutions with `math`: against their own number, and against another row's.

    python bench/gsm8k_score.py GSM8K/test.jsonl

Rows are made by examples/rl/prepare_gsm8k.py and scored by `pgs rl score`, as a user would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import record

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(folder: Path, rows: list[dict[str, Any]], name: str) -> tuple[list[float | None], float]:
    """Rewards of `pgs rl score`, and the seconds the whole command took."""
    completions, out, config = (folder / f"{name}.{kind}" for kind in ("jsonl", "scored.jsonl", "yaml"))
    completions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config.write_text(
        f"model: {{policy: none}}\ndata: {{dataset: {completions}}}\nrewards: {{correct: {{fn: math}}}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "palingenesis.cli", "rl", "score", "--config", str(config)]
    began = time.perf_counter()
    subprocess.run([*command, "--completions", str(completions), "--out", str(out)], check=True)
    return [row["reward"] for row in read(out)], time.perf_counter() - began


def main() -> None:
    source = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared = folder / "rows.jsonl"
        subprocess.run([sys.executable, ROOT / "examples/rl/prepare_gsm8k.py", source, prepared], check=True)
        rows = read(prepared)
        own = [{**row, "completion": row["solution"]} for row in rows]
        # The next row whose number differs lends its solution.
        other = []
        for index, row in enumerate(rows):
            turned = rows[index + 1 :] + rows[:index]
            other.append({**row, "completion": next(r["solution"] for r in turned if r["answer"] != row["answer"])})
        right, seconds = score(folder, own, "own")
        wrong, _ = score(folder, other, "other")
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
