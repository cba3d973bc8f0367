"""Bind a reward function once: what it asks for by name, and how it is called.

    signature + config args --bind--> FunctionReward --evaluate(samples)--> one Cell a sample

A function that names one of `prompts`, `completions`, `reasonings`, `finish_reasons` or `envs` is batched: it is called
once for all samples, and every other name it asks for holds one entry a sample. Any other function is called once a
sample. Synchronous functions run in threads, asynchronous ones on the running loop.

A Cell is a number, None (the reward does not apply) or the SkipSample that was raised. Invariant: whatever else a
function does (another exception, a wrong length, a NaN) raises RewardError with the reward's and the row's name, so
that no defect ever turns into a score.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from palingenesis.rl.errors import ConfigError, DataError, PalingenesisError, RewardError, SkipSample
from palingenesis.rl.observe.waits import progress, waiting
from palingenesis.rl.plugins import nearest, resolve, shown
from palingenesis.rl.rewards.threads import Threads
from palingenesis.rl.types import Row, Sample, last_user_text, where

Cell = float | SkipSample | None

# Seconds a reward may go without one of its running calls ending: a slow judge of the user's takes minutes with its retries.
CALL_S = 600.0

PER_SAMPLE: Mapping[str, Callable[[Sample], Any]] = {
    "completion": lambda s: s.completion,
    "reasoning": lambda s: s.reasoning,
    "prompt": lambda s: last_user_text(s.prompt_messages),
    "messages": lambda s: [message.to_dict() for message in s.messages],
    "completion_ids": lambda s: list(s.completion_ids),
    "finish_reason": lambda s: s.finish_reason,
    "env": lambda s: s.env,
    "sandbox": lambda s: s.sandbox,
}
BATCHED: Mapping[str, str] = {
    "prompts": "prompt",
    "completions": "completion",
    "reasonings": "reasoning",
    "finish_reasons": "finish_reason",
    "envs": "env",
}
EITHER = ("messages", "completion_ids", "sandbox")  # the same name in both forms

BUILTIN: Mapping[str, str] = {
    "math": "palingenesis.rl.rewards.math:Math",
    "exact": "palingenesis.rl.rewards.text:Exact",
    "choice": "palingenesis.rl.rewards.text:Choice",
    "boxed_choice": "palingenesis.rl.rewards.text:BoxedChoice",
    "qa_match": "palingenesis.rl.rewards.text:QAMatch",
    "regex": "palingenesis.rl.rewards.text:Regex",
    "code": "palingenesis.rl.rewards.code:Code",
    "judge": "palingenesis.rl.rewards.judge:Judge",
    "equivalence": "palingenesis.rl.rewards.judge:Equivalence",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What rewards and the sandbox did since they were last asked.

    Attributes:
        metrics: counts by their logged names, e.g. `code/wrong`, `sandbox/timeout`.
        examples: a few programs that did not pass: `{"status", "reason", "source", ...}`.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[Mapping[str, str], ...] = ()

    def __add__(self, other: Usage) -> Usage:
        names = dict.fromkeys((*self.metrics, *other.metrics))
        metrics = {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names}
        return Usage(metrics, (*self.examples, *other.examples))


class BoundReward(ABC):
    """A reward that is ready to score.

    Attributes:
        name: as logged under `rewards/<name>`.
        weight: its factor in the sample's reward.
    """

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight

    @abstractmethod
    async def evaluate(self, samples: Sequence[Sample], threads: Threads) -> list[Cell]:
        """One cell a sample. Raises RewardError for anything but numbers, None and SkipSample."""

    @abstractmethod
    def check_columns(self, row: Row) -> None:
        """Raise DataError or RewardError when the row lacks a column that the reward must have."""

    def check_reference(self, row: Row) -> str | None:
        """Why the reward cannot read the row's reference; None when it can."""
        return None

    @property
    def asks_sandbox(self) -> bool:
        """It wants the run's sandbox."""
        return False

    def usage(self) -> Usage:
        """What it counted since the last call."""
        return Usage()

    async def aclose(self) -> None:  # noqa: B027 - most rewards hold nothing
        """Release what belongs to the running loop."""

    def close(self) -> None:  # noqa: B027
        """Release processes."""


