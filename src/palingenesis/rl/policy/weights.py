"""The policy's weights as an engine loads them: checkpoint names and full tensors, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PolicyWeights:
    """Weights after `version` optimizer steps. `tensors` reads the live model: load before the next step."""

    version: int
    model: Any

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters under their checkpoint names; a tied head is sent once, as the embedding."""
        for name, param in self.model.named_parameters():
            yield name, param.detach()
