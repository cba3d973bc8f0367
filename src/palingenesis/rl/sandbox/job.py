"""What a sandbox is asked to do, and what it answers.

    Program   source + stdin              -> stdout, exit code
    Call      source + function + args    -> the returned value, plain data
    Check     source + test source        -> passed or not; the tests run where the program is not

Invariant: a program's room receives the program, its input and the arguments of calls, never an expected value or a
test. `Status.UNAVAILABLE` is the one status that says nothing about the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Program:
    """Run `source` as a script.

    Attributes:
        source: Python source text.
        stdin: what it reads from standard input.
        prelude: source that runs before it in the same namespace (imports its starter code expects).
        timeout: seconds of wall-clock time; None is the sandbox's.
    """

    source: str
    stdin: str = ""
    prelude: str = ""
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Load `source` and call one of its functions.

    Attributes:
        function: a module-level callable's name, else a method of its `class Solution`.
        args: plain built-in values, passed by position.
    """

    source: str
    function: str
    args: tuple[Any, ...] = ()
    prelude: str = ""
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """Load `source` in one room and run `tests` against its functions from another.

    Attributes:
        tests: test source (asserts, or a `check(candidate)` function).
        names: what the tests call by name: functions and classes of the program.
        helpers: source that the tests need (the row's prompt, imports, set-up); runs beside the tests.
        entry_point: when given, `check(<the program's entry_point>)` is called after the tests were loaded.
    """

    source: str
    tests: str
    names: tuple[str, ...] = ()
    helpers: str = ""
    entry_point: str = ""
    prelude: str = ""
    timeout: float | None = None


Job = Program | Call | Check


class Status(StrEnum):
    """How a job ended."""

    DONE = "done"  # exit code 0; the call returned a plain value; the tests passed
    FAILED = "failed"  # another exit code, an exception, a value that is not plain, a failed test
    TIMEOUT = "timeout"
    LIMIT = "limit"  # memory, processes or output
    BROKE = "broke"  # it killed what supervises it, on two rooms
    UNAVAILABLE = "unavailable"  # the sandbox failed, on two rooms

    @property
    def is_score(self) -> bool:
        """The status says something about the program."""
        return self is not Status.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a job.

    Attributes:
        reason: one line on why it is not DONE; empty when it is.
        stdout: captured standard output, UTF-8 with replacement, cut at the sandbox's cap.
        value: what a Call returned.
        seconds: wall-clock time inside the room.
    """

    status: Status
    reason: str = ""
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    value: Any = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """Work since it was last asked.

    Attributes:
        counts: jobs by status, and `retried` and `replaced` (rooms).
        examples: a few jobs that did not end DONE, newest last: `{"status", "reason", "source", "stderr"}`.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Mapping[str, str], ...] = ()


class Sandbox(Protocol):
    """Runs programs that are not trusted. Safe to call from any thread and any event loop."""

    def start(self) -> None:
        """Start the warm rooms and run a trivial job. Raises SandboxError with the cure when that fails."""
        ...

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, as many at once as there are rooms; results in order. A program's failure never raises."""
        ...

    def usage(self) -> SandboxUsage: ...

    def close(self) -> None:
        """End every room, running jobs included. Idempotent."""
        ...
