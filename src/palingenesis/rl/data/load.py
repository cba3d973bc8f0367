"""Read raw rows from a JSONL, JSON or parquet file, or from a Hugging Face data set.

    name ── a file here? ──> by its ending: JSON lines | JSON | parquet
         ── looks like a path, but nothing is there ──> error that says so (never a hub error)
         ── else ──> datasets.load_dataset(name, split=...)

Invariants: every row is an object and remembers where it stands (`train.jsonl:12`); JSON rows are read one by one, so a
column may hold different types in different rows; of duplicate keys the last wins; nothing is guessed about an
encoding, text that is not UTF-8 is an error with its line. Whatever goes wrong is one DataError with place and cure.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from palingenesis.rl.errors import DataError

_BOM = b"\xef\xbb\xbf"
_KNOWN = "JSONL, JSON or parquet"
_TABLES = {".csv", ".tsv", ".xlsx", ".xls"}
_SUFFIXES = {".jsonl", ".ndjson", ".json", ".parquet"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HALF_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_WHITESPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it was read: its columns, and where it stands, e.g. `train.jsonl:12`."""

    values: Mapping[str, Any]
    source: str


def load(dataset: str, split: str = "train", *, option: str = "data.dataset", **args: Any) -> list[RawRow]:
    """Every row of a data set, in order; never an empty list.

    Args:
        dataset: a file (`.jsonl`, `.json`, `.parquet`, the first two also with `.gz`), a folder written by
            `datasets.save_to_disk`, or a Hugging Face data set id. Relative paths start at the working directory.
        split: the split of a hub data set; a single file has none.
        option: the option that named `dataset`; errors cite it.
        args: further arguments of `datasets.load_dataset`, e.g. `name="main"` for a subset.

    Raises:
        DataError: nothing there, unreadable, malformed, or empty.
    """
    if not dataset.strip():
        raise DataError(f"{option} is empty: name a {_KNOWN} file or a Hugging Face data set id.")
    path = Path(dataset).expanduser()
    if path.is_dir():
        rows = list(_read_folder(path, split, option))
    elif path.exists():
        rows = list(_reader(path, option)(path))
    elif _looks_like_path(dataset):
        raise DataError(f"{option}: there is no file {dataset}{_near(path)} (looked in {Path.cwd()}).")
    else:
        rows = list(_read_hub(dataset, split, option, args))
    if not rows:
        raise DataError(f"{dataset}: holds no rows; {option} needs at least one.")
    return rows


def is_file(dataset: str) -> bool:
    """Whether a data set's name stands for a single file here, rather than a folder or a hub id."""
    return Path(dataset).expanduser().is_file()


# ---------------------------------------------------------------------------------------------------------------- names


def _looks_like_path(name: str) -> bool:
    endings = {suffix.lower() for suffix in Path(name).suffixes}
    return not _HUB_ID.fullmatch(name) or bool(endings & (_SUFFIXES | _TABLES | {".gz"}))


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder} either"
    found = difflib.get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _reader(path: Path, option: str) -> Callable[[Path], Iterator[RawRow]]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] == ".gz"
    ending = (suffixes[:-1] if packed else suffixes)[-1:]
    if ending in ([".jsonl"], [".ndjson"]):
        return _read_json_lines
    if ending == [".json"]:
        return _read_json
    if ending == [".parquet"] and not packed:
        return _read_parquet
    if ending and ending[0] in _TABLES:
        raise DataError(
            f"{option}: {path} is a table without types ({ending[0]}); convert it to JSONL, e.g. "
            f"pandas.read_csv('{path.name}').to_json('{path.name.split('.')[0]}.jsonl', orient='records', lines=True)."
        )
    raise DataError(f"{option}: cannot tell what {path} is; name a file with the ending .jsonl, .json or .parquet.")


# ----------------------------------------------------------------------------------------------------------------- JSON


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path))
    return path.open("rb")


