"""Whole runs: what they write, how they stop, and what they continue from."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palingenesis.rl import RLConfig, RLTrainer, SkipSample
from palingenesis.rl.engines.hf import HFEngine
from palingenesis.rl.errors import (
    CheckpointError,
    ConfigError,
    OutageError,
    PalingenesisError,
    RewardError,
    StopRun,
    UsageError,
)
from palingenesis.rl.observe.records import lock
from palingenesis.rl.policy.fp8 import round_to_fp8
from palingenesis.rl.policy.weights import PolicyWeights
from palingenesis.rl.trainer import Interrupts, build
from tests.e2e.conftest import ROOT, lines

Small = Callable[..., RLConfig]
TINY = ROOT / "src/palingenesis/rl/policy/builtin/tiny"

# What the specification names, for the parts that are built.
METRICS = {
    "reward",
    "rewards/correct",
    "policy/abs_ratio_dev",
    "policy/mismatch_k3",
    "policy/clipped",
    "policy/seq_masked",
    "policy/entropy",
    "groups/zero_variance",
    "groups/continued",
    "groups/retired",
    "staleness/mean",
    "staleness/max",
    "truncated",
    "skipped",
    "turns",
    "time/rollout",
    "time/train",
    "time/step",
    "engine/seqs_mean",
    "engine/tail_s",
    "engine/prefix_hit",
    "engine/prefill_tokens",
    "tokens/generated",
    "tokens/trained",
    "tokens/s",
    "lr",
    "grad_norm",
}


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_a_run_writes(small: Small, staleness: int) -> None:
    config = small(
        logging={"dump_trajectories": 2},
        train={"steps": 3, "eval_every": 2},
        rollout={"max_staleness": staleness},
    )
    final = RLTrainer(config).train()
    folder = Path(config.train.output_dir)

    metrics = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert set(line) >= METRICS
        parts = sum(value for name, value in line.items() if name.startswith("time/") and name != "time/step")
        assert parts == pytest.approx(line["time/step"])
        assert line["time/other"] < 0.03 * line["time/step"] + 0.05
    assert [line["step"] for line in lines(folder / "eval.jsonl")] == [0, 2, 3]
    assert {"step", "time", "rows", "reward", "rewards/correct", "truncated"} <= set(lines(folder / "eval.jsonl")[0])

    assert RLConfig.from_yaml(folder / "config.yaml") == config

    assert [path.name for path in (folder / "rollouts").iterdir()] == ["step_2.jsonl"]
    engine, *rollouts = lines(folder / "rollouts" / "step_2.jsonl")
    assert engine["kind"] == "engine"
    assert max(running for _, running in engine["timeline"]) >= 16
    informative = [line for line in rollouts if line["trained"]]
    assert informative
    for line in informative:
        prompt, turn = line["turns"]
        assert prompt["role"] == "prompt"
        assert turn["tokens"] == len(turn["logprobs"]) > 0
        assert line["advantage"] is not None
        assert line["rewards"]["correct"] == line["reward"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert final == folder / "final"
    model = AutoModelForCausalLM.from_pretrained(final, dtype="auto")
    assert model.dtype == torch.bfloat16, "the dtype of the checkpoint the run started from"
    assert AutoTokenizer.from_pretrained(final).chat_template


def run_cli(config: RLConfig, tmp_path: Path, *extra: str) -> subprocess.Popen[str]:
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(), encoding="utf-8")
    command = [sys.executable, "-m", "palingenesis.cli", "rl", "--config", str(path), *extra]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(config: RLConfig, count: int, process: subprocess.Popen[str], seconds: float = 120) -> None:
    path = Path(config.train.output_dir) / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_text(encoding="utf-8").count("\n") < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "staleness"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGTERM, 2)]
)
def test_a_signal_saves_and_the_run_continues(
    small: Small, tmp_path: Path, number: signal.Signals, staleness: int
) -> None:
    config = small(train={"steps": 1000}, rollout={"max_staleness": staleness})
    process = run_cli(config, tmp_path)
    wait_for_steps(config, 2, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert f"stopped by {number.name}" in out
    assert "--train.resume_from auto" in out
    (checkpoint,) = (Path(config.train.output_dir) / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("step_"))
    assert done >= 2

    more = run_cli(config, tmp_path, "--train.resume_from", "auto", "--train.steps", str(done + 1))
    out, _ = more.communicate(timeout=120)
    assert more.returncode == 0, out
    assert "resumed from" in out
    steps = [line["step"] for line in lines(Path(config.train.output_dir) / "metrics.jsonl")]
    assert steps == list(range(1, done + 2))


def test_a_killed_run_continues_from_its_last_checkpoint(small: Small, tmp_path: Path) -> None:
    config = small(train={"steps": 1000, "save_steps": 1})
    process = run_cli(config, tmp_path)
    wait_for_steps(config, 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    more = run_cli(config, tmp_path, "--train.resume_from", "auto", "--train.steps", "5")
    out, _ = more.communicate(timeout=120)
    assert more.returncode == 0, out
    assert [line["step"] for line in lines(Path(config.train.output_dir) / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_signal_in_the_middle_of_a_wave_leaves_the_models_own_files_alone(small: Small, tmp_path: Path) -> None:
    """Generation bends the model's generation config while it runs; a checkpoint must not see that."""
    config = small(rollout={"max_new_tokens": 100, "group_size": 32}, train={"steps": 1000})
    process = run_cli(config, tmp_path)
    wait_for_steps(config, 2, process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    (folder,) = (Path(config.train.output_dir) / "checkpoints").iterdir()
    saved = json.loads((folder / "policy" / "generation_config.json").read_text(encoding="utf-8"))
    own = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))
    versioned = {"transformers_version"}
    assert {k: v for k, v in saved.items() if k not in versioned} == {
        k: v for k, v in own.items() if k not in versioned
    }


