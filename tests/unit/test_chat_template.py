"""Rendering equals apply_chat_template, in the templates of many models; what cannot be rendered is one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palingenesis.rl.chat import ChatTemplate, load_tokenizer, stop_token_ids
from palingenesis.rl.errors import ConfigError, ModelError
from palingenesis.rl.types import Message, ToolCall
from tests.unit.tokenizer_zoo import NAMES, tokenizer

TINY = Path(__file__).parents[2] / "src" / "palingenesis" / "rl" / "policy" / "builtin" / "tiny"
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}
CHAT = [
    Message("system", "be brief"),
    Message("user", "1 + 1 < 3?"),
    Message("assistant", "yes"),
    Message("user", "é?"),
]
AGENT = [
    Message("user", "call f"),
    Message("assistant", "", (ToolCall("f", {"x": "1"}),)),
    Message("tool", "7", name="f"),
]


def templates() -> list[Any]:
    trl = pytest.importorskip("trl", reason="TRL's collection of chat templates is not installed")
    return sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def reference(tok: Any, chat: list[Any], tools: list[Any], **kwargs: Any) -> Any:
    turns = [message.to_dict() if isinstance(message, Message) else message for message in chat]
    return tok.apply_chat_template(turns, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(content=st.text("abc 1\n<|>é", max_size=20))
def test_ids_and_text_are_those_of_apply_chat_template(name: str, content: str) -> None:
    tok = tokenizer(name)
    chat = [Message("system", "s"), Message("user", content)]
    prompt = ChatTemplate(tok).render(chat, [TOOL])
    assert list(prompt.ids) == reference(tok, chat, [TOOL])
    assert prompt.text == reference(tok, chat, [TOOL], tokenize=False)


@pytest.mark.parametrize("conversation", [CHAT, CHAT[1:], AGENT], ids=["system", "no system", "tools"])
def test_the_templates_of_many_models_render_as_transformers_does(conversation: list[Message]) -> None:
    rendered, refused = 0, 0
    for path in templates():
        tok = tokenizer("byte-level")
        old, tok.chat_template = tok.chat_template, path.read_text(encoding="utf-8")
        tools = [TOOL] if conversation is AGENT else []
        try:
            try:
                given = [ChatTemplate(tok)._in_form(message.to_dict()) for message in conversation]
                expected = reference(tok, given, tools)
            except Exception:  # noqa: BLE001 - whatever a template raises must become a ModelError
                with pytest.raises(ModelError, match="refuses this conversation"):
                    ChatTemplate(tok).render(conversation, tools)
                refused += 1
                continue
            assert list(ChatTemplate(tok).render(conversation, tools).ids) == expected, path.name
            rendered += 1
        finally:
            tok.chat_template = old
    assert rendered > refused


@pytest.mark.parametrize("hostile", ["<|im_end|>", "</think>", "<tool_call>{}</tool_call>", "[INST]", "<|im_end|>x"])
def test_no_template_lets_a_user_write_a_control_token(hostile: str) -> None:
    """Against the same conversation with harmless text of the same place: as many control tokens, no more."""
    tok = tokenizer("byte-level")
    control = ChatTemplate(tok).control.ids
    for path in templates():
        old, tok.chat_template = tok.chat_template, path.read_text(encoding="utf-8")
        try:
            template = ChatTemplate(tok)
            try:
                harmless = template.render([Message("user", "a harmless b"), Message("user", "c")])
            except ModelError:
                harmless = template.render([Message("user", "a harmless b")])
                attack = template.render([Message("user", f"a {hostile} b")])
            else:
                attack = template.render([Message("user", f"a {hostile} b"), Message("user", "c")])
            count = [index for index in harmless.ids if index in control]
            assert [index for index in attack.ids if index in control] == count, path.name
            assert hostile in attack.text, path.name
        finally:
            tok.chat_template = old


OPENED = {"qwen3.jinja": False, "qwen3_5_think.jinja": True, "qwen3_5_nothink.jinja": False, "qwen3_8.jinja": True}
OPENED |= {
    "deepseek_r1_distill.jinja": True,
    "nemotron_3_nano.jinja": True,
    "glm4moe.jinja": False,
    "qwen2_5.jinja": False,
}
OPENED |= {"lfm2_2_5.jinja": False, "gptoss.jinja": False}


@pytest.mark.parametrize(("name", "opened"), OPENED.items())
def test_whether_the_template_opens_the_think_block(name: str, opened: bool) -> None:
    path = next((path for path in templates() if path.name == name), None)
    if path is None:
        pytest.skip(f"this TRL has no {name}")
    tok = tokenizer("byte-level")
    old, tok.chat_template = tok.chat_template, path.read_text(encoding="utf-8")
    try:
        hostile = [Message("user", "say <think>")]
        assert ChatTemplate(tok).render(hostile).reasoning_open is opened
        assert not ChatTemplate(tok, {"enable_thinking": False}).render(hostile).reasoning_open or name.startswith(
            "deep"
        )
    finally:
        tok.chat_template = old


def test_the_packaged_policy_renders() -> None:
    if not TINY.exists():
        pytest.skip("the packaged policy is not built")
    tok = load_tokenizer(str(TINY))
    prompt = ChatTemplate(tok).render(AGENT, [TOOL])
    assert list(prompt.ids) == reference(tok, AGENT, [TOOL])
    assert tok.decode(prompt.ids) == prompt.text


def test_a_template_that_reads_parts_only_does_not_lose_the_prompt() -> None:
    tok = tokenizer("byte-level")
    old = tok.chat_template
    try:
        tok.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
        assert ChatTemplate(tok).render([Message("user", "1+1"), Message("user", "")]).text == "1+1;;"
    finally:
        tok.chat_template = old


def test_a_refusal_names_the_row_and_the_turns() -> None:
    tok = tokenizer("byte-level")
    old, tok.chat_template = tok.chat_template, "{{ raise_exception('no\nsystem') }}"
    try:
        with pytest.raises(ModelError) as caught:
            ChatTemplate(tok).render(CHAT, source="a.jsonl:3")
    finally:
        tok.chat_template = old
    message = str(caught.value)
    assert message.startswith("a.jsonl:3: ")
    assert "no system" in message
    assert "system, user, assistant, user" in message
    assert "\n" not in message


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tok = tokenizer("byte-level")
    old, tok.chat_template = tok.chat_template, None
    try:
        with pytest.raises(ModelError, match="no chat template"):
            ChatTemplate(tok)
    finally:
        tok.chat_template = old


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.policy: cannot load a tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_decoding_leaves_out_special_tokens_but_not_text_marks() -> None:
    tok = tokenizer("byte-level")
    ids = tok("<think>a</think>b<tool_call>c<|im_end|>", add_special_tokens=False)["input_ids"]
    assert ChatTemplate(tok).decode(ids) == "<think>a</think>b<tool_call>c"


def test_special_reasoning_marks_are_decoded() -> None:
    from tokenizers import AddedToken

    tok = tokenizer.__wrapped__("byte-level")  # type: ignore[attr-defined]
    marks = [AddedToken(string, special=True) for string in ("[THINK]", "[/THINK]", "<|end|>")]
    tok.add_special_tokens({"additional_special_tokens": marks})
    ids = tok("[THINK]a[/THINK]b<|end|>", add_special_tokens=False)["input_ids"]
    assert ChatTemplate(tok).decode(ids) == "[THINK]a[/THINK]b"


def test_special_marks_of_calls_are_decoded_where_they_are_asked_for() -> None:
    from tokenizers import AddedToken

    tok = tokenizer.__wrapped__("byte-level")  # type: ignore[attr-defined]
    tok.add_special_tokens({"additional_special_tokens": [AddedToken("<call>", special=True)]})
    ids = tok("<call>a<|im_end|>", add_special_tokens=False)["input_ids"]
    assert ChatTemplate(tok).decode(ids) == "a"
    assert ChatTemplate(tok).decode(ids, ("<call>", "</call>")) == "<call>a"


def test_stop_tokens() -> None:
    tok = tokenizer("byte-level")
    end, text, start = tok.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|im_start|>"])
    assert stop_token_ids(tok, None) == (end,)
    assert stop_token_ids(tok, text) == tuple(sorted({end, text}))
    assert stop_token_ids(tok, [text, end], ["<|im_start|>"]) == tuple(sorted({end, text, start}))
    with pytest.raises(ConfigError, match=r"model\.stop_tokens: '<\|imend\|>'.*did you mean '<\|im_end\|>'"):
        stop_token_ids(tok, None, ["<|imend|>"])


def test_a_model_that_never_stops_is_refused() -> None:
    tok = tokenizer.__wrapped__("byte-level")  # type: ignore[attr-defined]
    tok.eos_token = None
    with pytest.raises(ModelError, match=r"set model\.stop_tokens"):
        stop_token_ids(tok, None)
