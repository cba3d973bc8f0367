"""The numbers a step logs about its rollouts and its engine, computed from frozen records.

`reward`, `rewards/*`, `truncated` and the lengths are means over every rollout the step generated, zero-variance groups
included: a mean over the informative groups alone would hover around one half however good the policy got. Shares are
between 0 and 1, times in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from palingenesis.rl.types import EngineUsage, Group, Rollout, ScoredBatch


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def reward_means(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """`reward`, `rewards/<name>` and an environment's own `env/<name>`: means over the rollouts each applies to; left out
    where there is none."""
    by_name: dict[str, list[float]] = defaultdict(list)
    totals: list[float] = []
    for rollout in rollouts:
        if rollout.score.reward is not None:
            totals.append(rollout.score.reward)
        for name, value in rollout.score.rewards.items():
            if value is not None:
                by_name[name].append(value)
    found = {"reward": totals}
    found |= {name if name.startswith("env/") else f"rewards/{name}": by_name[name] for name in sorted(by_name)}
    return {name: mean(values) for name, values in found.items() if values}


def batch_metrics(batch: ScoredBatch) -> dict[str, float]:
    """What one step's groups say."""
    groups: tuple[Group, ...] = (*batch.groups, *batch.set_aside)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return dict(batch.metrics)
    trajectories = [rollout.trajectory for rollout in rollouts]
    lengths = [float(t.sampled_tokens) for t in trajectories]
    return {
        **reward_means(rollouts),
        "groups/zero_variance": mean([float(not group.informative) for group in groups]),
        "groups/trained": float(len(batch.groups)),
        "truncated": mean([float(t.finish.is_truncated) for t in trajectories]),
        "skipped": mean([float(not rollout.score.scored) for rollout in rollouts]),
        "length/mean": mean(lengths),
        "length/max": max(lengths),
        "turns": mean([float(sum(s.sampled for s in t.segments)) for t in trajectories]),
        "tool_calls": mean([float(sum(len(s.tool_calls) for s in t.segments)) for t in trajectories]),
        "tool_errors": mean([float(sum(s.tool_errors for s in t.segments)) for t in trajectories]),
        "tokens/generated": sum(lengths),
        **batch.metrics,
    }


def engine_metrics(usage: EngineUsage) -> dict[str, float]:
    """`engine/*` from the concurrency timeline.

    `seqs_mean` is weighted by time while anything decoded; `tail_s` is the time with something decoding but under a
    quarter of the peak; `prefix_hit` is the share of prompt tokens served from the cache.
    """
    spans = [
        (after - at, running) for (at, running), (after, _) in zip(usage.timeline, usage.timeline[1:], strict=False)
    ]
    busy = sum(seconds for seconds, running in spans if running)
    peak = max((running for _, running in usage.timeline), default=0)
    prompt = usage.prefill_tokens + usage.cached_tokens
    return {
        "engine/seqs_mean": sum(seconds * running for seconds, running in spans) / busy if busy else 0.0,
        "engine/tail_s": sum(seconds for seconds, running in spans if 0 < running < peak / 4),
        "engine/prefix_hit": usage.cached_tokens / prompt if prompt else 0.0,
        "engine/prefill_tokens": float(usage.prefill_tokens),
    }


def relative_timeline(usage: EngineUsage) -> tuple[tuple[float, int], ...]:
    """The timeline in seconds since its first entry, one entry a change."""
    out: list[tuple[float, int]] = []
    for at, running in usage.timeline:
        if not out or out[-1][1] != running:
            out.append((round(at - usage.timeline[0][0], 4), running))
    return tuple(out)


def eval_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """One line of `eval.jsonl`, less step and time."""
    return {
        "rows": len(rollouts),
        **reward_means(rollouts),
        "truncated": mean([float(r.trajectory.finish.is_truncated) for r in rollouts]),
        "skipped": mean([float(not r.score.scored) for r in rollouts]),
    }
