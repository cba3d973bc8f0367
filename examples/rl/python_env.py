"""A Python interpreter for the policy: programs run in the trainer's sandbox, never in this process.

    env: {type: examples/rl/python_env.py:PythonEnv}

It has no reward of its own; reward functions score the answer. examples/rl/agentic_math.py grades by itself.
"""

from __future__ import annotations

from typing import Any

from palingenesis.rl import SkipSample
from palingenesis.rl.sandbox import Program, Sandbox, Status


class PythonEnv:
    def __init__(self, sandbox: Sandbox) -> None:  # receives the trainer's sandbox, because it asks
        self.sandbox = sandbox

    def reset(self, **row: Any) -> None:
        self.calls = 0

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The complete program.
        """
        self.calls += 1
        (result,) = await self.sandbox.run([Program(code)])
        if result.status is Status.UNAVAILABLE:  # says nothing about the program
            raise SkipSample(f"sandbox: {result.reason}")
        if result.status is Status.DONE:
            return result.stdout or "(the program printed nothing)"
        return "\n".join(part for part in (result.stdout, result.stderr, f"[{result.reason}]") if part)
