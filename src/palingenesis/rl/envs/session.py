"""Live environments: opened for a row, called by the policy, scored, and always closed.

    Environments.open(row) ── waits for max_concurrent ──> constructor ──> reset(**row) ──> tools ──> EnvSession
    session.call(call)     ── known tool? ── arguments fit? ── runs, at most env.tool_timeout ──> ToolAnswer
    session.reward(turns)  ── get_reward ──> components
    session.close()        ── close ── the slot is free

Whose failure is what:
    a tool raises, is slow, or is called wrongly     the policy reads it as the tool's answer
    the constructor, `reset`, `tool_schemas` or `done` raises, one of them or `get_reward` hangs   the sample is skipped
    `get_reward` raises or returns no finite number  RewardError: the run stops and names class and row
    SkipSample from anywhere                         the sample is skipped
    a task group that a hook has entered fails       the environment is closed, the sample is skipped
    an error of the package's own, from anywhere     it goes through and stops the run

Invariants: what is not among a session's schemas never reaches the environment; every environment that was made is
closed once, also when its `reset` failed, its rollout was cancelled or its constructor was still running then or ended
after its limit; never more than `max_concurrent` are alive.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from palingenesis.rl.chat.results import clean
from palingenesis.rl.envs.running import Ended, Home, Runner
from palingenesis.rl.envs.schema import BadArguments, Schema, Tool
from palingenesis.rl.errors import ConfigError, PalingenesisError, RewardError, SkipSample, StopRun
from palingenesis.rl.plugins import nearest, shown
from palingenesis.rl.types import Message, Row, ToolCall, where

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import EnvConfig

# Seconds that are no option, because waiting so long is a failure whatever the environment is.
RESET_S = 300.0  # the constructor, and `reset`: a remote environment may start a machine
REWARD_S = 300.0
CLOSE_S = 30.0

LONG = 10_000  # characters of arguments

THROUGH = (SkipSample, PalingenesisError, StopRun)  # raised by the user's code on purpose


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What the policy reads for a call. `is_error`: the call failed; counted in `tool_errors`."""

    text: str
    is_error: bool = False


class EnvSession(Protocol):
    """One episode's environment.

    Attributes:
        schemas: exactly the tools that can be called, in chat-template form.
        opening: text that `reset` returned; it joins the last user turn.
        env: the user's object, for rewards that ask for `env`; None where tools are functions.
    """

    schemas: tuple[Schema, ...]
    opening: str
    env: Any

    async def call(self, call: ToolCall) -> ToolAnswer:
        """Run one call. Several may run at once. Raises SkipSample; a tool's failure is its answer."""
        ...

    @property
    def done(self) -> bool:
        """The environment has ended the episode."""
        ...

    async def reward(self, messages: Sequence[Message]) -> Mapping[str, float] | None:
        """The environment's own components by name, of a bare number `{"reward": x}`; None when it has none.

        Raises:
            SkipSample: it cannot be scored.
            RewardError: `get_reward` is defective.
        """
        ...

    async def close(self) -> None:
        """Release the environment. Every session that was opened is closed; again does nothing."""
        ...


class Environment:
    """What `env.type` names, read once. As it stands it has no state and no hooks: functions need no more.

    Attributes:
        name: for errors and logs.
        tools: the exposed ones; None when each episode lists its own after reset.
        constructor: makes the object of one episode, and what its `reset` receives; None where there is none. Runs in a
            thread: it is the user's code, and copies a row's columns. Raises DataError for a missing column.
        file: where its code stands; empty when that is not known.
    """

    constructor: Callable[[Row], tuple[Any, dict[str, Any]]] | None = None
    file = ""

    def __init__(self, name: str, tools: tuple[Tool, ...] | None) -> None:
        self.name = name
        self.tools = tools

    def check_columns(self, row: Row) -> None:
        """Raise DataError when the row lacks a column that `reset` must have."""

    def hook(self, env: Any, name: str) -> Callable[..., Any] | None:
        """The method `name` of an object of the class; None when it has none."""
        return None

    @property
    def has_reward(self) -> bool:
        """It scores its episodes: there is a `get_reward`."""
        return False

    @property
    def reward_reads_messages(self) -> bool:
        return False

    def bound_tools(self, env: Any) -> tuple[Tool, ...]:
        """`tools`, on one object."""
        return self.tools or ()

    def listed_tools(self, schemas: Any, call_tool: Callable[..., Any]) -> tuple[Tool, ...]:
        """The exposed ones of what `tool_schemas()` returned."""
        raise NotImplementedError

    def is_done(self, env: Any) -> bool:
        return False


