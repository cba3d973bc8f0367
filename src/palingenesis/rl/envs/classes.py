"""An environment class of the user's: `env.type: module:Class` or `path/file.py:Class`.

    class ── read once, at start ──> constructor arguments, what reset and get_reward ask for, the tools
    per episode: Class(**env.args[, sandbox]) ──> reset(**row) ──> its public methods, or tool_schemas() + call_tool()

Public methods are the tools, inherited ones included, but for the hooks below and names with a leading underscore;
properties and other attributes are none. `tools = ("python", "submit")` on the class pins them, `env.allowed_tools` picks
from what is left. A class with `tool_schemas` and `call_tool` has only the tools that these list and run.

Invariant: whatever the class lacks or has too much of is an error here, before any episode; hooks are looked up on the
class, so an attribute of an object cannot become one.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palingenesis.rl.envs.schema import Tool, check_parameters, expose, tool_of, tools_of
from palingenesis.rl.envs.session import Environment
from palingenesis.rl.errors import ConfigError, DataError
from palingenesis.rl.plugins import nearest
from palingenesis.rl.types import Row, where

HOOKS = ("reset", "get_reward", "close", "tool_schemas", "call_tool")
SANDBOX = "sandbox"  # the constructor's argument that the trainer fills


class ClassEnvironment(Environment):
    """A class, read and checked.

    Args:
        cls: what `env.type` names.
        args: `env.args`.
        sandbox: what the constructor receives if it asks for `sandbox`; may be None.
        allowed: `env.allowed_tools`.

    Raises:
        ConfigError: it is no class, an argument is unknown or missing, a hook asks for what it cannot have, a tool
            cannot be described, or a pattern matches nothing.
    """

    def __init__(self, cls: Any, args: Mapping[str, Any], sandbox: Any = None, allowed: Sequence[str] = ()) -> None:
        if not isinstance(cls, type):
            raise ConfigError(f"env.type: {cls!r} is not a class; name one, or list functions in env.tools.")
        if inspect.isabstract(cls):
            raise ConfigError(f"env.type: {cls.__name__} is abstract; name a class that can be made.")
        self.cls = cls
        self.file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
        self._where = f"env.type: {cls.__name__}"
        self._args = dict(args)
        self._allowed = tuple(allowed)
        self._pinned = _pinned(cls, self._where)
        check_args(cls, self._args)
        self._sandbox = {SANDBOX: sandbox} if wants_sandbox(cls) else {}
        self.constructor = self._make
        self._asks = _read_reset(cls, self._where)
        self._reads_messages = _reads_messages(cls, self._where)
        super().__init__(cls.__name__, self._methods())

    def _methods(self) -> tuple[Tool, ...] | None:
        """The tools that are methods; None when the class lists its own."""
        cls, where = self.cls, self._where
        public = public_methods(cls)
        if "done" in public:
            raise ConfigError(f"{where}.done is a method; `done` is the flag that ends the episode, rename the tool.")
        listing = [name for name in ("tool_schemas", "call_tool") if is_method(cls, name)]
        if len(listing) == 1:
            other = "call_tool" if listing == ["tool_schemas"] else "tool_schemas"
            raise ConfigError(f"{where} has {listing[0]} but no {other}; the one lists the tools, the other runs them.")
        if listing:
            return None
        exposed = self._exposed(public)
        for name in exposed:
            _parameters(cls, name)
        return tuple(
            tool_of(getattr(cls, name), f"{where}.{name}", is_method=_takes_self(cls, name)) for name in exposed
        )

    def _exposed(self, names: Sequence[str]) -> list[str]:
        pinned = expose(names, self._pinned, f"{self._where}.tools")
        return expose(pinned, self._allowed, "env.allowed_tools")

    def _make(self, row: Row) -> tuple[Any, dict[str, Any]]:
        arguments = self._reset_arguments(row)
        made = self.cls(**copy.deepcopy(self._args), **self._sandbox)
        if not isinstance(made, self.cls):
            raise ConfigError(f"{self._where}(...) makes a {type(made).__name__} and no {self.name}; see its __new__.")
        return made, arguments

    def hook(self, env: Any, name: str) -> Callable[..., Any] | None:
        if env is None or not is_method(self.cls, name):
            return None
        method: Callable[..., Any] = getattr(env, name)
        return method

    def bound_tools(self, env: Any) -> tuple[Tool, ...]:
        return tuple(replace(tool, function=getattr(env, tool.name)) for tool in self.tools or ())

    def listed_tools(self, schemas: Any, call_tool: Callable[..., Any]) -> tuple[Tool, ...]:
        where = f"{self._where}.tool_schemas"
        tools = {tool.name: tool for tool in tools_of(schemas, call_tool, where)}
        exposed = tuple(tools[name] for name in self._exposed(list(tools)))
        for tool in exposed:
            check_parameters(tool, where)
        return exposed

    def is_done(self, env: Any) -> bool:
        return inspect.getattr_static(env, "done", None) is not None and bool(env.done)

    # ----------------------------------------------------------------------------------------------------------- reset

    def check_columns(self, row: Row) -> None:
        there = [*row.columns, *filter(None, [row.prompt_column[0]])]
        for name in self._asks.required:
            if name not in there:
                raise DataError(
                    f"{where(row)}: there is no column {name!r}{nearest(name, there)}, which {self.name}.reset asks for. "
                    f"The row's columns: {', '.join(there) or 'none'}."
                )

    def _reset_arguments(self, row: Row) -> dict[str, Any]:
        """The columns that `reset` names, all of them with `**row`; copies, which it may change."""
        self.check_columns(row)
        own = dict([row.prompt_column]) if row.prompt_column[0] else {}
        named = (own | dict(row.columns)).items()
        asked = {name: value for name, value in named if name in self._asks.names}
        return copy.deepcopy(asked | dict(row.columns) if self._asks.rest else asked)

    @property
    def has_reward(self) -> bool:
        return is_method(self.cls, "get_reward")

    @property
    def reward_reads_messages(self) -> bool:
        return self._reads_messages


# ---------------------------------------------------------------------------------------------------- reading a class


@dataclass(frozen=True, slots=True)
class _Asks:
    """What `reset` asks for: columns it must have, columns with a default, and `rest` with `**row`."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional


