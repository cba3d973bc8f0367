"""What a job is in exchanges with rooms, and what its end means.

    Program   {"run": script}                                              -> end
    Call      {"run": serve, the call} -> ask: the answer    {"stop"}      -> end
    Check     checker {"run": test}    -> ask: a request     program {"run": serve, the request} -> ask: the answer
              checker {"answer": it}   -> ask: the next      program {"answer": the next}        -> ask: its answer
              checker                  -> ask: the verdict   both {"stop"}                       -> end

Questions and answers are JSON text that is passed on as it is (inside/harness.py says what is in it).

Invariant: what a program says is data from an enemy. It is an answer to what it was asked and nothing else; the one
statement that makes a Check pass is the checker's, whose room never held the program.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palingenesis.rl.sandbox.inside import values
from palingenesis.rl.sandbox.job import Call, Check, Program, Result, Status
from palingenesis.rl.sandbox.room import Room, RoomLostError

GRACE = 20.0  # seconds past a job's deadline in which its room must have said how it ended
_SIGNALS = {int(one): one.name for one in signal.Signals}  # real-time ones have no name
CHECKER_GRACE = 2.0  # seconds that tests may take beyond their program, whose own deadline comes first
REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class End:
    """How a process in a room ended: of its own (`exited`), or stopped for a reason."""

    how: str
    reason: str = ""
    code: int | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0

    def result(self, status: Status, reason: str, value: Any = None) -> Result:
        return Result(status, reason[:REASON], self.stdout, self.stderr, self.code, value, self.seconds)


class Talk:
    """The exchanges of one job with one room."""

    def __init__(self, room: Room, seconds: float) -> None:
        self._room, self._timeout = room, seconds
        self._end: End | None = End("never begun")

    async def run(self, mode: str, **order: Any) -> str | End:
        """Begin. Returns the first question, as JSON text, or the end."""
        return await self._say({"run": {"mode": mode, "timeout": self._timeout, **order}})

    async def answer(self, text: str) -> str | End:
        return await self._say({"answer": text})

    async def stop(self) -> End:
        """The end, made now where it waits for an answer."""
        if self._end is None:
            await self._say({"stop": True})
        if self._end is None:
            raise RoomLostError("a room went on after it was told to stop")
        return self._end

    @property
    def begun(self) -> bool:
        return self._end is None or self._end.how != "never begun"

    async def _say(self, message: Mapping[str, Any]) -> str | End:
        event = await self._room.exchange(message, self._timeout + GRACE)
        try:
            self._end = None if "ask" in event else End(**event["end"])
            return self._end or str(event["ask"])
        except (KeyError, TypeError) as error:
            raise RoomLostError(f"a room said what no room says ({error!r})") from error


async def run_program(job: Program, room: Room, seconds: float) -> Result:
    talk = Talk(room, seconds)
    await talk.run("script", source=job.source, prelude=job.prelude, stdin=job.stdin)
    end = await talk.stop()
    done = end.how == "exited" and end.code == 0
    return end.result(Status.DONE, "") if done else end.result(*_why(end))


async def run_call(job: Call, room: Room, seconds: float) -> Result:
    talk = Talk(room, seconds)
    try:
        args = [values.encode(arg) for arg in job.args]
        order = {"do": "call", "path": [job.function], "args": args, "kwargs": {}, "method_first": True}
        request = values.dumps(order).decode()
    except values.NotPlainError as error:
        raise TypeError(f"Call.args of {job.function}: {error}") from error
    said = await talk.run("serve", source=job.source, prelude=job.prelude, request=request)
    end = await talk.stop()
    if isinstance(said, End):
        return end.result(*_why(end))
    try:
        value, raised = read_answer(said)
    except values.NotPlainError as error:
        return end.result(Status.FAILED, f"{job.function} returned {error}")
    return end.result(Status.FAILED, raised) if raised else end.result(Status.DONE, "", value)


async def run_check(job: Check, room: Room, checker: Room, seconds: float) -> Result:
    tests, program = Talk(checker, seconds + CHECKER_GRACE), Talk(room, seconds)
    status, reason = await _relay(job, tests, program)
    await tests.stop()
    return (await program.stop()).result(status, reason)


async def _relay(job: Check, tests: Talk, program: Talk) -> tuple[Status, str]:
    """Pass requests of the tests to the program, and its answers back, until one of them has ended."""
    said = await tests.run(
        "test", tests=job.tests, helpers=job.helpers, names=list(job.names), entry_point=job.entry_point
    )
    while isinstance(said, str):
        try:
            question: dict[str, Any] = values.loads(said)
        except values.NotPlainError as error:
            return Status.FAILED, f"the tests said {error}"
        if "verdict" in question:
            return _verdict(question, program.begun)
        if program.begun:
            answer = await program.answer(said)
        else:
            answer = await program.run("serve", source=job.source, prelude=job.prelude, request=said)
        if isinstance(answer, End):
            return _why(answer)
        try:
            read_answer(answer, _a_handle)
        except values.NotPlainError as error:
            return Status.FAILED, f"{question['path'][-1]} returned {error}"
        said = await tests.answer(answer)
    status, reason = _why(said)
    return status, f"the tests ended early: {reason}"


def _verdict(said: Mapping[str, Any], used: bool) -> tuple[Status, str]:
    if said.get("untestable"):
        return Status.UNAVAILABLE, f"the tests cannot be run here: {said['verdict']}"
    if said["verdict"]:
        return Status.FAILED, said["verdict"]
    return (Status.DONE, "") if used else (Status.FAILED, "the tests passed without using the program")


def _a_handle(_: Any) -> None:
    """Stands for an object of the program's own classes, where only the shape of an answer counts."""


def read_answer(text: str, handle: values.Other = values.refuse) -> tuple[Any, str]:
    """What a program answered: the value, or in one line what it raised. `handle` makes values of its own objects.

    Raises:
        NotPlainError: it is no answer, or says itself that the value is not plain.
    """
    answer = values.loads(text)
    if not isinstance(answer, dict) or len(answer.keys() & {"value", "method", "raised", "refused"}) != 1:
        raise values.NotPlainError("something that is no answer")
    if "refused" in answer:
        raise values.NotPlainError(str(answer["refused"]))
    if "raised" in answer:
        return None, str(answer.get("trace") or "an exception")
    changed = answer.get("changed", {})
    if not isinstance(changed, dict):
        raise values.NotPlainError("something that is no answer")
    for data in changed.values():
        values.decode(data, handle)
    return values.decode(answer.get("value"), handle), ""


def _why(end: End) -> tuple[Status, str]:
    """Status and reason of a process that ended before it did what it was to do."""
    if end.how == "timeout":
        return Status.TIMEOUT, end.reason
    if end.how == "limit":
        return Status.LIMIT, end.reason
    last = (end.stderr.strip().splitlines() or [""])[-1]
    if end.code == -signal.SIGKILL:
        return Status.LIMIT, "was killed: out of memory, or by itself"
    if end.code is not None and end.code < 0:
        return Status.FAILED, f"was killed by {_SIGNALS.get(-end.code, f'signal {-end.code}')}"
    if end.code and last.startswith("MemoryError"):
        return Status.LIMIT, "out of memory"
    if end.code == 0:
        return Status.FAILED, "exited before it answered"
    return Status.FAILED, last or f"exit code {end.code}"


__all__ = ["GRACE", "read_answer", "run_call", "run_check", "run_program"]
