"""From a ScoredBatch to what the policy trains on: one TrainSequence for each scored rollout of a trained group.

    ScoredBatch.groups ──(at least two scored rollouts)──> Rollout ──(scored)──> TrainSequence

Invariants:
- Nothing is re-tokenized: `input_ids` is the concatenation of the trajectory's segments, as the sampler saw them.
- `sampled` is True exactly at the tokens the policy sampled. Position 0 is never sampled (the prompt comes first), so
  the token at position t is predicted by the hidden state at t − 1.
- A skipped rollout makes no sequence, and a group with fewer than two scored rollouts makes none at all: it has no
  baseline, so it is in neither the std nor the denominators. An outage must not shrink the other groups' gradient.
- Sequences stand in the order of the batch: by group, then by rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from palingenesis.rl.errors import EngineError
from palingenesis.rl.types import Finish, Group, Rollout, ScoredBatch


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One scored rollout as tensors on the CPU, T tokens long, e.g. a prompt of 3 and an answer of 2 tokens:

        input_ids          [ 11,  7,  9,    4,    2]
        sampled            [  F,  F,  F,    T,    T]
        sampler_logprobs   [  0,  0,  0, -0.3, -1.2]

    Attributes:
        input_ids: int64 [T], every token of the trajectory.
        sampled: bool [T], True where the policy sampled the token.
        sampler_logprobs: float [T], the sampler's log-prob (mu) where `sampled`, else 0.
        group: position of its group in `ScoredBatch.groups`.
        rollout: `Rollout.index`, its place in the group.
        reward: the weighted sum of its rewards.
        finish: why it ended.
        sampled_tokens: how many tokens the policy sampled; never read from the tensors in the step.
    """

    input_ids: Tensor
    sampled: Tensor
    sampler_logprobs: Tensor
    group: int
    rollout: int
    reward: float
    finish: Finish
    sampled_tokens: int

    @property
    def truncated(self) -> bool:
        """A budget ended the rollout, the policy did not."""
        return self.finish.is_truncated

    @property
    def total_tokens(self) -> int:
        return self.input_ids.shape[0]


def train_sequences(batch: ScoredBatch, dtype: torch.dtype = torch.float32) -> list[TrainSequence]:
    """The batch as training records, in order. `dtype` is that of the sampler's log-probs."""
    return [
        _train_sequence(rollout, position, reward, dtype)
        for position, group in enumerate(batch.groups)
        if is_trained(group)
        for rollout in group.rollouts
        if (reward := rollout.score.reward) is not None
    ]


def is_trained(group: Group) -> bool:
    """Whether the group has a baseline: at least two scored rollouts."""
    return len(group.scored_rewards) >= 2


def _train_sequence(rollout: Rollout, group: int, reward: float, dtype: torch.dtype) -> TrainSequence:
    segments = rollout.trajectory.segments
    if segments[0].sampled:
        raise ValueError("the first segment of a trajectory is its prompt, not sampled tokens")
    # Not repeat_interleave: it took 6 ms a call on two CPU cores, 3 s for a batch.
    sampled = torch.tensor(list(chain.from_iterable([s.sampled] * len(s.token_ids) for s in segments)))
    mu = torch.tensor(list(chain.from_iterable(s.logprobs for s in segments if s.sampled)), dtype=dtype)
    if not bool(torch.isfinite(mu).all()):
        raise EngineError(f"the engine returned a log-prob that is not finite, for row {rollout.trajectory.row.id}")
    logprobs = torch.zeros(sampled.shape[0], dtype=dtype)
    logprobs[sampled] = mu
    return TrainSequence(
        input_ids=torch.tensor(list(chain.from_iterable(s.token_ids for s in segments)), dtype=torch.int64),
        sampled=sampled,
        sampler_logprobs=logprobs,
        group=group,
        rollout=rollout.index,
        reward=reward,
        finish=rollout.trajectory.finish,
        sampled_tokens=mu.shape[0],
    )