class StopAt:
    """A reward that asks the run to stop, as a signal would, at its n-th call."""

    __name__ = "stop_at"

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, completion: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_during_an_evaluation_leaves_no_gap(small: Small) -> None:
    config = small(
        rollout={"max_refill": 0},
        train={"steps": 3, "eval_every": 1, "eval_samples": 16, "output_dir": small().train.output_dir},
    )
    rollouts, evaluated = 4 * 4, 16
    with pytest.raises(StopRun):
        RLTrainer(config, rewards=[StopAt(evaluated + rollouts + 3)]).train()  # in the evaluation after step 1
    config.train.resume_from = "auto"
    RLTrainer(config, rewards=[StopAt(-1)]).train()
    folder = Path(config.train.output_dir)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines(folder / "eval.jsonl")] == [0, 1, 2, 3]


def test_going_back_to_an_older_checkpoint_keeps_the_newer_aside(small: Small) -> None:
    config = small(train={"steps": 3, "save_steps": 1, "keep_checkpoints": 5})
    RLTrainer(config).train()
    folder = Path(config.train.output_dir)
    config.train.resume_from = str(folder / "checkpoints" / "step_1")
    config.train.steps = 2
    RLTrainer(config).train()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step_1",
        "step_2",
        "step_2.abandoned",
        "step_3.abandoned",
    ]
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2]


def test_a_checkpoint_of_another_run_starts_a_run_of_its_own(small: Small, tmp_path: Path) -> None:
    first = small(train={"steps": 2, "save_steps": 2})
    RLTrainer(first).train()
    other = small(train={"steps": 1, "output_dir": str(tmp_path / "other")})
    RLTrainer(other).train()
    other.train.steps, other.train.resume_from = 3, str(Path(first.train.output_dir) / "checkpoints" / "step_2")
    RLTrainer(other).train()
    assert [line["step"] for line in lines(tmp_path / "other.1" / "metrics.jsonl")] == [1]
    assert [line["step"] for line in lines(tmp_path / "other" / "metrics.jsonl")] == [3]


