"""The commands as a user runs them: exit codes, one-line errors, and what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palingenesis.cli import run
from palingenesis.rl import RLConfig
from palingenesis.rl.config import EnvConfig
from tests.e2e.conftest import ROOT, lines
from tests.unit.test_wrong_configs import BASE, CASES
from tests.unit.test_wrong_data import WRONG


@pytest.fixture
def config(small: Callable[..., RLConfig], tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(small().dump(), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("command", [[], ["data"], ["eval"]], ids=["train", "data", "eval"])
def test_wrong_configs_end_with_2_and_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for added, overrides, parts in CASES.values():
        base = BASE.replace("data: {dataset: d}\n", "") if added.startswith("data:") else BASE
        Path("c.yaml").write_text(base + added, encoding="utf-8")
        assert run(["rl", *command, "--config", "c.yaml", *overrides]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.count("\n") == 1
        assert error.startswith("error: ")
        assert all(part in error for part in parts)


@pytest.mark.parametrize("command", [[], ["data"]], ids=["train", "data"])
def test_wrong_data_files_end_with_1_and_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = "model: {policy: builtin:tiny}\nrewards:\n  math: {fn: math}\n"
    for name, text, options, parts in WRONG:
        if text is not None:
            Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        Path("c.yaml").write_text(base + f"data: {json.dumps({'dataset': name, **options})}\n", encoding="utf-8")
        assert run(["rl", *command, "--config", "c.yaml"]) == 1
        error = capsys.readouterr().err.strip()
        assert "Traceback" not in error
        assert error.startswith("error: ")
        assert "\n" not in error
        for part in parts:
            assert part in error
        Path(name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["rl"], 2, "--config FILE is missing"),
        (["rl", "data"], 2, "--config FILE is missing"),
        (["sft"], 2, "no command 'sft'; there is rl"),
        ([], 2, "needs a command"),
        (["rl", "evaluate", "--config", "x.yaml"], 2, "did you mean 'eval'?"),
        (["rl", "score", "--config", "x.yaml", "--completions", "a", "--out", "./a"], 2, "would overwrite"),
        (["rl", "score", "--config", "x.yaml"], 2, "either --completions FILE or --gold COLUMN"),
        (["rl", "--config", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["rl", "data", "--show", "many"], 2, "invalid int value"),
    ],
)
def test_usage_errors(argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == code
    assert says in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert "palingenesis" in capsys.readouterr().out
    assert run(["rl", "--help"]) == 0
    text = capsys.readouterr().out
    for option, *_ in RLConfig(model={"policy": "p"}, data={"dataset": "d"}, rewards={}).options():
        assert option.split(".")[-1] in text
    assert run(["rl", "score", "--help"]) == 0


def test_a_defect_keeps_its_traceback(config: str, tmp_path: Path) -> None:
    """Only errors of the user's are one line; the exit code of a defect is 1 too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import palingenesis.rl.data.show as show\ndef broken(*a, **k): raise KeyError('ours')\nshow.show_data = broken\n"
    )
    command = [sys.executable, "-m", "palingenesis.cli", "rl", "data", "--config", config]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_data_prints_the_rows_as_the_policy_meets_them(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rl", "data", "--config", config, "--json", "--show", "2", "--tokens"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {"id", "messages", "tools", "columns"} <= set(row)
        assert row["messages"][-1]["role"] == "user"
        assert row["columns"].keys() == {"answer"}
        assert row["tokens"] > 10
    assert run(["rl", "data", "--config", config]) == 0
    assert rows[0]["messages"][-1]["content"] in capsys.readouterr().out


TOOL_ROW = {"prompt": "385 * 94 = ?", "answer": "36190"}
OWN_TOOL = {"type": "function", "function": {"name": "own", "description": "", "parameters": {"type": "object"}}}
LISTS_ITS_TOOLS = """
class Routes:
    def __init__(self, sandbox): raise AssertionError("nothing is opened to look at rows")
    def tool_schemas(self): return []
    def call_tool(self, name, arguments): return ""
    def get_reward(self): return 1.0
"""


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """`shown(env, row)`: what `pgs rl data --json --tokens` prints of the row, and its standard error."""

    def show(env: dict[str, Any], row: dict[str, Any]) -> tuple[dict[str, Any], str]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        sections = {"model": {"policy": "builtin:tiny-tools"}, "data": {"dataset": str(tmp_path / "rows.jsonl")}}
        path = tmp_path / "tools.yaml"
        path.write_text(RLConfig.from_dict({**sections, "env": env}).dump(), encoding="utf-8")
        assert run(["rl", "data", "--config", str(path), "--json", "--tokens"]) == 0
        out = capsys.readouterr()
        return json.loads(out.out), out.err

    return show


def names(row: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in row["tools"]]


def test_data_shows_and_counts_the_tools_of_the_environment(shown: Callable[..., tuple[dict[str, Any], str]]) -> None:
    from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer
    from palingenesis.rl.envs import build
    from palingenesis.rl.policy.model import policy_path
    from palingenesis.rl.rollout.prompts import Prompts
    from palingenesis.rl.types import Message, Row

    functions: dict[str, Any] = {"type": "tools", "tools": [f"{ROOT}/examples/rl/calculator_tools.py:calculator"]}
    row, _ = shown(functions, TOOL_ROW)
    schemas = build(EnvConfig(**functions)).schemas
    prompts = Prompts(ChatTemplate(load_tokenizer(policy_path("builtin:tiny-tools"))))
    asked = Row("r", (Message("user", TOOL_ROW["prompt"]),), {})
    assert names(row) == ["calculator"]
    assert row["tokens"] == len(prompts.render(asked, schemas or ()).ids)

    bare, _ = shown({}, TOOL_ROW)
    assert names(bare) == []
    assert bare["tokens"] == len(prompts.render(asked).ids) < row["tokens"]

    own, _ = shown({}, {**TOOL_ROW, "tools": [OWN_TOOL]})
    assert names(own) == ["own"]
    assert own["tokens"] > bare["tokens"]


def test_data_opens_no_environment_and_says_what_only_a_reset_knows(
    tmp_path: Path, shown: Callable[..., tuple[dict[str, Any], str]]
) -> None:
    row, _ = shown({"type": f"{ROOT}/examples/rl/python_env.py:PythonEnv"}, TOOL_ROW)
    assert names(row) == ["python"]

    (tmp_path / "routes.py").write_text(LISTS_ITS_TOOLS, encoding="utf-8")
    row, said = shown({"type": f"{tmp_path}/routes.py:Routes"}, {**TOOL_ROW, "tools": [OWN_TOOL]})
    assert names(row) == []
    assert "Routes lists its tools after each reset: they are neither shown nor counted here." in said


def test_score_writes_every_row_and_prints_the_table(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    completions, out = tmp_path / "c.jsonl", tmp_path / "g.jsonl"
    rows: list[dict[str, Any]] = [
        {"answer": "4", "completion": r"so \boxed{4}", "note": "kept"},
        {"answer": "4", "completion": r"\boxed{5}"},
        {"answer": "4", "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
    ]
    completions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run(["rl", "score", "--config", config, "--completions", str(completions), "--out", str(out)]) == 0
    scored = lines(out)
    assert [row["reward"] for row in scored] == [1.0, 0.0, 1.0]
    assert all(row["outcome"] == "scored" and row["rewards"] == {"correct": row["reward"]} for row in scored)
    assert scored[0]["note"] == "kept"
    assert "correct" in capsys.readouterr().out
    assert run(["rl", "score", "--config", config, "--gold", "answer"]) == 0
    assert "1.0000" in capsys.readouterr().out


def test_eval_reports_pass_at_k(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["--samples", "4", "--train.eval_temperature", "1.0", "--train.eval_samples", "12"]
    assert run(["rl", "eval", "--config", config, *sampled, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 12
    assert set(report["pass@k"]) == {"1", "2", "4"}
    assert report["pass@k"]["1"] == pytest.approx(report["reward"])
    assert report["pass@k"]["1"] <= report["pass@k"]["2"] <= report["pass@k"]["4"] <= 1.0
    assert run(["rl", "eval", "--config", config, "--samples", "4"]) == 2
    assert "train.eval_temperature" in capsys.readouterr().err
    assert run(["rl", "eval", "--config", config, "--policy", "nowhere/at-all"]) == 1
    assert "nowhere/at-all" in capsys.readouterr().err
    assert run(["rl", "eval", "--config", config]) == 0
    assert "held-out rows" in capsys.readouterr().out


def test_the_trainer_module_runs_as_torchrun_starts_it(config: str) -> None:
    command = [sys.executable, "-m", "palingenesis.rl.trainer", "--config", config, "--train.steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "AutoModelForCausalLM.from_pretrained" in done.stdout.splitlines()[-1]
