"""Rows mean what the specification says: prompt shapes, tools, ids, verifiers, the split, limits and what is shown."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from palingenesis.rl.config import RLConfig
from palingenesis.rl.config.schema import DataConfig
from palingenesis.rl.data import RowSet, build
from palingenesis.rl.data.formats import convert
from palingenesis.rl.data.load import RawRow
from palingenesis.rl.data.show import show, show_data, to_json
from palingenesis.rl.errors import ConfigError, DataError
from palingenesis.rl.types import Message, Row, ToolCall

ROOT = Path(__file__).parents[2]


def one(values: dict[str, Any], **options: Any) -> Row:
    return convert(RawRow(values, "a.jsonl:1"), DataConfig(dataset="a.jsonl", **options))


def rows_of(tmp_path: Path, rows: list[dict[str, Any]], name: str = "a.jsonl", **options: Any) -> RowSet:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(DataConfig(dataset=str(path), **options))


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("column", ["prompt", "question", "problem"])
def test_text_becomes_one_user_turn(column: str) -> None:
    row = one({column: " 1+1\n", "answer": "2"})
    assert row.messages == (Message("user", " 1+1\n"),)
    assert row.columns == {"answer": "2"}
    assert row.prompt_column == (column, " 1+1\n")


def test_the_first_prompt_column_wins_and_the_others_travel() -> None:
    row = one({"problem": "p", "question": "q", "prompt": "r", "messages": [USER]})
    assert row.prompt_column == ("messages", [USER])
    assert row.columns == {"problem": "p", "question": "q", "prompt": "r"}
    assert one({"problem": "p", "question": "q", "messages": None}).prompt_column == ("question", "q")


def test_a_named_column_is_the_prompt() -> None:
    row = one({"prompt": "p", "task": "t"}, prompt_field="task")
    assert row.messages == (Message("user", "t"),)
    assert row.columns == {"prompt": "p"}


def test_prompt_may_be_a_chat_as_trl_has_it() -> None:
    assert one({"prompt": [USER]}).messages == (Message("user", "hi"),)


def test_a_whole_chat_with_calls_and_results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    flat = {"name": "g", "arguments": {"y": [1]}}
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {**USER, "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call, flat], "reasoning_content": "hm"},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
    ]
    assert one({"messages": turns}).messages == (
        Message("system", "ab"),
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("f", {"x": 1}, "c1"), ToolCall("g", {"y": [1]})), reasoning="hm"),
        Message("tool", "7", name="f", tool_call_id="c1"),
    )


def test_the_system_prompt_stands_before_prompts_that_have_none() -> None:
    assert one({"prompt": "p"}, system_prompt="s").messages == (Message("system", "s"), Message("user", "p"))
    own = [{"role": "system", "content": "own"}, USER]
    assert one({"messages": own}, system_prompt="s").messages[0] == Message("system", "own")
    developer = [{"role": "developer", "content": "own"}, USER]
    assert one({"messages": developer}, system_prompt="s").messages[0] == Message("system", "own")


def test_the_id_is_the_rows_own_or_a_hash_of_its_content() -> None:
    assert one({"prompt": "p", "id": 7}).id == "7"
    assert one({"prompt": "p", "id": 7}).columns == {"id": 7}
    hashed = one({"prompt": "p", "answer": 1}).id
    assert len(hashed) == 16
    assert set(hashed) <= set("0123456789abcdef")
    assert hashed == one({"answer": 1, "prompt": "p"}).id
    assert hashed != one({"answer": 2, "prompt": "p"}).id


NESTED = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    "value", [[NESTED], [FLAT], json.dumps([FLAT]), [json.dumps(NESTED)], [{**FLAT, "type": None, "extra": None}]]
)
def test_tools_in_every_form_become_chat_template_schemas(value: Any) -> None:
    row = one({"prompt": "p", "tools": value})
    assert row.tools == (NESTED,)
    assert row.columns == {"tools": value}


def test_tools_may_be_absent_or_elsewhere() -> None:
    assert all(one({"prompt": "p", "tools": value}).tools == () for value in (None, [], "", "[]"))
    assert one({"prompt": "p", "tools": "hammer", "functions": [FLAT]}, tools_field="functions").tools == (NESTED,)


def test_nulls_that_tables_fill_in_are_no_part_of_a_schema() -> None:
    properties = {"a": {"type": "string", "enum": None}, "b": None, "c": {"type": "integer", "default": None}}
    row = one({"prompt": "p", "tools": [{"name": "f", "parameters": {"type": "object", "properties": properties}}]})
    assert row.tools[0]["function"]["parameters"]["properties"] == {
        "a": {"type": "string"},
        "c": {"type": "integer", "default": None},
    }


def test_verifier_and_reasoning_open() -> None:
    assert one({"prompt": "p"}).verifier == ()
    assert one({"prompt": "p", "verifier": "math"}).verifier == ("math",)
    assert one({"prompt": "p", "verifier": ["math", "code"]}).verifier == ("math", "code")
    assert one({"prompt": "p", "reasoning_open": True}).reasoning_open


def test_a_row_id_that_means_two_rows_is_told_apart(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}, {"id": 1, "prompt": "a"}]
    rowset = rows_of(tmp_path, rows)
    ids = [row.id for row in rowset.train]
    assert ids[0] == ids[2] == "1"
    assert ids[1].startswith("1#")
    assert len(rowset.notices) == 1


def test_an_eval_file_gives_the_held_out_rows_and_overlap_is_told(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text('{"prompt": "b"}\n{"prompt": "z"}\n')
    rowset = rows_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], eval_dataset=str(tmp_path / "e.jsonl"))
    assert [row.messages[0].content for row in rowset.held_out] == ["b", "z"]
    assert len(rowset.train) == 2
    assert "1 rows of data.eval_dataset are also training rows" in rowset.notices[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"split": "validation"}, "data.split"),
        ({"args": {"name": "main"}}, "data.args"),
        ({"args": {"split": "x"}}, "data.args"),
    ],
)
def test_options_that_do_nothing_for_a_file_are_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rows_of(tmp_path, [{"prompt": "a"}], **options)


def test_long_prompts_are_dropped_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (1, 9, 2, 8, 9, 9)))
    config = DataConfig(dataset=str(path))
    rowset = build(config, count_tokens=lambda row: len(row.messages[0].content), max_prompt_tokens=8)
    assert [len(row.messages[0].content) for row in rowset.train] == [1, 2, 8]
    (dropped,) = rowset.dropped
    assert (dropped.count, dropped.examples) == (3, tuple(f"{path}:{n}" for n in (2, 5, 6)))
    assert "3 rows dropped: prompt longer than 8 tokens" in str(dropped)
    assert build(config, count_tokens=lambda row: 99, max_prompt_tokens=0).dropped == ()


contents = st.lists(
    st.fixed_dictionaries({"prompt": st.text("abc", min_size=1, max_size=2), "answer": st.integers(0, 3)}),
    min_size=2,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(contents, st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_split_follows_content_and_copies_stay_together(rows: list[dict[str, Any]], size: int, random: Any) -> None:
    def split(order: list[dict[str, Any]]) -> tuple[list[str], list[str]] | None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rowset = rows_of(Path(folder), order, eval_size=size)
            except DataError:
                return None
        return sorted(row.id for row in rowset.train), sorted(row.id for row in rowset.held_out)

    shuffled = list(rows)
    random.shuffle(shuffled)
    first = split(rows)
    assert first == split(shuffled)
    if first is not None:
        train, held_out = first
        assert not set(train) & set(held_out)
        assert len(train) + len(held_out) == len(rows)
        assert len(held_out) >= size
        assert max(held_out) < min(train)  # the smallest hashes; ids are their beginnings
        assert len(held_out) - held_out.count(max(held_out)) < size  # no more than the copies ask for


def test_adding_a_row_moves_at_most_one_other(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(200)]
    before = {row.id for row in rows_of(tmp_path, rows, eval_size=20).held_out}
    after = {row.id for row in rows_of(tmp_path, [*rows, {"prompt": "new"}], eval_size=20).held_out}
    assert len(before - after) <= 1


def test_json_of_a_row_has_the_promised_keys() -> None:
    row = one({"prompt": "p", "n": float("nan"), "when": Path("x"), "tools": [FLAT]}, system_prompt="s")
    shown = to_json(row)
    assert list(shown) == ["id", "messages", "tools", "columns"]
    assert shown["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    assert shown["tools"] == [NESTED]
    assert shown["columns"]["n"] is None
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert to_json(row, split="train", count_tokens=lambda row: 3)["tokens"] == 3


def test_rows_are_shown_as_they_are(tmp_path: Path) -> None:
    rowset = rows_of(tmp_path, [{"prompt": "[bold]1+1[/bold]", "answer": 2, "verifier": "math"}, {"prompt": "b"}])
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(show(rowset, 1, count_tokens=lambda row: 7))
    text = capture.get()
    for part in (
        "2 training rows, 0 held out",
        "[bold]1+1[/bold]",
        "answer: 2",
        "scored by: math",
        "7 tokens",
        "1 of 2",
    ):
        assert part in text


def run_of(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> RLConfig:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RLConfig.from_dict(
        {
            "model": {"policy": "anything"},
            "data": {"dataset": str(path), **data},
            "rewards": {"correct": {"fn": "math"}},
            "rollout": {"max_model_len": 10, "max_new_tokens": 4},
        }
    )


def test_the_data_command_prints_one_object_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"p{n}", "answer": n, "prompt_tokens": 5 * n} for n in range(5)]
    config = run_of(tmp_path, rows)
    show_data(config, as_json=True)
    out = capsys.readouterr()
    assert [json.loads(line)["columns"]["answer"] for line in out.out.splitlines()] == [0, 1, 2, 3, 4]
    show_data(config, count=2, as_json=True, count_tokens=lambda row: row.columns["prompt_tokens"])
    out = capsys.readouterr()
    assert [json.loads(line)["tokens"] for line in out.out.splitlines()] == [0, 5]
    assert "3 rows dropped: prompt longer than 9 tokens" in out.err


def test_the_data_command_shows_people_a_few_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_data(run_of(tmp_path, [{"prompt": f"p{n}", "answer": n} for n in range(5)], max_prompt_tokens=3))
    out = capsys.readouterr().out
    assert "5 training rows" in out
    assert "p2" in out
    assert "p3" not in out
    assert "not measured" in out


def test_the_data_command_checks_verifiers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'corect'.*did you mean 'correct'"):
        show_data(run_of(tmp_path, [{"prompt": "p", "verifier": "corect"}]))


def test_gsm8k_is_prepared(tmp_path: Path) -> None:
    source = tmp_path / "raw.jsonl"
    answer = "She has 2*600=<<2*600=1200>>1,200.\nThat is all.\n#### 1,200"
    source.write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    script = ROOT / "examples" / "rl" / "prepare_gsm8k.py"
    target = tmp_path / "out" / "rows.jsonl"
    subprocess.run([sys.executable, str(script), str(source), str(target)], check=True, capture_output=True)
    assert json.loads(target.read_text()) == {
        "question": "How many?",
        "answer": "1200",
        "solution": "She has 2*600=1,200.\nThat is all.\n#### 1200",
    }
    source.write_text('{"question": "?", "answer": "none"}\n')
    failed = subprocess.run([sys.executable, str(script), str(source), str(target)], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "raw.jsonl:1" in failed.stderr


def test_the_whole_of_gsm8k_loads(tmp_path: Path) -> None:
    raw = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    if not raw.exists():
        pytest.skip("GSM8K's files are not on this machine")
    script = ROOT / "examples" / "rl" / "prepare_gsm8k.py"
    target = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, str(script), str(raw), str(target)], check=True, capture_output=True)
    rowset = build(DataConfig(dataset=str(target), eval_size=500))
    assert (len(rowset.train), len(rowset.held_out)) == (7473 - 500, 500)
    assert all(float(row.columns["answer"]) == float(row.columns["solution"].split("####")[1]) for row in rowset.rows)
