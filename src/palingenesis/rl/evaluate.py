"""`pgs rl eval`: roll out the held-out rows with a policy, score them, and say how good it is.

A sample passes when its reward is at least 1. With n samples of a row of which c pass, pass@k is the unbiased estimate
1 - C(n - c, k) / C(n, k) of the chance that k draws hold a right one (Chen et al. 2021, "Evaluating Large Language Models
Trained on Code"), averaged over rows; mean@n is the plain mean reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palingenesis.rl.config import RLConfig
from palingenesis.rl.errors import DataError, UsageError
from palingenesis.rl.observe.metrics import eval_metrics, mean
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rollout.producer import Producer
from palingenesis.rl.trainer import close_rollouts, eval_rows, load_parts
from palingenesis.rl.types import Rollout


def evaluate(config: RLConfig, policy: str, samples: int = 1) -> dict[str, Any]:
    """Evaluate `policy` on the config's held-out rows.

    Args:
        samples: rollouts of each row; more than one need `train.eval_temperature` above 0.

    Returns:
        `{"policy", "samples", "temperature", "rows", "reward", "rewards/<name>", "truncated", "skipped", "pass@k"}`;
        the last maps k to the share.

    Raises:
        UsageError: samples that would all be equal, or more of a row than there may be environments.
        DataError: no held-out rows. SandboxError: it cannot start.
    """
    temperature = config.train.eval_temperature
    if samples < 1 or (samples > 1 and temperature == 0):
        raise UsageError(
            f"--samples {samples}: needs at least 1, and more than 1 would all be equal at train.eval_temperature 0; "
            "add --train.eval_temperature 1.0"
        )
    if 0 < config.env.max_concurrent < samples:
        raise UsageError(
            f"--samples {samples}: the samples of a row are open together, and env.max_concurrent is "
            f"{config.env.max_concurrent}; lower the one or raise the other."
        )
    rewards = RewardSet.from_config(config.rewards)
    producer = Producer()
    environments = None
    try:
        parts = load_parts(config, rewards, policy)
        environments = parts.environments
        rows = eval_rows(config, parts.rows)
        if not rows:
            raise DataError("there are no held-out rows: set data.eval_dataset or data.eval_size.")
        try:
            groups = producer.run(parts.collector.evaluate(rows, temperature=temperature, samples=samples))
        finally:
            parts.engine.close()
    finally:
        close_rollouts(producer, environments, rewards)
    summary = eval_metrics([rollout for group in groups for rollout in group])
    return {
        "policy": policy,
        "samples": samples,
        "temperature": temperature,
        **summary,
        "rows": len(rows),
        "pass@k": {str(k): pass_at(groups, k) for k in _powers_of_two(samples)},
    }


def pass_at(groups: Sequence[Sequence[Rollout]], k: int) -> float | None:
    """pass@k over rows; rows with fewer than k scored samples do not count, None when no row does."""
    estimates = []
    for group in groups:
        scored = [r.score.reward for r in group if r.score.reward is not None]
        if len(scored) >= k:
            failed = sum(reward < 1.0 for reward in scored)
            estimates.append(1.0 - math.comb(failed, k) / math.comb(len(scored), k))
    return mean(estimates) if estimates else None


def _powers_of_two(limit: int) -> list[int]:
    return [2**power for power in range(limit.bit_length()) if 2**power <= limit]


def table(report: dict[str, Any], policy: Path) -> str:
    """The report as a person reads it."""
    lines = [
        f"{policy}: {report['rows']} held-out rows, {report['samples']} sample(s) each, "
        f"temperature {report['temperature']:g}"
    ]
    shown = {
        key: value
        for key, value in report.items()
        if key.startswith(("reward", "env/")) or key in ("truncated", "skipped")
    }
    shown |= {f"pass@{k}": share for k, share in report["pass@k"].items()}
    lines += [f"  {name:<24}{'-' if value is None else format(value, '8.4f'):>8}" for name, value in shown.items()]
    lines += ["  (a sample passes when the weighted sum of its rewards is at least 1)"]
    return "\n".join(lines)
