"""The reference of options, made from the schema: `docs/options.md` and the text of `pgs rl --help`.

In the repository's root, `python -m palingenesis.rl.config.docs` writes the page; with `--check` it exits 1 when the
page is not current.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from palingenesis.rl.config.builtin_rewards import BUILTIN_REWARDS
from palingenesis.rl.config.not_built import NOT_BUILT
from palingenesis.rl.config.schema import SECTIONS
from palingenesis.rl.config.values import default_of, expects

TARGET = Path("docs/options.md")

INTRO = """\
# Options

<!-- Written by `python -m palingenesis.rl.config.docs` from the schema. Do not edit. -->

Every option of `pgs rl`. In the YAML file an option stands under its section; on the command line it is
`--section.option value` and wins over the file. Values are YAML 1.2. `${oc.env:NAME}` is replaced by an environment
variable, `${section.option}` by another option that the file sets; a literal `${` is written `\\${`. An unknown option,
and one that would do nothing in the chosen mode, is an error that names the nearest option or what would make it act.
"""


def options_markdown() -> str:
    """The whole of docs/options.md."""
    parts = [INTRO]
    for section, cls in SECTIONS.items():
        prefix = _prefix(section)
        parts.append(f"## {section}\n\n{cls.__doc__}\n")
        rows = [_row(prefix, name, field) for name, field in cls.model_fields.items()]
        parts.append(_table(("option", "value", "default", "meaning"), rows))
        if section == "rewards":
            parts.append(_builtin_rewards())
    return "\n".join(parts)


def help_text(width: int = 100) -> str:
    """The options for a terminal of `width` columns: name, default, meaning."""
    lines = ["options, set in the YAML file or as --section.option value [default]:"]
    for section, cls in SECTIONS.items():
        lines += ["", f"{section}: {cls.__doc__}"]
        for name, field in cls.model_fields.items():
            option = f"--{_prefix(section)}{name}"
            lines.append(f"  {option} [{_default(field)}]")
            text = " ".join(_meaning(_prefix(section), name, field).replace("`", "").split())
            lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _row(prefix: str, name: str, field: FieldInfo) -> tuple[str, ...]:
    cells = (f"`{prefix}{name}`", expects(field), f"`{_default(field)}`", _meaning(prefix, name, field))
    return tuple(cell.replace("|", "\\|") for cell in cells)


def _prefix(section: str) -> str:
    return "rewards.NAME." if section == "rewards" else f"{section}."


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = default_of(field)
    return "unset" if value is None else _written(value)


def _written(value: Any) -> str:
    """A default as one writes it."""
    if value is ...:
        return "required"
    if value == "":
        return '""'
    if isinstance(value, float):
        return f"{value:g}"
    return yaml.safe_dump(value, default_flow_style=True, width=200).removesuffix("...\n").strip().strip("'")


def _meaning(prefix: str, name: str, field: FieldInfo) -> str:
    return " ".join([" ".join((field.description or "").split()), *_missing(f"{prefix}{name}")])


def _missing(option: str) -> Iterator[str]:
    for entry in NOT_BUILT:
        if fnmatchcase(option, entry.option):
            values = " and ".join(f"`{_written(value)}`" for value in entry.values)
            yield f"Not built yet: {values}." if values else "Not built yet."


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _builtin_rewards() -> str:
    rows = [
        (f"`{name}`", reward.scores, ", ".join(f"`{arg}: {_written(value)}`" for arg, value in reward.args.items()))
        for name, reward in BUILTIN_REWARDS.items()
    ]
    head = "### Built-in rewards\n\nFor `rewards.NAME.fn`. `field` names the column that holds the reference.\n\n"
    return head + _table(("fn", "scores", "args and their defaults"), rows)


def main(arguments: list[str]) -> int:
    """Write or check the page; 0 when it is current."""
    text = options_markdown()
    if arguments == ["--check"]:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET} is not current: run python -m palingenesis.rl.config.docs", file=sys.stderr)
        return 1
    if arguments:
        print("usage: python -m palingenesis.rl.config.docs [--check]", file=sys.stderr)
        return 2
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
