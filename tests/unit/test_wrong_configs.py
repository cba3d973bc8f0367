"""Wrong configs: each is answered by one line that names the thing, the place and the cure, with exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palingenesis.rl.config import RLConfig
from palingenesis.rl.errors import ConfigError

BASE = "model: {policy: p}\ndata: {dataset: d}\n"  # two lines: what a case adds starts on line 3

# name -> (added to BASE, overrides, parts of the message: thing, place, cure)
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "misspelt option": ("rollout:\n  groupsize: 8\n", [], ["c.yaml:4: rollout.groupsize", "rollout.group_size?"]),
    "misspelt on the command line": (
        "",
        ["--rollout.groupsize", "4"],
        ["command line: rollout.groupsize", "did you mean rollout.group_size?"],
    ),
    "misspelt section": ("trian:\n  steps: 3\n", [], ["c.yaml:3: trian", "did you mean train?"]),
    "misspelt section, command line": ("", ["--rollouts.groupsize", "4"], ["command line", "rollout.group_size?"]),
    "wrong section": ("train:\n  group_size: 8\n", [], ["c.yaml:4: train.group_size", "it is rollout.group_size"]),
    "no section": ("group_size: 8\n", [], ["c.yaml:3: group_size", "it is rollout.group_size"]),
    "a dotted key": ("train.steps: 8\n", [], ["c.yaml:3: train.steps", "write train: {steps: ...}"]),
    "no section, command line": ("", ["--steps", "4"], ["command line: steps", "it is train.steps"]),
    "misspelt reward option": (
        "rewards:\n  a:\n    fn: math\n    wieght: 1\n",
        [],
        ["c.yaml:6: rewards.a.wieght", "did you mean rewards.a.weight?"],
    ),
    "misspelt reward": ("rewards:\n  a: {fn: maths}\n", [], ["c.yaml:4: rewards.a.fn", "did you mean 'math'?"]),
    "misspelt choice": ("loss:\n  type: cipso\n", [], ["c.yaml:4: loss.type", "masked_is, cispo", "mean 'cispo'?"]),
    "top-p": ("rollout:\n  top_p: 0.9\n", [], ["c.yaml:4: rollout.top_p", "bias", "rollout.temperature"]),
    "top-k elsewhere": ("", ["--model.top_k", "5"], ["command line: model.top_k", "bias", "rollout.temperature"]),
    "below the bound": ("", ["--rollout.group_size", "1"], ["command line: rollout.group_size", "at least 2, not 1"]),
    "above the bound": ("train: {max_skipped: 2}\n", [], ["c.yaml:3: train.max_skipped", "at most 1, not 2"]),
    "a word for a number": ("train:\n  steps: many\n", [], ["c.yaml:4: train.steps", "a whole number", "'many'"]),
    "a truth value for a number": ("train:\n  steps: true\n", [], ["c.yaml:4: train.steps", "a whole number", "true"]),
    "not a number": ("train: {learning_rate: .nan}\n", [], ["c.yaml:3: train.learning_rate", "a number, at least 0"]),
    "an empty value": ("train:\n  steps:\n", [], ["c.yaml:4: train.steps", "a whole number", "empty"]),
    "a word for a list": ("", ["--model.stop_tokens", "x"], ["command line: model.stop_tokens", "[a, b]"]),
    "a word for a mapping": ("env: {args: x}\n", [], ["c.yaml:3: env.args", "{key: value}"]),
    "a word for a section": ("train: fast\n", [], ["c.yaml:3: train", "{output_dir: ...}", "'fast'"]),
    "a bare reward": ("rewards:\n  a: math\n", [], ["c.yaml:4: rewards.a", "{fn: ...}", "'math'"]),
    "a list of rewards": ("rewards: [math]\n", [], ["c.yaml:3: rewards", "{correct: {fn: math}}"]),
    "a reserved reward name": ("rewards:\n  overlong: {fn: math}\n", [], ["c.yaml:4: rewards.overlong", "rename"]),
    "a reward name with a slash": ("rewards:\n  a/b: {fn: math}\n", [], ["c.yaml:4: rewards.a/b", "rename"]),
    "a reward without fn": ("rewards:\n  a: {weight: 2}\n", [], ["c.yaml:4: rewards.a.fn", "is required"]),
    "a key twice": ("train:\n  seed: 1\n  seed: 2\n", [], ["c.yaml:5: train.seed", "twice", "line 4", "remove one"]),
    "bad syntax": ("train:\n  stop: [a\nloss: {}\n", [], ["c.yaml:5", "not valid YAML"]),
    "an environment variable missing": (
        "train:\n  output_dir: ${oc.env:PGS_NOT_THERE}/x\n",
        [],
        ["c.yaml:4: train.output_dir", "PGS_NOT_THERE", "set it"],
    ),
    "a flag without value": ("", ["--train.steps"], ["command line: train.steps", "write --train.steps VALUE"]),
    "a flag before a flag": (
        "",
        ["--train.steps", "--train.seed", "1"],
        ["command line: train.steps", "write --train.steps VALUE"],
    ),
    "a value without flag": ("", ["fast"], ["command line: 'fast'", "--section.option value"]),
    "a section as a flag": ("", ["--train", "{steps: 1}"], ["command line: train", "--train.output_dir"]),
    "a part of a plain option": ("", ["--train.steps.x", "1"], ["command line: train.steps.x", "a whole number"]),
    "an override below a plain value": ("train: 3\n", ["--train.steps", "1"], ["c.yaml:3: train", "--train.steps"]),
    "icepop's bound with masked_is": (
        "loss:\n  icepop_low: 0.4\n",
        [],
        ["c.yaml:4: loss.icepop_low", "does nothing", "loss.type icepop"],
    ),
    "gspo's bound with masked_is": ("", ["--loss.gspo_eps", "0.1"], ["command line: loss.gspo_eps", "loss.type gspo"]),
    "a clip with cispo": ("loss: {type: cispo, eps_low: 0.1}\n", [], ["c.yaml:3: loss.eps_low", "loss.type masked_is"]),
    "a cap with icepop": ("loss: {type: icepop, is_cap: 2}\n", [], ["c.yaml:3: loss.is_cap", "masked_is or cispo"]),
    "a sequence mask with gspo": ("loss: {type: gspo, seq_mask: 0}\n", [], ["c.yaml:3: loss.seq_mask", "icepop"]),
    "a penalty without buffer": (
        "loss: {overlong_penalty: 0.5}\n",
        [],
        ["c.yaml:3: loss.overlong_penalty", "loss.overlong_buffer"],
    ),
    "a buffer longer than a rollout": (
        "loss: {overlong_buffer: 5000}\n",
        [],
        ["c.yaml:3: loss.overlong_buffer", "2048 tokens", "lower it"],
    ),
    "no room for a prompt": (
        "rollout:\n  max_model_len: 2048\n",
        [],
        ["c.yaml:4: rollout.max_model_len", "rollout.max_new_tokens 2048", "raise the one"],
    ),
    "prompts that fill the context": (
        "data: {dataset: d, max_prompt_tokens: 9000}\n",
        [],
        ["c.yaml:2: data.max_prompt_tokens", "rollout.max_model_len 8192", "lower the one"],
    ),
    "a turn longer than a rollout": (
        "",
        ["--rollout.max_new_tokens", "900", "--rollout.max_completion_tokens", "100"],
        ["command line: rollout.max_new_tokens", "rollout.max_completion_tokens"],
    ),
    "a rollout longer than its only turn": (
        "",
        ["--rollout.max_completion_tokens", "4096"],
        ["command line: rollout.max_completion_tokens", "env.type"],
    ),
    "evaluation without held-out rows": ("train: {eval_every: 5}\n", [], ["c.yaml:3: train.eval_every", "eval_size"]),
    "a held-out split of nothing": (
        "",
        ["--data.eval_split", "dev"],
        ["command line: data.eval_split", "eval_dataset"],
    ),
    "a split of a file": (
        "",
        ["--data.dataset", "d.jsonl", "--data.split", "x"],
        ["command line: data.split", "a file has no splits"],
    ),
    "kept checkpoints without saving": (
        "train: {keep_checkpoints: 5}\n",
        [],
        ["c.yaml:3: train.keep_checkpoints", "train.save_steps"],
    ),
    "vllm's option with hf": (
        "rollout:\n  backend: hf\n  prefix_caching: false\n",
        [],
        ["c.yaml:5: rollout.prefix_caching", "rollout.backend vllm"],
    ),
    "TRL's style with a built-in": (
        "rewards:\n  a: {fn: math, style: trl}\n",
        [],
        ["c.yaml:4: rewards.a.style", "a function of your own"],
    ),
    "a part not built": ("train: {guard: act}\n", [], ["c.yaml:3: train.guard", "not built yet", "leave it off"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_names_thing_place_and_cure(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    added, overrides, parts = CASES[case]
    base = BASE.replace("data: {dataset: d}\n", "") if added.startswith("data:") else BASE
    Path("c.yaml").write_text(base + added)
    with pytest.raises(ConfigError) as caught:
        RLConfig.from_yaml("c.yaml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message
    assert caught.value.exit_code == 2


FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["c.yaml: is empty", "model: and data:"]),
    "only comments": (b"# nothing\n", ["c.yaml: is empty", "model: and data:"]),
    "a list": (b"- a\n", ["c.yaml:1", "a mapping of sections"]),
    "a word": (b"config\n", ["c.yaml:1", "a mapping of sections"]),
    "not UTF-8": (b"a: \xff\n", ["c.yaml", "not UTF-8", "save it as UTF-8"]),
    "a control character": (b"a: \x00\n", ["c.yaml", "not valid YAML"]),
    "two documents": (b"model: {}\n---\ndata: {}\n", ["c.yaml:2", "not valid YAML", "single document"]),
    "a tab": (b"model:\n\tpolicy: x\n", ["c.yaml:2", "not valid YAML"]),
    "an unknown tag": (b"model:\n  policy: !!python/name:os.system x\n", ["c.yaml", "python/name"]),
    "itself": (b"model: &m\n  policy: *m\n", ["c.yaml:1: model.policy", "refers to itself"]),
    "a list for a key": (b"model: {[a]: 1}\n", ["c.yaml:1: model", "a key must be a word"]),
    "no policy": (b"data: {dataset: d}\n", ["c.yaml: model.policy", "is required"]),
    "no dataset": (b"model: {policy: p}\n", ["c.yaml: data.dataset", "is required"]),
    "an empty policy": (b"model:\n  policy: ''\n", ["c.yaml:2: model.policy", "not empty"]),
    "a line break in a name": (b'"a\\nb": 1\n', ["c.yaml:1: a b", "there are model, data"]),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_config(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, parts = FILES[case]
    Path("c.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RLConfig.from_yaml("c.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such file \(looked in "):
        RLConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory; name the YAML file in it"):
        RLConfig.from_yaml(tmp_path)


def test_the_command_line_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(BASE)
    command = [sys.executable, "-m", "palingenesis.cli", "rl", "--config", str(config), "--rollout.groupsize", "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean rollout.group_size?" in done.stderr
