"""What the model's own template adds after a turn that called tools: their answers, up to where the next turn begins.

    sampled  ...<tool_call>...</tool_call><|im_end|>
    given    \\n<|im_start|>user\\n<tool_response>\\n7\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

Nothing sampled is tokenized again. A stand-in conversation (a question, a turn with one call, the real answers) is
rendered, and what follows the stop token that ends the stand-in's call is given. Which stop token that is, counted from
the start, depends on the template alone and is found once; counting is safe, because untrusted text yields no stop token
(untrusted.py). The template escapes, trims and frames the answers as it always does; what it changes in earlier turns
(Qwen3 drops reasoning) stands before the cut.

Invariants: no control token comes out of an answer; the ids are those of the whole conversation's rendering, from that
stop token on. A template that cannot show a tool's answer is an error at start, as in TRL and vLLM: told in another
role's name, the answer would be a turn that the model was never trained on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palingenesis.rl.chat.template import ChatTemplate, RenderedPrompt
from palingenesis.rl.errors import ModelError
from palingenesis.rl.types import Message, ToolCall

# Letters that no template changes.
_MARK = "palingenesismark"
_ANSWERS = ("palingenesisfirst", "palingenesissecond")
_NO_CALL = ToolCall("", {})
_MOST_CHARACTERS = 16  # characters a token looked at in each half of a long answer: its length costs no time


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens that the template adds after a sampled turn.

    Attributes:
        ids: from behind the stop token that ended the turn up to where the policy writes.
        text: the ids decoded, control tokens included, as in a rendered prompt.
        reasoning_open: the next turn's think block is already open.
    """

    ids: tuple[int, ...]
    text: str
    reasoning_open: bool


