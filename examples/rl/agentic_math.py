"""Math word problems with a Python interpreter: the policy writes programs, reads what they print, and submits.

    reset(answer) ──> python(code), as often as it likes ──> submit_answer(answer) ends the episode ──> get_reward

The environment grades: `correct` when the submitted number equals the row's, and a little for submitting at all, without
which a policy that has never done so learns nothing from its first steps. `env.type` names the class; see
configs/rl_agentic_math.yaml. Programs run in the trainer's sandbox and never in this process.
"""

from __future__ import annotations

from palingenesis.rl import SkipSample
from palingenesis.rl.rewards.math import Math
from palingenesis.rl.sandbox import Program, Sandbox, Status

SUBMITTED = 0.1  # reward for an answer that is wrong


class AgenticMath:
    """One problem. `tools` pins what the policy may call; `grade` is public and no tool."""

    tools = ("python", "submit_answer")

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.math = Math()
        self.done = False
        self.submitted = ""

    def reset(self, answer: str) -> None:
        self.answer = answer

    async def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The complete program. Print what you want to see.
        """
        (result,) = await self.sandbox.run([Program(code)])
        if result.status is Status.UNAVAILABLE:  # not the policy's fault
            raise SkipSample(f"sandbox: {result.reason}")
        if result.status is Status.DONE:
            return result.stdout or "(the program printed nothing)"
        return f"{result.stdout}{result.stderr}".strip() or result.reason

    async def submit_answer(self, answer: str) -> str:
        """Submit the final answer. This ends the task.

        Args:
            answer: The number alone.
        """
        if self.done:  # calls of a turn run at once, asynchronous ones in their order: the first counts
            return "an answer was submitted already"
        self.submitted, self.done = answer, True
        return "submitted"

    async def grade(self) -> float:
        return await self.math(f"\\boxed{{{self.submitted}}}", answer=self.answer)

    async def get_reward(self) -> dict[str, float]:
        if not self.done:
            return {"correct": 0.0, "submitted": 0.0}
        return {"correct": await self.grade(), "submitted": SUBMITTED}
