"""Reinforcement learning of language models: `RLTrainer(RLConfig.from_yaml(path), rewards=[f]).train()`.

Importing this package loads neither torch nor transformers; `RLTrainer` does when it is first touched.
"""

from typing import TYPE_CHECKING, Any

from palingenesis.rl.config import RLConfig
from palingenesis.rl.errors import SkipSample

if TYPE_CHECKING:
    from palingenesis.rl.trainer import RLTrainer

__all__ = ["RLConfig", "RLTrainer", "SkipSample"]


def __getattr__(name: str) -> Any:
    if name == "RLTrainer":
        from palingenesis.rl.trainer import RLTrainer

        return RLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
