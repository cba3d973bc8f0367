"""Turn GSM8K's files into rows for `pgs rl`.

    python examples/rl/prepare_gsm8k.py train.jsonl gsm8k_train.jsonl

GSM8K (Cobbe et al., 2021, MIT license) has rows {"question", "answer"}, the answer being a worked solution with
calculator marks that ends in `#### 1,234`. A row here is

    {"question": "...", "answer": "1234", "solution": "... worked solution ...\n#### 1234"}

`answer` is what a reward compares with; `solution` stays for people and for `pgs rl score --gold solution`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
FINAL = re.compile(r"####\s*(\S.*?)\s*$")


def convert(row: dict[str, str]) -> dict[str, str]:
    """One row of GSM8K as one row of ours. Raises ValueError when the solution has no final `#### number`."""
    found = FINAL.search(row["answer"])
    if found is None:
        raise ValueError("the answer does not end in '#### number'")
    number = found.group(1).replace(",", "").lstrip("$")
    steps = CALCULATOR_MARK.sub("", row["answer"][: found.start()]).rstrip()
    return {"question": row["question"].strip(), "answer": number, "solution": f"{steps}\n#### {number}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC.jsonl", help="a file of GSM8K")
    parser.add_argument("target", type=Path, metavar="DST.jsonl", help="where to write the rows")
    options = parser.parse_args()
    rows = []
    with options.source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(convert(json.loads(line)))
            except (KeyError, ValueError) as error:
                print(f"{options.source}:{number}: not a row of GSM8K: {error}", file=sys.stderr)
                return 1
    options.target.parent.mkdir(parents=True, exist_ok=True)
    with options.target.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{len(rows)} rows written to {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