def test_a_failure_in_the_backward_pass_still_saves(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.rl.policy.step import PolicyStep

    original, calls = PolicyStep._backward, []

    def fails_third(self: PolicyStep, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("CUDA out of memory")
        return original(self, *args)

    monkeypatch.setattr(PolicyStep, "_backward", fails_third)
    config = small(train={"steps": 9})
    with pytest.raises(RuntimeError, match="out of memory"):
        RLTrainer(config).train()
    assert (Path(config.train.output_dir) / "checkpoints" / "step_2" / "COMPLETE").exists()


@pytest.mark.parametrize("name", ["state.json", "optimizer.pt", "policy/model.safetensors"])
def test_a_damaged_checkpoint_is_one_message(small: Small, name: str) -> None:
    config = small(train={"steps": 1, "save_steps": 1})
    RLTrainer(config).train()
    file = Path(config.train.output_dir) / "checkpoints" / "step_1" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    config.train.resume_from = "auto"
    with pytest.raises(PalingenesisError) as caught:
        RLTrainer(config).train()
    assert "step_1" in str(caught.value)


def test_the_heap_of_a_run_is_not_walked_through_while_it_is_under_way(small: Small) -> None:
    """A collection of it takes 0.2 s and more, and stops the rollout loop as well."""
    before = gc.get_freeze_count()
    with build(small()):
        assert gc.get_freeze_count() > before + 100_000
    assert gc.get_freeze_count() == 0


def test_several_processes_are_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="not built yet"):
        RLTrainer(small()).train()


def test_an_output_dir_that_is_a_file_is_one_message(small: Small, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"train.output_dir: .*taken cannot be written"):
        RLTrainer(small(train={"output_dir": str(tmp_path / "taken")})).train()


def test_a_folder_that_a_run_is_writing_to_is_refused(small: Small) -> None:
    config = small(train={"steps": 1})
    RLTrainer(config).train()
    with lock(Path(config.train.output_dir)), pytest.raises(UsageError, match="another run is writing"):
        RLTrainer(config).train()


def test_the_working_directory_is_never_moved(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    config = small(train={"steps": 1, "output_dir": "."})
    RLTrainer(config).train()
    with pytest.raises(UsageError, match="the working directory; name another"):
        RLTrainer(config).train()
    assert [p.name for p in tmp_path.iterdir() if "project" in p.name] == ["project"]


def test_a_reward_that_changes_the_directory_moves_nothing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wanders(completion: str) -> None:
        os.chdir(tmp_path / "elsewhere")

    assert RLTrainer(small(train={"steps": 1, "output_dir": "here"}), rewards=[wanders]).train() == Path("here/final")
    assert (tmp_path / "here" / "final" / "config.json").exists()
    assert not any((tmp_path / "elsewhere").iterdir())


FORKS = """
import os, signal, time
from palingenesis.rl.trainer import Interrupts
with Interrupts():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.5)  # Python drops a signal that arrives within the fork itself
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
"""


def test_a_process_that_a_reward_forks_ends_on_sigterm() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=30)


def test_a_second_ctrl_c_waits_for_the_save() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.saving = True
        signal.raise_signal(signal.SIGINT)


def test_a_full_disk_is_one_message_and_keeps_the_older_checkpoint(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palingenesis.rl.policy import checkpoint

    config = small(train={"steps": 9, "save_steps": 2})
    original = checkpoint.export

    def fails_on_the_second(folder: Path, *args: Any, **kwargs: Any) -> Path:
        if "step_2" not in str(folder):
            raise OSError(28, "No space left on device")
        return original(folder, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "export", fails_on_the_second)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4 cannot be written.*No space left"):
        RLTrainer(config).train()
    assert [p.name for p in (Path(config.train.output_dir) / "checkpoints").iterdir()] == ["step_2"]


def test_an_old_run_is_set_aside(small: Small) -> None:
    config = small(train={"steps": 1})
    RLTrainer(config).train()
    RLTrainer(config).train()
    folder = Path(config.train.output_dir)
    assert (folder.with_name(folder.name + ".1") / "final").is_dir()
    assert len(lines(folder / "metrics.jsonl")) == 1


def test_a_checkpoint_of_other_rows_is_refused(small: Small, tmp_path: Path) -> None:
    rows = (ROOT / "examples/rl/data/addition/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(rows[:50]), encoding="utf-8")
    RLTrainer(small(data={"dataset": str(data)}, train={"steps": 1, "save_steps": 1})).train()
    data.write_text("".join(rows[1:51]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not those of the checkpoint"):
        RLTrainer(small(data={"dataset": str(data)}, train={"resume_from": "auto"})).train()


def noted(told: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        told.append(name)
        return original(*args)

    return call


def test_the_engine_sleeps_while_the_policy_steps(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    from palingenesis.rl.engines.hf import HFEngine
    from palingenesis.rl.policy.step import PolicyStep

    for staleness, expected in ((0, ["sleep", "run", "load", "wake"]), (1, ["run", "load"])):
        told: list[str] = []
        with monkeypatch.context() as patch:
            for owner, name in ((HFEngine, "sleep"), (HFEngine, "wake"), (HFEngine, "load"), (PolicyStep, "run")):
                original = getattr(owner, name)

                patch.setattr(owner, name, noted(told, name, original))
            RLTrainer(small(train={"steps": 2, "save_final": False}, rollout={"max_staleness": staleness})).train()
        assert told == ["load", *expected, *expected]  # the first: the weights the run starts with


def test_prompts_under_way_are_drawn_again_after_a_resume(small: Small) -> None:
    """Every prompt of the epoch is trained or set aside once, the kill in the middle notwithstanding."""
    options: dict[str, Any] = {
        "rollout": {"max_staleness": 2, "max_refill": 0, "max_num_seqs": 16},
        "logging": {"dump_trajectories": 1},
    }
    RLTrainer(small(train={"steps": 4, "save_steps": 2}, **options)).train()
    folder = Path(small().train.output_dir)
    resume = {"steps": 5, "resume_from": str(folder / "checkpoints" / "step_2")}
    RLTrainer(small(train=resume, **options)).train()
    dumps = [lines(folder / "rollouts" / f"step_{step}.jsonl")[1:] for step in range(1, 6)]
    groups = {(line["group"], line["prompt_id"]) for dump in dumps for line in dump}
    numbers, prompts = zip(*groups, strict=True)
    assert len(set(numbers)) == len(numbers)
    assert len(set(prompts)) == len(prompts)


STALLS = """
import importlib, sys, threading
from palingenesis import cli
from palingenesis.rl.observe import exits
from palingenesis.rl.rollout import episode, producer
exits.LEAVE_S, episode.ENGINE_S, producer.LOOP_S, producer.CLOSE_S = 1.0, 3.0, 2.0, 0.5
importlib.import_module("palingenesis.rl.rewards.bind").CALL_S = 2.0
{hang}
cli.main(sys.argv[1:])
"""
HANGS = {
    "engine": (
        """
from palingenesis.rl.engines import hf
hf.CLOSE_S = 0.5
original, calls = hf.HFEngine._decode, []
def decode(self, batch):
    calls.append(1)
    if len(calls) > 3:
        threading.Event().wait()
    return original(self, batch)
hf.HFEngine._decode = decode
""",
        r"error: engine stood still for \d+ s .*a request of row ",
        "in decode",
    ),
    "reward": ("", r"error: reward 'mine' stood still for \d+ s .*row ", "in mine"),
    "loop": ("", r"error: (rollout loop|reward 'mine') stood still for \d+ s ", "in mine"),
}
MINE = {
    "engine": "def mine(completion): return float(len(completion) % 2)",
    "reward": """
import concurrent.futures, threading
pool, calls = concurrent.futures.ThreadPoolExecutor(1), []
def mine(completion):
    calls.append(1)
    if len(calls) > 60:
        pool.submit(threading.Event().wait).result()
    return float(len(completion) % 2)
""",
    "loop": """
import time
calls = []
async def mine(completion):
    calls.append(1)
    if len(calls) > 60:
        time.sleep(1000)
    return float(len(completion) % 2)
""",
}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("part", HANGS)
def test_what_stands_still_ends_the_run(small: Small, tmp_path: Path, part: str, staleness: int) -> None:
    hang, message, frame = HANGS[part]
    (tmp_path / "mine.py").write_text(MINE[part], encoding="utf-8")
    config = small(
        train={"steps": 1000, "eval_samples": 4},
        rewards={"mine": {"fn": f"{tmp_path}/mine.py:mine"}},
        rollout={"max_staleness": staleness, "max_refill": 0},
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(), encoding="utf-8")
    code = STALLS.format(hang=hang)
    command = [sys.executable, "-c", code, "rl", "--config", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 1, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    stalled = Path(config.train.output_dir) / "stalled.txt"
    assert str(stalled) in done.stderr
    assert frame in stalled.read_text(encoding="utf-8")
    steps = len(lines(Path(config.train.output_dir) / "metrics.jsonl"))
    assert steps >= 1
    assert (Path(config.train.output_dir) / "checkpoints" / f"step_{steps}" / "COMPLETE").exists()


def raising(completion: str, **row: Any) -> float:
    raise ZeroDivisionError("a defect of the user's")


def test_a_defective_reward_stops_the_run_and_names_itself(small: Small) -> None:
    with pytest.raises(RewardError, match=r"raising.*ZeroDivisionError"):
        RLTrainer(small(), rewards=[raising]).train()


def test_what_was_learned_is_saved_before_an_error_ends_the_run(small: Small) -> None:
    calls = []

    def fails_later(completion: str) -> float:
        calls.append(completion)
        return 0.0 if len(calls) < 100 else float("nan")

    config = small(train={"steps": 50})
    with pytest.raises(RewardError, match="fails_later"):
        RLTrainer(config, rewards=[fails_later]).train()
    done = len(lines(Path(config.train.output_dir) / "metrics.jsonl"))
    assert (Path(config.train.output_dir) / "checkpoints" / f"step_{done}" / "COMPLETE").exists()


def test_an_outage_stops_the_run(small: Small) -> None:
    def down(completion: str) -> float:
        raise SkipSample("the judge is unreachable")

    with pytest.raises(OutageError, match=r"down.*the judge is unreachable"):
        RLTrainer(small(train={"steps": 9, "eval_samples": 1}), rewards=[down]).train()


def test_without_an_informative_group_there_is_no_step(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    def same(completion: str) -> float:
        return 1.0

    config = small(rewards={"correct": {"fn": "exact", "args": {"field": "answer"}, "weight": 0.0}}, train={"steps": 1})
    final = RLTrainer(config, rewards=[same]).train()
    assert final is not None
    before = load_file(ROOT / "src/palingenesis/rl/policy/builtin/tiny/model.safetensors")
    after = load_file(final / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "no optimizer step" in capsys.readouterr().out
    (line,) = lines(Path(config.train.output_dir) / "metrics.jsonl")
    assert line["groups/zero_variance"] == 1.0
    assert "grad_norm" not in line


def test_retired_prompts_end_the_run(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "easy.jsonl"
    data.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 3, encoding="utf-8")

    def always(completion: str) -> float:
        return 1.0

    config = small(data={"dataset": str(data), "retire_above": 0.9}, train={"steps": 9})
    RLTrainer(config, rewards=[always]).train()
    assert "every prompt is retired" in capsys.readouterr().out


def test_a_run_without_rewards_is_refused(small: Small) -> None:
    config = small()
    config.rewards.clear()
    with pytest.raises(ConfigError, match="rewards: there is none"):
        RLTrainer(config).train()


def test_weights_that_the_engine_rounds_to_fp8_are_rounded_in_training_and_in_the_final_policy(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, seen = "model.layers.0.mlp.down_proj.weight", []

    def is_rounded(weight: torch.Tensor) -> bool:
        again = weight.clone()
        round_to_fp8([again])
        return torch.equal(again, weight)

    def load(self: HFEngine, weights: PolicyWeights) -> None:
        seen.append({key: value.clone() for key, value in weights.tensors()})
        own_load(self, weights)

    monkeypatch.setattr(HFEngine, "fp8_groups", [(name,), ("model.layers.0.mlp.experts",)])
    own_load = HFEngine.load
    monkeypatch.setattr(HFEngine, "load", load)
    config = small()
    RLTrainer(config).train()
    assert len(seen) == config.train.steps + 1
    assert all(is_rounded(weights[name]) for weights in seen)
    assert not is_rounded(seen[0]["model.layers.0.mlp.up_proj.weight"])
    final = load_file(Path(config.train.output_dir) / "final" / "model.safetensors")
    assert is_rounded(final[name].float())
    assert "FP8 in the engine and not in training: model.layers.0.mlp.experts\n" in capsys.readouterr().out
