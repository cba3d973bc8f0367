"""The `code` reward: the last Python block of a completion against the row's hidden tests.

    completion ──answer_block──> answer ──┐
    row ──read_tests──> tests ────────────┴─grade──> jobs of the sandbox ──> 1.0 or 0.0, or the share with `partial`

Invariants: a program's room sees inputs only (sandbox/job.py); a row whose tests cannot be read is found at load and never
scores; a sandbox that fails skips the sample, everything else is a score.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from palingenesis.rl.errors import ConfigError, RewardError
from palingenesis.rl.rewards.bind import Usage
from palingenesis.rl.rewards.grading.extract import answer_block
from palingenesis.rl.rewards.grading.run import Grade, Verdict, chosen, grade
from palingenesis.rl.rewards.grading.tests import Test, UnreadableTestsError, check_arguments, read_tests
from palingenesis.rl.sandbox.job import Sandbox
from palingenesis.rl.types import Row

WRONG_KEPT = 2  # wrong answers kept as examples between two calls of `reward_usage`


class Code:
    """1.0 when the completion's last Python block passes the row's tests, else 0.0.

    Args:
        field: column of the tests, in the shape of APPS, TACO, LiveCodeBench, MBPP or HumanEval.
        max_tests: most tests that run, those with the longest input.
        timeout: seconds one test may take; None is `sandbox.timeout`.
        partial: score the share of tests passed instead.

    Raises:
        SkipSample: the sandbox was not available.
        RewardError: there is no sandbox.
    """

    def __init__(
        self, field: str = "tests", max_tests: int = 16, timeout: float | None = None, partial: bool = False
    ) -> None:
        if isinstance(max_tests, bool) or not isinstance(max_tests, int) or max_tests < 1:
            raise ConfigError(f"`max_tests` is {max_tests!r}; it is a count of at least 1.")
        if timeout is not None and (isinstance(timeout, bool) or not timeout > 0):
            raise ConfigError(f"`timeout` is {timeout!r}; a test needs a positive number of seconds.")
        if not isinstance(partial, bool):
            raise ConfigError(f"`partial` is {partial!r}; it is true or false.")
        self.field = field
        self.columns = (field,)
        self._max_tests = max_tests
        self._timeout = timeout
        self._partial = partial
        self._lock = threading.Lock()  # the rollout loop counts, the trainer's thread takes the counts
        self._counts: Counter[str] = Counter()
        self._wrong: list[Mapping[str, str]] = []

    async def __call__(self, completion: str, prompt: str, sandbox: Sandbox | None, **row: Any) -> float:
        if sandbox is None:
            raise RewardError("the code reward got no sandbox: call start_sandbox(config.sandbox) on its RewardSet.")
        answer = answer_block(completion)
        if answer is None:
            return self._count(Grade(0.0, Verdict.NO_CODE), "")
        tests = await asyncio.to_thread(self._tests, row, prompt)
        found = await grade(answer, tests, sandbox, seconds=self._timeout, partial=self._partial)
        return self._count(found, answer)

    def _tests(self, columns: Mapping[str, Any], prompt: str) -> Sequence[Test]:
        return chosen(read_tests(columns, self.field, prompt), self._max_tests)

    def check_reference(self, row: Row) -> str | None:
        """Why the row's tests cannot be read; None when they can."""
        columns = dict([row.prompt_column]) | dict(row.columns)
        try:
            check_arguments(read_tests(columns, self.field, row.last_user_text))
        except UnreadableTestsError as error:
            return f"column {self.field!r} {error}"
        return None

    def _count(self, found: Grade, answer: str) -> float:
        with self._lock:
            self._counts[found.verdict.value] += 1
            if found.verdict is Verdict.WRONG and len(self._wrong) < WRONG_KEPT:
                self._wrong.append({"status": "wrong", "reason": found.reason, "source": answer})
        return found.score

    def reward_usage(self) -> Usage:
        """Since the last call: answers by verdict as `code/<verdict>`, and a few whose result was wrong.

        Answers that failed in the sandbox are among the sandbox's own examples.
        """
        with self._lock:
            counts, wrong = self._counts, self._wrong
            self._counts, self._wrong = Counter(), []
        return Usage({f"code/{verdict}": float(counts[verdict]) for verdict in Verdict}, tuple(wrong))
