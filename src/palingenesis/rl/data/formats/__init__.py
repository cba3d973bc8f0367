"""Row formats: what a raw row's columns mean. One file a format; `convert` picks by `data.format` or by looking.

Invariant: a format turns one raw row into one `Row` or raises a DataError that names the row's place and the column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from palingenesis.rl.data.formats import chat
from palingenesis.rl.data.load import RawRow
from palingenesis.rl.errors import ConfigError, DataError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.types import Row

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import DataConfig


class RowFormat(Protocol):
    """A way of writing rows."""

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Whether a row's columns are of this format; asked when `data.format` is auto."""
        ...

    def convert(self, raw: RawRow, config: DataConfig) -> Row:
        """The row as the trainer uses it. Raises DataError."""
        ...


class NemoGymFormat:
    """NeMo Gym rows, recognised so that they are not taken for broken chat rows."""

    def matches(self, values: Mapping[str, Any]) -> bool:
        return isinstance(values.get("responses_create_params"), (dict, str))

    def convert(self, raw: RawRow, config: DataConfig) -> Row:
        raise DataError(
            f"{raw.source}: column 'responses_create_params' makes this a NeMo Gym row, and data.format nemo_gym "
            "is not built yet; give the rows a messages or prompt column and set data.format: chat."
        )


FORMATS: dict[str, RowFormat] = {"nemo_gym": NemoGymFormat(), "chat": chat.ChatFormat()}


def convert(raw: RawRow, config: DataConfig) -> Row:
    """One row by `data.format`; `auto` asks each format in turn and falls back to chat, whose errors name the cure."""
    if config.format == "auto":
        chosen = next((form for form in FORMATS.values() if form.matches(raw.values)), FORMATS["chat"])
    elif config.format in FORMATS:
        chosen = FORMATS[config.format]
    else:
        raise ConfigError(
            f"data.format: {config.format!r} is unknown{nearest(config.format, FORMATS)}; "
            f"use auto, {' or '.join(sorted(FORMATS))}."
        )
    return chosen.convert(raw, config)


__all__ = ["FORMATS", "RowFormat", "convert"]
