"""Run reward functions written for TRL (GRPOTrainer's `reward_funcs`) unchanged.

    samples --TRL's shapes, pickled--> worker process, main thread: f(prompts=..., completions=..., **columns)
    cells  <--JSON----------------------

They run in the main thread of a process of their own, because many of them (TRL's `accuracy_reward` among them) use
signals for their time-outs, which work nowhere else; and a process can be killed when a call passes its deadline.

What a function receives, always by keyword and only as far as its signature takes it: `prompts` and `completions` as
lists of messages (the last turn's content is its raw text, reasoning included), `completion_ids`, every column as a
list, `trainer_state` (None), `log_extra` and `log_metric` (which record nothing). A call that passes its deadline, or
a process that cannot be had, skips the samples.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palingenesis.rl.errors import ConfigError, RewardError, SkipSample
from palingenesis.rl.plugins import nearest, resolve
from palingenesis.rl.rewards.bind import (
    BoundReward,
    Cell,
    describe_failure,
    instantiate,
    is_async,
    numbers,
    parameters_of,
)
from palingenesis.rl.rewards.threads import Threads
from palingenesis.rl.rewards.workers import (
    TaskCrashedError,
    TaskFailedError,
    TaskTimeoutError,
    WorkerPool,
    WorkersUnavailableError,
)
from palingenesis.rl.types import Row, Sample, where

DEADLINE = 60.0  # seconds one call may take, unless `args.timeout` says otherwise
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class TrlReward(BoundReward):
    """A function with TRL's signature. Its process is started here, so that a wrong name or argument is found at once.

    Args:
        fn: `module:Name` or `file.py:Name`: the function, or what builds it from `args`.
        args: as for plain rewards. `timeout` (seconds a call may take, 60) is ours where the function has no such
            parameter.

    Raises:
        ConfigError: the function cannot be loaded or refuses `args`.
    """

    def __init__(self, name: str, fn: str, *, weight: float = 1.0, args: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, weight)
        self._pool = WorkerPool("palingenesis.rl.rewards.trl:serve", 1, {"name": name, "fn": fn, "args": args or {}})
        try:
            about = self._pool.submit({"call": "describe"}, DEADLINE).result()
        except TaskFailedError as error:
            self._pool.close()
            known = error.kind in ("ConfigError", "RewardError")
            raise ConfigError(error.message if known else f"rewards.{name}.fn: {fn!r}: {error}") from error
        except (WorkersUnavailableError, TaskTimeoutError, TaskCrashedError) as error:
            self._pool.close()
            raise ConfigError(f"rewards.{name}.fn: the process for {fn!r} does not start: {error}") from error
        self._deadline = float(about["timeout"])
        self._required: list[str] = about["required"]

    async def evaluate(self, samples: Sequence[Sample], threads: Threads) -> list[Cell]:
        if not samples:
            return []
        payload = {"call": "score", **trl_arguments(samples)}
        try:
            values = await asyncio.wrap_future(self._pool.submit(payload, self._deadline))
        except TaskTimeoutError:
            return [SkipSample(f"no answer within {self._deadline:g} s")] * len(samples)
        except (TaskCrashedError, WorkersUnavailableError) as error:
            return [SkipSample(str(error))] * len(samples)
        except TaskFailedError as error:
            if error.kind == "SkipSample":
                return [SkipSample(error.message)] * len(samples)
            error.add_note(error.trace)
            raise RewardError(describe_failure(self.name, samples, error.kind, error.message)) from error
        return numbers(values, self.name, samples)

    def check_columns(self, row: Row) -> None:
        there = [*row.columns, *filter(None, [row.prompt_column[0]])]
        for key in self._required:
            if key not in GIVEN and key not in there:
                raise RewardError(
                    f"reward {self.name!r} asks for {key!r}{nearest(key, [*GIVEN, *there])}, which {where(row)} does "
                    f"not have. The row's columns: {', '.join(there) or 'none'}."
                )

    def close(self) -> None:
        self._pool.close()


def trl_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """The batch in TRL's shapes; `columns` holds a list for every column that any row has."""
    names = dict.fromkeys(key for sample in samples for key in sample.row.columns)
    own = samples[0].row.prompt_column[0]
    return {
        "prompts": [[message.to_dict() for message in sample.prompt_messages] for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        "columns": {name: [sample.row.columns.get(name) for sample in samples] for name in names},
        "prompt_column": (own, [sample.row.prompt_column[1] for sample in samples]),
    }


def _completion(sample: Sample) -> list[dict[str, Any]]:
    """The turns after the prompt; the last one's content is the text as sampled."""
    turns = [message.to_dict() for message in sample.answer_messages]
    last = {"role": "assistant", "content": _with_opening(sample)}
    if turns and turns[-1]["role"] != "assistant":
        return turns
    return [*turns[:-1], last]


def _with_opening(sample: Sample) -> str:
    """The raw text, with the `<think>` that the prompt had opened."""
    return f"<think>\n{sample.raw}" if sample.reasoning_open else sample.raw


# ---------------------------------------------------------------------------------------------------- worker side


def serve(init: Mapping[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """The worker's task: load the function once, then describe or call it."""
    name, option = init["name"], f"rewards.{init['name']}"
    target = resolve(init["fn"], {}, f"{option}.fn")
    if not callable(target):
        raise ConfigError(f"{option}.fn: {init['fn']!r} is a {type(target).__name__}, which cannot be called.")
    args = dict(init["args"])
    own_timeout = "timeout" not in [p.name for p in parameters_of(target)]
    deadline = args.pop("timeout", DEADLINE) if own_timeout else DEADLINE
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < math.inf:
        raise ConfigError(f"{option}.args.timeout: {deadline!r} is not a positive number of seconds.")
    function, constants = instantiate(option, target, args)
    runner = asyncio.Runner() if is_async(function) else None

    def handle(payload: dict[str, Any]) -> Any:
        if payload["call"] == "describe":
            return {"required": _required(function, constants), "timeout": deadline}
        result = function(**_keywords(function, payload, constants))
        if inspect.isawaitable(result):
            assert runner is not None
            result = runner.run(_wait_for(result))
        return _plain(result, name)

    return handle


async def _wait_for(result: Any) -> Any:
    return await result


def _required(function: Callable[..., Any], constants: Mapping[str, Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        p.name for p in parameters_of(function) if p.kind in kinds and p.default is p.empty and p.name not in constants
    ]


def _keywords(function: Callable[..., Any], payload: Mapping[str, Any], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Everything TRL passes, cut to what the function takes, as a function without `**kwargs` needs."""
    parameters = parameters_of(function)
    named = {p.name for p in parameters}
    given: dict[str, Any] = {
        **payload["columns"],
        "prompts": payload["prompts"],
        "completions": payload["completions"],
        "completion_ids": payload["completion_ids"],
        "trainer_state": None,
        "log_extra": _record_nothing,
        "log_metric": _record_nothing,
    }
    own, values = payload["prompt_column"]
    if own in named:
        given.setdefault(own, values)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {key: value for key, value in given.items() if key in named}
    return given | dict(constants)


def _record_nothing(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`."""


def _plain(result: Any, name: str) -> list[float | None]:
    """The result as JSON holds it; the parent checks length and range."""
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__iter__"):
        raise RewardError(f"it returned a {type(result).__name__}; a TRL reward returns a list of numbers or None.")
    values = []
    for value in result:
        if value is not None and (isinstance(value, (str, bytes)) or not hasattr(value, "__float__")):
            raise RewardError(f"it returned {value!r} in its list; a reward is a number or None.")
        values.append(None if value is None else float(value))
    return values
