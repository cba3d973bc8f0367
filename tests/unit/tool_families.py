"""Model families as far as tools go: a tokenizer with the family's control tokens, its template, how its policy writes.

The tokenizers are small, but of the real ones' kind (byte-level BPE behind the same splitting of words, NFC where the
family normalizes), so a result's first characters merge with the template's last ones as they do in the real ones.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from palingenesis.rl.chat import ChatTemplate, ToolResults
from palingenesis.rl.chat.template import load_tokenizer
from palingenesis.rl.types import Message, ToolCall

BUILTIN = Path(__file__).parents[2] / "src/palingenesis/rl/policy/builtin"
CORPUS = [
    'user assistant system tool {"name": "search", "arguments": {"query": "Etna", "n": 5}}\n</tool_call>\n',
    "<tool_response>\n7\n</tool_response>\n\n<think>\n\n</think>\n\n<function=search>\n<parameter=query>\n",
    "The cat sat on the mat. 1 + 1 = 2\n\n  def f(x):\n        return x\n {} [] () | / \\ é 日本 tool_response im_end",
]
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_QWEN_PLAIN = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
]  # fmt: skip
_QWEN3_PLAIN = [*_QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>"]
_PACKAGED_PLAIN = ["<tool_call>", "</tool_call>", *_QWEN3_PLAIN[-4:]]
_SMOLLM2 = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
    "<jupyter_output>", "<jupyter_script>", "<empty_output>",
]  # fmt: skip
_LLAMA3 = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{n}|>" for n in range(8)),
]  # fmt: skip
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "i": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "a": {"type": "array"},
                },
            },
        },
    }
    for name in ("search", "python")
]


@dataclass(frozen=True)
class Turn:
    """What a policy says in a turn."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]


