"""Whole runs with tools: through the real trainer, on the real engine and on one that calls them on purpose."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl import RLConfig, RLTrainer
from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.errors import ConfigError, DataError, ModelError, SandboxError, UsageError
from palingenesis.rl.evaluate import evaluate
from palingenesis.rl.sandbox import open_sandbox
from palingenesis.rl.trainer import load_environments
from palingenesis.rl.types import SamplingParams
from tests.e2e.conftest import ROOT, lines

SMOLLM2 = Path(os.environ.get("PGS_SMOLLM2", ROOT / "models" / "SmolLM2-135M-Instruct"))
IMAGE = os.environ.get("SANDBOX_IMAGE", "palingenesis-sandbox:local")  # scripts/sandbox-image makes it
CALCULATOR = f"{ROOT}/examples/rl/calculator_tools.py:calculator"
AGENT = f"{ROOT}/examples/rl/agentic_math.py:AgenticMath"
UNSAFE = {"backend": "subprocess", "allow_unsafe": True, "workers": 2, "timeout": 5.0}
LENGTHS = {"max_new_tokens": 160, "max_completion_tokens": 480, "max_model_len": 2048}

ENVIRONMENT = '''
ALIVE = []

class Adds:
    """Closed when the run ends, or the test says so."""

    def __init__(self, bonus: float = 0.5):
        ALIVE.append(self)
        self.bonus, self.done, self.sum = bonus, False, None

    def reset(self, answer, **row):
        self.answer = answer
        return "Use the tool."

    async def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.sum = a + b
        return self.sum

    def get_reward(self):
        assert self in ALIVE
        return {"right": float(str(self.sum) == self.answer), "called": self.bonus * (self.sum is not None)}

    def close(self):
        ALIVE.remove(self)
'''


def with_rewards(config: RLConfig, **rewards: Any) -> RLConfig:
    return RLConfig.from_dict({**config.model_dump(), "rewards": rewards})


@pytest.fixture
def environment(tmp_path: Path) -> str:
    path = tmp_path / "adds_env.py"
    path.write_text(ENVIRONMENT, encoding="utf-8")
    return f"{path}:Adds"


def alive(environment: str) -> list[Any]:
    from palingenesis.rl.plugins import resolve

    found: list[Any] = resolve(environment, {}, "env.type").add.__globals__["ALIVE"]
    return found


def needs_docker() -> None:
    there = open_sandbox(SandboxConfig(backend="docker", image=IMAGE, workers=1))
    try:
        there.start()
    except SandboxError as error:
        pytest.skip(str(error))
    there.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`calls(text)`: in place of the real engine, one that writes `text` in every other first turn, then `5`."""

    def use(text: str) -> None:
        def build_engine(config: RLConfig, policy: Any, path: str, tokenizer: Any, stop: tuple[int, ...]) -> Any:
            def say(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
                first = tokenizer.decode(list(prompt)).count("<|im_start|>assistant") == 1
                said = text if first and params.seed % 2 else r"\boxed{5}"
                return [*tokenizer(said, add_special_tokens=False)["input_ids"], stop[0]]

            return ScriptedEngine(say)

        monkeypatch.setattr("palingenesis.rl.trainer.build_engine", build_engine)

    return use


def test_a_run_with_function_tools_on_the_real_engine(
    small: Callable[..., RLConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(
        env={"type": "tools", "tools": [CALCULATOR], "max_turns": 3},
        rollout={**LENGTHS, "max_new_tokens": 16, "max_completion_tokens": 48, "batch_prompts": 2, "backend": "hf"},
        train={"steps": 2, "eval_samples": 4},
    )
    assert RLTrainer(config).train() is not None
    assert "calculator (env.tools)" in capsys.readouterr().out
    steps = lines(Path(config.train.output_dir) / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert {"turns", "tool_calls", "tool_errors"} <= set(steps[0])
    assert RLConfig.from_yaml(Path(config.train.output_dir) / "config.yaml") == config


def test_a_step_without_a_score_says_why(
    small: Callable[..., RLConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lost_env.py").write_text(
        "class Lost:\n    def reset(self, **row): raise RuntimeError('db down')\n    def go(self) -> str: return ''\n"
    )
    config = small(env={"type": f"{tmp_path}/lost_env.py:Lost"}, rollout=LENGTHS, train={"steps": 1, "eval_samples": 1})
    RLTrainer(config).train()
    shown = " ".join(capsys.readouterr().out.split())
    told = r"no optimizer step: (\d+) of \1 rollouts were skipped, most by environment: reset of Lost failed: Runtime"
    assert re.search(told, shown), shown
    assert "too hard or too easy" not in shown


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_policy_calls_tools(
    small: Callable[..., RLConfig], environment: str, calls: Callable[[str], None], staleness: int
) -> None:
    """Sampled log-probs are made up, so the masks are off: what is tested is the way of the tokens into the step."""
    calls('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>')
    config = small(
        env={"type": environment, "max_concurrent": 8, "args": {"bonus": 0.25}},
        rollout={**LENGTHS, "max_staleness": staleness},
        loss={"seq_mask": 0, "eps_high": 1e6, "eps_low": 0.99},
        train={"steps": 2, "eval_samples": 4},
        logging={"dump_trajectories": 1},
    )
    RLTrainer(config).train()
    folder = Path(config.train.output_dir)
    for step in lines(folder / "metrics.jsonl"):
        assert 0 < step["tool_calls"] < 1
        assert step["turns"] == 1 + step["tool_calls"]
        assert step["env/called"] == pytest.approx(0.25 * step["tool_calls"])
        assert step["grad_norm"] > 0
        assert step["skipped"] == step["tool_errors"] == 0
    _, *rollouts = lines(folder / "rollouts" / "step_1.jsonl")
    called = next(line for line in rollouts if len(line["turns"]) > 2)
    assert [turn["role"] for turn in called["turns"]] == ["prompt", "assistant", "tool", "assistant"]
    assert "Use the tool." in called["turns"][0]["text"]
    assert called["turns"][2]["tool_name"] == "add"
    assert called["turns"][2]["version"] is None
    assert called["rewards"]["env/called"] == 0.25
    assert "env/right" in lines(folder / "eval.jsonl")[0]
    assert alive(environment) == []


def test_a_held_out_evaluation_plays_too(
    small: Callable[..., RLConfig], environment: str, calls: Callable[[str], None]
) -> None:
    calls('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>')
    config = small(env={"type": environment, "max_concurrent": 4}, rollout=LENGTHS, train={"eval_temperature": 1.0})
    report = evaluate(config, "builtin:tiny", samples=4)
    assert 0 < report["env/called"] < 0.5
    assert alive(environment) == []
    with pytest.raises(UsageError, match=r"--samples 5: .*env\.max_concurrent is 4"):
        evaluate(config, "builtin:tiny", samples=5)


@pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")
@pytest.mark.parametrize("sandbox", [UNSAFE, {"image": IMAGE, "workers": 2}], ids=["subprocess", "docker"])
def test_an_environment_gets_the_sandbox_and_grades_without_rewards(
    small: Callable[..., RLConfig], calls: Callable[[str], None], sandbox: dict[str, Any]
) -> None:
    if "image" in sandbox:
        needs_docker()
    code = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    answer = json.dumps({"name": "submit_answer", "arguments": {"answer": "42"}})
    calls(f"<tool_call>\n{code}\n</tool_call>\n<tool_call>\n{answer}\n</tool_call>")
    config = small(
        env={"type": AGENT, "tool_timeout": 30.0},
        rollout={**LENGTHS, "batch_prompts": 1, "max_refill": 0},
        loss={"seq_mask": 0, "eps_high": 1e6, "eps_low": 0.99},
        sandbox=sandbox,
        train={"steps": 1, "eval_samples": 1},
        logging={"dump_trajectories": 1},
    )
    RLTrainer(with_rewards(config)).train()
    (step,) = lines(Path(config.train.output_dir) / "metrics.jsonl")
    assert step["tool_calls"] > 0
    assert step["skipped"] == step["tool_errors"] == 0
    assert step["grad_norm"] > 0
    _, *rollouts = lines(Path(config.train.output_dir) / "rollouts" / "step_1.jsonl")
    submitted = [line for line in rollouts if line["finish"] == "done"]
    assert submitted
    for line in submitted:
        assert line["reward"] == pytest.approx(0.1 + (line["row"]["answer"] == "42"))
        assert "42" in line["turns"][2]["text"]
        assert line["turns"][2]["tokens"] == 0, "nobody read it"
    assert all(line["reward"] == 0.0 for line in rollouts if line["finish"] == "stop")


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_told_before_the_model_loads(
    small: Callable[..., RLConfig], environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_policy(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("palingenesis.rl.policy.model.load_policy", load_policy)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "1 + {n}?", "number": "{1 + n}"}}\n' for n in range(9)), encoding="utf-8")
    data = {"dataset": str(rows), "eval_dataset": "", "eval_size": 1}
    lacks = small(env={"type": environment}, rollout=LENGTHS, data=data)
    with pytest.raises(DataError, match=r"'answer'.*Adds\.reset asks for"):
        RLTrainer(with_rewards(lacks)).train()
    with pytest.raises(ConfigError, match=r"env\.args\.bonsu: .*'bonus'"):
        RLTrainer(small(env={"type": environment, "args": {"bonsu": 1}}, rollout=LENGTHS)).train()
    with pytest.raises(ConfigError, match=r"env\.allowed_tools"):
        RLTrainer(small(env={"type": environment, "allowed_tools": ["search*"]}, rollout=LENGTHS)).train()
    with pytest.raises(ConfigError, match=r"env\.tool_parser"):
        RLTrainer(small(env={"type": environment, "tool_parser": "hermse"}, rollout=LENGTHS)).train()
    with pytest.raises(ConfigError, match=r"env\.tool_parser: hermes does nothing: no row has tools"):
        RLTrainer(small(env={"tool_parser": "hermes"})).train()
    unscored = with_rewards(small(env={"type": "tools", "tools": [CALCULATOR]}))
    with pytest.raises(ConfigError, match=r"rewards: there is none, and tools has no get_reward"):
        RLTrainer(unscored).train()
    with pytest.raises(ConfigError, match=r"env\.max_concurrent: the 4 rollouts of a group"):
        small(env={"type": environment, "max_concurrent": 3})


def test_a_template_that_cannot_show_answers_is_an_error_at_start(
    small: Callable[..., RLConfig], environment: str, tmp_path: Path
) -> None:
    import shutil

    policy = tmp_path / "policy"
    shutil.copytree(ROOT / "src/palingenesis/rl/policy/builtin/tiny", policy)
    template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    (policy / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ModelError, match="cannot show what tools answer"):
        RLTrainer(small(model={"policy": str(policy)}, env={"type": environment}, rollout=LENGTHS)).train()


# ------------------------------------------------------------------------------------------------------------- configs


@pytest.mark.parametrize("name", ["rl_tools.yaml", "rl_agentic_math.yaml"])
def test_the_configs_load_and_their_tools_are_described(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.rl.rewards import RewardSet

    monkeypatch.chdir(ROOT)
    config = RLConfig.from_yaml(
        f"configs/{name}",
        ["--sandbox.backend", "subprocess", "--sandbox.allow_unsafe", "true"][: 4 * (name == "rl_agentic_math.yaml")],
    )
    rewards = RewardSet.from_config(config.rewards)
    monkeypatch.setattr(RewardSet, "start_sandbox", lambda self, config, needed=False: None)
    environments = load_environments(config, rewards)
    assert environments is not None
    expected = {"rl_tools.yaml": ["calculator"], "rl_agentic_math.yaml": ["python", "submit_answer"]}[name]
    assert [schema["function"]["name"] for schema in environments.schemas or ()] == expected


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"no {SMOLLM2}: examples/rl/prepare_smollm2.py makes it")
def test_a_real_model_plays_two_steps_with_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is too weak to call anything in 40 tokens: what is shown is that such a run goes its way."""
    needs_docker()
    monkeypatch.chdir(ROOT)
    data = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"Tom has {n} apples and buys {n + 2} more. How many has he?", "answer": f"{2 * n + 2}"}
        for n in (3, 4)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {
        "model.policy": SMOLLM2, "data.dataset": data, "data.eval_dataset": data,
        "rollout.backend": "hf", "rollout.batch_prompts": 1, "rollout.group_size": 4, "rollout.max_new_tokens": 40,
        "rollout.max_completion_tokens": 80, "rollout.max_model_len": 2048, "rollout.max_refill": 0,
        "sandbox.image": IMAGE, "sandbox.workers": 2, "train.steps": 2, "train.eval_samples": 1, "train.eval_every": 0,
        "train.save_steps": 0, "train.save_final": "false", "train.output_dir": tmp_path / "run",
        "logging.dump_trajectories": 1,
    }  # fmt: skip
    overrides = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    RLTrainer(RLConfig.from_yaml("configs/rl_agentic_math.yaml", overrides)).train()
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["skipped"] == 0 for step in steps)
