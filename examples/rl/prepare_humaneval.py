"""Turn HumanEval's file into rows for `pgs rl`.

    python examples/rl/prepare_humaneval.py HumanEval.jsonl.gz data/humaneval/rows.jsonl

HumanEval (Chen et al., 2021, MIT license) has rows {"task_id", "prompt", "canonical_solution", "test", "entry_point"}:
the prompt is a signature with a docstring, the test is source that defines `check(candidate)`. A row here is

    {"id": "HumanEval/0", "prompt": "Write ...\n\n```python\ndef ...\n```", "tests": "def check(candidate): ...",
     "entry_point": "has_close_elements", "solution": "```python\n...\n```"}

`tests` and `entry_point` are what the reward `code` reads; the prompt's block holds the helpers that three of the tests
call. `solution` is for people and for `pgs rl score --gold solution`, whose mean is 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

ASK = "Complete this Python function. Answer with one Python code block that holds the whole function and its imports."


def convert(row: dict[str, str]) -> dict[str, str]:
    """One row of HumanEval as one row of ours. Raises KeyError when it is something else."""
    return {
        "id": row["task_id"],
        "prompt": f"{ASK}\n\n```python\n{row['prompt'].strip()}\n```",
        "tests": row["test"],
        "entry_point": row["entry_point"],
        "solution": f"```python\n{row['prompt']}{row['canonical_solution']}```",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC.jsonl.gz", help="HumanEval's file, packed or not")
    parser.add_argument("target", type=Path, metavar="DST.jsonl", help="where to write the rows")
    options = parser.parse_args()
    rows = []
    read = gzip.open if options.source.suffix == ".gz" else open
    with read(options.source, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(convert(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                print(f"{options.source}:{number}: not a row of HumanEval: {error!r}", file=sys.stderr)
                return 1
    options.target.parent.mkdir(parents=True, exist_ok=True)
    with options.target.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{len(rows)} rows written to {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
