"""Model FLOPs utilization of the policy step: 6 x parameters x tokens over the time and the device's dense bf16 peak.

The backbone runs on every token, the head on the sampled ones; the embedding look-up multiplies nothing. Attention over
the context, recomputation and padding are not counted (the PaLM paper's definition, appendix B, less its attention term).
"""

from __future__ import annotations

from typing import Any

import torch

# Dense bf16 tensor peak by the vendor's data sheet, FLOP/s, by a part of the device's name. The first match wins.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float:
    """The device's assumed peak; 0 where it is not known, and then no utilization is logged."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)


def step_flops(model: Any, tokens: int, sampled: int) -> float:
    """Forward and backward of `tokens` through the backbone, and of the `sampled` ones among them through the head."""
    head = model.get_output_embeddings().weight.numel()
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    backbone = sum(p.numel() for p in model.parameters()) - head - (0 if tied else embedding.numel())
    return 6.0 * float(backbone * tokens + head * sampled)
