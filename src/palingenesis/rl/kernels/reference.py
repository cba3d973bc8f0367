"""The head in plain torch, from whole logits: the ground truth. Needs N·V numbers; for tests and small vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`(logp [N], entropy [N])` as `head.selected_logprobs` defines them, differentiable by autograd.

    z = cap(scale · (h Wᵀ + b)) / T,   cap(x) = softcap · tanh(x / softcap), or x where softcap is 0
    logp = log softmax(z)[target],   entropy = −Σ_v softmax(z)_v · log softmax(z)_v
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    logp = log_probs.gather(1, targets[:, None])[:, 0]
    return logp, -(log_probs.exp() * log_probs).sum(dim=-1)
