"""Files become rows: every format, and the oddities of real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from palingenesis.rl.data.load import load
from palingenesis.rl.errors import DataError

ROWS = [{"prompt": "1+1", "answer": 2}, {"prompt": "é", "answer": "two"}]


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def values(path: str) -> list[object]:
    return [dict(row.values) for row in load(path)]


def lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", lines(ROWS)),
        ("a.JSONL", lines(ROWS)),
        ("a.ndjson", lines(ROWS)),
        ("a.jsonl", "\ufeff" + lines(ROWS)),
        ("a.jsonl", lines(ROWS).replace("\n", "\r\n")),
        ("a.jsonl", "\n" + lines(ROWS).replace("\n", "\n  \n")),
        ("a.jsonl", lines(ROWS).rstrip("\n")),
        ("a.json", lines(ROWS)),
        ("a.json", "\ufeff" + lines(ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("a.json", json.dumps(ROWS, indent=2, ensure_ascii=False)),
        ("a.json", f"\n {json.dumps(ROWS)} \n"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    ],
)
def test_every_way_to_write_json_gives_the_same_rows(tmp_path: Path, name: str, text: str | bytes) -> None:
    assert values(write(tmp_path / name, text)) == ROWS


def test_a_column_may_hold_different_types_in_different_rows(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a", "x": value} for value in (1, "1", [1], {"a": 1}, None, 1.5, True)]
    assert values(write(tmp_path / "a.jsonl", lines(rows))) == rows


def test_of_duplicate_keys_the_last_wins(tmp_path: Path) -> None:
    assert values(write(tmp_path / "a.jsonl", '{"prompt": "a", "prompt": "b"}\n')) == [{"prompt": "b"}]


def test_rows_remember_their_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n" + lines(ROWS))
    assert [row.source for row in load(path)] == [f"{path}:2", f"{path}:3"]
    path = write(tmp_path / "a.json", json.dumps(ROWS, indent=1))
    assert [row.source for row in load(path)] == [f"{path}[0] (line 2)", f"{path}[1] (line 6)"]


def test_a_line_separator_inside_text_is_not_the_end_of_a_row(tmp_path: Path) -> None:
    row = {"prompt": "one\u2028two\u0085three"}
    assert values(write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False))) == [row]


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert values(write(tmp_path / "a.jsonl", r'{"prompt": "\ud83d\ude00"}')) == [{"prompt": "😀"}]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    rows = [{"prompt": [{"role": "user", "content": "a"}], "n": 1}, {"prompt": [], "n": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert values(str(path)) == rows
    assert load(str(path))[1].source == f"{path}[1]"


def test_a_folder_of_save_to_disk_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS[:1])
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "two"))
    assert values(str(tmp_path / "one")) == ROWS[:1]
    assert values(str(tmp_path / "two")) == ROWS[:1]
    with pytest.raises(DataError, match="no split 'tset'; it has train"):
        load(str(tmp_path / "two"), "tset")


def test_a_hub_id_passes_split_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[object] = []

    def fake(path: str, **arguments: object) -> list[dict[str, object]]:
        asked.append((path, arguments))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", fake)
    rows = load("openai/gsm8k", "test", name="main")
    assert asked == [("openai/gsm8k", {"split": "test", "name": "main"})]
    assert rows[1].source == "openai/gsm8k[1]"


def test_a_hub_that_fails_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(path: str, **arguments: object) -> None:
        raise ConnectionError("cannot reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as caught:
        load("openai/gsm8k")
    message = str(caught.value)
    assert "\n" not in message
    assert "'openai/gsm8k'" in message
    assert "name a local file" in message


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "./missing", "/no/such/file", "a/b/c", "~/x", "missing.csv", "x.json"]
)
def test_a_missing_file_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="there is no file"):
        load(name)