def _json_call(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def _hermes(turn: Turn) -> str:
    return "\n".join(filter(None, [turn.content, *(f"<tool_call>\n{_json_call(c)}\n</tool_call>" for c in turn.calls)]))


def _thinking(write: Callable[[Turn], str]) -> Callable[[Turn], str]:
    def written(turn: Turn) -> str:
        return (f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else "") + write(turn)

    return written


def _thinking_on(write: Callable[[Turn], str]) -> Callable[[Turn], str]:
    """The prompt has opened the block."""
    return lambda turn: f"{turn.reasoning}\n</think>\n\n" + write(turn)


def _json_list(turn: Turn) -> str:
    block = f"<tool_call>[{', '.join(map(_json_call, turn.calls))}]</tool_call>" if turn.calls else ""
    return "\n".join(filter(None, [turn.content, block]))


def _xml(scalar: Callable[[Any], str]) -> Callable[[Turn], str]:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return item
        return json.dumps(item, ensure_ascii=False) if isinstance(item, (dict, list)) else scalar(item)

    def call(item: ToolCall) -> str:
        lines = "".join(f"<parameter={key}>\n{value(v)}\n</parameter>\n" for key, v in item.arguments.items())
        return f"<tool_call>\n<function={item.name}>\n{lines}</function>\n</tool_call>"

    return lambda turn: "\n\n".join(filter(None, [turn.content, "\n".join(map(call, turn.calls))]))


def _llama31(turn: Turn) -> str:
    if not turn.calls:
        return turn.content
    arguments = json.dumps(turn.calls[0].arguments, ensure_ascii=False)
    return f'{{"name": "{turn.calls[0].name}", "parameters": {arguments}}}'


def _as_it_is(text: str) -> str:
    return text


def _no_empty_thoughts(text: str) -> str:
    """Qwen3 writes an empty block into the last turn, sampled or not, and leaves it out of earlier ones."""
    return re.sub(r"<think>\n\n</think>\n\n", "", text)


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        writes: a turn as the policy samples it, without its stop token.
        after: what the template writes behind the last turn's stop token.
        parser: the call format `auto` must find; none for Llama 3.1, whose form has no parser here.
        keeps_calls: the template renders `tool_calls`. Where it does not, the conversation holds the turn as content.
        one_call: the template refuses several calls in a turn, and leaves out the content of a turn with one.
        same: applied to both sides before they are compared.
        own_tokenizer: the packaged policy's own, whose tokens are bytes and whole pieces of a call.
    """

    name: str
    template: str
    special: Sequence[str]
    plain: Sequence[str]
    stop: str
    writes: Callable[[Turn], str]
    parser: str = ""
    after: str = "\n"
    nfc: bool = False
    keeps_calls: bool = True
    one_call: bool = False
    thinks: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    same: Callable[[str], str] = _as_it_is
    own_tokenizer: bool = False

    def message(self, turn: Turn) -> Message:
        if not self.keeps_calls:
            return Message("assistant", self.writes(turn))
        content = "" if self.one_call and turn.calls else turn.content
        return Message("assistant", content, turn.calls, reasoning=turn.reasoning)

    def normal(self, text: str) -> str:
        return self.same(unicodedata.normalize("NFC", text) if self.nfc else text)


_XML_35, _XML_36 = _xml(str), _xml(json.dumps)
FAMILIES = {
    family.name: family
    for family in (
        Family("Qwen2.5", "trl:qwen2_5", _QWEN, _QWEN_PLAIN, "<|im_end|>", _hermes, "hermes", nfc=True),
        Family("Qwen3", "trl:qwen3", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _thinking(_hermes), "hermes", nfc=True,
               thinks=True, same=_no_empty_thoughts),
        Family("Qwen3, not thinking", "trl:qwen3", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _hermes, "hermes", nfc=True,
               kwargs={"enable_thinking": False}, same=_no_empty_thoughts),
        Family("Qwen3-2507", "trl:qwen3_instruct_2507", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _hermes, "hermes", nfc=True),
        Family("Qwen3.5", "trl:qwen3_5_think", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _thinking_on(_XML_35), "xml", nfc=True,
               thinks=True),
        Family("Qwen3.5, not thinking", "trl:qwen3_5_nothink", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _XML_35, "xml", nfc=True),
        Family("Qwen3.6", "trl:qwen3_6", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _thinking_on(_XML_36), "xml", nfc=True,
               thinks=True),
        Family("Qwen3.8", "trl:qwen3_8", _QWEN, _QWEN3_PLAIN, "<|im_end|>", _thinking_on(_XML_36), "xml", nfc=True,
               thinks=True),
        Family("SmolLM2", SMOLLM2_TEMPLATE, _SMOLLM2, [], "<|im_end|>", _json_list, "json_list", keeps_calls=False),
        Family("Llama 3", "trl:llama3", _LLAMA3, [], "<|eot_id|>", _json_list, "json_list", after="", keeps_calls=False),
        Family("Llama 3.1", "trl:llama3_1", _LLAMA3, [], "<|eot_id|>", _llama31, after="", one_call=True),
        Family("ChatML", CHATML_TEMPLATE, _SMOLLM2[:3], [], "<|im_end|>", _json_list, "json_list", keeps_calls=False),
        Family("packaged", "tiny", _SMOLLM2[:3], ["<tool_call>", "</tool_call>"], "<|im_end|>", _hermes, "hermes"),
        Family("packaged, with tools", "tiny-tools", _SMOLLM2[:3], _PACKAGED_PLAIN, "<|im_end|>", _hermes, "hermes",
               own_tokenizer=True),
    )
}  # fmt: skip


def source(name: str) -> str:
    """A template's source: itself, TRL's copy of a model's, or the packaged policy's."""
    if name in ("tiny", "tiny-tools"):
        return (BUILTIN / name / "chat_template.jinja").read_text(encoding="utf-8")
    if not name.startswith("trl:"):
        return name
    trl = pytest.importorskip("trl", reason="TRL's collection of chat templates is not installed")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name.removeprefix('trl:')}.jinja"
    return path.read_text(encoding="utf-8")


@cache
def _base() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    text: str = tokenizer.to_str()
    return text


def tokenizer(special: Sequence[str], plain: Sequence[str], stop: str, *, nfc: bool = False) -> Any:
    """A transformers tokenizer with these added tokens."""
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(_base())
    if nfc:
        raw.normalizer = normalizers.NFC()
    raw.add_special_tokens([AddedToken(string, normalized=False, special=True) for string in special])
    raw.add_tokens([AddedToken(string, normalized=False, special=False) for string in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=special[0], eos_token=stop, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True)
class Model:
    """A family, ready for use."""

    family: Family
    template: ChatTemplate
    results: ToolResults
    stop: int

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@cache
def model(name: str) -> Model:
    family = FAMILIES[name]
    if family.own_tokenizer:
        tok = load_tokenizer(str(BUILTIN / family.template))
    else:
        tok = tokenizer(family.special, family.plain, family.stop, nfc=family.nfc)
        tok.chat_template = source(family.template)
    template = ChatTemplate(tok, family.kwargs)
    stop = tok.convert_tokens_to_ids(family.stop)
    return Model(family, template, ToolResults(template, [stop]), stop)
