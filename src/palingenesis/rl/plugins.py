"""Turn what a config calls a thing into the Python object: `math`, `package.module:Name` or `path/file.py:Name`.

Flow: a string with a colon names a module or a file and an attribute in it; one without is a short name of a built-in.
A miss lists the nearest names. Files load once under a name made from their absolute path, so two files called
`rewards.py` do not shadow each other, and objects defined in them pickle within one process tree.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from palingenesis.rl.errors import ConfigError


def shown(value: Any, most: int) -> str:
    """A value in a message: its `repr`, in at most `most` characters."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or an empty string when nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f" (did you mean {found[0]!r}?)" if found else ""


def resolve(name: str, builtin: Mapping[str, Any], option: str) -> Any:
    """The object `name` stands for.

    Args:
        name: a key of `builtin`, `package.module:Name`, or `path/to/file.py:Name` (relative to the working directory).
        builtin: short names. A string value is itself a `module:Name`, imported when asked for.
        option: the option that holds `name`; errors cite it.

    Raises:
        ConfigError: unknown short name, missing file or module, missing attribute.
    """
    if name in builtin:
        target = builtin[name]
        return resolve(target, {}, option) if isinstance(target, str) else target
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        names = ", ".join(sorted(builtin)) or "none"
        raise ConfigError(
            f"{option}: {name!r} is not a built-in name{nearest(name, builtin)}. Use one of {names}, "
            "`package.module:Name` or `path/file.py:Name`."
        )
    module = _load_file(Path(where), option) if where.endswith(".py") else _load_module(where, option)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{option}: {where} has no {attribute!r}{nearest(attribute, public)}.") from None


def _importable(folder: Path) -> None:
    """Let modules of `folder` be imported, after everything that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _load_file(path: Path, option: str) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise ConfigError(f"{option}: there is no file {path} (looked in {Path.cwd()}).")
    name = f"pgs_file_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{option}: {path} cannot be loaded as Python.")
    _importable(full.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"{option}: {path} fails on import: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, option: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which may raise anything
        raise ConfigError(f"{option}: cannot import {name!r}: {type(error).__name__}: {error}") from error
