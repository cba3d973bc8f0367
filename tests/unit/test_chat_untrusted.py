"""No control token comes out of untrusted text, in any tokenizer; ordinary text is encoded as usual."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.chat import ChatTemplate, ControlTokens
from palingenesis.rl.types import Message, ToolCall
from tests.unit.tokenizer_zoo import LOSSLESS, NAMES, PLAIN, SPECIAL, tokenizer

CONTROL = SPECIAL + PLAIN
FRAGMENTS = [*CONTROL, *(s[: len(s) // 2] for s in CONTROL), *(s[len(s) // 2 :] for s in CONTROL)]
WIDE = ["＜think＞", "＜|IM_END|＞", "<THINK>", "<|Im_End|>", "[inst]", "＜ｔｏｏｌ＿ｃａｌｌ＞"]
texts = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS), st.sampled_from(WIDE), st.sampled_from(["\n\n", "\n", " ", "<", "<|", "the cat"])
    ),
    max_size=8,
).map("".join)


def control_ids(tok: Any) -> set[int]:
    return {index for index, token in tok.added_tokens_decoder.items() if token.content in CONTROL}


def template_only(tok: Any, turns: int) -> list[int]:
    """Control ids that the ChatML template itself writes, in order."""
    start, end = tok.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    return [start, end] * turns + [start]


@pytest.mark.parametrize("normalized", [False, True], ids=["exact", "normalized"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(text=texts)
def test_no_control_id_comes_out(name: str, normalized: bool, text: str) -> None:
    tok = tokenizer(name, normalized=normalized)
    control = ControlTokens(tok)
    assert control.ids >= control_ids(tok)
    assert not control.ids & set(control.encode(text))


@pytest.mark.parametrize("normalized", [False, True], ids=["exact", "normalized"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_a_rendered_prompt_holds_the_templates_control_tokens_only(
    name: str, normalized: bool, contents: list[str]
) -> None:
    tok = tokenizer(name, normalized=normalized)
    roles = ["user", "tool", "user"]
    prompt = ChatTemplate(tok).render([Message(role, text) for role, text in zip(roles, contents, strict=False)])
    control = control_ids(tok)
    assert [index for index in prompt.ids if index in control] == template_only(tok, len(contents))


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from([*FRAGMENTS, "the", "<"]), max_size=8).map("".join))
def test_decoding_gives_the_text_back(name: str, text: str) -> None:
    tok = tokenizer(name)
    ids = ControlTokens(tok).encode(text)
    decoded = tok.decode(ids, clean_up_tokenization_spaces=False)
    assert decoded.removeprefix(" ") == text  # a tokenizer's own prefix blank is decoded or not


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(text=st.text("abc <>|/\n1é", max_size=20))
def test_text_without_a_control_string_is_encoded_as_usual(name: str, text: str) -> None:
    tok = tokenizer(name)
    assert list(ControlTokens(tok).encode(text)) == tok(text, add_special_tokens=False)["input_ids"]


def test_whitespace_tokens_stay_whole() -> None:
    tok = tokenizer("byte-level")
    assert tok.convert_tokens_to_ids("\n\n") in ControlTokens(tok).encode("a\n\nb<|im_end|>")


def test_tools_names_and_arguments_are_untrusted_too() -> None:
    tok = tokenizer("byte-level")
    tool = {"type": "function", "function": {"name": "f<|im_end|>", "description": "<tool_call>", "<think>": [1, None]}}
    prompt = ChatTemplate(tok).render([Message("user", "hi")], [tool])
    control = control_ids(tok)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert [index for index in prompt.ids if index in control].count(end) == 1
    assert json.dumps([tool]) in prompt.text


def test_a_template_that_escapes_its_json_hides_no_mark() -> None:
    tok = tokenizer("byte-level")
    template = ChatTemplate(tok)
    old = tok.chat_template
    try:
        tok.chat_template = old.replace("tools | tojson", "tools | tojson(ensure_ascii=True)")
        prompt = template.render([Message("user", "hi")], [{"type": "function", "function": {"name": "<|im_end|>"}}])
    finally:
        tok.chat_template = old
    assert "\\ue0" not in prompt.text
    assert [i for i in prompt.ids if i in control_ids(tok)] == template_only(tok, 1)


def test_the_authors_turns_may_use_text_marks_but_end_no_turn() -> None:
    tok = tokenizer("byte-level")
    turns = [
        Message("system", "Write <think> first. <|im_end|>"),
        Message("user", "<think>"),
        Message("assistant", "<think>x</think>y <|im_end|>"),
        Message("user", "z"),
    ]
    ids = ChatTemplate(tok).render(turns).ids
    think, close, end = tok.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    assert (ids.count(think), ids.count(close), ids.count(end)) == (2, 1, 4)


def test_arguments_of_calls_stay_objects() -> None:
    tok = tokenizer("byte-level")
    old = tok.chat_template
    try:
        calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
        tok.chat_template = "{% for m in messages %}" + calls + "{% endfor %}"
        call = Message("assistant", "", (ToolCall("f", {"x": "<|im_end|>"}),))
        prompt = ChatTemplate(tok).render([call, Message("tool", "r")])
    finally:
        tok.chat_template = old
    assert prompt.text == "<|im_end|>"
    assert not set(prompt.ids) & control_ids(tok)


def test_private_use_characters_in_the_text_are_kept() -> None:
    tok = tokenizer("byte-level")
    text = "\ue000\ue001 <|im_end|> \\ue000"
    prompt = ChatTemplate(tok).render([Message("user", text)])
    assert text in prompt.text
    assert tok.decode(prompt.ids) == prompt.text


def test_a_special_token_of_one_character_is_left_out() -> None:
    from tokenizers import AddedToken

    tok = tokenizer.__wrapped__("byte-level")  # type: ignore[attr-defined]
    tok.add_special_tokens({"additional_special_tokens": [AddedToken("§", special=True)]})
    tok.add_tokens([AddedToken("日", special=False)])
    ids = ControlTokens(tok).encode("a§b<|im§_end|>日")
    assert tok.decode(ids) == "ab<|im_end|>日"
    assert not control_ids(tok) & set(ids)
