"""A whole run whose rewards run programs: the sandbox starts before the model, is counted, and is gone afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl import RLConfig, RLTrainer, SkipSample
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.evaluate import evaluate
from palingenesis.rl.sandbox import Program, Sandbox, Status
from tests.e2e.conftest import lines

pytestmark = pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")

UNSAFE = {"backend": "subprocess", "allow_unsafe": True, "workers": 2, "timeout": 5.0}
ROWS = [
    {"prompt": f"{a} + {b} = ?", "answer": str(a + b), "tests": {"inputs": [f"{a} {b}"], "outputs": [str(a + b)]}}
    for a in range(10, 30)
    for b in (3, 14)
]


@pytest.fixture
def coded(small: Callable[..., RLConfig], tmp_path: Path) -> Callable[..., RLConfig]:
    def make(**sections: Any) -> RLConfig:
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        ours: dict[str, Any] = {
            "data": {"dataset": str(rows), "eval_dataset": "", "eval_size": 4},
            "rewards": {"tests": {"fn": "code"}},
            "sandbox": UNSAFE,
            "train": {"steps": 2},
        }
        return small(**{name: ours.get(name, {}) | sections.get(name, {}) for name in {*ours, *sections}})

    return make


async def runs(completion: str, sandbox: Sandbox) -> float:
    """The tiny policy writes numbers and a box, which is no Python; half of the answers get a program that fails."""
    source = "print(1)" if len(completion) % 2 else "raise ValueError('odd')"
    (result,) = await sandbox.run([Program(source)])
    if result.status is Status.UNAVAILABLE:
        raise SkipSample(result.reason)
    return float(result.status is Status.DONE)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_counts_what_its_programs_did(coded: Callable[..., RLConfig], staleness: int) -> None:
    config = coded(rollout={"max_staleness": staleness})
    assert RLTrainer(config, rewards=[runs]).train() is not None
    folder = Path(config.train.output_dir)
    steps = lines(folder / "metrics.jsonl")
    assert len(steps) == 2
    for step in steps:
        ran = step["sandbox/done"] + step["sandbox/failed"]
        assert step["sandbox/failed"] > 0
        assert ran == step["code/no_code"] or staleness  # else a group may be half scored when the step is written
        assert step["sandbox/unavailable"] == step["sandbox/replaced"] == step["code/passed"] == 0
        assert step["skipped"] == 0
    failures = lines(folder / "failures.jsonl")
    assert {line["step"] for line in failures} <= {1, 2}
    assert {(line["status"], line["source"]) for line in failures} == {("failed", "raise ValueError('odd')")}
    assert "ValueError: odd" in failures[0]["stderr"]


def test_a_held_out_evaluation_starts_the_sandbox_too(coded: Callable[..., RLConfig]) -> None:
    report = evaluate(coded(), "builtin:tiny")
    assert (report["rewards/tests"], report["skipped"]) == (0.0, 0.0)


def test_a_sandbox_that_cannot_start_ends_the_run_before_the_model_loads(
    coded: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_policy(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("palingenesis.rl.policy.model.load_policy", load_policy)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"sandbox\.backend: "):
        RLTrainer(coded(sandbox={"backend": "docker", "allow_unsafe": False})).train()


def test_a_run_whose_rewards_run_nothing_starts_no_sandbox(small: Callable[..., RLConfig]) -> None:
    config = small(train={"steps": 1, "eval_samples": 1})
    RLTrainer(config).train()
    (step,) = lines(Path(config.train.output_dir) / "metrics.jsonl")
    assert not [name for name in step if name.startswith(("sandbox/", "code/"))]
    assert not (Path(config.train.output_dir) / "failures.jsonl").exists()
