"""The objective: from scored groups to the scalar a policy step differentiates.

    once a step    ScoredBatch ─ train_sequences ─> TrainSequence... ─ sequence_terms ─> advantage, weight, dropped [R]
    micro-batch    logp, mu of whole sequences ─ surrogate, with build_loss(options) ─> scalar, sums
    once a step    Σ sums ─ policy_metrics ─> policy/*

`reference.py` computes the same from whole logits, literally and in float64; the tests compare exact gradients with it.
"""

from palingenesis.rl.objective.losses import LOSSES, Level, Loss, build_loss
from palingenesis.rl.objective.surrogate import STATISTICS, Surrogate, policy_metrics, surrogate
from palingenesis.rl.objective.terms import SequenceTerms, sequence_terms
from palingenesis.rl.objective.tokens import TrainSequence, train_sequences

__all__ = [
    "LOSSES",
    "STATISTICS",
    "Level",
    "Loss",
    "SequenceTerms",
    "Surrogate",
    "TrainSequence",
    "build_loss",
    "policy_metrics",
    "sequence_terms",
    "surrogate",
    "train_sequences",
]
