"""The prompts a run trains and is evaluated on.

    load ──> convert each row ──> held-out split ──> drop prompts over the limit ──> RowSet

Invariants: which side a row falls on depends on the rows' contents alone, never on their order, the tokenizer or a
limit; equal rows fall on the same side; nothing leaves silently: every dropped row is counted under its reason, and a
few are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from palingenesis.rl.data.formats import convert
from palingenesis.rl.data.formats.chat import content_hash
from palingenesis.rl.data.load import RawRow, is_file, load
from palingenesis.rl.errors import ConfigError, DataError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.types import Row

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import DataConfig

_NAMED = 3  # dropped rows named in a message


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows that were left out for one reason, e.g. `Dropped("prompt longer than 512 tokens", 7, ("a.jsonl:3",))`."""

    reason: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        rows = "row" if self.count == 1 else "rows"
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.count} {rows} dropped: {self.reason} ({', '.join(self.examples)}{more})"


@dataclass(frozen=True, slots=True)
class RowSet:
    """The rows of a run.

    Attributes:
        train: rows to draw from; never empty.
        held_out: rows of `data.eval_dataset`, or those split off by `data.eval_size`; may be empty.
        dropped: what was left out, by reason.
        notices: sentences worth a log line, e.g. rows that stand on both sides.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.train + self.held_out

    def without(self, reason_of: Callable[[Row], str | None]) -> RowSet:
        """The set less the rows for which `reason_of` gives a reason.

        Raises:
            DataError: no training row is left.
        """
        gone: dict[str, list[str]] = {}

        def keep(rows: tuple[Row, ...]) -> tuple[Row, ...]:
            kept = []
            for row in rows:
                reason = reason_of(row)
                if reason is None:
                    kept.append(row)
                else:
                    gone.setdefault(reason, []).append(row.source)
            return tuple(kept)

        train, held_out = keep(self.train), keep(self.held_out)
        dropped = tuple(Dropped(why, len(places), tuple(places[:_NAMED])) for why, places in gone.items())
        if not train:
            raise DataError(f"no training row is left: {'; '.join(map(str, dropped)) or 'there was none'}.")
        return replace(self, train=train, held_out=held_out, dropped=self.dropped + dropped)


def build(
    config: DataConfig, *, count_tokens: Callable[[Row], int] | None = None, max_prompt_tokens: int = 0
) -> RowSet:
    """Load, convert, split and limit the rows that `config` names.

    Args:
        count_tokens: tokens of a row's rendered prompt; None measures nothing and drops nothing.
        max_prompt_tokens: longer prompts are dropped; 0 means no limit. The caller has already combined
            `data.max_prompt_tokens` with what fits into `rollout.max_model_len`.

    Raises:
        DataError: a file, row or column cannot be used, or no training row remains.
    """
    _refuse_idle_options(config)
    if clash := {"dataset", "split", "option"} & set(config.args):
        raise ConfigError(f"data.args: {min(clash)!r} is not for here; use data.dataset and data.split.")
    raws = load(config.dataset, config.split, option="data.dataset", **dict(config.args))
    rows, notices = _convert_all(raws, config)
    train, held_out = rows, tuple[Row, ...]()
    if config.eval_dataset:
        eval_raws = load(config.eval_dataset, config.eval_split, option="data.eval_dataset", **dict(config.args))
        held_out, more = _convert_all(eval_raws, config)
        notices += more + _overlap(raws, eval_raws)
    elif config.eval_size:
        train, held_out = split_off(rows, [content_hash(raw.values) for raw in raws], config.eval_size)
    rowset = RowSet(train, held_out, notices=notices)
    return limit(rowset, count_tokens, max_prompt_tokens) if count_tokens and max_prompt_tokens > 0 else rowset


def split_off(rows: Sequence[Row], hashes: Sequence[str], size: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """`(train, held out)`: the `size` rows smallest by content hash are held out, with all their copies.

    Both sides keep the order of `rows`.

    Raises:
        DataError: fewer rows than asked for, or none left to train on.
    """
    if size >= len(rows):
        raise DataError(
            f"data.eval_size: {size} of {len(rows)} rows leaves nothing to train on; make it smaller or add rows."
        )
    last = sorted(hashes)[size - 1]
    train = tuple(row for row, key in zip(rows, hashes, strict=True) if key > last)
    held_out = tuple(row for row, key in zip(rows, hashes, strict=True) if key <= last)
    if not train:
        raise DataError(
            f"data.eval_size: {size} rows and their copies are all {len(rows)} rows, which leaves nothing to train on; "
            "make it smaller or add rows."
        )
    return train, held_out


def limit(rowset: RowSet, count_tokens: Callable[[Row], int], max_prompt_tokens: int) -> RowSet:
    """The set less the prompts of more than `max_prompt_tokens` tokens."""
    reason = f"prompt longer than {max_prompt_tokens} tokens"
    shortest = 0

    def too_long(row: Row) -> str | None:
        nonlocal shortest
        tokens = count_tokens(row)
        shortest = min(shortest or tokens, tokens)
        return reason if tokens > max_prompt_tokens else None

    try:
        return rowset.without(too_long)
    except DataError as error:
        raise DataError(
            f"{error} The shortest has {shortest} tokens: raise data.max_prompt_tokens or rollout.max_model_len."
        ) from None


def check_verifiers(rows: Iterable[Row], known: Iterable[str]) -> None:
    """Every name in a row's `verifier` column is one of the run's rewards.

    Raises:
        DataError: names the row, the unknown reward and the nearest known one.
    """
    names = set(known)
    for row in rows:
        for name in row.verifier:
            if name not in names:
                raise DataError(
                    f"{row.source or f'row {row.id}'}: column 'verifier' names {name!r}, which is no reward of the config"
                    f"{nearest(name, sorted(names))}; rewards: {', '.join(sorted(names)) or 'none'}."
                )


def _refuse_idle_options(config: DataConfig) -> None:
    """Options that would do nothing beside what was named; only here is it known which names are files."""
    if config.eval_dataset and config.eval_size:
        raise ConfigError("data.eval_size: does nothing beside data.eval_dataset; remove one of them.")
    named = [("data.split", config.split, "train", config.dataset)]
    if config.eval_dataset:
        named.append(("data.eval_split", config.eval_split, "test", config.eval_dataset))
    for option, split, default, dataset in named:
        if split != default and is_file(dataset):
            raise ConfigError(f"{option}: {split!r} does nothing, the file {dataset} has no splits; remove it.")
    if config.args and all(is_file(dataset) for *_, dataset in named):
        raise ConfigError("data.args: arguments of datasets.load_dataset do nothing for a file; remove them.")


def _convert_all(raws: Sequence[RawRow], config: DataConfig) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    rows = [convert(raw, config) for raw in raws]
    return _tell_apart(rows, raws)


def _tell_apart(rows: list[Row], raws: Sequence[RawRow]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Rows of different content under one `id` (merged sets count from 1 each) get `id#hash`, but for the first."""
    owner: dict[str, int] = {}
    changed = 0
    first = ""
    for index, row in enumerate(rows):
        other = owner.setdefault(row.id, index)
        if other != index and raws[other].values != raws[index].values:
            rows[index] = replace(row, id=f"{row.id}#{content_hash(raws[index].values)[:8]}")
            first = first or f"{raws[other].source} and {row.source} share {row.id!r}"
            changed += 1
    if not changed:
        return tuple(rows), ()
    return tuple(rows), (f"{changed} rows repeat the id of a different row ({first}); they got ids of their own.",)


def _overlap(train: Sequence[RawRow], held_out: Sequence[RawRow]) -> tuple[str, ...]:
    seen = {content_hash(raw.values) for raw in train}
    both = [raw.source for raw in held_out if content_hash(raw.values) in seen]
    if not both:
        return ()
    named = ", ".join(both[:_NAMED])
    return (f"{len(both)} rows of data.eval_dataset are also training rows ({named}); held-out figures will flatter.",)
