"""vLLM's norms with a residual stream that stays float32, as the trainer's does (kernels.precision says what it is worth).

    block output, residual ──> sum in float32 ──┬──> norm in float32 ──> the block's dtype ──> next block
                                                └──> residual, not rounded

vLLM's models hand the residual from norm to norm and do nothing else with it, so the two classes of norm are the place.
Exchanged before the engine is built, because vLLM compiles the model as it starts; float32 models are as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

# Part of `additional_config`, and so of the key under which vLLM keeps compiled models on disk: one that was compiled
# without this module must not be found.
COMPILED_WITH = {"residual": "float32"}


def widen_residuals() -> None:
    """Exchange `forward_native` of vLLM's RMS norms; once a process."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    for norm, scale in ((RMSNorm, _weight), (GemmaRMSNorm, _weight_plus_one)):
        if not hasattr(norm.forward_native, "__wrapped__"):
            norm.forward_native = _wide(norm.forward_native, scale)


def _weight(norm: Any) -> Tensor:
    weight: Tensor = norm.weight.float()
    return weight


def _weight_plus_one(norm: Any) -> Tensor:
    return _weight(norm) + 1.0


def _wide(original: Callable[..., Any], scale: Callable[[Any], Tensor]) -> Callable[..., Any]:
    @wraps(original)
    def forward_native(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None or x.dtype == torch.float32 or getattr(self, "variance_size_override", None) is not None:
            return original(self, x, residual)
        total = x.float() + residual.float()
        inverse = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        return (total * inverse * scale(self)).to(x.dtype), total

    return forward_native
