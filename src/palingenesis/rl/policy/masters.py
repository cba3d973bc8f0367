"""Float32 master weights, on every device.

At a learning rate of 1e-6 an AdamW update is smaller than a bf16 weight's last bit, so it would vanish. The optimizer
therefore steps float32 tensors and sums micro-batch gradients in float32:

    backward ──> param.grad ──collect()──> master.grad (float32 sum) ──optimizer──> master ──publish()──> param

What is published is rounded to the model's dtype, and to FP8 where the engine has such weights (policy/fp8.py).
Where a parameter is float32 already (the CPU) it is its own master: nothing is copied and autograd accumulates in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from palingenesis.rl.policy.fp8 import FP8Weights


class Masters:
    """The trainable parameters of a model beside their float32 masters.

    Args:
        model: the model in its compute dtype.
        values: float32 values by parameter name, as loaded.
        fp8: weights that are rounded further.
    """

    def __init__(
        self, model: torch.nn.Module, values: Mapping[str, torch.Tensor], fp8: FP8Weights | None = None
    ) -> None:
        self.fp8 = fp8 or FP8Weights(model, ())
        self.pairs: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            own = param.dtype == torch.float32
            self.pairs[name] = (param, param if own else torch.nn.Parameter(values[name].float()))

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer steps."""
        return [master for _, master in self.pairs.values()]

    def collect(self) -> None:
        """Add each parameter's gradient to its master's in float32 and clear it; after every micro-batch."""
        for param, master in self.pairs.values():
            if param is master or param.grad is None:
                continue
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad.add_(param.grad)
            param.grad = None

    def publish(self) -> None:
        """Write the masters into the model, rounded; after every optimizer step."""
        with torch.no_grad():
            for param, master in self.pairs.values():
                if param is not master:
                    param.copy_(master)
        self.fp8.round()
