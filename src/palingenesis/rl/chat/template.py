"""Render chats with the model's own template, as text and as token ids.

    messages, tools ──template──> text ──tokenizer──> ids          no control string in any content: exactly what
                                                                   apply_chat_template gives
                    ──mark──template──> text with marks ──> ids    else: contents are cut where a control token
                                                                   would come out (untrusted.py); the template's own
                                                                   stay whole

Who may write what: user and tool turns, tool names and schemas are untrusted, no control token comes out of them.
System and assistant turns are the data author's, who may write the model's text marks (`<think>`, `<tool_call>` where
they are not special), and yet cannot end a turn: special tokens are neutral there too.

Invariants: `RenderedPrompt.ids` are the tokens of `RenderedPrompt.text`; whatever a template or tokenizer raises
becomes one ModelError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palingenesis.rl.chat.reasoning import MARKS, opened_by
from palingenesis.rl.chat.untrusted import ControlTokens, free_mark, split_marked
from palingenesis.rl.errors import ConfigError, ModelError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.types import Message

_TRUSTED_ROLES = ("system", "assistant")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the policy meets it: its token ids, the same as text, and whether it has opened the think block."""

    ids: tuple[int, ...]
    text: str
    reasoning_open: bool


class ChatTemplate:
    """A tokenizer's chat template with fixed arguments.

    Args:
        tokenizer: a transformers tokenizer that has a chat template.
        kwargs: variables for the template (`model.chat_template_kwargs`), e.g. `{"enable_thinking": False}`.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "the policy"
            raise ModelError(
                f"{name}: the tokenizer has no chat template; use the instruct version of the model, or save "
                "a template beside it as chat_template.jinja."
            )
        self.tokenizer = tokenizer
        self.control = ControlTokens(tokenizer)
        self._kwargs = dict(kwargs or {})
        self._silent = _silent(tokenizer)
        self._in_parts = self._wants_parts()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        source: str = "",
    ) -> RenderedPrompt:
        """Token ids and text of a conversation, up to where the policy starts to write.

        Args:
            messages: at least one turn.
            tools: schemas in chat-template form.
            source: where the row stands; errors begin with it.

        Raises:
            ModelError: the template refuses the conversation.
        """
        chat = [self._in_form(message.to_dict()) for message in messages]
        schemas = [dict(tool) for tool in tools]
        if not self._has_control(chat, schemas):
            text = self._apply(chat, schemas, add_generation_prompt, source)
            ids = tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        else:
            mark = free_mark(json.dumps([chat, schemas], ensure_ascii=False, default=str))
            marked_chat = [self._mark_message(message, mark) for message in chat]
            marked = self._apply(marked_chat, self.control.mark(schemas, mark), add_generation_prompt, source)
            text = "".join(split_marked(marked, mark))
            ids = self.control.encode_marked(marked, mark)
        return RenderedPrompt(ids, text, add_generation_prompt and opened_by(text))

    def decode(self, ids: Sequence[int], marks: Sequence[str] = ()) -> str:
        """Text of sampled tokens: special tokens are left out, but for those that mark reasoning or stand in `marks`.

        Args:
            marks: strings whose tokens stay, special or not: those of a call format.
        """
        kept = [index for index in ids if index not in self._silent or self._silent[index] in marks]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _wants_parts(self) -> bool:
        """Whether the template reads content as a list of parts only: some drop a string without a word."""
        probe = {"role": "user", "content": "palingenesis"}
        parts = {"role": "user", "content": [{"type": "text", "text": "palingenesis"}]}
        for form in (probe, parts):
            try:
                text = self._apply([form], [], True, "")
            except ModelError:  # not with this conversation; the real one will tell
                continue
            if "palingenesis" in text:
                return form is parts
        return False

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._in_parts:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}] if message["content"] else []}

    def _has_control(self, chat: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> bool:
        if any(self.control.found_in(text) for text in _strings(schemas)):
            return True
        return any(
            self.control.found_in(text, special_only=message["role"] in _TRUSTED_ROLES)
            for message in chat
            for text in _strings(message)
        )

    def _mark_message(self, message: dict[str, Any], mark: str) -> Any:
        return self.control.mark(message, mark, special_only=message["role"] in _TRUSTED_ROLES)

    def _apply(self, chat: Any, schemas: Any, add_generation_prompt: bool, source: str) -> str:
        where = f"{source}: " if source else ""
        try:
            text: str = self.tokenizer.apply_chat_template(
                chat,
                tools=schemas or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # a template is the model's code and may raise anything
            reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
            roles = ", ".join(message["role"] for message in chat)
            raise ModelError(
                f"{where}the model's chat template refuses this conversation (turns: {roles}): {reason}. "
                "Change the row, data.system_prompt or model.chat_template_kwargs."
            ) from error
        return text


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder or hub id.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # hub client, JSON, tokenizers: many types, one meaning
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ModelError(
            f"model.policy: cannot load a tokenizer from {path!r}: {type(error).__name__}: {reason}. "
            "Name a folder with tokenizer.json, or a Hugging Face model id."
        ) from error


def stop_token_ids(
    tokenizer: Any, generation_config_eos: int | Sequence[int] | None, extra: Iterable[str] = ()
) -> tuple[int, ...]:
    """Ids that end the policy's turn, in ascending order.

    Args:
        generation_config_eos: `eos_token_id` of the model's generation config.
        extra: further tokens by their strings (`model.stop_tokens`).

    Raises:
        ConfigError: an extra string is not one token of the vocabulary.
        ModelError: nothing would ever end a turn.
    """
    ids = set([generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    for string in extra:
        if string not in vocabulary:
            known = [token.content for token in tokenizer.added_tokens_decoder.values()]
            raise ConfigError(
                f"model.stop_tokens: {string!r} is not a token of this model{nearest(string, known)}; "
                "name single tokens of its vocabulary."
            )
        ids.add(vocabulary[string])
    if not ids:
        raise ModelError("the model names no end-of-sequence token, so no turn would end; set model.stop_tokens.")
    return tuple(sorted(ids))


def _silent(tokenizer: Any) -> dict[int, str]:
    """Special tokens that `decode` leaves out: all but the marks of a family whose opening mark this tokenizer has."""
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    own = [marks for marks in MARKS if any(string in marks.open for string in special.values())]
    return {
        index: string
        for index, string in special.items()
        if not any(string in marks.open + marks.close for marks in own)
    }


def _strings(value: Any) -> Iterable[str]:
    """Every string inside nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
