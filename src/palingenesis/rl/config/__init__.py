"""The configuration of a run: schema, loading, checks and the reference made from it. Loads neither torch nor vllm."""

from palingenesis.rl.config.builtin_rewards import BUILTIN_REWARDS
from palingenesis.rl.config.check import check, unused_on_hf
from palingenesis.rl.config.schema import (
    DataConfig,
    EnvConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    SandboxConfig,
    TrainConfig,
)

__all__ = [
    "BUILTIN_REWARDS",
    "DataConfig",
    "EnvConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "RLConfig",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "TrainConfig",
    "check",
    "unused_on_hf",
]
