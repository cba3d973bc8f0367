"""Small tokenizers of every kind that policies use, built here: no file and no network is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "user system assistant think tool_call im_end the cat sat on the mat. 1 + 1 = 2\n\n  <div> {} [] () | / \\ é 日本"
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]", "<s>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>x"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _byte_level(prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))


def _metaspace(scheme: str, model: str = "bpe") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False) if model == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "é", "日", "本"]
    if model == "bpe":
        return _train(tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    unigram = trainers.UnigramTrainer(
        vocab_size=200, initial_alphabet=alphabet, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    return _train(tokenizer, unigram)


def _normalizing(normalizer: Any) -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _train(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False))


_BUILD: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level, prefix space": lambda: _byte_level(prefix=True),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never"),
    "unigram": lambda: _metaspace("first", "unigram"),
    "NFC": lambda: _normalizing(normalizers.NFC()),
    "NFKC": lambda: _normalizing(normalizers.NFKC()),
    "lower case": lambda: _normalizing(normalizers.Lowercase()),
    "word pieces": _words,
}
NAMES = tuple(_BUILD)
LOSSLESS = ("byte-level", "byte-level, prefix space", "metaspace first", "metaspace always", "metaspace never")


@cache
def tokenizer(name: str, *, normalized: bool = False) -> Any:
    """A transformers tokenizer of kind `name`. `normalized`: added tokens are looked for in the normalized text."""
    from transformers import PreTrainedTokenizerFast

    raw = _BUILD[name]()
    raw.add_special_tokens([AddedToken(string, normalized=normalized, special=True) for string in SPECIAL])
    raw.add_tokens([AddedToken(string, normalized=normalized, special=False) for string in PLAIN])
    raw.add_tokens([AddedToken("\n\n", normalized=False, special=False)])  # whitespace, as Gemma has it
    unknown = {"unigram": "<unk>", "word pieces": "[UNK]"}.get(name)
    out = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )
    out.chat_template = CHATML
    return out