@dataclass(frozen=True, slots=True)
class Asks:
    """What a function's signature asks for. `optional` names have a default; `rest` says that it has `**row`."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    rest: bool = False
    batched: bool = False
    is_async: bool = False
    columns: tuple[str, ...] = ()  # columns a built-in reads by `field`
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional


def bind(
    name: str,
    fn: str | Callable[..., Any],
    *,
    weight: float = 1.0,
    args: Mapping[str, Any] | None = None,
    style: str = "plain",
) -> BoundReward:
    """Make a reward of what the config or `RLTrainer(rewards=[...])` names.

    Args:
        name: the reward's name.
        fn: a built-in's short name, `module:Name`, `file.py:Name`, or the object itself: a function, a callable
            object, a class whose instances are callable, or a function that builds one of these from `args`.
        weight: its factor in the weighted sum.
        args: `rewards.<name>.args`, bound by name: to the class or builder, or to parameters of the function.
        style: `plain`, or `trl` for functions written for TRL (only located by name: they run in another process).

    Raises:
        ConfigError: `fn` cannot be found, or an argument is unknown, missing or refused.
        RewardError: the signature cannot be served (per-sample and batched names together, positional-only).
    """
    args = dict(args or {})
    if style == "trl":
        from palingenesis.rl.rewards.trl import TrlReward

        if not isinstance(fn, str):
            raise ConfigError(f"rewards.{name}: a function of style `trl` is named in the config (`module:Name`).")
        return TrlReward(name, fn, weight=weight, args=args)
    option = f"rewards.{name}"
    target = resolve(fn, BUILTIN, f"{option}.fn") if isinstance(fn, str) else fn
    if not callable(target):
        raise ConfigError(f"{option}.fn: {fn!r} is a {type(target).__name__}, which cannot be called.")
    function, constants = instantiate(option, target, args)
    return FunctionReward(name, weight, function, read_signature(name, function, constants))


def instantiate(
    option: str, target: Callable[..., Any], args: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function to call, and the config's arguments that remain to be passed at every call."""
    if inspect.isclass(target):
        check_args(option, target, args, leave=())
        made = _build(option, target, args)
        if not callable(made):
            raise ConfigError(f"{option}.fn: objects of class {target.__name__} cannot be called; give it `__call__`.")
        return made, {}
    if _may_be_builder(target, args):
        made = _build(option, target, args) if args else target()
        if callable(made):
            return made, {}
        if inspect.isawaitable(made):
            getattr(made, "close", lambda: None)()
    check_args(option, target, args, leave=(*PER_SAMPLE, *BATCHED))
    return target, args


def _may_be_builder(target: Callable[..., Any], args: Mapping[str, Any]) -> bool:
    """It asks for nothing of a sample and `args` fill all it needs, so one call shows whether it builds a reward.

    A function that reads neither the sample nor a column would score a constant, so no reward is taken for a builder.
    """
    if is_async(target):
        return False
    parameters = parameters_of(target)
    if any(p.kind is p.VAR_KEYWORD or p.name in PER_SAMPLE or p.name in BATCHED for p in parameters):
        return False
    if any(p.default is p.empty and p.name not in args and p.kind is not p.VAR_POSITIONAL for p in parameters):
        return False
    return bool(args) or _returns_callable(target)


def _returns_callable(target: Callable[..., Any]) -> bool:
    annotation = inspect.signature(target).return_annotation
    return "Callable" in str(annotation)


