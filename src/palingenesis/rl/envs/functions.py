"""`env.type: tools`: the functions of `env.tools`, without state.

file.py:fn ──> the function ──> Tool, described by its hints and docstring ── env.allowed_tools ──> Environment
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palingenesis.rl.envs.schema import expose, tool_of
from palingenesis.rl.envs.session import Environment
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import resolve


def function_tools(names: Sequence[str], allowed: Sequence[str] = ()) -> Environment:
    """The environment of function tools.

    Args:
        names: `module:name` or `path/file.py:name` of each function.
        allowed: `env.allowed_tools`.

    Raises:
        ConfigError: a function cannot be found or described, or two have one name.
    """
    functions: dict[str, tuple[str, Any]] = {}
    for name in names:
        where = f"env.tools: {name}"
        function = resolve(name, {}, "env.tools")
        if isinstance(function, type) or not callable(function) or not hasattr(function, "__name__"):
            raise ConfigError(f"{where} is {_kind(function)}; a tool is a function, and a class is named in env.type.")
        if function.__name__ in functions:
            other = functions[function.__name__][0]
            raise ConfigError(f"{where} and {other} are both called {function.__name__!r}; rename one.")
        functions[function.__name__] = (where, function)
    exposed = expose(functions, allowed, "env.allowed_tools")
    found = [functions[name] for name in exposed]
    return Environment("env.tools", tuple(tool_of(function, where) for where, function in found))


def _kind(value: Any) -> str:
    return "a class" if isinstance(value, type) else f"a {type(value).__name__}"
