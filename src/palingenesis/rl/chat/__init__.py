"""Between chats and token ids: the model's own template, untrusted text, what is reasoning in an answer and what calls.

Nothing here samples, runs a tool, scores or reads data.
"""

from palingenesis.rl.chat.calls import CallParser, ModelCalls, ParsedTurn, parser_for
from palingenesis.rl.chat.reasoning import opened_by, split_reasoning
from palingenesis.rl.chat.results import Given, ToolResults
from palingenesis.rl.chat.template import ChatTemplate, RenderedPrompt, load_tokenizer, stop_token_ids
from palingenesis.rl.chat.untrusted import ControlTokens

__all__ = [
    "CallParser",
    "ChatTemplate",
    "ControlTokens",
    "Given",
    "ModelCalls",
    "ParsedTurn",
    "RenderedPrompt",
    "ToolResults",
    "load_tokenizer",
    "opened_by",
    "parser_for",
    "split_reasoning",
    "stop_token_ids",
]
