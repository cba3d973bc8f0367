"""`builtin:tiny-tools` and its data: what the quickstart with a tool relies on. test_tiny_policy.py tests what it shares
with `tiny`; tool_families.py plays conversations over its template and tokenizer."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from palingenesis.rl.chat import ChatTemplate, ParsedTurn, ToolResults, parser_for
from palingenesis.rl.chat.template import load_tokenizer
from palingenesis.rl.envs import build
from palingenesis.rl.policy.model import policy_path
from palingenesis.rl.types import Message, Row, ToolCall

ROOT = Path(__file__).parents[2]
PAIR = (347, 82)
CALL = ToolCall("calculator", {"expression": "347 * 82"})
WRITTEN = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "347 * 82"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def examples() -> Iterator[None]:
    """The scripts of examples/rl import each other by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "rl"))
        yield


@pytest.fixture(scope="module")
def make(examples: None) -> ModuleType:
    return importlib.import_module("make_tiny_tools")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(load_tokenizer(policy_path("builtin:tiny-tools")))


def schemas(make: ModuleType) -> Any:
    return build(make.ENV).schemas


# ---- data


def test_committed_rows_are_what_the_script_writes(tmp_path: Path) -> None:
    prepare = importlib.import_module("prepare_multiplication")
    prepare.write(tmp_path)
    assert sorted(path.name for path in prepare.DATA.iterdir()) == ["heldout.jsonl", "train.jsonl"]
    for written in tmp_path.iterdir():
        assert written.read_bytes() == (prepare.DATA / written.name).read_bytes(), written.name


def test_no_product_is_in_two_sets() -> None:
    split = importlib.import_module("prepare_multiplication").split_pairs()
    sets = [set(split.held_out), set(split.supervised), set(split.rl)]
    assert list(map(len, sets)) == [300, 4000, 4000]
    assert len(set().union(*sets)) == 8300
    assert all(100 <= a <= 999 and 10 <= b <= 99 for pairs in sets for a, b in pairs)


# ---- template and tokenizer


def test_the_files_are_those_of_the_script(make: ModuleType, template: ChatTemplate) -> None:
    tokenizer = make.build_tokenizer(make.WORDS, make.chat_template())
    assert tokenizer.backend_tokenizer.to_str() == template.tokenizer.backend_tokenizer.to_str()
    assert tokenizer.chat_template == template.tokenizer.chat_template


def test_a_prompt_is_short_and_shows_the_tool(make: ModuleType, template: ChatTemplate) -> None:
    prompt = template.render([Message("user", "347 * 82 = ?")], schemas(make))
    assert prompt.text == (
        "<|im_start|>system\nTools:\ncalculator(expression)<|im_end|>\n"
        "<|im_start|>user\n347 * 82 = ?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(prompt.ids) == 22


def test_tools_without_parameters_and_several_tools_are_shown(template: ChatTemplate) -> None:
    functions: list[dict[str, Any]] = [
        {"name": "now"},
        {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
        {"name": "none", "parameters": {"type": "object"}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    text = template.render([Message("system", "Be brief."), Message("user", "Hi")], tools).text
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nTools:\nnow()\nadd(a, b)\nnone()<|im_end|>\n<|im_start|>user"
    )


def test_a_call_goes_through_parser_and_template_and_back(make: ModuleType, template: ChatTemplate) -> None:
    tokenizer = template.tokenizer
    ids = tokenizer.encode(WRITTEN)
    assert len(ids) == 14
    assert parser_for("auto", template).parse(template.decode(ids), schemas(make)) == ParsedTurn("", (CALL,), ())
    question = Message("user", "347 * 82 = ?")
    prompt = template.render([question], schemas(make))
    given = ToolResults(template, [tokenizer.eos_token_id]).render([CALL], ["28454"])
    played = [*prompt.ids, *ids, tokenizer.eos_token_id, *given.ids]
    messages = [question, Message("assistant", "", (CALL,)), Message("tool", "28454")]
    whole = template.render(messages, schemas(make))
    assert played == list(whole.ids)
    assert tokenizer.decode(played) == whole.text


def test_the_supervised_conversations_are_what_a_rollout_has(make: ModuleType, template: ChatTemplate) -> None:
    """Tokens as the loop puts them together; only the policy's own are trained on."""
    conversations = make.Conversations(template, schemas(make))
    said = [[template.tokenizer.decode(ids) for ids, own in way(PAIR) if own] for way in conversations.ways]
    end = "<|im_end|>"
    assert said == [
        ["\\boxed{28454}" + end],
        ["<tool_call>\ncalculator(347 * 82)\n</tool_call>" + end],
        [WRITTEN + end, "\\boxed{28454}" + end],
        ["\\boxed{28454}" + end],
    ]
    errors = parser_for("auto", template).parse(said[1][0].removesuffix(end), schemas(make)).errors
    assert len(errors) == 1
    shown = ["calculator(expression)" in template.tokenizer.decode(way(PAIR)[0][0]) for way in conversations.ways]
    assert shown == [True, True, True, False]


# ---- policy


def test_the_policy_is_half_skilled(make: ModuleType, template: ChatTemplate) -> None:
    """It calls sometimes, and a group of 8 most often holds right and wrong answers; a guess is never right."""
    from palingenesis.rl.engines.hf import HFEngine

    engine = HFEngine(transformers_model(), template.tokenizer.pad_token_id)
    try:
        groups = make.play(engine, template, make.split_pairs().held_out[:32], temperature=1.0, count=8)
    finally:
        engine.close()
    every = [episode for group in groups for episode in group]
    assert 0.15 <= make.share(make.is_right, every) <= 0.4
    assert 0.15 <= make.share(make.called, every) <= 0.5
    assert make.share(make.is_right, [episode for episode in every if not make.called(episode)]) <= 0.02
    assert sum(0 < make.share(make.is_right, group) < 1 for group in groups) / len(groups) >= 0.6


def transformers_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_path("builtin:tiny-tools"), dtype=torch.float32)


# ---- tool


def test_many_calls_at_once_are_all_computed(make: ModuleType) -> None:
    """Parsed in threads, CPython 3.11 would fail some of them."""

    async def everything() -> list[str]:
        session = await build(make.ENV).open(Row("r", (Message("user", "?"),), {}))
        calls = [ToolCall("calculator", {"expression": f"{n} * ({n} + 1)"}) for n in range(500)]
        answers = await asyncio.gather(*map(session.call, calls))
        await session.close()
        return [answer.text for answer in answers]

    assert asyncio.run(everything()) == [str(n * (n + 1)) for n in range(500)]


def test_heldout_answers_are_the_products() -> None:
    for line in (ROOT / "examples/rl/data/multiplication/heldout.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        a, b = map(int, row["prompt"].removesuffix(" = ?").split(" * "))
        assert row["answer"] == str(a * b)
