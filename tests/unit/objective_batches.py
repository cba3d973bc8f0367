"""Batches for the objective's tests: ragged lengths, two turns, skipped and lone rollouts, ratios beyond each bound.

The policy is a table: the hidden state of a sampled token is a fixed vector, its logits are hidden · weightᵀ + bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from palingenesis.rl.config.schema import LossConfig
from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.objective import (
    STATISTICS,
    TrainSequence,
    build_loss,
    policy_metrics,
    sequence_terms,
    surrogate,
    train_sequences,
)
from palingenesis.rl.types import Finish, Group, Message, Outcome, Rollout, Row, Score, ScoredBatch, Segment, Trajectory

HIDDEN, VOCABULARY = 5, 11
TEMPERATURE = 0.8
MAX_COMPLETION = 12
Key = tuple[int, int]


def options(**changes: Any) -> LossConfig:
    return LossConfig.model_validate(changes)


def rollout_of(
    turns: Sequence[tuple[Sequence[int], Sequence[float]]],
    reward: float | None,
    index: int = 0,
    finish: Finish = Finish.STOP,
    prompt: Sequence[int] = (1, 2),
) -> Rollout:
    """A rollout of sampled turns `(token ids, log-probs)`, a given token 7 between them."""
    segments = [Segment("user", tuple(prompt), "", sampled=False)]
    for number, (ids, logprobs) in enumerate(turns):
        if number:
            segments.append(Segment("tool", (7,), "", sampled=False))
        segments.append(Segment("assistant", tuple(ids), "", True, tuple(logprobs), (0,) * len(ids)))
    row = Row("row", (Message("user", "?"),), {})
    trajectory = Trajectory(row, tuple(segments), row.messages, "", "", "", finish)
    outcome = Outcome.SKIPPED if reward is None else Outcome.SCORED
    return Rollout(trajectory, Score({}, reward, outcome), index)


def batch_of(groups: Sequence[Sequence[Rollout]]) -> ScoredBatch:
    return ScoredBatch(
        step=0,
        groups=tuple(Group(rollouts[0].trajectory.row, tuple(rollouts), i) for i, rollouts in enumerate(groups)),
    )


@dataclass(frozen=True)
class Problem:
    """A batch and a policy: hidden states by rollout, and the head's parameters."""

    batch: ScoredBatch
    hidden: dict[Key, Tensor]
    weight: Tensor
    bias: Tensor

    def logits(self) -> dict[Key, Tensor]:
        return {key: hidden @ self.weight.T + self.bias for key, hidden in self.hidden.items()}

    @property
    def leaves(self) -> list[Tensor]:
        return [self.weight, self.bias, *self.hidden.values()]


def problem(seed: int = 0, drift: float = 0.5) -> Problem:
    """Four groups: ordinary; two turns; one rollout skipped; all but one skipped. `drift` is the std of logp − mu."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias = normal(VOCABULARY, HIDDEN), normal(VOCABULARY)
    hidden: dict[Key, Tensor] = {}
    shapes = [
        [((3,), 1.0, Finish.STOP), ((5,), 0.0, Finish.LENGTH), ((1,), 0.25, Finish.STOP)],
        [((2, 4), 0.5, Finish.STOP), ((3,), 2.0, Finish.CONTEXT), ((6, 1, 2), -1.0, Finish.STOP)],
        [((4,), None, Finish.STOP), ((2,), 1.0, Finish.LENGTH), ((7,), 0.0, Finish.STOP), ((3,), 0.0, Finish.STOP)],
        [((4,), None, Finish.STOP), ((2,), 1.0, Finish.STOP)],
    ]
    groups = []
    for g, rollouts in enumerate(shapes):
        made = []
        for i, (turns, reward, finish) in enumerate(rollouts):
            count = sum(turns)
            states = normal(count, HIDDEN)
            tokens = torch.randint(0, VOCABULARY, (count,), generator=generator)
            logp = ((states @ weight.T + bias) / TEMPERATURE).log_softmax(1)[torch.arange(count), tokens]
            # Two rollouts in three stay near the policy, so that the sequence mask and gspo's clip keep some.
            mu = (logp + drift * (1.0 if i % 3 == 0 else 0.03) * normal(count)).tolist()
            cut, ids = [0, *torch.tensor(turns).cumsum(0).tolist()], tokens.tolist()
            pieces = [(ids[a:b], mu[a:b]) for a, b in itertools.pairwise(cut)]
            made.append(rollout_of(pieces, reward, i, finish))
            if reward is not None:
                hidden[g, i] = states.requires_grad_()
        groups.append(made)
    return Problem(batch_of(groups), hidden, weight.requires_grad_(), bias.requires_grad_())


@dataclass(frozen=True)
class Answer:
    """What the production path gives: gradients of the problem's leaves, metrics, sums."""

    gradients: list[Tensor]
    metrics: dict[str, float]
    sums: Tensor


def production(
    case: Problem, config: LossConfig, *, micro: Sequence[Sequence[int]] | None = None, slice_rows: int = 3
) -> Answer:
    """The production path, one backward a micro-batch; `micro` lists the sequences of each (default: all in one)."""
    sequences = train_sequences(case.batch, dtype=torch.float64)
    loss = build_loss(config)
    terms = sequence_terms(sequences, config, loss.level, MAX_COMPLETION)
    for leaf in case.leaves:
        leaf.grad = None
    sums = torch.zeros(len(STATISTICS), dtype=torch.float64)
    for chosen in micro if micro is not None else [range(len(sequences))]:
        rows = [sequences[i] for i in chosen]
        logp, entropy = selected_logprobs(
            torch.cat([case.hidden[row.group, row.rollout] for row in rows]),
            case.weight,
            case.bias,
            torch.cat([row.input_ids[row.sampled] for row in rows]),
            TEMPERATURE,
            slice_rows=slice_rows,
        )
        index = torch.tensor(list(chosen))
        result = surrogate(
            logp,
            torch.cat([row.sampler_logprobs[row.sampled] for row in rows]),
            sequence_index(rows),
            entropy,
            advantage=terms.advantage[index],
            weight=terms.weight[index],
            dropped=terms.dropped[index],
            loss=loss,
            seq_mask=config.seq_mask,
        )
        result.loss.backward()
        sums += result.sums
    return Answer([gradient_of(leaf) for leaf in case.leaves], policy_metrics(sums), sums)


def sequence_index(rows: Sequence[TrainSequence]) -> Tensor:
    return torch.arange(len(rows)).repeat_interleave(torch.tensor([row.sampled_tokens for row in rows]))


def gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
