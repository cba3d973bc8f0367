"""Stops a run whose samples cannot be scored: an outage must not pass for training."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from palingenesis.rl.errors import OutageError
from palingenesis.rl.types import Rollout

OUTAGE_BATCHES = 3  # batches over which `train.max_skipped` is judged


def most_skipped(rollouts: Sequence[Rollout]) -> tuple[int, str]:
    """How many rollouts were skipped, and for what most of them: `environment: reset of Maze failed ...`."""
    skipped = [r.score for r in rollouts if not r.score.scored]
    if not skipped:
        return 0, ""
    source, _ = Counter(score.skip_source for score in skipped).most_common(1)[0]
    reason = next(score.skip_reason for score in reversed(skipped) if score.skip_source == source)
    return len(skipped), f"{source}: {reason}"


class Outages:
    """Watches the share of skipped rollouts.

    Args:
        limit: share over the last `OUTAGE_BATCHES` batches that ends the run.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._recent: deque[tuple[int, int]] = deque(maxlen=OUTAGE_BATCHES)

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Count a batch.

        Raises:
            OutageError: naming the source that skipped most and its last reason.
        """
        skipped, why = most_skipped(rollouts)
        self._recent.append((skipped, len(rollouts)))
        share = sum(s for s, _ in self._recent) / max(1, sum(n for _, n in self._recent))
        if len(self._recent) < OUTAGE_BATCHES or share <= self.limit or not skipped:
            return
        raise OutageError(
            f"{share:.0%} of the rollouts of the last {OUTAGE_BATCHES} batches could not be scored "
            f"(train.max_skipped is {self.limit:g}), {skipped} in this batch. Most were skipped by {why}"
        )

    def state_dict(self) -> list[list[int]]:
        return [list(pair) for pair in self._recent]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        self._recent = deque(((s, n) for s, n in state), maxlen=OUTAGE_BATCHES)