def is_method(cls: type, name: str) -> bool:
    """The class has a method `name`: not a property, a nested class or another attribute."""
    return inspect.isroutine(inspect.getattr_static(cls, name, None)) and callable(getattr(cls, name))


def public_methods(cls: type) -> list[str]:
    """Names of the methods that may be tools, in the order of definition, base classes first."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) if base is not object for name in vars(base))
    return [name for name in names if not name.startswith("_") and name not in HOOKS and is_method(cls, name)]


def wants_sandbox(cls: type) -> bool:
    """The constructor asks for `sandbox`."""
    return any(p.name == SANDBOX for p in _constructor(cls))


def check_args(cls: type, args: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that the constructor does not take, and for one that it needs and did not get."""
    if SANDBOX in args and wants_sandbox(cls):
        raise ConfigError("env.args.sandbox: it comes from the trainer (section `sandbox`) and cannot be set.")
    parameters = _constructor(cls)
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ConfigError(
                f"env.type: {cls.__name__} takes {p.name!r} only by position; arguments are given by name."
            )
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != SANDBOX]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in args:
        if name not in known and not takes_any:
            raise ConfigError(
                f"env.args.{name}: {cls.__name__} takes no {name!r}{nearest(name, known)}; it takes: "
                f"{', '.join(known) or 'none'}."
            )
    for p in parameters:
        if p.name in known and p.default is p.empty and p.name not in args:
            raise ConfigError(f"env.args.{p.name} is missing: {cls.__name__} needs it.")


def _constructor(cls: type) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(cls).parameters.values())
    except ValueError as error:
        raise ConfigError(f"env.type: the arguments of {cls.__name__} cannot be read: {error}.") from error


def _takes_self(cls: type, name: str) -> bool:
    return not isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))


def _parameters(cls: type, name: str) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
    if not _takes_self(cls, name):
        return parameters
    if not parameters:
        raise ConfigError(f"env.type: {cls.__name__}.{name} takes no `self`; write `def {name}(self, ...)`.")
    return parameters[1:]


def _read_reset(cls: type, where: str) -> _Asks:
    if not is_method(cls, "reset"):
        return _Asks()
    required: list[str] = []
    optional: list[str] = []
    rest = False
    for p in _parameters(cls, "reset"):
        if p.kind is p.VAR_KEYWORD:
            rest = True
        elif p.kind is p.POSITIONAL_ONLY:
            raise ConfigError(f"{where}.reset: {p.name!r} is positional-only; columns are given by name.")
        elif p.kind is not p.VAR_POSITIONAL:
            (required if p.default is p.empty else optional).append(p.name)
    return _Asks(tuple(required), tuple(optional), rest)


def _reads_messages(cls: type, where: str) -> bool:
    if not is_method(cls, "get_reward"):
        return False
    parameters = _parameters(cls, "get_reward")
    for p in parameters:
        if p.default is p.empty and p.name != "messages" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ConfigError(
                f"{where}.get_reward asks for {p.name!r}; it can have `messages`. Keep what it needs of the row in reset."
            )
    return any(p.name == "messages" or p.kind is p.VAR_KEYWORD for p in parameters)


def _pinned(cls: type, where: str) -> tuple[str, ...]:
    """`tools` of the class; empty when it pins none."""
    pinned = inspect.getattr_static(cls, "tools", None)
    if pinned is None or inspect.isroutine(pinned):
        return ()
    if not isinstance(pinned, (tuple, list)) or not pinned or not all(isinstance(name, str) for name in pinned):
        raise ConfigError(f'{where}.tools is {pinned!r}; it names the tools, such as `tools = ("python", "submit")`.')
    return tuple(pinned)
