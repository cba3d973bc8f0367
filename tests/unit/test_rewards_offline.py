"""`pgs rl score`: rows in, scored rows and a table out; GSM8K in full."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import RLConfig
from palingenesis.rl.errors import DataError, UsageError
from palingenesis.rl.rewards.offline import score_file

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
ROWS = Path(__file__).parents[2] / "examples" / "rl" / "data" / "addition" / "train.jsonl"


def config(dataset: object = ROWS, **rewards: dict[str, Any]) -> RLConfig:
    return RLConfig(
        model={"policy": "builtin:tiny"},
        data={"dataset": str(dataset)},
        rewards=rewards or {"m": {"fn": "math"}},
    )


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k() -> list[dict[str, str]]:
    if not GSM8K.is_file():
        pytest.skip(f"needs the GSM8K test rows at {GSM8K}")
    return [json.loads(line) for line in GSM8K.read_text().splitlines()]


def number(row: dict[str, str]) -> str:
    return row["answer"].rsplit("####", 1)[1].strip()


def test_gsm8k_against_the_own_number_is_all_right(gsm8k: list[dict[str, str]], tmp_path: Path) -> None:
    rows = [{"question": r["question"], "answer": number(r), "completion": r["answer"]} for r in gsm8k]
    began = time.monotonic()
    scored = score_file(config(), completions=write(tmp_path / "c.jsonl", rows), out=str(tmp_path / "o.jsonl"))
    assert time.monotonic() - began < 10
    assert len(scored.scores) == 1319
    assert {score.reward for score in scored.scores} == {1.0}
    written = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert written[0] == {**rows[0], "rewards": {"m": 1.0}, "reward": 1.0, "outcome": "scored"}
    assert len(written) == 1319


def test_gsm8k_against_another_rows_number_is_all_wrong(gsm8k: list[dict[str, str]], tmp_path: Path) -> None:
    numbers = [number(row) for row in gsm8k]
    rows = []
    for place, row in enumerate(gsm8k):
        other = next(
            n for n in numbers[place + 1 :] + numbers[:place] if n.replace(",", "") != numbers[place].replace(",", "")
        )
        rows.append({"question": row["question"], "answer": other, "completion": row["answer"]})
    scored = score_file(config(), completions=write(tmp_path / "c.jsonl", rows))
    assert len(scored.scores) == 1319
    assert {score.reward for score in scored.scores} == {0.0}


def test_gsm8k_gold(gsm8k: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    scored = score_file(config(GSM8K), gold="answer")
    assert {score.reward for score in scored.scores} == {1.0}
    assert "1.0000" in capsys.readouterr().out


def test_messages_alone_and_beside_a_completion(tmp_path: Path) -> None:
    (tmp_path / "see.py").write_text(
        "SEEN = []\n"
        "def f(prompt, completion, reasoning, messages, **row):\n"
        "    SEEN.append((prompt, completion, reasoning, len(messages), sorted(row)))\n"
        "    return len(SEEN)\n"
    )
    user, assistant = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>hm</think>4"}
    rows = [
        {"messages": [user, assistant], "answer": "4"},
        {"messages": [user], "completion": "hm</think>4", "answer": "4", "reasoning_open": True},
        {"completion": "4", "answer": "4"},
        {"messages": [{"role": "assistant", "content": "4", "reasoning_content": "hm"}]},
    ]
    scored = score_file(config(f={"fn": f"{tmp_path}/see.py:f"}), completions=write(tmp_path / "c.jsonl", rows))
    from palingenesis.rl.plugins import resolve

    seen = sorted(resolve(f"{tmp_path}/see.py:SEEN", {}, "x"), key=str)
    assert [s.reward for s in scored.scores] != []
    assert seen == sorted(
        [
            ("2+2?", "4", "hm", 2, ["answer"]),
            ("2+2?", "4", "hm", 2, ["answer", "reasoning_open"]),
            ("", "4", "", 1, ["answer"]),
            ("", "4", "hm", 1, []),
        ],
        key=str,
    )


def test_a_skip_is_written_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "skip.py").write_text(
        "from palingenesis.rl import SkipSample\n"
        "def f(completion):\n"
        "    if completion == 'b':\n"
        "        raise SkipSample('down')\n"
        "    return None if completion == 'c' else 0.5\n"
    )
    rows = [{"completion": text, "prompt": "p"} for text in "abc"]
    out = tmp_path / "o.jsonl"
    score_file(config(f={"fn": f"{tmp_path}/skip.py:f"}), completions=write(tmp_path / "c.jsonl", rows), out=str(out))
    a, b, c = (json.loads(line) for line in out.read_text().splitlines())
    assert (a["reward"], a["outcome"], "skip_reason" in a) == (0.5, "scored", False)
    assert (b["reward"], b["rewards"], b["outcome"], b["skip_reason"]) == (None, {"f": None}, "skipped", "f: down")
    assert (c["reward"], c["outcome"]) == (None, "skipped")
    printed = capsys.readouterr().out
    assert "33.3 %" in printed
    assert "skipped by f: down" in printed


def test_a_few_unreadable_references_are_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"completion": "5", "answer": "5"}] * 29 + [{"completion": "5", "answer": ""}]
    scored = score_file(config(), completions=write(tmp_path / "c.jsonl", rows))
    assert scored.rows[29]["outcome"] == "skipped"
    assert "1 rows have a reference that cannot be read" in capsys.readouterr().out


def test_what_cannot_be_scored(tmp_path: Path) -> None:
    for row, message in (
        ({"answer": "4"}, "no completion"),
        ({"messages": [{"role": "user", "content": "x"}]}, "ends with a user turn"),
        ({"completion": 5}, "must be text"),
        ({"completion": "5"}, "no column 'answer'"),
    ):
        with pytest.raises(DataError, match=message):
            score_file(config(), completions=write(tmp_path / "c.jsonl", [row]))
    with pytest.raises(UsageError):
        score_file(config())
    with pytest.raises(DataError, match=r"did you mean 'answer'"):
        score_file(config(ROWS), gold="anwser")
    with pytest.raises(DataError, match="cannot be written"):
        score_file(
            config(), completions=write(tmp_path / "c.jsonl", [{"completion": "5", "answer": "5"}]), out="/nowhere/x"
        )
