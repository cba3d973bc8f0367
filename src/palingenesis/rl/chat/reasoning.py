"""Tell reasoning and final answer apart in a sampled turn.

    [prompt: ...<think>\n]  sampled: a b </think> c      opened: everything up to the close is reasoning
    [prompt: ...]           sampled: <think> a </think> c
    [prompt: ...]           sampled: <think> a           never closed: all reasoning, the answer is empty
    [prompt: ...]           sampled: c                   no reasoning; the answer is the text as it stands

Invariants: the answer is what follows the last closing mark, so a second block does not leak into it; a policy that
never closes its block has given no answer; a mark quoted inside an argument of a well-formed tool call is text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """How a model family encloses reasoning. `bare_close`: the close counts even where nothing opened the block."""

    open: str
    close: str
    bare_close: bool = False


MARKS = (
    # Qwen3 and later, DeepSeek-R1, GLM-4.5, Nemotron 3, LFM2.5, SmolLM3. Prompts often open it, hence bare_close.
    Marks("<think>", "</think>", bare_close=True),
    Marks("[THINK]", "[/THINK]"),  # Magistral, Ministral reasoning
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    Marks("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
)
# gpt-oss names the channel of its answer; with the analysis gone, the name is no part of the answer.
_FINAL_CHANNEL = re.compile(r"\A\s*(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")

# An error of json counts the lines before it, so the time of many of them is quadratic: a turn with more is babble.
_MOST_MENTIONS = 100
_CALL = re.compile(r"<tool_call>\s*(?=[{\[])")
# A second opening tag inside means that the first one was a mention: what follows it is no argument.
_XML_CALL = re.compile(r"<tool_call>\s*<function=[^>\n]+>((?:(?!<function=).)*?)</function>\s*</tool_call>", re.DOTALL)
_XML_ARGUMENT = re.compile(
    r"<parameter=[^>\n]+>\n?((?:(?!<parameter=|<function=|<tool_call>).)*?)\n?</parameter>", re.DOTALL
)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """`(reasoning, answer)` of a sampled turn.

    Args:
        text: the turn as decoded, without its end-of-turn token.
        opened: the prompt had already opened the block (`opened_by`).

    The reasoning is everything before the last closing mark, marks removed, outer whitespace stripped. An answer after
    reasoning loses its leading whitespace; without reasoning it is `text`, unchanged. Tool calls stay in the answer.
    """
    block: Marks | None = None  # what opened the block; unknown when the prompt did
    inside = opened
    counted: list[_Event] = []
    for event in _events(text):
        if event.opens and not inside:
            block, inside = event.marks, True
        elif event.opens and event.marks is (block or event.marks):
            pass  # opened again: the same block
        elif not event.opens and (block in (None, event.marks) if inside else event.marks.bare_close):
            block, inside = None, False
        else:
            continue  # another family's mark: text
        counted.append(event)
    if inside:
        return _strip_marks(text, counted), ""
    boundary = counted[-1].end if counted else 0
    answer = _FINAL_CHANNEL.sub("", text[boundary:], count=1)
    return (_strip_marks(text[:boundary], counted), answer.lstrip()) if counted else ("", answer)


def opened_by(rendered_prompt: str) -> bool:
    """Whether a prompt, rendered up to where the policy starts to write, has opened the reasoning block.

    Only the very end counts: a user may write `<think>` anywhere, and a template may write an empty, closed block.
    """
    tail = rendered_prompt.rstrip()
    return any(tail.endswith(marks.open.rstrip()) for marks in MARKS)


@dataclass(frozen=True, slots=True)
class _Event:
    start: int
    end: int
    opens: bool
    marks: Marks


def _events(text: str) -> list[_Event]:
    """Marks in the text, in order, without those quoted in arguments of calls."""
    events = [
        _Event(found.start(), found.end(), opens, marks)
        for marks in MARKS
        for mark, opens in ((marks.open, True), (marks.close, False))
        if mark in text
        for found in re.finditer(re.escape(mark), text)
    ]
    events.sort(key=lambda event: event.start)
    return _outside(events, _quoted(text)) if events else []


def _outside(events: list[_Event], spans: list[tuple[int, int]]) -> list[_Event]:
    """Events that begin in none of the spans; both are in order, so one walk tells."""
    outside, reach, upcoming = [], 0, iter(spans)
    span = next(upcoming, None)
    for event in events:
        while span and span[0] <= event.start:
            reach = max(reach, span[1])
            span = next(upcoming, None)
        if event.start >= reach:
            outside.append(event)
    return outside


def _quoted(text: str) -> list[tuple[int, int]]:
    """Spans of arguments of well-formed calls, by their starts. A mention of the call form that does not parse quotes
    nothing."""
    spans = []
    decoder = json.JSONDecoder(strict=False)
    mentions = 0
    for call in _CALL.finditer(text):
        try:
            _, end = decoder.raw_decode(text, call.end())
        except (ValueError, RecursionError):
            mentions += 1
            if mentions >= _MOST_MENTIONS:
                break
            continue
        spans.append((call.end(), end))
    for function in _XML_CALL.finditer(text):
        for argument in _XML_ARGUMENT.finditer(text, function.start(1), function.end(1)):
            spans.append(argument.span(1))
    return sorted(spans)


def _strip_marks(text: str, events: list[_Event]) -> str:
    pieces, position = [], 0
    for event in events:
        pieces.append(text[position : event.start])
        position = event.end
    pieces.append(text[position:])
    return "".join(pieces).strip()
