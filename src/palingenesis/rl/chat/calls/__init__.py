"""Call formats: how a family of models writes tool calls. One file a format; `parser_for` picks it.

    sampled turn ── split_reasoning ──> answer ── parse ──> what is said | calls to run | what was wrong with the others

Invariants: a call runs only when it is written exactly in the model's form; everything else is an error in words that
the policy can act on, and nothing is repaired: the policy would learn to rely on it. Calls inside reasoning never get
here. Names are not checked against the schemas: the session answers an unknown tool.

A new format is a new file in this folder with a `PARSER`; files whose names begin with an underscore are shared parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2

from palingenesis.rl.chat.template import ChatTemplate
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import resolve
from palingenesis.rl.types import ToolCall

OPTION = "env.tool_parser"


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn, read.

    Attributes:
        content: the text without its well-formed calls; malformed ones stay in it, for they are text. A turn without a
            call is unchanged.
        calls: well-formed calls in the order they stand in.
        errors: one message for each malformed call, for the policy to read.
    """

    content: str
    calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]


class CallParser(Protocol):
    """A call format."""

    @property
    def marks(self) -> Sequence[str]:
        """The strings that enclose a call. Where a tokenizer has them as special tokens, decoding must not drop them."""
        ...

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        """Read a turn.

        Args:
            text: the turn after its reasoning was split off, without its end-of-turn token.
            schemas: the tools in chat-template form; formats whose values are bare text read the types there.
        """
        ...

    def matches(self, template: str) -> bool:
        """Whether the source of a chat template writes calls in this format."""
        ...

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The schemas and the form of a call, to end the system message with."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """A call format as one model uses it: where its template shows the tools by itself, `how` has nothing to add."""

    parser: CallParser
    in_template: bool

    @property
    def marks(self) -> Sequence[str]:
        return self.parser.marks

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        return self.parser.parse(text, schemas)

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return "" if self.in_template or not schemas else self.parser.how(schemas)


def formats() -> dict[str, CallParser]:
    """Every format of this folder by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return {name: importlib.import_module(f"{__name__}.{name}").PARSER for name in sorted(names)}


def parser_for(name: str, template: ChatTemplate) -> ModelCalls:
    """The call format of a model.

    Args:
        name: a format's name, `module:PARSER` or `file.py:PARSER`; `auto` reads it off the template: the format it
            writes calls in, or `json_list` where it never reads `tools`.

    Raises:
        ConfigError: there is no such format, or `auto` recognises none.
    """
    source = template.tokenizer.get_chat_template(tools=[])
    known = formats()
    in_template = _reads_tools(source)
    if name != "auto":
        return ModelCalls(_checked(resolve(name, known, OPTION), name), in_template)
    if not in_template:
        return ModelCalls(known["json_list"], in_template)
    found = next((parser for parser in known.values() if parser.matches(source)), None)
    if found is None:
        raise ConfigError(
            f"{OPTION}: auto does not recognise the form in which the model's chat template writes tool calls; name one "
            f"of {', '.join(known)}, or `file.py:PARSER` with a parser of your own."
        )
    return ModelCalls(found, in_template)


def _checked(parser: Any, name: str) -> CallParser:
    """A parser, which may be the user's own."""
    missing = [member for member in ("parse", "matches", "how", "marks") if not hasattr(parser, member)]
    if missing:
        raise ConfigError(
            f"{OPTION}: {name} has no {', no '.join(missing)}; a parser has all of parse(text, schemas), matches(template), "
            "how(schemas) and marks."
        )
    found: CallParser = parser
    return found


def _reads_tools(source: str) -> bool:
    """Whether a template mentions the variable `tools`; its prose may hold the word."""
    return any(kind == "name" and value == "tools" for _, kind, value in jinja2.Environment().lex(source))


__all__ = ["CallParser", "ModelCalls", "ParsedTurn", "formats", "parser_for"]
