"""The environments of examples/rl with the real sandbox; programs are trusted here, so the plain backend will do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import EnvConfig, SandboxConfig
from palingenesis.rl.envs import build, wants_sandbox
from palingenesis.rl.errors import SkipSample
from palingenesis.rl.sandbox import Job, Result, Sandbox, Status, open_sandbox
from palingenesis.rl.types import Message, Row, ToolCall

EXAMPLES = Path(__file__).parents[2] / "examples" / "rl"
ROW = Row("r1", (Message("user", "What is 6 * 7?"),), {"answer": "42"})
PYTHON = EnvConfig(type=f"{EXAMPLES}/python_env.py:PythonEnv")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = open_sandbox(SandboxConfig(backend="subprocess", allow_unsafe=True, workers=1))
    made.start()
    yield made
    made.close()


def run(config: EnvConfig, sandbox: Any, *calls: ToolCall) -> list[str]:
    async def main() -> list[str]:
        session = await build(config, sandbox).open(ROW)
        try:
            return [(await session.call(call)).text for call in calls]
        finally:
            await session.close()

    return asyncio.run(main())


def test_the_python_environment(sandbox: Sandbox) -> None:
    assert wants_sandbox(PYTHON)
    schema = (build(PYTHON, sandbox).schemas or ())[0]["function"]
    assert schema["name"] == "python"
    assert schema["parameters"]["required"] == ["code"]
    good, silent, bad = run(
        PYTHON,
        sandbox,
        *(ToolCall("python", {"code": code}) for code in ("print(6 * 7)", "x = 1", "print('a')\n1 / 0")),
    )
    assert good == "42\n"
    assert silent == "(the program printed nothing)"
    assert bad.startswith("a\n")
    assert "ZeroDivisionError" in bad


class Down:
    """A sandbox whose rooms cannot be reached."""

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        return [Result(Status.UNAVAILABLE, "no room could be started") for _ in jobs]


@pytest.mark.parametrize("env", ["python_env.py:PythonEnv", "agentic_math.py:AgenticMath"])
def test_a_sandbox_that_is_down_skips_the_sample(env: str) -> None:
    with pytest.raises(SkipSample, match=r"^sandbox: no room could be started"):
        run(EnvConfig(type=f"{EXAMPLES}/{env}"), Down(), ToolCall("python", {"code": "print(1)"}))


def test_the_calculator(sandbox: Sandbox) -> None:
    config = EnvConfig(type="tools", tools=[f"{EXAMPLES}/calculator_tools.py:calculator"])
    expressions = (
        "(12 + 7) * 3",
        "1 / 8",
        "-2 * -3",
        "2 ** 9",
        "1 / 0",
        "__import__('os')",
        "(" * 150,
        "9" * 300,
        "1 +",
    )
    good = run(config, sandbox, *(ToolCall("calculator", {"expression": text}) for text in expressions))
    assert good[:3] == ["57", "0.125", "6"]
    assert all(text.startswith("Error: ") for text in good[3:])