def _read_json_lines(path: Path) -> Iterator[RawRow]:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                text = _decode(line.removeprefix(_BOM) if number == 1 else line, f"{path}:{number}")
                if text.strip():
                    yield RawRow(_parse_line(text, f"{path}:{number}", first=number == 1), f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        _unreadable(path, error)


def _read_json(path: Path) -> Iterator[RawRow]:
    try:
        with _open(path) as file:
            data = file.read().removeprefix(_BOM)
    except (OSError, EOFError, zlib.error) as error:
        _unreadable(path, error)
    start = data.lstrip()[:1]
    if start == b"{" and _first_line_is_row(data):
        yield from _read_json_lines(path)
        return
    text = "\n".join(_decode(line, f"{path}:{number}") for number, line in enumerate(data.split(b"\n"), start=1))
    if start == b"[":
        yield from _read_array(text, path)
    elif text.strip():
        yield RawRow(_parse(text, str(path), document=True), str(path))


def _first_line_is_row(data: bytes) -> bool:
    """JSON lines in a `.json` file: the first line is an object by itself."""
    line = data.lstrip().split(b"\n", 1)[0]
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_array(text: str, path: Path) -> Iterator[RawRow]:
    """Elements of a JSON list one at a time, so that an error can name index and line."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position, line, index = _skip(text, text.index("[") + 1), 1, 0
    counted = 0
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        source = f"{path}[{index}] (line {line})"
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            _malformed(source, error)
        yield RawRow(_object(value, source, text[counted:position]), source)
        index, position = index + 1, _skip(text, position)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        elif not text.startswith("]", position):
            raise DataError(f"{source}: not JSON: expected ',' or ']' after this row; the file may be cut off.")
    if _skip(text, position + 1) < len(text):
        raise DataError(f"{path}: not JSON: text follows the closing ']' of the list; remove it.")


def _skip(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _decode(line: bytes, source: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise DataError(
            f"{source}: not UTF-8 (byte 0x{byte:02x} at position {error.start}); save the file with UTF-8 encoding."
        ) from None


def _parse_line(text: str, source: str, *, first: bool) -> dict[str, Any]:
    if first and text.strip() in ("{", "["):
        raise DataError(
            f"{source}: a row ends after {text.strip()!r}; JSONL has one whole object a line. "
            "Name the file .json if it is one JSON document."
        )
    return _parse(text, source)


def _parse(text: str, source: str, *, document: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if document and isinstance(error, json.JSONDecodeError) else ""
        _malformed(source + line, error)
    return _object(value, source, text)


def _object(value: Any, source: str, text: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
        raise DataError(f'{source}: a row must be an object such as {{"prompt": "..."}}, not {kind}.')
    if _HALF_SURROGATE.search(text):
        _check_surrogates(value, source)
    return value


def _check_surrogates(row: dict[str, Any], source: str) -> None:
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{source}: column {column!r} holds half of a surrogate pair (\\ud...), which is no character; "
                "write the whole pair or remove it."
            ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null or a number")


def _malformed(source: str, error: ValueError | RecursionError) -> NoReturn:
    if isinstance(error, RecursionError):
        raise DataError(f"{source}: nested too deeply to read; flatten the row.") from None
    if isinstance(error, json.JSONDecodeError):
        where = f"character {error.colno}" + (f" of line {error.lineno}" if error.lineno > 1 else "")
        raise DataError(f"{source}: not JSON: {error.msg} at {where}; fix or remove this row.") from None
    raise DataError(f"{source}: not JSON: {_one_line(error)}.") from None


# ------------------------------------------------------------------------------------------------------ parquet and hub


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        index = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    yield RawRow(values, f"{path}[{index}]")
                    index += 1
    except (OSError, pyarrow.ArrowException) as error:
        _unreadable(path, error)


def _read_folder(path: Path, split: str, option: str) -> Iterator[RawRow]:
    if not any((path / name).exists() for name in ("dataset_dict.json", "dataset_info.json")):
        files = sorted(entry.name for entry in path.iterdir() if _SUFFIXES & set(entry.suffixes))
        inside = f", e.g. {path / files[0]}" if files else ""
        raise DataError(f"{option}: {path} is a folder; name a {_KNOWN} file in it{inside}.")
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        _unreadable(path, error)
    if isinstance(data, dict):
        if split not in data:
            raise DataError(f"{option}: {path} has no split {split!r}; it has {', '.join(sorted(data))}.")
        data = data[split]
    for index, values in enumerate(data):
        yield RawRow(values, f"{path}[{index}]")


def _read_hub(name: str, split: str, option: str, args: Mapping[str, Any]) -> Iterator[RawRow]:
    import datasets

    try:
        data = datasets.load_dataset(name, split=split, **args)
    except Exception as error:  # noqa: BLE001 - the client raises a dozen unrelated types; all mean: no data set
        raise DataError(
            f"{option}: {name!r} is no file here, and cannot be loaded from the Hugging Face hub as split {split!r}: "
            f"{type(error).__name__}: {_one_line(error)}. Check name, split and connection, or name a local file."
        ) from None
    for index, values in enumerate(data):
        yield RawRow(values, f"{name}[{index}]")


def _unreadable(path: Path, error: Exception) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _one_line(error)
    cure = "Check that the file is whole and is what its ending says."
    raise DataError(f"{path}: cannot be read: {reason}. {cure}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