def _build(option: str, target: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    try:
        return target(**args)
    except ConfigError as error:
        raise ConfigError(f"{option}.args: {error}") from error
    except Exception as error:
        raise ConfigError(f"{option}.args: {_name_of(target)} refuses them: {type(error).__name__}: {error}") from error


def check_args(option: str, target: Callable[..., Any], args: Mapping[str, Any], leave: Sequence[str]) -> None:
    """Raise ConfigError for arguments that `target` does not take, and for ones it needs and did not get."""
    parameters = parameters_of(target)
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = inspect.isclass(target) and any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in args:
        if key in leave:
            raise ConfigError(f"{option}.args.{key}: {key!r} comes from the sample and cannot be set.")
        if key not in known and not takes_any:
            options = ", ".join(k for k in known if k not in leave) or "none"
            raise ConfigError(
                f"{option}.args.{key}: {_name_of(target)} takes no {key!r}{nearest(key, known)}; it takes: {options}."
            )
    if inspect.isclass(target):
        for p in parameters:
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in args:
                raise ConfigError(f"{option}.args.{p.name} is missing: {target.__name__} needs it.")


def read_signature(name: str, function: Callable[..., Any], constants: Mapping[str, Any]) -> Asks:
    """Decide from the signature, once, what each call passes."""
    required: list[str] = []
    optional: list[str] = []
    rest = False
    for p in parameters_of(function):
        if p.kind is p.VAR_KEYWORD:
            rest = True
        elif p.kind is p.POSITIONAL_ONLY:
            raise RewardError(f"reward {name!r}: parameter {p.name!r} is positional-only; arguments are given by name.")
        elif p.kind is not p.VAR_POSITIONAL and p.name not in constants:
            (required if p.default is p.empty else optional).append(p.name)
    plural = [key for key in (*required, *optional) if key in BATCHED]
    single = [key for key in (*required, *optional) if key in PER_SAMPLE and key not in EITHER]
    if plural and single:
        raise RewardError(
            f"reward {name!r} asks for {single[0]!r} (one sample) and {plural[0]!r} (all samples): use either the "
            "singular or the plural names."
        )
    columns = tuple(getattr(function, "columns", ()))
    return Asks(tuple(required), tuple(optional), rest, bool(plural), is_async(function), columns, dict(constants))


class FunctionReward(BoundReward):
    """A plain Python function, callable object or built-in."""

    def __init__(self, name: str, weight: float, function: Callable[..., Any], asks: Asks) -> None:
        super().__init__(name, weight)
        self.function = function
        self.asks = asks

    async def evaluate(self, samples: Sequence[Sample], threads: Threads) -> list[Cell]:
        if self.asks.batched:
            return await self._evaluate_batch(samples, threads)
        return list(await gather(self._evaluate_one(sample, threads) for sample in samples))

    async def _evaluate_one(self, sample: Sample, threads: Threads) -> Cell:
        kwargs = self._arguments(sample)
        value = await self._call(kwargs, [sample], threads)
        return value if isinstance(value, SkipSample) else number(value, self.name, sample.row)

    async def _evaluate_batch(self, samples: Sequence[Sample], threads: Threads) -> list[Cell]:
        kwargs = self._batch_arguments(samples)
        values = await self._call(kwargs, samples, threads)
        if isinstance(values, SkipSample):
            return [values] * len(samples)
        return numbers(values, self.name, samples)

    async def _call(self, kwargs: dict[str, Any], samples: Sequence[Sample], threads: Threads) -> Any:
        """The function's result, or the SkipSample it raised.

        Whatever else it raises ends the run as this reward's failure, KeyboardInterrupt and StopIteration included: an
        event loop dies of the one, and a future cannot carry the other.
        """
        if self.asks.is_async:
            result, error = await self._awaited(self.function(**kwargs), samples)
        else:
            result, error = await asyncio.wrap_future(threads.submit(lambda: self._outcome(kwargs, samples)))
            if inspect.isawaitable(result):
                result, error = await self._awaited(result, samples)
        if error is None or isinstance(error, SkipSample):
            return error or result
        if isinstance(error, PalingenesisError):
            raise error
        message = f"{error}{_place(error, self.function)}"
        raise RewardError(describe_failure(self.name, samples, type(error).__name__, message)) from error

    def _outcome(self, kwargs: dict[str, Any], samples: Sequence[Sample]) -> tuple[Any, BaseException | None]:
        """In the thread: the result, or what was raised, as values. A generator runs here too."""
        try:
            with self._running(samples):
                result = self.function(**kwargs)
                is_lazy = isinstance(result, Iterator)
                return list(itertools.islice(result, len(samples) + 1)) if is_lazy else result, None
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, and the caller tells it
            return None, error

    async def _awaited(self, call: Awaitable[Any], samples: Sequence[Sample]) -> tuple[Any, BaseException | None]:
        """The result, or what was raised; a cancellation of our own goes through."""
        try:
            with self._running(samples):
                return await call, None
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return None, error

    @contextmanager
    def _running(self, samples: Sequence[Sample]) -> Iterator[None]:
        """A call that has begun: one that waits for a thread is not late, the calls before it are."""
        part = f"reward {self.name!r}"
        try:
            with waiting(part, span(samples), CALL_S):
                yield
        finally:
            progress(part)

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        asks, row = self.asks, sample.row
        kwargs = dict(asks.constants)
        for key in (*asks.names, *asks.columns):
            if key in PER_SAMPLE and key not in asks.columns:
                kwargs[key] = PER_SAMPLE[key](sample)
            elif key in row.columns:
                kwargs[key] = _own(row.columns[key])
            elif key == row.prompt_column[0]:
                kwargs[key] = row.prompt_column[1]
            elif key not in asks.optional:
                self._refuse(key, row)
        if asks.rest:
            kwargs |= {key: _own(value) for key, value in row.columns.items() if key not in kwargs}
        return kwargs

    def _batch_arguments(self, samples: Sequence[Sample]) -> dict[str, Any]:
        asks = self.asks
        kwargs = dict(asks.constants)
        for key in (*asks.names, *asks.columns):
            if key == "sandbox":
                kwargs[key] = samples[0].sandbox if samples else None
            elif key in BATCHED or key in EITHER:
                read = PER_SAMPLE[BATCHED.get(key, key)]
                kwargs[key] = [read(sample) for sample in samples]
            elif key not in asks.optional or any(_has(sample.row, key) for sample in samples):
                kwargs[key] = [self._column(sample.row, key) for sample in samples]
        if asks.rest:
            columns = dict.fromkeys(key for sample in samples for key in sample.row.columns)
            kwargs |= {k: [_own(sample.row.columns.get(k)) for sample in samples] for k in columns if k not in kwargs}
        return kwargs

    def _column(self, row: Row, key: str) -> Any:
        if key in row.columns:
            return _own(row.columns[key])
        if key == row.prompt_column[0]:
            return row.prompt_column[1]
        return None if key in self.asks.optional else self._refuse(key, row)

    def check_columns(self, row: Row) -> None:
        served = BATCHED if self.asks.batched else PER_SAMPLE
        for key in (*self.asks.required, *self.asks.columns):
            is_served = (key in served or key in EITHER) and key not in self.asks.columns
            if not is_served and not _has(row, key):
                self._refuse(key, row)

    def _refuse(self, key: str, row: Row) -> Any:
        there = [*row.columns, *filter(None, [row.prompt_column[0]])]
        names = ", ".join(there) or "none"
        if key in self.asks.columns:
            raise DataError(
                f"{where(row)}: there is no column {key!r}{nearest(key, there)}, which reward {self.name!r} compares "
                f"with (rewards.{self.name}.args.field). The row's columns: {names}."
            )
        served = [*(BATCHED if self.asks.batched else PER_SAMPLE), *there]
        raise RewardError(
            f"reward {self.name!r} asks for {key!r}{nearest(key, served)}, which {where(row)} does not have. "
            f"The row's columns: {names}."
        )

    def check_reference(self, row: Row) -> str | None:
        check: Callable[[Row], str | None] | None = getattr(self.function, "check_reference", None)
        return check(row) if check is not None else None

    @property
    def asks_sandbox(self) -> bool:
        return "sandbox" in self.asks.names

    def usage(self) -> Usage:
        taken: Callable[[], Usage] | None = getattr(self.function, "reward_usage", None)
        return taken() if taken is not None else Usage()

    async def aclose(self) -> None:
        close: Callable[[], Awaitable[None]] | None = getattr(self.function, "aclose", None)
        if close is not None:
            await close()

    def close(self) -> None:
        close: Callable[[], object] | None = getattr(self.function, "close", None)
        if close is not None:
            close()


# ---------------------------------------------------------------------------------------------------- shared parts


def _own(value: Any) -> Any:
    """A copy of a column for one call: a reward that changes a list must not change the row of the next sample."""
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


async def gather(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """All results in order; the first failure cancels the rest and is raised once they have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def numbers(values: Any, name: str, samples: Sequence[Sample]) -> list[Cell]:
    """A batched function's result as cells. Raises RewardError for a wrong length or type."""
    rows = span(samples)
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise RewardError(
            f"reward {name!r} returned a {type(values).__name__} for {rows}; a batched reward returns a list with one "
            "number (or None) a sample."
        )
    found = list(values)
    if len(found) != len(samples):
        raise RewardError(f"reward {name!r} returned {len(found)} values for {len(samples)} samples ({rows}).")
    return [number(value, name, sample.row) for value, sample in zip(found, samples, strict=True)]


def number(value: Any, name: str, row: Row) -> float | None:
    """One result as a float; True is 1. Raises RewardError for anything that is not a finite number or None."""
    if value is None:
        return None
    told = f"reward {name!r} returned {shown(value, 60)} for {where(row)}; it must return"
    if isinstance(value, (str, bytes, complex)) or not hasattr(value, "__float__"):
        raise RewardError(f"{told} a number or None.")
    try:
        result = float(value)
    except Exception as error:
        raise RewardError(f"{told} one number or None: {error}") from error
    if not math.isfinite(result):
        raise RewardError(f"{told} a finite number or None.")
    return result


def describe_failure(name: str, samples: Sequence[Sample], kind: str, message: str) -> str:
    hint = ""
    if "main thread" in message or "signal" in message:
        hint = (
            " Reward functions run in threads, where signals do not work. The built-in `math` does without; a TRL "
            f"function runs in a main thread with rewards.{name}.style: trl."
        )
    return f"reward {name!r} failed on {span(samples)}: {kind}: {message}{hint}"


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """` (my_rewards.py:12)`: the last line of the function's own file that the exception passed."""
    module = inspect.getmodule(function)
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == getattr(module, "__file__", None)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def span(samples: Sequence[Sample]) -> str:
    if not samples:
        return "no samples"
    if len(samples) == 1:
        return where(samples[0].row)
    return f"a batch of {len(samples)} samples that begins with {where(samples[0].row)}"


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters a call may name; none for built-in callables that hide theirs."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigError(f"the parameters of {_name_of(function)} cannot be read: {error}") from error


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def clock() -> float:
    return time.perf_counter()


def _has(row: Row, key: str) -> bool:
    return key in row.columns or (bool(key) and key == row.prompt_column[0])


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
