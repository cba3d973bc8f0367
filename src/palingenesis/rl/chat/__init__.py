"""Between chats and token ids: the model's own template, untrusted text, and what is reasoning in an answer.

Call formats and tool schemas are in this folder too; nothing here samples, scores or reads data.
"""

from palingenesis.rl.chat.reasoning import opened_by, split_reasoning
from palingenesis.rl.chat.template import ChatTemplate, RenderedPrompt, load_tokenizer, stop_token_ids
from palingenesis.rl.chat.untrusted import ControlTokens

__all__ = [
    "ChatTemplate",
    "ControlTokens",
    "RenderedPrompt",
    "load_tokenizer",
    "opened_by",
    "split_reasoning",
    "stop_token_ids",
]
