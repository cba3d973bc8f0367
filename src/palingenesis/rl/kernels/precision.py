"""How a half-precision model computes: matrix products in its own dtype, everything that is added up in float32.

    token ids ── embedding ──> float32 residual stream ──(norm ── bf16 products ── attention ──> + )──> norm ──> head

A residual stream that is rounded to bf16 after every block is the largest part of what sampler and trainer disagree about.
Mean |difference| of the log-probs of sampled tokens from those of float32 arithmetic with the same bf16 weights,
SmolLM2-135M: 0.0227 with every result rounded, 0.0174 with a float32 residual stream alone, 0.0148 as here
(bench/rounding.py). vLLM's side of it is engines/vllm/residual.py.

Who computes how, by what a module owns in half precision:

    embedding                                    comes out in float32
    linear layer, convolution                    autocast: float32 in, half precision out
    vector, no children (a norm of the model's)  float32 in, float32 out
    matrix, or children (routers, experts,       as written, of half-precision inputs: where their authors widen something
    linear attention, state-space mixers)        autocast would narrow it again
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def widen_residuals(model: nn.Module) -> None:
    """Let the residual stream of a half-precision model be float32; nothing for a float32 model. The model is to be run
    inside `mixed_precision`, and so are deep copies of it."""
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dtype in HALF]
        if not own or isinstance(module, nn.Linear | nn.Conv1d):
            continue
        inner = [child for child in module.modules() if child is not module]
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(_widened)
        elif type(module) is nn.LayerNorm:
            module.forward = MethodType(_wide_layer_norm, module)  # type: ignore[method-assign]
        elif any(isinstance(child, nn.Embedding) for child in inner):
            continue  # the stream begins inside
        elif inner or isinstance(module, nn.LayerNorm) or any(p.dim() > 1 for p in own):
            module.forward = MethodType(_as_written, module)


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Where products take the model's half precision and norms float32; nothing for a float32 model.

    Args:
        model: a transformers model.
    """
    half = model.dtype in HALF
    return torch.autocast(model.device.type, dtype=model.dtype if half else torch.bfloat16, enabled=half)


def _widened(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    return embedded.float()


def _wide_layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    """Autocast does this on a GPU and not on a CPU."""
    if not torch.is_autocast_enabled(x.device.type):  # inside a module that computes as written
        return nn.LayerNorm.forward(self, x)
    weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
    return nn.functional.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)


def _as_written(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = next(self.parameters(recurse=False))
    with torch.autocast(own.device.type, enabled=False):
        return type(self).forward(self, *_narrowed(args, own.dtype), **_narrowed(kwargs, own.dtype))


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    """Float32 tensors in `dtype`; a mask's lowest number stays finite."""
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            return value
        return value.to(dtype) if value.requires_grad else value.clamp(min=torch.finfo(dtype).min).to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_narrowed(inner, dtype) for inner in value)
    if type(value) is dict:
        return {name: _narrowed(inner, dtype) for name, inner in value.items()}
    return value
