"""Model FLOPs utilization of the policy step: 6 x parameters x tokens over the time and the device's dense bf16 peak.

The embedding look-up multiplies nothing and is left out; a tied head is counted. Attention over the context, recomputation
and padding are not counted (the PaLM paper's definition, appendix B, less its attention term).
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


def flops_per_token(model: Any) -> float:
    """Forward and backward of one token."""
    parameters = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return 6.0 * float(parameters - (0 if tied else embedding.numel()))
