"""Score the rollouts of one group: rewards, then the overlong penalty.

A skipped rollout keeps its reason and has no reward; the penalty is a reward like any other in the logs
(`rewards/overlong`), but it only shapes what a reward has already scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rollout.overlong import overlong_penalty
from palingenesis.rl.types import Rollout, Sample, Score, Trajectory


def sample_of(trajectory: Trajectory) -> Sample:
    """What rewards see of a trajectory."""
    return Sample(
        row=trajectory.row,
        messages=trajectory.messages,
        completion=trajectory.completion,
        reasoning=trajectory.reasoning,
        raw=trajectory.raw,
        reasoning_open=trajectory.reasoning_open,
        finish_reason="length" if trajectory.finish.is_truncated else "stop",
        completion_ids=trajectory.completion_ids,
    )


@dataclass(frozen=True)
class Scorer:
    """Scores groups.

    Attributes:
        max_completion: sampled tokens a rollout may have.
        overlong_buffer: the last tokens before it in which the reward falls; 0 is off.
        overlong_penalty: how far it falls.
    """

    rewards: RewardSet
    max_completion: int
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    async def score(self, trajectories: Sequence[Trajectory], *, shaped: bool = True) -> tuple[Rollout, ...]:
        """All rewards of a group at once. The overlong penalty shapes training (`shaped`), not an evaluation.

        Raises:
            RewardError: a reward is defective.
        """
        scores = await self.rewards.score([sample_of(t) for t in trajectories])
        return tuple(
            Rollout(trajectory, self._shape(trajectory, score) if shaped else score, index)
            for index, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True))
        )

    def _shape(self, trajectory: Trajectory, score: Score) -> Score:
        if not self.overlong_buffer or score.reward is None:
            return score
        penalty = overlong_penalty(
            trajectory.sampled_tokens, self.max_completion, self.overlong_buffer, self.overlong_penalty
        )
        return replace(score, reward=score.reward + penalty, rewards={**score.rewards, "overlong": penalty})
