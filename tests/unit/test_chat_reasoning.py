"""Reasoning is removed before anything is scored, however the template and the policy wrote it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palingenesis.rl.chat import opened_by, split_reasoning

HERMES = '<tool_call>\n{"name": "f", "arguments": {"code": "print(\'</think>\')"}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=code>\nprint('</think>')\n</parameter>\n</function>\n</tool_call>"
LIST = '<tool_call>[{"name": "f", "arguments": {"code": "</think>"}}]</tool_call>'

CASES = [
    # text, prompt opened it, reasoning, answer
    ("42", False, "", "42"),
    (" 42\n", False, "", " 42\n"),
    ("", False, "", ""),
    ("", True, "", ""),
    ("<think>\na\n</think>\n\n42", False, "a", "42"),
    ("<think>\n\n</think>\n\n42", False, "", "42"),
    ("a\n</think>\n\n42 ", True, "a", "42 "),
    ("a</think>42", False, "a", "42"),
    ("<think>a", False, "a", ""),
    ("a 42", True, "a 42", ""),
    ("<think>a</think>", False, "a", ""),
    ("<think>a</think>1<think>b</think>2", False, "a1b", "2"),
    ("a</think>1<think>b", True, "a1b", ""),
    ("<think>a</think>1<think>b", False, "a1b", ""),
    ("<think>a<think>b</think>c</think>2", False, "abc", "2"),
    ("<think>again</think>2", True, "again", "2"),
    ("Sure. <think>a</think> 2", False, "Sure. a", "2"),
    (f"a</think>\n{HERMES}", True, "a", HERMES),
    (f"a {HERMES} b</think>2", True, f"a {HERMES} b", "2"),
    (f"a {HERMES}", True, f"a {HERMES}", ""),
    (HERMES, False, "", HERMES),
    (XML, False, "", XML),
    (LIST, False, "", LIST),
    (f"<think>{XML} b</think>{XML}", False, f"{XML} b", XML),
    (f"<think>{LIST}</think>2", False, LIST, "2"),
    # a call form that is only mentioned quotes nothing
    (f"use <tool_call> {{name}}</think>{HERMES}", True, "use <tool_call> {name}", HERMES),
    (f"write <function=f> <parameter=code></think>{XML}", True, "write <function=f> <parameter=code>", XML),
    (f"<tool_call><function=f><parameter=code></think>{XML}", True, "<tool_call><function=f><parameter=code>", XML),
    ("[THINK]a[/THINK]2", False, "a", "2"),
    ("[/THINK]2", False, "", "[/THINK]2"),
    ("<seed:think>a</seed:think>2", False, "a", "2"),
    ("<think>[/THINK] a</think>2", False, "[/THINK] a", "2"),
    ("<|channel>thought\na\n<channel|>2", False, "a", "2"),
    ("<|START_THINKING|>a<|END_THINKING|>2", False, "a", "2"),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>2", False, "a", "2"),
    ("<|channel|>final<|message|>2", False, "", "2"),
    ("<|channel|>analysis<|message|>a", False, "a", ""),
    ("bye<|end|>", False, "", "bye<|end|>"),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "answer"), CASES)
def test_reasoning_and_answer(text: str, opened: bool, reasoning: str, answer: str) -> None:
    assert split_reasoning(text, opened) == (reasoning, answer)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", "42", " ", HERMES]), max_size=8).map("".join), st.booleans()
)
def test_no_mark_of_the_policy_reaches_the_answer(text: str, opened: bool) -> None:
    reasoning, answer = split_reasoning(text, opened)
    for part in (reasoning, answer):
        outside = part.replace(HERMES, "")
        assert "<think>" not in outside
        assert "</think>" not in outside
    assert split_reasoning(answer, False) == ("", answer)


@given(st.text(max_size=30))
def test_a_closing_tag_quoted_in_an_argument_never_ends_the_reasoning(code: str) -> None:
    call = "<tool_call>" + json.dumps({"name": "f", "arguments": {"code": f"{code}</think>"}}) + "</tool_call>"
    reasoning, answer = split_reasoning(f"hm {call}", True)
    assert answer == ""
    assert reasoning.startswith("hm")


LONG = 1_000_000  # characters; a quadratic walk over them takes minutes
FLOODS = [
    HERMES,
    XML,
    LIST,
    "</think>",
    "<think>a</think>",
    f"<think>{HERMES}</think>{XML}",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>["</think>',
    '<tool_call>["</think>","',
    "<tool_call><function=f>",
    "<tool_call><function=</think>",
    "<tool_call><function=f><parameter=a></think>",
    "<tool_call><function=f><parameter=a></think></parameter>",
    "</function>   </think>",
    "<tool_call>   </think>",
]


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("start", ["", "<tool_call>", "<tool_call><function=f>", '<tool_call>{"a": "'])
def test_no_flood_takes_more_than_linear_time(flood: str, start: str) -> None:
    text = start + flood * (LONG // len(flood))
    before = time.process_time()
    split_reasoning(text, False)
    assert time.process_time() - before < 1.0


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|assistant|>\n<think></think>", False),
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|im_start|>user\nwrite <think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_whether_the_prompt_opened_the_block(prompt: str, opened: bool) -> None:
    assert opened_by(prompt) is opened