class Environments:
    """Opens sessions of one environment. Belongs to one event loop.

    A session is best closed only when its rollout was scored, and a group is scored when all of its rollouts have ended:
    then `env.max_concurrent` has to be at least `rollout.group_size`, and the sessions of a group have to be opened
    together, or groups wait for each other. Slots are given in the order of asking.

    Attributes:
        schemas: of the exposed tools; None when they are known only after a reset.
        listing: one line for the start of the log.
    """

    def __init__(self, environment: Environment, config: EnvConfig) -> None:
        self._environment = environment
        self._timeout = config.tool_timeout
        self._slots = asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else None
        self._runner = Runner(f"environment {environment.name}")
        self._open: set[_Session] = set()

    @property
    def schemas(self) -> tuple[Schema, ...] | None:
        tools = self._environment.tools
        return None if tools is None else tuple(tool.schema for tool in tools)

    @property
    def listing(self) -> str:
        tools = self._environment.tools
        if tools is None:
            return f"{self._environment.name} lists its tools after each reset"
        names = ", ".join(tool.name for tool in tools) or "none"
        return f"{names} ({self._environment.name})"

    @property
    def has_reward(self) -> bool:
        """The environment scores its episodes."""
        return self._environment.has_reward

    def check_columns(self, row: Row) -> None:
        """Raise DataError when the row lacks a column that `reset` must have."""
        self._environment.check_columns(row)

    async def open(self, row: Row) -> EnvSession:
        """Make an environment and reset it for `row`. The caller closes it.

        Raises:
            SkipSample: the environment failed to start.
            ConfigError, DataError: the class, a pattern of `env.allowed_tools` or the row cannot be used.
        """
        if self._slots is not None:
            await self._slots.acquire()
        session = _Session(self._environment, self._runner, row, self._timeout, self._closed)
        self._open.add(session)
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

    def _closed(self, session: _Session) -> None:
        self._open.discard(session)
        if self._slots is not None:
            self._slots.release()

    async def aclose(self) -> None:
        """Close every session that is still open."""
        await asyncio.gather(*(session.close() for session in tuple(self._open)))


