"""The parts that do not exist yet, exactly. Work that builds one deletes its line here and in `not_built.py`."""

from __future__ import annotations

from typing import Any

import pytest

from palingenesis.rl.config import RLConfig
from palingenesis.rl.config.not_built import NOT_BUILT
from palingenesis.rl.errors import ConfigError

BASE = {"model": {"policy": "p"}, "data": {"dataset": "d"}}

# (option or pattern, refused values; none given means all but the default)
EXPECTED: list[tuple[str, tuple[Any, ...]]] = [
    ("model.gradient_checkpointing", ("selective",)),
    ("data.format", ("nemo_gym",)),
    (
        "env.type",
        (
            "palingenesis.rl.envs.mcp:MCPEnv",
            "palingenesis.rl.envs.openenv:OpenEnvAdapter",
            "palingenesis.rl.envs.nemo_gym:NemoGymAdapter",
        ),
    ),
    ("train.optimizer", ("adamw8bit", "paged_adamw8bit")),
    ("train.fsdp", (True,)),
    ("train.cpu_offload", ()),
    ("train.prompt_sharing", (True,)),
    ("train.guard", ("warn", "act")),
    ("logging.wandb", ()),
    ("logging.tensorboard", ()),
    ("logging.trackio", ()),
    ("logging.project", ()),
    ("logging.run_name", ()),
]

# One value of each that asks for the missing part.
ASKS: list[tuple[str, Any]] = [
    ("model.gradient_checkpointing", "selective"),
    ("data.format", "nemo_gym"),
    ("env.type", "palingenesis.rl.envs.mcp:MCPEnv"),
    ("env.type", "palingenesis.rl.envs.openenv:OpenEnvAdapter"),
    ("env.type", "palingenesis.rl.envs.nemo_gym:NemoGymAdapter"),
    ("train.optimizer", "adamw8bit"),
    ("train.fsdp", True),
    ("train.cpu_offload", True),
    ("train.prompt_sharing", True),
    ("train.guard", "warn"),
    ("logging.wandb", True),
    ("logging.tensorboard", True),
    ("logging.trackio", True),
    ("logging.project", "mine"),
    ("logging.run_name", "mine"),
]


def with_option(option: str, value: Any) -> dict[str, Any]:
    section, name = option.split(".")
    return BASE | {section: {**BASE.get(section, {}), name: value}}


def test_the_list_is_exactly_this() -> None:
    assert [(entry.option, entry.values) for entry in NOT_BUILT] == EXPECTED


@pytest.mark.parametrize(("option", "value"), ASKS, ids=[f"{option}={value}" for option, value in ASKS])
def test_asking_for_a_missing_part_is_refused_as_such(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is not built yet; ") as caught:
        RLConfig.from_dict(with_option(option, value))
    assert str(caught.value).startswith(f"{option}: ")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rollout.backend", "hf"),
        ("rollout.max_staleness", 0),
        ("env.type", "single_turn"),
        ("env.type", "my_envs.mcp:MCPEnv"),
        ("env.tools", []),
        ("sandbox.backend", "bubblewrap"),
        ("sandbox.workers", 8),
        ("train.fsdp", False),
        ("train.fsdp", "auto"),
        ("train.prompt_sharing", False),
        ("train.optimizer", "adamw"),
        ("train.guard", "off"),
        ("model.gradient_checkpointing", "full"),
        ("data.format", "chat"),
    ],
)
def test_what_does_not_ask_for_it_passes(option: str, value: Any) -> None:
    assert RLConfig.from_dict(with_option(option, value)).get(option) == value


def test_an_untouched_config_asks_for_nothing_missing() -> None:
    assert RLConfig.from_dict(BASE).rollout.backend == "vllm"
