"""A table of wrong data files. Each is answered by one line that names thing, place and cure; exit code 1."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config.schema import DataConfig
from palingenesis.rl.data import build, check_verifiers
from palingenesis.rl.errors import DataError

GOOD = '{"prompt": "1+1", "answer": "2"}\n'


def row(**columns: Any) -> str:
    return json.dumps(columns) + "\n"


def chat(*turns: Any) -> str:
    return row(messages=list(turns))


USER = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]}

# (file name, its text, options, what the message must hold: place, thing, cure)
WRONG: list[tuple[str, str | bytes | None, dict[str, Any], list[str]]] = [
    ("a.jsonl", None, {}, ["there is no file", "a.jsonl", "data.dataset"]),
    ("a.jsonl", "", {}, ["a.jsonl", "no rows", "at least one"]),
    ("a.jsonl", "\n \n", {}, ["a.jsonl", "no rows"]),
    ("a.jsonl", GOOD + '{"prompt": "x",}\n', {}, ["a.jsonl:2", "not JSON", "character 16", "fix or remove"]),
    ("a.jsonl", GOOD + '{"prompt": "x"', {}, ["a.jsonl:2", "not JSON"]),
    ("a.jsonl", GOOD + GOOD.strip() + GOOD, {}, ["a.jsonl:2", "Extra data"]),
    ("a.jsonl", json.dumps([{"prompt": "x"}], indent=1), {}, ["a.jsonl:1", "one whole object a line", ".json"]),
    ("a.jsonl", GOOD + '["x"]\n', {}, ["a.jsonl:2", "must be an object", "not a list"]),
    ("a.jsonl", GOOD + "null\n", {}, ["a.jsonl:2", "not null"]),
    ("a.jsonl", GOOD + '{"prompt": "x", "w": NaN}\n', {}, ["a.jsonl:2", "NaN", "write null"]),
    ("a.jsonl", GOOD + '{"prompt": "' + "\\ud800" + '"}\n', {}, ["a.jsonl:2", "'prompt'", "surrogate"]),
    ("a.jsonl", GOOD.encode() + '{"prompt": "é"}\n'.encode("latin-1"), {}, ["a.jsonl:2", "UTF-8", "0xe9", "save"]),
    ("a.jsonl", GOOD.encode("utf-16"), {}, ["a.jsonl:1", "UTF-8", "save"]),
    ("a.jsonl", GOOD + '{"prompt": ' + "[" * 20000 + "]" * 20000 + "}\n", {}, ["a.jsonl:2", "deep"]),
    ("a.jsonl", GOOD + row(prompt=None), {}, ["a.jsonl:2", "'prompt'", "null"]),
    ("a.jsonl", GOOD + row(prompt="  "), {}, ["a.jsonl:2", "'prompt'", "empty", "give every row a prompt"]),
    ("a.jsonl", GOOD + row(prompt=5), {}, ["a.jsonl:2", "'prompt'", "text or a list of messages", "a number"]),
    ("a.jsonl", row(instruction="x", answer="2"), {}, ["a.jsonl:1", "answer, instruction", "data.prompt_field"]),
    (
        "a.jsonl",
        GOOD,
        {"prompt_field": "promt"},
        ["a.jsonl:1", "'promt'", "did you mean 'prompt'", "data.prompt_field"],
    ),
    ("a.jsonl", row(messages="hi"), {}, ["a.jsonl:1", "'messages'", "list of messages", "text"]),
    ("a.jsonl", row(messages=[]), {}, ["a.jsonl:1", "'messages'", "empty list"]),
    ("a.jsonl", chat("hi"), {}, ["a.jsonl:1", "'messages', turn 1", "must be an object"]),
    ("a.jsonl", chat({"content": "hi"}), {}, ["a.jsonl:1", "turn 1", "no role", "system, user"]),
    ("a.jsonl", chat({"from": "human", "value": "hi"}), {}, ["a.jsonl:1", "ShareGPT", "role/content"]),
    ("a.jsonl", chat({"role": "usr", "content": "hi"}), {}, ["a.jsonl:1", "'usr'", "did you mean 'user'"]),
    ("a.jsonl", chat({"role": "user", "contents": "hi"}), {}, ["a.jsonl:1", "turn 1", "did you mean 'contents'"]),
    ("a.jsonl", chat({"role": "user", "content": 3}), {}, ["a.jsonl:1", "turn 1", "content must be text"]),
    (
        "a.jsonl",
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        {},
        ["a.jsonl:1", "turn 1", "'image_url'", "only text parts"],
    ),
    ("a.jsonl", chat(USER, {"role": "assistant", "content": "yo"}), {}, ["a.jsonl:1", "assistant turn", "remove"]),
    ("a.jsonl", chat(USER, CALL, USER), {}, ["a.jsonl:1", "turn 2, call 1", "'f'", "must be an object"]),
    (
        "a.jsonl",
        row(prompt="x", tools={"name": "f"}),
        {},
        ["a.jsonl:1", "'tools'", "must be a list", "data.tools_field"],
    ),
    ("a.jsonl", row(prompt="x", tools="hammer"), {}, ["a.jsonl:1", "'tools'", "not JSON", "data.tools_field"]),
    ("a.jsonl", row(prompt="x", tools=[{"type": "function"}]), {}, ["a.jsonl:1", "'tools', tool 1", "no name"]),
    ("a.jsonl", row(prompt="x", tools=[{"name": "f", "parameters": 1}]), {}, ["'tools', tool 1", "JSON schema"]),
    ("a.jsonl", row(prompt="x", tools=[{"type": "web_search"}]), {}, ["'tools', tool 1", "'web_search'", "functions"]),
    ("a.jsonl", row(prompt="x", tools=[{"name": "f"}, {"name": "f"}]), {}, ["'tools'", "2 tools called 'f'"]),
    ("a.jsonl", row(prompt="x", verifier=3), {}, ["a.jsonl:1", "'verifier'", "name or a list"]),
    ("a.jsonl", GOOD + row(prompt="x", verifier="mth"), {}, ["a.jsonl:2", "'verifier'", "did you mean 'math'"]),
    ("a.jsonl", row(prompt="x", id=[1]), {}, ["a.jsonl:1", "'id'", "text or a number"]),
    ("a.jsonl", row(prompt="x", reasoning_open="yes"), {}, ["a.jsonl:1", "'reasoning_open'", "true or false"]),
    ("a.jsonl", row(responses_create_params={"input": []}), {}, ["a.jsonl:1", "NeMo Gym", "not built yet"]),
    ("a.jsonl", GOOD, {"eval_size": 1}, ["data.eval_size", "1 of 1 rows", "nothing to train on"]),
    ("a.jsonl", GOOD + GOOD, {"eval_size": 1}, ["data.eval_size", "copies", "nothing to train on"]),
    ("a.jsonl", GOOD, {"eval_dataset": "no/such/file.jsonl"}, ["data.eval_dataset", "no/such/file.jsonl"]),
    ("a.csv", "prompt,answer\n1,2\n", {}, ["a.csv", "convert it to JSONL", "to_json"]),
    ("a.txt", "hello", {}, ["a.txt", "cannot tell", ".jsonl"]),
    ("a.json", '{"prompt": "x"\n', {}, ["a.json:2", "not JSON"]),
    ("a.json", '[{"prompt": "x"} {"prompt": "y"}]', {}, ["a.json[0] (line 1)", "expected ','"]),
    ("a.json", '[\n{"prompt": "x"},\n3]', {}, ["a.json[1] (line 3)", "must be an object"]),
    ("a.json", '[{"prompt": "x"}', {}, ["a.json[0]", "cut off"]),
    ("a.json", "[]", {}, ["a.json", "no rows"]),
    ("a.parquet", "PAR1 not really", {}, ["a.parquet", "cannot be read", "what its ending says"]),
    ("a.jsonl.gz", GOOD, {}, ["a.jsonl.gz", "cannot be read"]),
    ("a.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-9], {}, ["a.jsonl.gz", "cannot be read"]),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}-{case[3][-1]}"[:48])
def test_one_line_names_thing_place_and_cure(
    case: tuple[str, str | bytes | None, dict[str, Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, text, options, expected = case
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError) as caught:
        check_verifiers(build(DataConfig(dataset=name, **options)).rows, ["math", "code"])
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in message
    assert len(message) < 500
    assert message.endswith(".")
    for part in expected:
        assert part in message


def test_the_table_is_long_enough() -> None:
    assert len(WRONG) >= 20


def test_a_folder_names_a_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(DataError, match=r"is a folder; name a .* file in it, e\.g\. .*train\.jsonl"):
        build(DataConfig(dataset=str(tmp_path)))


def test_a_near_name_is_offered(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(DataError, match=r"did you mean 'train\.jsonl'"):
        build(DataConfig(dataset=str(tmp_path / "trian.jsonl")))


def test_when_every_prompt_is_too_long_the_shortest_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 2)
    count: Callable[[Any], int] = lambda row: 40  # noqa: E731
    with pytest.raises(DataError) as caught:
        build(DataConfig(dataset=str(tmp_path / "a.jsonl")), count_tokens=count, max_prompt_tokens=9)
    assert "2 rows dropped: prompt longer than 9 tokens" in str(caught.value)
    assert "shortest has 40" in str(caught.value)
