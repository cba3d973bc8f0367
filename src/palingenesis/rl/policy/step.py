"""One policy-gradient step.

    ScoredBatch ─> sequences, terms ─> micro-batches ─┬─ backbone ─> hidden at the tokens before sampled ones
                                                      ├─ head, a slice at a time ─> logp, entropy
                                                      └─ surrogate ─> backward ─> float32 gradient sum
    after the last: clip ─> AdamW on the masters ─> weights published to the model

Invariants:
- The gradient is the sum over micro-batches and does not depend on how they are cut: every weight in it was fixed
  before the first one.
- We read values back from the device at the end only: the gradient's norm, and the statistics. (To choose its masks
  transformers reads a flag or two at the beginning of a forward.)
- A gradient that is not finite changes no weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from palingenesis.rl.errors import ModelError
from palingenesis.rl.kernels.head import selected_logprobs
from palingenesis.rl.objective import (
    SequenceTerms,
    Surrogate,
    TrainSequence,
    build_loss,
    policy_metrics,
    sequence_terms,
    surrogate,
    train_sequences,
)
from palingenesis.rl.policy.masters import Masters
from palingenesis.rl.policy.microbatch import microbatches
from palingenesis.rl.policy.model import Policy
from palingenesis.rl.policy.optim import build_optimizer, schedule
from palingenesis.rl.types import ScoredBatch

if TYPE_CHECKING:
    from palingenesis.rl.config import LossConfig, TrainConfig

Key = tuple[int, int]  # (group number, rollout index)


@dataclass(frozen=True)
class StepResult:
    """What a step reports.

    Attributes:
        metrics: `policy/*`, `grad_norm`, `lr`, `tokens/trained`.
        advantages: of every rollout that entered the loss.
        mask_reasons: `seq_mask` or `truncated` for rollouts whose gradient was taken out.
        stepped: whether the optimizer stepped.
    """

    metrics: Mapping[str, float]
    advantages: Mapping[Key, float] = field(default_factory=dict)
    mask_reasons: Mapping[Key, str] = field(default_factory=dict)
    stepped: bool = True


class PolicyStep:
    """Owns the optimizer.

    Args:
        temperature: the sampling temperature; log-probs are taken at it.
        max_completion_tokens: resolved, for `aggregation: constant`.

    Attributes:
        torn: set before the first weight moves; whoever counts steps clears it once the step is whole. Weights saved
            while it is set would belong to no step.
    """

    def __init__(
        self,
        policy: Policy,
        masters: Masters,
        loss: LossConfig,
        train: TrainConfig,
        *,
        temperature: float,
        max_completion_tokens: int,
    ) -> None:
        self.policy = policy
        self.masters = masters
        self.loss_options = loss
        self.loss = build_loss(loss)
        self.train = train
        self.temperature = temperature
        self.max_completion_tokens = max_completion_tokens
        self.optimizer = build_optimizer(
            masters.parameters(),
            learning_rate=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.resolved_adam_eps,
            weight_decay=train.weight_decay,
        )
        self.factor = schedule(train.lr_scheduler, train.warmup_steps, train.steps)
        self.torn = False

    def run(self, batch: ScoredBatch) -> StepResult:
        """Step on `batch`; without an informative group nothing is stepped.

        Raises:
            ModelError: the gradient is not finite; the weights are as before the step.
        """
        sequences = train_sequences(batch)
        lr = self.train.learning_rate * self.factor(batch.step - 1)
        if not sequences:
            return StepResult({"lr": lr, "tokens/trained": 0.0}, stepped=False)
        terms = sequence_terms(sequences, self.loss_options, self.loss.level, self.max_completion_tokens)
        sums, masked = self._backward(sequences, terms)
        norm = self._step(lr, batch.step)
        metrics = {"lr": lr, "grad_norm": norm, "tokens/trained": float(sum(s.sampled_tokens for s in sequences))}
        keys = [(batch.groups[s.group].number, s.rollout) for s in sequences]
        return StepResult(
            metrics | policy_metrics(sums),
            advantages=dict(zip(keys, terms.advantage.tolist(), strict=True)),
            mask_reasons=_mask_reasons(keys, terms.dropped.tolist(), masked.tolist()),
        )

    def _backward(self, sequences: Sequence[TrainSequence], terms: SequenceTerms) -> tuple[torch.Tensor, torch.Tensor]:
        """Accumulate the gradient; returns the statistics' sums and which sequences the sequence mask dropped."""
        self.policy.model.train(self.policy.recompute)  # transformers recomputes activations in training mode only
        self.optimizer.zero_grad(set_to_none=True)
        sums: list[torch.Tensor] = []
        order: list[int] = []
        seq_masked: list[torch.Tensor] = []
        for indices in microbatches([s.total_tokens for s in sequences], self.train.micro_tokens):
            out = self._micro([sequences[i] for i in indices], _rows(terms, indices))
            out.loss.backward()  # type: ignore[no-untyped-call]
            self.masters.collect()
            sums.append(out.sums)
            order += indices
            seq_masked.append(out.seq_masked)
        masked = torch.cat(seq_masked)[torch.tensor(order).argsort().to(self.policy.device)]
        return torch.stack(sums).sum(0), masked

    def _micro(self, sequences: Sequence[TrainSequence], terms: SequenceTerms) -> Surrogate:
        rows = pad(sequences, self.policy.device)
        hidden = self.policy.hidden_states(rows.input_ids)
        logp, entropy = selected_logprobs(
            hidden.flatten(0, 1).index_select(0, rows.predicts),
            *self.policy.head_parameters,
            rows.targets,
            self.temperature,
            **self.policy.logit_shape,
        )
        device = self.policy.device
        return surrogate(
            logp,
            rows.mu,
            rows.sequence,
            entropy,
            advantage=terms.advantage.to(device),
            weight=terms.weight.to(device),
            dropped=terms.dropped.to(device),
            loss=self.loss,
            seq_mask=self.loss_options.seq_mask,
        )

    def _step(self, lr: float, step: int) -> float:
        parameters = self.masters.parameters()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.train.max_grad_norm))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise ModelError(
                f"the gradient of step {step} is not finite (norm {norm}), so the weights were left as they were. "
                "Lower train.learning_rate, or look at the step's rollouts (logging.dump_trajectories: 1)."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.torn = True
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.publish()
        return norm

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the moments of `state`; betas, epsilon and weight decay stay the config's."""
        own = [{name: value for name, value in g.items() if name != "params"} for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, options in zip(self.optimizer.param_groups, own, strict=True):
            group.update(options)


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Right-padded sequences on the device.

    Attributes:
        input_ids: [rows, tokens].
        predicts: int64 [N], flat positions in [rows x tokens] whose next token was sampled.
        targets, mu, sequence: [N], the sampled tokens, the sampler's log-probs, and each token's row.
    """

    input_ids: torch.Tensor
    predicts: torch.Tensor
    targets: torch.Tensor
    mu: torch.Tensor
    sequence: torch.Tensor


def pad(sequences: Sequence[TrainSequence], device: torch.device) -> PaddedRows:
    """Put whole sequences side by side. The padding, id 0, comes after every real token, none of which looks ahead."""
    stack = torch.nn.utils.rnn.pad_sequence
    input_ids = stack([s.input_ids for s in sequences], batch_first=True)
    sampled = stack([s.sampled for s in sequences], batch_first=True).flatten().nonzero()[:, 0]
    mu = stack([s.sampler_logprobs for s in sequences], batch_first=True).flatten()[sampled]
    targets = input_ids.flatten()[sampled]
    sequence = sampled // input_ids.shape[1]
    predicts = sampled - 1  # position 0 of a row is never sampled, so this stays in the row
    return PaddedRows(*(t.to(device) for t in (input_ids, predicts, targets, mu, sequence)))


def _rows(terms: SequenceTerms, indices: Sequence[int]) -> SequenceTerms:
    at = torch.tensor(indices)
    return SequenceTerms(terms.advantage[at], terms.weight[at], terms.dropped[at])


def _mask_reasons(keys: Sequence[Key], dropped: Sequence[bool], seq_masked: Sequence[bool]) -> dict[Key, str]:
    reasons = {key: "seq_mask" for key, masked in zip(keys, seq_masked, strict=True) if masked}
    return reasons | {key: "truncated" for key, cut in zip(keys, dropped, strict=True) if cut}
