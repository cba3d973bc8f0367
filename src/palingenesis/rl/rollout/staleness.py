"""How old a group is, in weight versions, and which groups a batch must have.

Batch k trains weights of version k - 1. A group remembers the version it was launched with; none of its tokens is older.
It is due for batch k when it was launched with version k - 1 - max_staleness: in batch k + 1 its oldest token could be
older than that bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palingenesis.rl.observe.metrics import mean
from palingenesis.rl.types import Group, Row, Trajectory


@dataclass(frozen=True, slots=True)
class Launch:
    """What is remembered of a group from its launch on: `version` of the weights, and batches `handed` over before."""

    row: Row
    number: int
    version: int
    handed: int

    def is_due(self, step: int, max_staleness: int) -> bool:
        """The batch of `step` must have it."""
        return self.version <= step - 1 - max_staleness


@dataclass(frozen=True, slots=True)
class Landed:
    """A finished group; `handed` counts the batches handed over before it finished."""

    launch: Launch
    group: Group
    handed: int

    @property
    def continued(self) -> bool:
        """It was under way when a batch was handed over."""
        return self.handed > self.launch.handed


def age(trajectory: Trajectory, version: int) -> int:
    """Versions between the oldest sampled token and the weights that are trained; 0 without a sampled token."""
    return version - min((min(s.versions) for s in trajectory.segments if s.versions), default=version)


def staleness(groups: Sequence[Group], step: int, max_staleness: int) -> dict[str, float]:
    """`staleness/*` over the rollouts that the batch of `step` trains.

    Raises:
        RuntimeError: a token is older than `max_staleness`: a defect of ours.
    """
    ages = [age(rollout.trajectory, step - 1) for group in groups for rollout in group.rollouts]
    oldest = max(ages, default=0)
    if oldest > max_staleness:
        raise RuntimeError(
            f"a defect in palingenesis: step {step} would train a token that is {oldest} versions old, and "
            f"rollout.max_staleness is {max_staleness}."
        )
    return {"staleness/mean": mean(ages), "staleness/max": float(oldest)}
