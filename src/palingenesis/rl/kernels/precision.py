"""How a half-precision model computes: matrix products in its own dtype, everything that is added up in float32.

    token ids ── embedding ──> float32 residual stream ──(norm ── bf16 products ── attention ──> + )──> norm ──> head

A residual stream that is rounded to bf16 after every block is the largest part of what sampler and trainer disagree about.
Mean |difference| of the log-probs of sampled tokens from those of float32 arithmetic with the same bf16 weights,
SmolLM2-135M: 0.0227 with every result rounded, 0.0174 with a float32 residual stream alone, 0.0148 as here
(bench/rounding.py). vLLM's side of it is engines/vllm/residual.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def widen_residuals(model: nn.Module) -> None:
    """Let the embeddings of a half-precision model come out in float32; the additions of its blocks then stay so. Nothing
    for a float32 model. The model is to be run inside `mixed_precision`."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype in HALF:
            module.register_forward_hook(_widened)


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Where products take the model's half precision and norms float32; nothing for a float32 model.

    Args:
        model: a transformers model.
    """
    half = model.dtype in HALF
    return torch.autocast(model.device.type, dtype=model.dtype if half else torch.bfloat16, enabled=half)


def _widened(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    return embedded.float()
