"""Score the episodes of one group.

    episodes ──┬─ their environments' own components, as env/<name> ─┬─> all rewards at once ──> overlong penalty
               └─ the environment failed: skipped, no reward is asked ┘

A skipped rollout keeps its reason and has no reward; the penalty is a reward like any other in the logs
(`rewards/overlong`), but it only shapes what a reward has already scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palingenesis.rl.errors import SkipSample
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rewards.bind import gather
from palingenesis.rl.rollout.episode import Episode
from palingenesis.rl.rollout.overlong import overlong_penalty
from palingenesis.rl.types import Outcome, Rollout, Sample, Score, Trajectory

ENVIRONMENT = "environment"  # the source of what an environment skips


def sample_of(episode: Episode) -> Sample:
    """What rewards see of an episode."""
    trajectory = episode.trajectory
    return Sample(
        row=trajectory.row,
        messages=trajectory.messages,
        completion=trajectory.completion,
        reasoning=trajectory.reasoning,
        raw=trajectory.raw,
        reasoning_open=trajectory.reasoning_open,
        prompt_turns=trajectory.prompt_turns,
        finish_reason="length" if trajectory.finish.is_truncated else "stop",
        completion_ids=trajectory.completion_ids,
        env=episode.session.env if episode.session else None,
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

    async def score(self, episodes: Sequence[Episode], *, shaped: bool = True) -> tuple[Rollout, ...]:
        """All rewards of a group at once. The overlong penalty shapes training (`shaped`), not an evaluation.

        Raises:
            RewardError: a reward, or the environment's own, is defective.
        """
        own = await gather(_own(episode) for episode in episodes)
        places = [place for place, components in enumerate(own) if not isinstance(components, Score)]
        found = await self.rewards.score([sample_of(episodes[p]) for p in places], [own[p] for p in places])
        scores: dict[int, Score] = dict(enumerate(own)) | dict(zip(places, found, strict=True))
        return tuple(
            Rollout(e.trajectory, self._shape(e.trajectory, scores[place]) if shaped else scores[place], place)
            for place, e in enumerate(episodes)
        )

    def _shape(self, trajectory: Trajectory, score: Score) -> Score:
        if not self.overlong_buffer or score.reward is None:
            return score
        penalty = overlong_penalty(
            trajectory.sampled_tokens, self.max_completion, self.overlong_buffer, self.overlong_penalty
        )
        return replace(score, reward=score.reward + penalty, rewards={**score.rewards, "overlong": penalty})


async def _own(episode: Episode) -> dict[str, float] | Score:
    """The components of its environment by their logged names; a Score where the environment skips it."""
    if episode.skip_reason:
        return _skipped(episode.skip_reason)
    if episode.session is None:
        return {}
    try:
        components = await episode.session.reward(episode.trajectory.messages)
    except SkipSample as error:
        return _skipped(str(error) or "SkipSample without a reason")
    return {f"env/{name}": value for name, value in (components or {}).items()}


def _skipped(reason: str) -> Score:
    return Score({}, None, Outcome.SKIPPED, ENVIRONMENT, reason)
