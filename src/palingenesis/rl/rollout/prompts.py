"""Prompts as the policy meets them: a row's messages, the text its environment opened with, the tools it may call.

row.messages + opening (at the end of the last user turn) + how to call (where the template never shows tools)
    ── template, tools ──> Prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from palingenesis.rl.chat.calls import ModelCalls, parser_for
from palingenesis.rl.chat.template import ChatTemplate
from palingenesis.rl.types import Message, Row

Schemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        messages: the row's, with `opening` in the last user turn; what the package adds on tools is not among them.
        ids, text: as rendered.
        reasoning_open: the think block is already open.
    """

    messages: tuple[Message, ...]
    ids: tuple[int, ...]
    text: str
    reasoning_open: bool


class Prompts:
    """Renders prompts with one template.

    Args:
        tool_parser: `env.tool_parser`.
    """

    def __init__(self, template: ChatTemplate, tool_parser: str = "auto") -> None:
        self.template = template
        self._tool_parser = tool_parser

    @cached_property
    def calls(self) -> ModelCalls:
        """The model's call format, read when there are tools: a template without them need not show any.

        Raises:
            ConfigError: there is none that fits.
        """
        return parser_for(self._tool_parser, self.template)

    def render(self, row: Row, schemas: Schemas = (), opening: str = "") -> Prompt:
        """The prompt of `row`.

        Args:
            schemas: the tools, in chat-template form.
            opening: text that the environment's reset returned.

        Raises:
            ModelError: the template refuses the conversation. ConfigError: no call format fits the template.
        """
        messages = _opened(row.messages, opening)
        shown = _ending_system(messages, self.calls.how(schemas)) if schemas else messages
        rendered = self.template.render(shown, schemas, source=row.source)
        return Prompt(messages, rendered.ids, rendered.text, rendered.reasoning_open)


def shown_tools(row: Row, listed: Schemas | None) -> Schemas:
    """The tools in `row`'s prompt: the environment's, or the row's own where that has none.

    Args:
        listed: `Environments.schemas`; None, for tools that only a reset lists, shows nothing yet.
    """
    return () if listed is None else listed or row.tools


def _opened(messages: tuple[Message, ...], opening: str) -> tuple[Message, ...]:
    """`messages` with `opening` at the end of the last user turn; in a turn of its own where there is none."""
    if not opening:
        return messages
    last = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None:
        return (*messages, Message("user", opening))
    return (*messages[:last], _with(messages[last], opening), *messages[last + 1 :])


def _ending_system(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """`messages` with `text` at the end of the system message; in one of its own where there is none."""
    if not text:
        return messages
    if messages[0].role == "system":
        return (_with(messages[0], text), *messages[1:])
    return (Message("system", text), *messages)


def _with(message: Message, text: str) -> Message:
    return replace(message, content=f"{message.content}\n\n{text}" if message.content else text)
