"""Tools and environments: what the policy acts on between its turns.

build(config.env, sandbox) ──> Environments ── open(row) ──> EnvSession (schemas, call, reward, done, close)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palingenesis.rl.envs.classes import ClassEnvironment
from palingenesis.rl.envs.classes import wants_sandbox as _wants_sandbox
from palingenesis.rl.envs.functions import function_tools
from palingenesis.rl.envs.session import Environments, EnvSession, ToolAnswer
from palingenesis.rl.plugins import resolve

if TYPE_CHECKING:
    from palingenesis.rl.config.schema import EnvConfig


def build(config: EnvConfig, sandbox: Any = None) -> Environments:
    """The environment that the section `env` names; not for `single_turn`, which has none.

    Args:
        sandbox: for a class whose constructor asks for `sandbox`.

    Raises:
        ConfigError: a class, function, argument or pattern cannot be used.
    """
    if config.type == "tools":
        return Environments(function_tools(config.tools, config.allowed_tools), config)
    cls = resolve(config.type, {}, "env.type")
    return Environments(ClassEnvironment(cls, config.args, sandbox, config.allowed_tools), config)


def wants_sandbox(config: EnvConfig) -> bool:
    """The environment's constructor asks for the trainer's sandbox, which then has to run."""
    cls = resolve(config.type, {}, "env.type") if ":" in config.type else None
    return isinstance(cls, type) and _wants_sandbox(cls)


__all__ = ["EnvSession", "Environments", "ToolAnswer", "build", "wants_sandbox"]
