"""What an option takes, read from its schema and said in words; and the error that says a value is not that.

FieldInfo ──kind_of──> whole, number, text ... ──expects──> "a whole number, at least 2"   (errors, docs, help)
ValidationError ──first_problem──> OptionError: one option, one line
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import nearest


class OptionError(ConfigError):
    """A `ConfigError` about one option, kept in parts so that the loader can add where the option was set."""

    def __init__(self, option: str, problem: str, place: str = "") -> None:
        super().__init__(" ".join(": ".join(part for part in (place, option, problem) if part).split("\n")))
        self.option = option
        self.problem = problem


def default_of(field: FieldInfo) -> Any:
    """A field's default; None for a required one."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


Kind = Literal["choice", "switch", "text", "texts", "mapping", "truth", "whole", "number"]


def _bare(field: FieldInfo) -> tuple[Any, list[Any]]:
    """A field's type without `Annotated` and `| None`, and the bounds found on the way."""
    annotation, metadata = field.annotation, list(field.metadata)
    if get_origin(annotation) in (Union, UnionType) and type(None) in get_args(annotation):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    return annotation, metadata


def kind_of(field: FieldInfo) -> Kind:
    """What sort of value an option takes. A `switch` is auto, true or false."""
    annotation, _ = _bare(field)
    origins: dict[Any, Kind] = {Literal: "choice", UnionType: "switch", Union: "switch", list: "texts", dict: "mapping"}
    plain: dict[Any, Kind] = {bool: "truth", int: "whole", float: "number", str: "text"}
    return plain[annotation] if annotation in plain else origins[get_origin(annotation)]


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The values of a closed choice, as they are written in YAML; empty for an open one."""
    kind = kind_of(field)
    if kind == "choice":
        return tuple(get_args(_bare(field)[0]))
    return ("auto", "true", "false") if kind == "switch" else ()


def expects(field: FieldInfo) -> str:
    """What a value must be, in words: `a whole number, at least 2`."""
    if choices := choices_of(field):
        return "one of " + ", ".join(choices)
    words: dict[Kind, str] = {
        "truth": "true or false",
        "whole": "a whole number",
        "number": "a number",
        "text": "a text",
        "texts": "a list of texts such as [a, b]",
        "mapping": "a mapping such as {key: value}",
    }
    return words[kind_of(field)] + _bounds_in_words(_bare(field)[1])


BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "not empty"}


def _bounds_in_words(metadata: Sequence[Any]) -> str:
    flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    said = [
        words if name == "min_length" else f"{words} {getattr(item, name)}"
        for item in flat
        for name, words in BOUNDS.items()
        if hasattr(item, name)
    ]
    return f", {' and '.join(said)}" if said else ""


def show(value: Any) -> str:
    """A value for a message of one line."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_problem(cls: type[BaseModel], error: ValidationError) -> OptionError:
    """The first of pydantic's findings as one line; an unknown name goes first, for it explains a missing one."""
    found = min(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    name = str(found["loc"][0]) if found["loc"] else ""
    field = cls.model_fields.get(name)
    if field is None:
        return OptionError(name, f"there is no such option{nearest(name, cls.model_fields)}")
    if found["type"] == "missing":
        return OptionError(name, f"is required; set it to {expects(field)}")
    if found["type"] == "value_error":
        return OptionError(name, str(found["ctx"]["error"]))
    value = found["input"]
    hint = nearest(str(value), choices_of(field))
    return OptionError(name, f"must be {expects(field)}, not {show(value)}{hint}")