class ToolResults:
    """Renders tools' answers with one template.

    Args:
        stop_token_ids: the tokens that end the policy's turn (`template.stop_token_ids`).

    Raises:
        ModelError: the template cannot show tools' answers, or writes no stop token after a call.
    """

    def __init__(self, template: ChatTemplate, stop_token_ids: Sequence[int]) -> None:
        self._template = template
        self._stops = frozenset(stop_token_ids)
        # The mark stands in an argument of the call. Templates that never read calls show it as content; it is not in both
        # places, because others (Gemma 4) write the content behind the answers.
        self._reads_calls = True
        self._stops_to_cut = self._probe()

    def messages(self, calls: Sequence[ToolCall], answers: Sequence[str]) -> tuple[Message, ...]:
        """The tool turns as messages: an answer for each call, in order, then those to malformed calls."""
        padded = [*calls, *[_NO_CALL] * (len(answers) - len(calls))]
        return tuple(
            Message("tool", clean(answer), name=call.name, tool_call_id=call.id)
            for call, answer in zip(padded, answers, strict=True)
        )

    def render(self, calls: Sequence[ToolCall], answers: Sequence[str], ended_by: int | None = None) -> Given:
        """What is given after a turn that a stop token ended.

        Args:
            calls: the turn's calls.
            answers: at least one; one for each call, in order; further ones answer malformed calls.
            ended_by: the stop token. Where the template ends turns with another (`<|endoftext|>` was sampled), that one
                is given first, or the next turn would stand in one that never ended.

        Raises:
            ModelError: the template refuses these answers.
        """
        rendered = self._render(calls, answers)
        stops = [place for place, token in enumerate(rendered.ids) if token in self._stops]
        cut = stops[self._stops_to_cut - 1]
        ids = rendered.ids[cut + (ended_by in (None, rendered.ids[cut])) :]
        return Given(ids, self._decode(ids), rendered.reasoning_open)

    def cut(self, text: str, max_tokens: int) -> str:
        """`text` in at most `max_tokens` of the policy's tokens: a longer one is its head and tail, a note between.

        Where not even the note has room, the head alone.
        """
        window = max_tokens * _MOST_CHARACTERS
        if len(text) <= 2 * window:
            text = clean(text)
            head = tail = self._encode(text)
            if len(head) <= max_tokens:
                return text
        else:
            head, tail = self._encode(clean(text[:window])), self._encode(clean(text[-window:]))

        def both(keep: int) -> str:
            start = len(self._decode(head[: keep - keep // 2]).rstrip("\ufffd"))  # a character cut in two is left out
            end = len(text) - len(self._decode(tail[len(tail) - keep // 2 :]).lstrip("\ufffd"))
            end = max(start, end)
            return clean(f"{text[:start]}{_note(end - start)}{text[end:]}")

        def only_head(keep: int) -> str:
            return clean(text[: len(self._decode(head[:keep]).rstrip("\ufffd"))])

        room = max_tokens - len(self._encode(_note(len(text))))
        return self._longest(both, room, max_tokens) or self._longest(only_head, max_tokens, max_tokens)

    def _longest(self, shorten: Callable[[int], str], keep: int, max_tokens: int) -> str:
        """`shorten(keep)` with the most tokens kept that fits; nothing when none does.

        Parts put together are not always as many tokens as they were apart.
        """
        while keep > 0:
            candidate = shorten(keep)
            excess = len(self._encode(candidate)) - max_tokens
            if excess <= 0:
                return candidate
            keep -= excess
        return ""

    def _probe(self) -> int:
        """Settles what the stand-in looks like; returns `_find_cut`."""
        reason = "it leaves out the turn that calls a tool"
        for self._reads_calls in (True, False):
            try:
                ids = self._render([_NO_CALL, _NO_CALL], _ANSWERS).ids
            except ModelError as error:
                reason = " ".join(str(error.__cause__).split())
                continue
            if _MARK in self._decode(ids):
                return self._find_cut(ids)
        raise _no_tools(reason)

    def _find_cut(self, ids: Sequence[int]) -> int:
        """How many stop tokens there are up to and including the one that ends the stand-in's call."""
        mark, *answers = (self._position(ids, text) for text in (_MARK, *_ANSWERS))
        if not mark < answers[0] < answers[1] <= len(ids):
            raise _no_tools("it leaves their answers out")
        stop = next((place for place in range(mark, answers[0]) if ids[place] in self._stops), None)
        if stop is None:
            names = ", ".join(repr(self._decode([index])) for index in sorted(self._stops))
            raise ModelError(
                f"the model's chat template ends a turn that calls a tool with none of the policy's stop tokens ({names}), "
                "so such a turn would never end; add the token it writes there to model.stop_tokens."
            )
        return sum(token in self._stops for token in ids[: stop + 1])

    def _render(self, calls: Sequence[ToolCall], answers: Sequence[str]) -> RenderedPrompt:
        """The stand-in conversation. Some templates name the tool of the call when they show the answer."""
        first = calls[0] if calls else _NO_CALL
        name = first.name if first.name and not self._template.control.found_in(first.name) else "tool"
        call = Message("assistant", "", (ToolCall(name, {"mark": _MARK}, first.id),))
        turn = call if self._reads_calls else Message("assistant", _MARK)
        return self._template.render([Message("user", "palingenesis"), turn, *self.messages(calls, answers)])

    def _position(self, ids: Sequence[int], text: str) -> int:
        """How many of the first tokens it takes for `text` to stand in them; more than there are when it never does."""
        places = range(len(ids) + 1)
        return bisect_left(places, True, key=lambda place: text in self._decode(ids[:place]))

    def _encode(self, text: str) -> tuple[int, ...]:
        return self._template.control.encode(text)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._template.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def clean(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair: no tokenizer reads those."""
    return text.encode("utf-8", "replace").decode()


def _note(characters: int) -> str:
    return f"\n[... {characters} characters left out ...]\n"


def _no_tools(reason: str) -> ModelError:
    return ModelError(
        f"the model's chat template cannot show what tools answer: {reason.rstrip('.')}. Use a model whose template has "
        "a tool role, or save a template that has one beside the model as chat_template.jinja."
    )
