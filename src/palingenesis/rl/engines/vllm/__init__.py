"""vLLM in the trainer's process: `engine` (threads), `core` (requests, weights, memory), `sampler` (draw and log-probs)."""

from palingenesis.rl.engines.vllm.core import VLLMOptions
from palingenesis.rl.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine", "VLLMOptions"]
