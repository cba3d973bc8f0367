"""The policy gets better: the quickstart's own config, and a real model with real text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from palingenesis.rl import RLConfig, RLTrainer
from tests.e2e.conftest import ROOT, lines

SMOLLM2 = Path(os.environ.get("PGS_SMOLLM2", ROOT / "models" / "SmolLM2-135M-Instruct"))


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of its steps; bench/quickstart.py runs the whole over five seeds."""
    monkeypatch.chdir(ROOT)
    options = ["--train.output_dir", str(tmp_path / "run"), "--train.steps", "33", "--train.eval_every", "0"]
    RLTrainer(RLConfig.from_yaml("configs/rl_quickstart.yaml", options)).train()
    first, last = (line["reward"] for line in lines(tmp_path / "run" / "eval.jsonl"))
    assert 0.3 < first < 0.5
    assert last > first + 0.25
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["policy/abs_ratio_dev"] < 1e-4 for line in metrics), "sampler and trainer are one model"


@pytest.mark.slow
def test_the_quickstart_learns_while_rollouts_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench/staleness_cpu.py compares the samples it needs with staleness 0."""
    monkeypatch.chdir(ROOT)
    options = ["--train.output_dir", str(tmp_path / "run"), "--train.steps", "33", "--train.eval_every", "0"]
    options += ["--rollout.max_staleness", "1", "--rollout.max_num_seqs", "64"]
    RLTrainer(RLConfig.from_yaml("configs/rl_quickstart.yaml", options)).train()
    first, last = (line["reward"] for line in lines(tmp_path / "run" / "eval.jsonl"))
    assert last > first + 0.25
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert {line["staleness/max"] for line in metrics} <= {0.0, 1.0}
    assert any(line["staleness/mean"] > 0 for line in metrics)


PROBLEMS = [
    ("Tom has 3 apples and buys 4 more. How many apples has he?", "7"),
    ("A box holds 6 eggs. How many eggs are in 2 boxes?", "12"),
    ("Ann had 9 coins and lost 5. How many are left?", "4"),
    ("There are 5 cars with 4 wheels each. How many wheels?", "20"),
]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"no {SMOLLM2}: examples/rl/prepare_smollm2.py makes it")
def test_a_real_model_takes_a_step_and_its_export_reloads(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = ({"question": question, "answer": answer} for question, answer in PROBLEMS)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {
        "model.policy": SMOLLM2,
        "data.dataset": data,
        "data.eval_dataset": data,
        "rollout.batch_prompts": 2,
        "rollout.max_new_tokens": 48,
        "train.output_dir": tmp_path / "run",
        "train.steps": 1,
    }
    overrides = [token for name, value in options.items() for token in (f"--{name}", str(value))]
    final = RLTrainer(RLConfig.from_yaml(ROOT / "configs" / "rl_smollm2.yaml", overrides)).train()
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["groups/trained"] > 0
    assert line["grad_norm"] > 0
    assert line["policy/abs_ratio_dev"] < 1e-3

    from transformers import AutoModelForCausalLM

    assert final is not None
    assert AutoModelForCausalLM.from_pretrained(final).num_parameters() == 134_515_008
