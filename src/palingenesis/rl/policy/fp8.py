"""FP8 values for the policy's weights, where the engine multiplies by such: what is trained is what samples.

    master (float32) ──> FP8 value · scale ──> the model's weight (bf16) ──> the engine, which finds the same value and scale
           ^── gradient, as it comes (straight through)

Rounded by the engine alone, SmolLM2's weights put 0.126 between the two log-probs of a token (mean |difference|, one H200);
rounded alike but for the scale's last bits, 0.024, where bf16 weights leave 0.019.

Invariants:
- A scale has 4 significant bits, as an FP8 value has: bf16 holds their product, and vLLM's kernels, which keep the scale in
  bf16, the scale itself.
- The largest value is 448, e4m3's own largest, so that the engine's scale, the largest weight over 448, is this one again.
  For that a scale is up to an eighth too small, and weights beyond 448 of it are cut.

Source: e4m3, Micikevicius et al. 2022 (FP8 Formats for Deep Learning); straight-through, Bengio et al. 2013.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
REACHES = 432.0  # what is rounded to it at the least


class FP8Weights:
    """The weights of a model that an engine rounds to FP8.

    Args:
        model: in half precision, with masters beside it: vLLM rounds no float32 model.
        groups: parameters' names, those under one scale together (`Engine.fp8_groups`).

    Attributes:
        left_out: names that the model does not have; with them their groups are left to the engine.
    """

    def __init__(self, model: torch.nn.Module, groups: Iterable[Sequence[str]]) -> None:
        own = dict(model.named_parameters())
        self.groups: list[list[torch.nn.Parameter]] = []
        self.left_out: list[str] = []
        for group in groups:
            unknown = [name for name in group if name not in own]
            self.left_out += unknown
            if not unknown:
                self.groups.append([own[name] for name in group])

    def __contains__(self, parameter: Tensor) -> bool:
        return any(parameter is one for group in self.groups for one in group)

    def round(self) -> None:
        """Give every weight its FP8 value."""
        for group in self.groups:
            round_to_fp8(group)


@torch.no_grad()
def round_to_fp8(weights: Sequence[Tensor]) -> None:
    """Round `weights`, in place, to e4m3 under one scale."""
    largest = torch.stack([weight.abs().amax() for weight in weights]).amax().float()
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**-100) / REACHES)  # zeros keep a scale, too
    scale = torch.ldexp(torch.floor(mantissa * 16.0) / 16.0, exponent)
    for weight in weights:
        value = (weight.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        weight.copy_(value.float() * scale)
