"""The `code` reward: what becomes of a sandbox's results, and, through a real sandbox, of HumanEval's own answers.

The double below answers from a script, for what a real sandbox does only when it is broken.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import RewardConfig, RLConfig
from palingenesis.rl.config.schema import SandboxConfig
from palingenesis.rl.errors import ConfigError, DataError, RewardError
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rewards.grading.run import Verdict
from palingenesis.rl.sandbox.job import Job, Program, Result, Sandbox, SandboxUsage, Status
from palingenesis.rl.types import Message, Row, Sample, Score

pytestmark = pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")

ROOT = Path(__file__).parents[2]
HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
TESTS = {"inputs": ["1", "22", "333"], "outputs": ["1", "2", "3"]}


class Scripted:
    """A sandbox that answers each job by a function."""

    def __init__(self, answer: Callable[[Any], Result]) -> None:
        self.answer = answer
        self.jobs: list[Job] = []
        self.started = self.closed = False

    def start(self) -> None:
        self.started = True

    async def run(self, jobs: Sequence[Job]) -> list[Result]:
        self.jobs += jobs
        await asyncio.sleep(0)
        return [self.answer(job) for job in jobs]

    def usage(self) -> SandboxUsage:
        example = {"status": "failed", "reason": "exit code 1", "source": "x", "stderr": ""}
        return SandboxUsage({"done": len(self.jobs), "retried": 2}, (example,))

    def close(self) -> None:
        self.closed = True


def sample(completion: str, prompt: str = "Solve it.", **columns: Any) -> Sample:
    row = Row("1", (Message("user", prompt),), columns, prompt_column=("prompt", prompt))
    return Sample(row, row.messages, completion, "", completion)


def score(sandbox: Sandbox | None, samples: Sequence[Sample], **args: Any) -> list[Score]:
    return scored(sandbox, samples, **args)[0]


def scored(sandbox: Sandbox | None, samples: Sequence[Sample], **args: Any) -> tuple[list[Score], RewardSet]:
    rewards = RewardSet.from_config({"tests": RewardConfig(fn="code", args=args)}, sandbox=sandbox)
    try:
        rewards.check([one.row for one in samples])
        return asyncio.run(rewards.score(samples)), rewards
    finally:
        rewards.close()


def prints(*outputs: str) -> Callable[[Program], Result]:
    """By length of the input."""
    return lambda job: Result(Status.DONE, stdout=outputs[len(job.stdin) - 1])


ANSWER = "```python\nprint(1)\n```"


# ------------------------------------------------------------------------------------------------ scores and verdicts


@pytest.mark.parametrize(
    ("answer", "args", "reward", "verdict", "ran"),
    [
        (prints("1", "2", "3"), {}, 1.0, "passed", ["333", "22", "1"]),
        (prints("1", "2", "3"), {"max_tests": 2}, 1.0, "passed", ["333", "22"]),
        (prints("x", "2", "3"), {"max_tests": 2}, 1.0, "passed", ["333", "22"]),
        (prints("1", "2", "x"), {}, 0.0, "wrong", ["333"]),
        (prints("1", "x", "3"), {}, 0.0, "wrong", ["333", "22"]),
        (prints("x", "2", "3"), {"partial": True}, 2 / 3, "wrong", ["333", "22", "1"]),
        (prints("x", "x", "x"), {"partial": True}, 0.0, "wrong", ["333", "22", "1"]),
        (prints("1", "2", "3"), {"partial": True}, 1.0, "passed", ["333", "22", "1"]),
        (prints("1", "x", "3"), {"partial": True, "max_tests": 1}, 1.0, "passed", ["333"]),
        (lambda job: Result(Status.FAILED, "exit code 1", stdout="3"), {}, 0.0, "failed", ["333"]),
        (lambda job: Result(Status.TIMEOUT, "6 s", stdout="3"), {}, 0.0, "timeout", ["333"]),
        (lambda job: Result(Status.LIMIT, "memory", stdout="3"), {}, 0.0, "limit", ["333"]),
        (lambda job: Result(Status.BROKE, "it killed", stdout="3"), {}, 0.0, "broke", ["333"]),
    ],
    ids=range(13),
)
def test_results_become_scores(
    answer: Callable[[Any], Result], args: Mapping[str, Any], reward: float, verdict: str, ran: list[str]
) -> None:
    sandbox = Scripted(answer)
    (found,), rewards = scored(sandbox, [sample(ANSWER, tests=TESTS)], **args)
    assert found.reward == pytest.approx(reward)
    assert [job.stdin for job in sandbox.jobs if isinstance(job, Program)] == ran
    metrics = rewards.usage().metrics
    assert {name for name, count in metrics.items() if name.startswith("code/") and count} == {f"code/{verdict}"}


@pytest.mark.parametrize("partial", [False, True])
def test_a_broken_sandbox_skips_the_sample(partial: bool) -> None:
    def answer(job: Any) -> Result:
        gone = job.stdin == "22"
        return Result(Status.UNAVAILABLE, "no docker") if gone else Result(Status.DONE, stdout=str(len(job.stdin)))

    (found,) = score(Scripted(answer), [sample(ANSWER, tests=TESTS)], partial=partial)
    assert found.reward is None
    assert (found.skip_source, found.skip_reason) == ("tests", "the sandbox could not run it: no docker")


def test_a_test_that_fails_first_needs_no_sandbox_for_the_others() -> None:
    def answer(job: Any) -> Result:
        return Result(Status.FAILED, "exit code 1") if job.stdin == "333" else Result(Status.UNAVAILABLE, "gone")

    assert [one.reward for one in score(Scripted(answer), [sample(ANSWER, tests=TESTS)])] == [0.0]


@pytest.mark.parametrize("completion", ["", "print(1)", "```python\nprint(1)", "```bash\necho 1\n```"])
def test_no_code_is_no_answer(completion: str) -> None:
    sandbox = Scripted(prints("1", "2", "3"))
    (found,), rewards = scored(sandbox, [sample(completion, tests=TESTS)])
    assert found.reward == 0.0
    assert not sandbox.jobs
    assert rewards.usage().metrics["code/no_code"] == 1


def test_an_answer_that_defines_nothing_of_the_tests_does_not_run() -> None:
    sandbox = Scripted(lambda job: Result(Status.DONE))
    (found,), rewards = scored(sandbox, [sample(ANSWER, tests=["assert sum(1, 2) == 3"])])
    assert found.reward == 0.0
    assert not sandbox.jobs
    assert rewards.usage().metrics["code/undefined"] == 1


def test_no_sandbox_is_an_error_with_the_cure() -> None:
    with pytest.raises(RewardError, match="got no sandbox"):
        score(None, [sample(ANSWER, tests=TESTS)])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_tests": 0}, "`max_tests` is 0"),
        ({"max_tests": True}, "`max_tests` is True"),
        ({"max_tests": 1.5}, "`max_tests` is 1.5"),
        ({"timeout": 0}, "`timeout` is 0"),
        ({"timeout": True}, "`timeout` is True"),
        ({"partial": "yes"}, "`partial` is 'yes'"),
        ({"feild": "x"}, "takes no 'feild'"),
    ],
)
def test_wrong_arguments(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.tests\.args.*") as caught:
        RewardSet.from_config({"tests": RewardConfig(fn="code", args=args)})
    assert says in str(caught.value)


def test_rows_without_tests_are_found_at_load() -> None:
    rewards = RewardSet.from_config({"tests": RewardConfig(fn="code")})
    rows = [sample("", tests=TESTS).row] * 40 + [sample("", tests=None).row]
    kept, (dropped,) = rewards.readable(rows)
    assert len(kept) == 40
    assert str(dropped) == "row 1: column 'tests' holds no tests: None, which reward 'tests' cannot read"
    with pytest.raises(DataError, match="there is no column 'tests'"):
        rewards.check([sample("").row])
    rewards.close()


# ------------------------------------------------------------------------------------------------- counts and examples


def test_usage_counts_since_the_last_call() -> None:
    sandbox = Scripted(prints("1", "2", "x"))
    samples = [sample(ANSWER, tests=TESTS)] * 3 + [sample("", tests=TESTS)]
    _, rewards = scored(sandbox, samples)
    usage = rewards.usage()
    assert {name for name in usage.metrics if name.startswith("code/")} == {f"code/{verdict}" for verdict in Verdict}
    assert {name for name in usage.metrics if name.startswith("sandbox/")} == {
        f"sandbox/{name}" for name in (*Status, "retried", "replaced")
    }
    assert (usage.metrics["code/wrong"], usage.metrics["code/no_code"]) == (3.0, 1.0)
    assert (usage.metrics["sandbox/done"], usage.metrics["sandbox/replaced"]) == (3.0, 0.0)
    wrong = {"status": "wrong", "reason": "input '333': printed 'x', expected '3'", "source": "print(1)\n"}
    assert usage.examples == (wrong, wrong, sandbox.usage().examples[0])
    assert rewards.usage().metrics["code/wrong"] == 0


def test_two_code_rewards_add_up() -> None:
    config = {name: RewardConfig(fn="code", args={"max_tests": 1}) for name in ("a", "b")}
    rewards = RewardSet.from_config(config, sandbox=Scripted(prints("1", "2", "3")))
    asyncio.run(rewards.score([sample(ANSWER, tests=TESTS)]))
    assert rewards.usage().metrics["code/passed"] == 2


def test_a_sandbox_is_opened_only_for_a_reward_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Scripted] = []

    def open_sandbox(config: SandboxConfig) -> Scripted:
        opened.append(Scripted(prints("1", "2", "3")))
        return opened[-1]

    monkeypatch.setattr("palingenesis.rl.sandbox.open_sandbox", open_sandbox)

    async def asks(completion: str, sandbox: Sandbox) -> float:
        return float(len(await sandbox.run([Program(completion, "x")])))

    def plain(completion: str) -> float:
        return 1.0

    for functions, expected in (([plain], 0), ([asks], 1)):
        rewards = RewardSet.from_config({}, functions)
        rewards.start_sandbox(SandboxConfig())
        assert asyncio.run(rewards.score([sample("print(1)")]))[0].reward == 1.0
        rewards.close()
        assert [one.started and one.closed for one in opened] == [True] * expected


# ----------------------------------------------------------------------------------------------------- a real sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    from palingenesis.rl.sandbox import open_sandbox

    opened = open_sandbox(SandboxConfig(backend="subprocess", allow_unsafe=True, workers=2))
    opened.start()
    yield opened
    opened.close()


def fenced(source: str) -> str:
    return f"Here:\n```python\n{source}\n```\n"


SOLUTION = "class Solution:\n    def f(self, x: List[int]) -> int:\n        return {}"
FUNCTION = {"inputs": [[[1, 2]], [[3]]], "outputs": [3, [3]], "fn_name": "f"}
LCB = [{"input": "[1, 2]", "output": "3", "testtype": "functional"}]
NAMED = {"metadata": '{"func_name": "f"}'}
MBPP = ["assert f([1, 2]) == 3", "assert f([]) == 0"]
CHECK = "from __future__ import annotations\ndef check(candidate):\n    assert candidate(2) == -2"
ENTRY = {"entry_point": "f", "test_imports": ["import math"]}
TREE = {
    "tests": ["assert depth(root) == 2"],
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
}
NODE = "class Node:\n    def __init__(self, x):\n        self.x, self.left = x, None\ndef depth(n):\n    return {}"

# (program, columns, score)
REAL: list[tuple[str, dict[str, Any], float]] = [
    ("n = int(input())\nprint(len(str(n)))", {"tests": TESTS}, 1.0),
    ("n = int(input())\nprint(n)", {"tests": TESTS}, 0.0),
    ("import sys\nn = input()\nprint(len(n))\nsys.exit(1)", {"tests": TESTS}, 0.0),
    ("import sys\nn = input()\nprint(len(n))\nsys.exit(0)", {"tests": TESTS}, 1.0),
    ("from __future__ import annotations\nprint(len(input()))", {"tests": TESTS}, 1.0),
    ("c = Counter(input())\nprint(sum(c.values()), math.floor(0.5) or '')", {"tests": TESTS}, 1.0),
    ("", {"tests": TESTS}, 0.0),
    ("print(", {"tests": TESTS}, 0.0),
    (SOLUTION.format("sum(x)"), {"tests": FUNCTION}, 1.0),
    (SOLUTION.format("len(x)"), {"tests": FUNCTION}, 0.0),
    ("def f(x):\n    return sum(x)", {"tests": FUNCTION}, 1.0),
    ("def f(x):\n    return (sum(x),)", {"tests": FUNCTION}, 0.0),  # wrapped is what the test may be, not the answer
    ("def g(x):\n    return sum(x)", {"tests": FUNCTION}, 0.0),
    (SOLUTION.format("sum(x)"), {"tests": LCB, **NAMED}, 1.0),
    (SOLUTION.format("True"), {"tests": LCB, **NAMED}, 0.0),
    (SOLUTION.format("len(x) == 2"), {"tests": {**FUNCTION, "outputs": [1, 0]}}, 1.0),
    ("print(3)", {"tests": {"inputs": ["1"], "outputs": ["0e99999999999999999999"]}}, 0.0),
    ("print('0e99999999999999999999')", {"tests": {"inputs": ["1"], "outputs": ["3"]}}, 0.0),
    ("def f(x):\n    return [range(10**5000)]", {"tests": FUNCTION}, 0.0),
    ("pass", {"tests": {"inputs": ["x" * 9] * 16 + ["1"], "outputs": [""] * 16 + ["yes"]}}, 0.0),
    ("def f(x):\n    return sum(x)", {"tests": MBPP}, 1.0),
    ("def f(x):\n    return 3", {"tests": MBPP}, 0.0),
    ("def f(x):\n    raise SystemExit(0)", {"tests": MBPP}, 0.0),
    ("import os\nos._exit(0)", {"tests": MBPP}, 0.0),
    ("class Same:\n    def __eq__(self, x): return True\ndef f(x):\n    return Same()", {"tests": MBPP}, 0.0),
    ("def f(x):\n    return 1\ndef abs(x):\n    return 0", {"tests": ["assert abs(f(1)) == 0"]}, 0.0),
    ("def f(x):\n    return -1\ndef abs(x):\n    return 7", {"tests": ["assert abs(f(1)) == 1"]}, 1.0),
    ("def f(x):\n    return 1.2\nclass math:\n    def ceil(x): return 9", {"tests": ["assert math.ceil(f(1)) == 9"]}, 0.0),
    ("def f(x):\n    return 1.2\nclass math:\n    def ceil(x): return 9", {"tests": ["assert math.ceil(f(1)) == 2"]}, 1.0),
    ("def sum(a, b):\n    return a * b", {"tests": ["assert sum(2, 3) == 6"]}, 1.0),
    ("def sum(a, b):\n    return a + b", {"tests": ["assert sum(2, 3) == 6"]}, 0.0),
    ("def f(x):\n    return math.pi", {"tests": ["assert f(1) == math.pi"], "test_imports": ["import math"]}, 1.0),
    ("from builtins import sum", {"tests": ["assert sum([2, 3]) == 5"]}, 1.0),
    ("from operator import neg as f", {"tests": CHECK, **ENTRY}, 1.0),
    ("def f(x):\n    return -x", {"tests": "def test_f():\n    assert f(2) == -2\ntest_f()"}, 1.0),
    ("def f(x):\n    return x", {"tests": "def test_f():\n    assert f(2) == -2\ntest_f()"}, 0.0),
    ("def f(x):\n    x.append(1)", {"tests": ["a = []\nf(a)\nassert a == [1]"]}, 1.0),
    (NODE.format("0 if n is None else 1 + depth(n.left)"), TREE, 1.0),
    (NODE.format("1"), TREE, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("program", "columns", "expected"), REAL, ids=range(len(REAL)))
def test_programs_in_a_real_sandbox(sandbox: Sandbox, program: str, columns: dict[str, Any], expected: float) -> None:
    (found,) = score(sandbox, [sample(fenced(program), **columns)])
    assert found.reward == expected


def humaneval() -> list[dict[str, str]]:
    if not HUMANEVAL.exists():
        pytest.skip(f"there is no {HUMANEVAL}")
    with gzip.open(HUMANEVAL, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (lambda row: row["canonical_solution"], 1.0),
        (lambda row: "    pass", 0.0),
        (lambda row: "return None", 0.0),
    ],
    ids=["body", "pass", "none"],
)
def test_humaneval(sandbox: Sandbox, completion: Callable[[dict[str, str]], str], expected: float) -> None:
    samples = [sample(fenced(completion(row)), **row) for row in humaneval()]
    scores = score(sandbox, samples, field="test")
    names = [one.row.columns["task_id"] for one, got in zip(samples, scores, strict=True) if got.reward != expected]
    assert not names


def test_the_prepared_rows_and_the_shipped_config(tmp_path: Path) -> None:
    from palingenesis.rl.rewards.offline import score_file

    humaneval()
    target = tmp_path / "rows.jsonl"
    command = [sys.executable, "examples/rl/prepare_humaneval.py", str(HUMANEVAL), str(target)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    unsafe = ["--sandbox.backend=subprocess", "--sandbox.allow_unsafe=true", "--sandbox.workers=2"]
    config = RLConfig.from_yaml(ROOT / "configs/rl_code.yaml", [f"--data.dataset={target}", *unsafe])
    found = score_file(config, gold="solution")
    assert [one.reward for one in found.scores] == [1.0] * 164


def test_score_prints_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from palingenesis.rl.rewards.offline import score_file

    rows = [
        {"prompt": "Double it.", "tests": TESTS, "completion": fenced(text)} for text in ("print(len(input()))", "1/0")
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = RLConfig.from_dict(
        {
            "model": {"policy": "p"},
            "data": {"dataset": "d"},
            "rewards": {"tests": {"fn": "code"}},
            "sandbox": {"backend": "subprocess", "allow_unsafe": True, "workers": 1},
        }
    )
    found = score_file(config, completions=str(file))
    assert [one.reward for one in found.scores] == [1.0, 0.0]
    printed = capsys.readouterr().out
    assert "code: 1 passed, 1 failed\n" in printed
    assert "sandbox: 3 done, 1 failed\n" in printed
