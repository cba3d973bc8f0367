#!/usr/bin/env python3
"""The quickstart with a tool over five seeds: does the policy learn to use it, and does it need it?

    python bench/quickstart_tools.py [--seeds 5] [--section.option value ...]

Rewards are those of the 300 held-out products, sampled at the config's temperature. Seconds are those of
`RLTrainer.train()`, loading and evaluations included. The share of right answers that used the tool comes from a second
reward that weighs nothing. Without the tool, the trained policy sees the same held-out prompts and no tool.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstart import arguments, run, seeded
from record import record

from palingenesis.rl import RLConfig
from palingenesis.rl.config import EnvConfig
from palingenesis.rl.evaluate import evaluate
from palingenesis.rl.rewards.boxes import last_box

CONFIG = Path(__file__).parents[1] / "configs" / "rl_quickstart_tools.yaml"
SECOND_REWARD = ["--rewards.with_tool.fn", f"{Path(__file__)}:with_tool", "--rewards.with_tool.weight", "0"]


def with_tool(completion: str, messages: Sequence[Mapping[str, Any]], answer: str) -> float:
    """1 for a right answer in a rollout that made a well-formed call."""
    called = any(message.get("tool_calls") for message in messages)
    return float(called and last_box(completion).content == answer)


def without_tool(overrides: list[str], policy: Path) -> float:
    """The trained policy's held-out reward where there is no tool."""
    config = RLConfig.from_yaml(CONFIG, overrides)
    config.env = EnvConfig()
    return float(evaluate(config, str(policy))["reward"])


def main() -> None:
    seeds, overrides = arguments(__doc__)
    overrides += SECOND_REWARD
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"seed{seed}" for seed in range(seeds)]
        results = [run(CONFIG, folder, seeded(overrides, seed)) for seed, folder in enumerate(folders)]
        alone = [without_tool(overrides, folder / "final") for folder in folders]
    before, after, seconds = zip(*results, strict=True)
    record(
        "quickstart_tools",
        {
            "reward_before": [evaluation["reward"] for evaluation in before],
            "reward_after": [evaluation["reward"] for evaluation in after],
            "right_answers_that_used_the_tool": [e["rewards/with_tool"] / e["reward"] for e in after],
            "reward_after_without_the_tool": alone,
            "train_seconds": [round(s, 1) for s in seconds],
        },
    )


if __name__ == "__main__":
    main()
