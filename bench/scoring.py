"""What the benches of built-in rewards share: rows prepared as a user prepares them, scored as a user scores them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prepared(script: str, source: str | Path) -> list[dict[str, Any]]:
    """The rows that a script of examples/rl makes of `source`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        subprocess.run([sys.executable, ROOT / "examples/rl" / script, source, path], check=True)
        return read(path)


def score(rows: Sequence[dict[str, Any]], config: str) -> tuple[list[float | None], float]:
    """Rewards that `pgs rl score` gives to rows with their completions, and the seconds of the whole command.

    Args:
        config: YAML of the sections beside `model` and `data`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        completions, out, file = (Path(scratch) / name for name in ("in.jsonl", "out.jsonl", "config.yaml"))
        completions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        file.write_text(f"model: {{policy: none}}\ndata: {{dataset: {completions}}}\n{config}", encoding="utf-8")
        command = [sys.executable, "-m", "palingenesis.cli", "rl", "score", "--config", str(file)]
        began = time.perf_counter()
        subprocess.run([*command, "--completions", str(completions), "--out", str(out)], check=True)
        return [row["reward"] for row in read(out)], time.perf_counter() - began
