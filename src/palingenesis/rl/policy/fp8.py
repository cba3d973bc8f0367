"""FP8 values for the policy's weights, where the engine multiplies by such: what is trained is what samples.

    master (float32) ──> bf16 ──> FP8 value · scale ──> the model's weight (bf16) ──> the engine, which finds the same values
           ^── gradient, as it comes (straight through)

Rounded by the engine alone, SmolLM2's weights put 0.126 between the two log-probs of a token (mean |difference|, one H200);
rounded alike, 0.024, where bf16 weights leave 0.019.

Invariant: rounding is idempotent, so that the engine's own, of the weights that it is sent, changes nothing: the largest
weight is 448 · scale exactly, and bf16 keeps every other one within a sixteenth of the distance to its FP8 neighbour.

Source: e4m3, Micikevicius et al. 2022 (FP8 Formats for Deep Learning); straight-through, Bengio et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3


class FP8Weights:
    """The weights of a model that an engine rounds to FP8.

    Args:
        model: in its compute dtype.
        groups: parameters' names, those under one scale together (`Engine.fp8_groups`). A group of which the model lacks
            one is left out.
    """

    def __init__(self, model: torch.nn.Module, groups: Iterable[Sequence[str]]) -> None:
        own = dict(model.named_parameters())
        self.groups = [[own[name] for name in group] for group in groups if all(name in own for name in group)]

    def round(self) -> None:
        """Give every weight its FP8 value."""
        for group in self.groups:
            round_to_fp8(group)


@torch.no_grad()
def round_to_fp8(weights: Sequence[Tensor]) -> None:
    """Round `weights`, in place, to e4m3 under one scale: their largest absolute value over 448."""
    largest = torch.stack([weight.abs().amax() for weight in weights]).amax().float()
    scale = largest.clamp(min=LARGEST * torch.finfo(torch.float32).tiny) / LARGEST  # a normal number if all are 0
    for weight in weights:
        value = (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        weight.copy_(value.float() * scale)
