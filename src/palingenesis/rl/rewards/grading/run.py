"""Run tests against one answer, and say how it went.

    tests ── the `max_tests` longest, one not idle ──> job ──> sandbox ──> result ──difference──> verdict

Each test is a job of its own, so in a fresh process. The first that does not pass ends the run, unless the share is asked
for. Invariants: the score is positive only for tests whose job ended DONE and whose result equals what is expected; a
sandbox that is not available raises SkipSample and never becomes a verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from palingenesis.rl.errors import SkipSample
from palingenesis.rl.observe.waits import progress
from palingenesis.rl.rewards.bind import gather
from palingenesis.rl.rewards.grading.tests import Test
from palingenesis.rl.sandbox.job import Sandbox, Status


class Verdict(StrEnum):
    """What became of an answer, or of one of its tests. The names are those of the metrics `code/<verdict>`."""

    PASSED = "passed"
    WRONG = "wrong"  # it ran, and its output or returned value is not the expected one
    FAILED = "failed"  # an exception, a failed assert, an exit code, a value that is not plain
    TIMEOUT = "timeout"
    LIMIT = "limit"
    BROKE = "broke"
    UNDEFINED = "undefined"  # it defines nothing that the test calls
    NO_CODE = "no_code"  # no closed Python fence


@dataclass(frozen=True, slots=True)
class Grade:
    """How an answer did: its score in [0, 1], the verdict (of the first test that did not pass) and that test's reason."""

    score: float
    verdict: Verdict
    reason: str = ""


PASS = Grade(1.0, Verdict.PASSED)


def chosen(tests: Sequence[Test], max_tests: int) -> Sequence[Test]:
    """The tests that run: the longest inputs, longest first; equal ones in the row's order.

    One of them, at the place of the last, is a test that a program which does nothing fails.
    """
    ordered = sorted(tests, key=lambda test: -test.size)
    first, rest = ordered[:max_tests], ordered[max_tests:]
    if all(test.idle for test in first):
        first[-1:] = [next((test for test in rest if not test.idle), first[-1])]
    return first


async def grade(
    answer: str, tests: Sequence[Test], sandbox: Sandbox, *, seconds: float | None = None, partial: bool = False
) -> Grade:
    """Run the tests, one after another until one does not pass; with `partial` all at once, for the share that does.

    Args:
        seconds: one test may take; None is the sandbox's own limit.

    Raises:
        SkipSample: the sandbox was not available for a test.
    """
    if partial:
        grades = await gather(run_test(answer, test, sandbox, seconds) for test in tests)
        share = sum(one.score for one in grades) / len(grades)
        first = next((one for one in grades if one is not PASS), PASS)
        return Grade(share, first.verdict, first.reason)
    for test in tests:
        one = await run_test(answer, test, sandbox, seconds)
        if one is not PASS:
            return one
    return PASS


async def run_test(answer: str, test: Test, sandbox: Sandbox, seconds: float | None) -> Grade:
    """Run one test. Raises SkipSample."""
    job = test.job(answer, seconds)
    if job is None:
        return Grade(0.0, Verdict.UNDEFINED, "the answer defines nothing that the test calls")
    (result,) = await sandbox.run([job])
    progress()  # of the reward that waits: an answer with many slow tests does not stand still
    if not result.status.is_score:
        raise SkipSample(f"the sandbox could not run it: {result.reason}")
    if result.status is not Status.DONE:
        return Grade(0.0, Verdict(result.status.value), result.reason)
    # In a thread: a program may print megabytes, and the event loop serves every other rollout.
    difference = await asyncio.to_thread(test.difference, result)
    return Grade(0.0, Verdict.WRONG, difference) if difference else PASS