class _Session:
    """An EnvSession over an Environment's hooks."""

    def __init__(
        self,
        environment: Environment,
        runner: Runner,
        row: Row,
        timeout: float,
        closed: Callable[[_Session], None],
    ) -> None:
        self.schemas: tuple[Schema, ...] = ()
        self.opening = ""
        self.env: Any = None
        self._environment = environment
        self._runner = runner
        self._row = row
        self._timeout = timeout
        self._closed = closed
        self._tools: dict[str, Tool] = {}
        self._left: list[Ended] = []  # calls that passed the time-out and run on
        self._home: Home | None = None
        self._is_lost = False
        self._making: asyncio.Task[Ended] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed_empty = False  # the constructor was still running

    # ---------------------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        environment = self._environment
        arguments: dict[str, Any] = {}
        if environment.constructor is not None:
            self._home = Home(self._lost)
            make = functools.partial(self._make, environment.constructor, asyncio.get_running_loop())
            self._making = asyncio.create_task(self._runner.run(make, self._told("the constructor"), RESET_S))
            # Shielded: a constructor that ends after its rollout was cancelled has made something that is to be closed.
            self.env, arguments = self._started("the constructor", await asyncio.shield(self._making))
        if reset := self._hook("reset"):
            self.opening = self._text(await self._start("reset", functools.partial(reset, **arguments)))
        tools = await self._listed() if environment.tools is None else self._bound_tools()
        self._tools = {tool.name: tool for tool in tools}
        self.schemas = tuple(tool.schema for tool in tools)

    def _make(
        self, constructor: Callable[[Row], tuple[Any, dict[str, Any]]], loop: asyncio.AbstractEventLoop
    ) -> tuple[Any, dict[str, Any]]:
        """In a thread: what is made is known to the loop before anything else is told of the call's end."""
        made = constructor(self._row)
        with suppress(RuntimeError):  # the loop is closed: the run is over
            loop.call_soon_threadsafe(self._arrived, made[0])
        return made

    def _arrived(self, env: Any) -> None:
        """The constructor has made `env`; perhaps long after its limit, when this session was closed without it."""
        self.env = env
        if self._closed_empty:
            self._closing = asyncio.create_task(self._close_env())

    async def _start(self, name: str, call: Callable[[], Any]) -> Any:
        return self._started(name, await self._runner.run(call, self._told(name), RESET_S, self._home))

    def _started(self, name: str, ended: Ended) -> Any:
        """The value; the environment's own failure skips the sample."""
        if ended.error is None:
            return ended.value
        if isinstance(ended.error, THROUGH):
            raise ended.error
        raise SkipSample(f"{name} of {self._environment.name} failed: {self._failure(ended.error)}") from ended.error

    async def _listed(self) -> tuple[Tool, ...]:
        tool_schemas, call_tool = self._hook("tool_schemas"), self._hook("call_tool")
        assert tool_schemas is not None
        assert call_tool is not None
        schemas = await self._start("tool_schemas", tool_schemas)
        if isinstance(schemas, Iterator):
            schemas = await self._start("tool_schemas", functools.partial(list, schemas))
        return self._environment.listed_tools(schemas, call_tool)

    def _bound_tools(self) -> tuple[Tool, ...]:
        try:
            return self._environment.bound_tools(self.env)
        except BaseException as error:
            raise SkipSample(f"the tools of {self._environment.name} failed: {self._failure(error)}") from error

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """A method of the object; an object that may not be looked at skips the sample."""
        try:
            return self._environment.hook(self.env, name)
        except BaseException as error:
            raise SkipSample(f"{name} of {self._environment.name} failed: {self._failure(error)}") from error

    def _text(self, opening: Any) -> str:
        if opening is None or isinstance(opening, str):
            return clean(opening or "")
        raise ConfigError(
            f"env.type: reset of {self._environment.name} returned {shown(opening, 80)}; it returns text for the policy, "
            "or nothing."
        )

    # ----------------------------------------------------------------------------------------------------------- call

    async def call(self, call: ToolCall) -> ToolAnswer:
        self._check_there()
        tool = self._tools.get(call.name)
        if tool is None:
            known = f"the tools are: {', '.join(self._tools)}" if self._tools else "there are no tools"
            return _error(f"unknown tool {shown(call.name, 80)}{nearest(call.name, self._tools)}; {known}")
        if any(ended.left is not None and ended.left.alive for ended in self._left):
            return _error(
                "an earlier call of this episode has passed its time-out and still runs; nothing can be called"
            )
        read = await self._read(tool, call.arguments)
        if isinstance(read.error, BadArguments):
            return _error(str(read.error))
        if read.error is not None:
            return _answer(read)
        ended = await self._run(tool.bound(read.value), f"tool {call.name!r}")
        if ended.error is None and not isinstance(ended.value, _PLAIN):
            ended = await self._run(functools.partial(as_text, ended.value), f"the result of tool {call.name!r}")
        self._check_there()
        return _answer(ended)

    async def _read(self, tool: Tool, arguments: Mapping[str, Any]) -> Ended:
        """The arguments, checked; long ones against a bare schema in a thread, since 30,000 items take a second.

        Short ones here, so that the calls of a turn begin in their order.
        """
        if not tool.by_name and len(repr(arguments)) > LONG:
            return await self._run(functools.partial(tool.read, arguments), f"the arguments of tool {tool.name!r}")
        try:
            return Ended(tool.read(arguments))
        except BaseException as error:  # noqa: BLE001 - a validator of the user's own types may raise anything, as a tool may
            return Ended(error=error)

    async def _run(self, call: Callable[[], Any], what: str) -> Ended:
        ended = await self._runner.run(call, what, self._timeout)
        if ended.left is not None:
            self._left.append(ended)
        return ended

    # ---------------------------------------------------------------------------------------------------------- reward

    @property
    def done(self) -> bool:
        try:
            return self._environment.is_done(self.env)
        except THROUGH:
            raise
        except BaseException as error:  # a property of the user's
            raise SkipSample(f"done of {self._environment.name} failed: {self._failure(error)}") from error

    async def reward(self, messages: Sequence[Message]) -> Mapping[str, float] | None:
        self._check_there()
        get_reward = self._hook("get_reward")
        if get_reward is None:
            return None
        if self._environment.reward_reads_messages:
            get_reward = functools.partial(get_reward, messages=[message.to_dict() for message in messages])
        ended = await self._runner.run(get_reward, self._told("get_reward"), REWARD_S, self._home)
        told = f"get_reward of environment {self._environment.name}"
        if ended.error is None and not _is_plain(ended.value):  # its conversion is the user's code
            read = functools.partial(_components, ended.value, f"{told} for {where(self._row)}")
            ended = await self._runner.run(read, self._told("get_reward"), REWARD_S)
        if ended.error is None:
            return _components(ended.value, f"{told} for {where(self._row)}")
        if isinstance(ended.error, THROUGH):
            raise ended.error
        self._check_there()
        if ended.late:
            raise SkipSample(str(ended.error))
        raise RewardError(f"{told} failed on {where(self._row)}: {self._failure(ended.error)}") from ended.error

    # ----------------------------------------------------------------------------------------------------------- close

    async def close(self) -> None:
        await asyncio.shield(self._close_once())

    def _close_once(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return self._closing

    def _lost(self) -> None:
        self._is_lost = True
        self._close_once()

    def _check_there(self) -> None:
        if self._is_lost:
            raise SkipSample(
                f"environment {self._environment.name} is lost: a task group or time-out of its own ended it"
            )

    async def _close(self) -> None:
        try:
            if self._making is not None:  # it has its own limit, and may have been left running by a cancelled `start`
                await asyncio.wait({self._making})
            self._closed_empty = self.env is None
            await self._close_env()
        finally:
            if self._home is not None:
                self._home.end()
            self._closed(self)

    async def _close_env(self) -> None:
        try:
            close = self._hook("close")
            ended = await self._runner.run(close, self._told("close"), CLOSE_S, self._home) if close else Ended()
        except SkipSample as error:
            ended = Ended(error=error)
        if ended.error is not None:
            # The rollout is scored by now, so nobody else would hear of it. Python shows an equal warning once.
            told = f"close of environment {self._environment.name} failed: {self._failure(ended.error)}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)

    # ----------------------------------------------------------------------------------------------------------- words

    def _told(self, name: str) -> str:
        return f"{name} of {self._environment.name} for {where(self._row)}"

    def _failure(self, error: BaseException) -> str:
        return f"{_words(error)}{_place(error, self._environment.file)}"


# ---------------------------------------------------------------------------------------------------------------- parts

_PLAIN = (
    str,
    type(None),
    bool,
    int,
    float,
)  # written out at once; what else there is may be large, so a thread does it


def as_text(value: Any) -> str:
    """A tool's result as the policy reads it: text as it is, None as nothing, plain data as JSON, else `str()`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # also of an enum member that is one
    if isinstance(value, (dict, list, tuple, bool, int, float)):
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except TypeError:  # a key that JSON has no form for
            return str(value)
    return str(value)


def _answer(ended: Ended) -> ToolAnswer:
    """What the policy reads. Raises what goes through."""
    if ended.error is None:
        try:
            return ToolAnswer(as_text(ended.value))
        except Exception as error:  # noqa: BLE001 - an integer too long to be written out is the tool's failure too
            return _answer(Ended(error=error))
    if isinstance(ended.error, THROUGH):
        raise ended.error
    return _error(_words(ended.error))


def _words(error: BaseException) -> str:
    """The exception's class and text."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - the text is the user's code
        return f"{type(error).__name__}, whose text cannot be shown"


def _error(text: str) -> ToolAnswer:
    return ToolAnswer(f"Error: {text}", is_error=True)


def _is_plain(value: Any) -> bool:
    """Numbers of Python's own, or a dict of them by name."""
    if type(value) is dict:
        return all(type(name) is str and type(part) in _NUMBERS for name, part in value.items())
    return value is None or type(value) in _NUMBERS


_NUMBERS = (bool, int, float)


def _components(value: Any, told: str) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return {"reward": _finite(value, told)}
    for name in value:
        if not isinstance(name, str) or not name:
            raise RewardError(f"{told} has a component called {shown(name, 80)}; names are text.")
    return {clean(name): _finite(part, f"{told}, component {name!r},") for name, part in value.items()}


def _finite(value: Any, told: str) -> float:
    wanted = "it must be a finite number, or components such as {'format': 0.1, 'correct': 1.0}."
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise RewardError(f"{told} is {shown(value, 80)}; {wanted}")
    try:
        number = float(value)
    except Exception as error:
        raise RewardError(f"{told} is {shown(value, 80)}; {wanted}") from error
    if not math.isfinite(number):
        raise RewardError(f"{told} is {number}; {wanted}")
    return number


def _place(error: BaseException, file: str) -> str:
    """` (my_env.py:12)`: the last line of the environment's own file that the exception passed.

    By hand: `inspect.getmodule` and `traceback.extract_tb` read files, 0.3 s the first time.
    """
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""


__all__ = [
    "EnvSession",
    "Environment",
    "Environments",
    "ToolAnswer",
    "as_text",
]
