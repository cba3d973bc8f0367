"""Log-probs of the sampled tokens, a slice of rows at a time: logits [N, V] never stand in memory.

    forward    for each slice of rows:  z = logits(slice);  logp, entropy, lse        keeps lse [N], drops z
    backward   for each slice of rows:  z again;  dz = g · (onehot − exp(z − lse));  dX = dz W;  dW += dzᵀ X

Invariants:
- The largest tensor is a slice's logits [rows, V], or dW [V, H].
- Products of bf16 or fp16 inputs come out in float32: a bf16 logit of 20 is off by 0.06, and so would its log-prob be.
- dW is summed over slices in float32 and rounded once: a bf16 sum drops the small terms, and the entropy of a policy
  trained with it drifts lower. float64 stays float64 throughout.
- Logits are finite; a log-prob may then be as low as it likes, its gradient stays finite.

Memory at V = 248,320 and 16,384 rows: whole fp32 logits would take 15 GiB, a slice takes 64 MiB (CPU) or
512 MiB (GPU), twice that in the forward (z and exp z).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_SLICE_BYTES = 64 * 2**20
GPU_SLICE_BYTES = 512 * 2**20
# Rows of a half-precision weight widened at a time on the CPU, which has no half × half → float32 product.
WIDEN_ROWS = 8192


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    slice_rows: int = 0,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`(logp [N] with grad, entropy [N] without)`, float32 (float64 for float64 input), of

        z = cap(scale · (h Wᵀ + b)) / T,   cap(x) = softcap · tanh(x / softcap), or x where softcap is 0
        logp = log softmax(z)[target],   entropy = −Σ_v softmax(z)_v · log softmax(z)_v

    Args:
        hidden: [N, H], the states that predict the sampled tokens; its dtype is the compute dtype.
        weight: [V, H], the output embedding. No dW is computed when it needs no gradient.
        bias: [V] or None.
        targets: int64 [N], the sampled tokens.
        temperature: the sampling temperature T, above 0 (greedy sampling reports log-probs at 1).
        slice_rows: rows whose logits stand at once; 0 takes what fits the budget.
        softcap: Gemma's `final_logit_softcapping`; 0 is none.
        scale: Cohere's `logit_scale`; 1 / Granite's `logits_scaling`.
    """
    if temperature <= 0:
        raise ValueError(f"the temperature of log-probs is above 0, not {temperature}")
    rows = slice_rows or budget_rows(weight.shape[0], hidden.device.type)
    head = _Head(temperature=temperature, softcap=softcap, scale=scale, rows=rows)
    apply: Any = _SlicedHead.apply  # versions of torch differ in whether it is typed
    logp, entropy = apply(hidden, weight, bias, targets, head)
    return logp, entropy


def budget_rows(vocabulary: int, device_type: str) -> int:
    """Rows whose float32 logits fit the slice budget; a multiple of 64 where that many fit (whole GEMM tiles)."""
    fit = (CPU_SLICE_BYTES if device_type == "cpu" else GPU_SLICE_BYTES) // (4 * vocabulary)
    return max(1, fit - fit % 64 if fit >= 64 else fit)


@dataclass(frozen=True, slots=True)
class _Head:
    """How hidden states become logits, and how many rows at a time."""

    temperature: float
    softcap: float
    scale: float
    rows: int

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """z [rows, V] in the wide dtype, a fresh tensor that may be overwritten."""
        z = wide_product(hidden, weight)
        if bias is not None:
            z.add_(bias)
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.softcap:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1.0 else z

    def slope(self, z: Tensor) -> Tensor | None:
        """cap'(x) at logits z = cap(x) / T: 1 − tanh²(x / softcap); None without a cap."""
        return z.mul(self.temperature / self.softcap).square_().neg_().add_(1.0) if self.softcap else None


class _SlicedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        logp = hidden.new_empty(hidden.shape[0], dtype=_wide(hidden.dtype))
        entropy, lse = torch.empty_like(logp), torch.empty_like(logp)
        operand = weight.to(hidden.dtype)
        for at in _slices(hidden.shape[0], head.rows):
            z = head.logits(hidden[at], operand, bias)
            top = z.amax(dim=1, keepdim=True)
            picked = z.sub_(top).gather(1, targets[at, None])[:, 0]
            p = z.exp()
            total = p.sum(dim=1)
            log_total = total.log()
            logp[at] = picked - log_total
            lse[at] = top[:, 0] + log_total
            entropy[at] = log_total - torch.linalg.vecdot(p, z) / total
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.head = head
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        head: _Head = ctx.head
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if wants_bias else None
        operand = weight.to(hidden.dtype)
        for at in _slices(hidden.shape[0], head.rows):
            dz = _logits_gradient(head, head.logits(hidden[at], operand, bias), targets[at], lse[at], grad_logp[at])
            if d_bias is not None:
                d_bias += dz.sum(dim=0)
            if _has_wide_product(hidden):
                dz = dz.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[at] = _product_with_weight(dz, operand)
            if d_weight is not None:
                _add_outer(d_weight, dz, hidden[at])
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            None,
            None,
        )


def _logits_gradient(head: _Head, z: Tensor, targets: Tensor, lse: Tensor, grad_logp: Tensor) -> Tensor:
    """d(h Wᵀ + b) = g · scale / T · (onehot − softmax(z)) · cap'; overwrites z."""
    slope = head.slope(z)
    inner = (grad_logp * (head.scale / head.temperature))[:, None]
    dz = z.sub_(lse[:, None]).exp_().mul_(-inner).scatter_add_(1, targets[:, None], inner)
    return dz if slope is None else dz.mul_(slope)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _has_wide_product(operand: Tensor) -> bool:
    """Whether the device multiplies this half precision straight into float32."""
    return operand.is_cuda and operand.element_size() < 4


def _widened(weight: Tensor) -> list[slice]:
    """Blocks of vocabulary rows to widen one after another."""
    return _slices(weight.shape[0], WIDEN_ROWS)


def wide_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """h Wᵀ [rows, V] in float32 (float64 for float64), also of half-precision operands."""
    if _has_wide_product(hidden):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    wide = _wide(hidden.dtype)
    if hidden.dtype == wide:
        return hidden @ weight.T
    out = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=wide)
    for block in _widened(weight):
        out[:, block] = hidden.to(wide) @ weight[block].to(wide).T
    return out


def _product_with_weight(dz: Tensor, weight: Tensor) -> Tensor:
    """dz W [rows, H], summed in float32 over the vocabulary."""
    if dz.dtype == weight.dtype:
        return dz @ weight
    out = dz.new_zeros(dz.shape[0], weight.shape[1])
    for block in _widened(weight):
        out.addmm_(dz[:, block], weight[block].to(dz.dtype))
    return out


def _add_outer(d_weight: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """dW += dzᵀ X, in the wide dtype."""
    if _has_wide_product(dz):
        d_weight += torch.mm(dz.T, hidden, out_dtype=torch.float32)
    else:
        d_weight.addmm_(dz.T, hidden.to(dz.dtype))
