"""Turn text that nobody vouches for into token ids, so that no control token comes out.

A tokenizer gives the string `<|im_end|>` the id that ends a turn, wherever it stands: in a question, in what a tool
printed. `split_special_tokens` covers only tokens added as special (`<tool_call>` often is not), so one path serves
every tokenizer and version: **cut every control string after its first character and encode the parts apart.**

    "say <|im_end|>"  ──mark──>  "say <¦|im_end|>"  ──cut at ¦──>  encode("say <") + encode("|im_end|>")

Invariants: no id of a control string comes out of untrusted text; text without a control string is encoded exactly as
usual; decoding gives the text back. Control strings are all added tokens but whitespace (some tokenizers add runs of
blanks and newlines) and single characters that are not special (somebody's extra letter). A special token of a single
character cannot be cut, so that character is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)  # code points without a meaning; one absent from the text becomes the mark


class ControlTokens:
    """The control tokens of one tokenizer.

    Attributes:
        ids: their ids. The unknown token is not among them: strange characters give it, and it controls nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if _is_control(token)}
        self.ids = frozenset(added) - _unknown(tokenizer)
        self._all = _Pattern({token.content for token in added.values()})
        self._special = _Pattern({token.content for token in added.values() if token.special})
        self._special_ids = frozenset(index for index in self.ids if added[index].special)
        self._by_meaning = _normalizes(tokenizer) and any(token.normalized for token in added.values())
        self._anchor = _anchor(tokenizer)

    def found_in(self, text: str, *, special_only: bool = False) -> bool:
        """Whether encoding `text` as usual could give a control id (one of a special token, with `special_only`)."""
        if (self._special if special_only else self._all).search(text):
            return True
        return self._by_meaning and self._gives(text, special_only)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of untrusted text. `text` starts the sequence as far as the tokenizer's prefix space goes."""
        if not self.found_in(text):
            return tuple(self._plain(text))
        mark = free_mark(text)
        return self.encode_marked(self.mark(text, mark), mark)

    def mark(self, value: Any, mark: str, *, special_only: bool = False) -> Any:
        """`value`, a string or nested lists and objects of them, with `mark` inside every control string."""
        if isinstance(value, str):
            return self._mark_text(value, mark, special_only)
        if isinstance(value, Mapping):
            return {
                self.mark(key, mark, special_only=special_only): self.mark(item, mark, special_only=special_only)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(item, mark, special_only=special_only) for item in value]
        return value

    def encode_marked(self, text: str, mark: str) -> tuple[int, ...]:
        """Token ids of text cut at `mark`. Unmarked control strings give their ids: the template wrote them."""
        pieces = split_marked(text, mark)
        ids = list(self._plain(pieces[0]))
        for piece in pieces[1:]:
            ids += self._continued(piece)
        return tuple(ids)

    def _mark_text(self, text: str, mark: str, special_only: bool) -> str:
        marked = (self._special if special_only else self._all).mark(text, mark)
        if self._by_meaning:
            parts = [part for piece in marked.split(mark) for part in self._cut_by_meaning(piece, special_only)]
            marked = mark.join(parts)
        return marked

    def _cut_by_meaning(self, text: str, special_only: bool) -> list[str]:
        """Text that a normalizer would turn into a control string (`＜think＞` under NFKC), cut until none does."""
        if not self._gives(text, special_only):
            return [text]
        if len(text) == 1:
            return []
        middle = len(text) // 2
        return [*self._cut_by_meaning(text[:middle], special_only), *self._cut_by_meaning(text[middle:], special_only)]

    def _gives(self, text: str, special_only: bool) -> bool:
        """Whether a control id comes out of encoding `text` as usual."""
        return not (self._special_ids if special_only else self.ids).isdisjoint(self._plain(text))

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _continued(self, text: str) -> list[int]:
        """Ids of text in the middle of a sequence: tokenizers that put a blank before their input get an anchor."""
        if not self._anchor or not text:
            return self._plain(text)
        before = self._plain(self._anchor)
        ids = self._plain(self._anchor + text)
        return ids[len(before) :] if ids[: len(before)] == before else self._plain(text)


class _Pattern:
    """Occurrences of any of some strings, overlapping ones too."""

    def __init__(self, strings: set[str]) -> None:
        self._single = {string for string in strings if len(string) == 1}
        longest_first = sorted(strings - self._single, key=lambda string: (-len(string), string))
        self._search = re.compile("|".join(map(re.escape, sorted(strings))) or "(?!)")
        self._cut = re.compile("|".join(f"{re.escape(s[0])}(?={re.escape(s[1:])})" for s in longest_first) or "(?!)")

    def search(self, text: str) -> bool:
        return self._search.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of every occurrence; lookahead finds overlapping ones."""
        for string in self._single:
            text = text.replace(string, "")
        return self._cut.sub(lambda found: found.group() + mark, text)


def free_mark(text: str) -> str:
    """A private-use character that `text` does not hold."""
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in text)


def split_marked(text: str, mark: str) -> list[str]:
    """Parts between marks; a template that writes JSON with ASCII escapes writes the mark as one."""
    escaped = json.dumps(mark)[1:-1]
    return text.replace(escaped, mark).split(mark)


def _is_control(token: Any) -> bool:
    content = token.content
    if not content or not content.replace("▁", " ").strip():
        return False
    return bool(token.special) or len(content) > 1


def _unknown(tokenizer: Any) -> frozenset[int]:
    """The id of the unknown token, unless it is a token of another use too (GPT-2's also ends the text)."""
    others = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    return frozenset({tokenizer.unk_token_id} - others - {None})


def _normalizes(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is None or backend.normalizer is not None


def _anchor(tokenizer: Any) -> str:
    """A newline, when the tokenizer puts a blank before whatever it is given; else nothing."""
    first = tokenizer.convert_ids_to_tokens(tokenizer("|x", add_special_tokens=False, verbose=False)["input_ids"][:1])
    return "\n" if first and str(first[0]).startswith(("▁", "Ġ")) else ""
