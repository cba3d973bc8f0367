"""Options whose part does not exist yet. Work that builds a part deletes its lines here and in the test of the list.

An option is refused when it asks for the part: when its value is one of `values` and the user set it, or, without
`values`, when it differs from its default. An option left alone is never refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """One missing part.

    Attributes:
        option: the option, or a pattern such as `logging.*`.
        values: the values that ask for the part; empty means every value but the default.
        part: what is missing, as in "asks for ..., which is not built yet".
        instead: what to do until then.
    """

    option: str
    values: tuple[Any, ...]
    part: str
    instead: str

    def refuses(self, option: str, value: Any, default: Any, is_set: bool) -> bool:
        """`option` with this value asks for the missing part."""
        if not fnmatchcase(option, self.option):
            return False
        return is_set and value in self.values if self.values else bool(value != default)


_ADAPTERS = (
    "palingenesis.rl.envs.mcp:MCPEnv",
    "palingenesis.rl.envs.openenv:OpenEnvAdapter",
    "palingenesis.rl.envs.nemo_gym:NemoGymAdapter",
)
_TRACKER = "follow metrics.jsonl in train.output_dir"

NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("model.gradient_checkpointing", ("selective",), "selective checkpointing", "use full or none"),
    NotBuilt("data.format", ("nemo_gym",), "the NeMo Gym row format", "convert the rows and use chat"),
    NotBuilt("env.type", _ADAPTERS, "an adapter to other systems", "name a class with tool_schemas and call_tool"),
    NotBuilt("train.optimizer", ("adamw8bit", "paged_adamw8bit"), "8-bit AdamW", "use adamw"),
    NotBuilt("train.fsdp", (True,), "sharding over ranks", "leave it at auto and run one process"),
    NotBuilt("train.cpu_offload", (), "offloading to CPU memory", "leave it at false"),
    NotBuilt("train.prompt_sharing", (True,), "sharing a group's prompt", "leave it at auto"),
    NotBuilt("train.guard", ("warn", "act"), "the collapse guard", "leave it off and watch policy/abs_ratio_dev"),
    NotBuilt("logging.wandb", (), "reporting to Weights & Biases", _TRACKER),
    NotBuilt("logging.tensorboard", (), "reporting to TensorBoard", _TRACKER),
    NotBuilt("logging.trackio", (), "reporting to Trackio", _TRACKER),
    NotBuilt("logging.project", (), "reporting to a tracker", _TRACKER),
    NotBuilt("logging.run_name", (), "reporting to a tracker", _TRACKER),
)
