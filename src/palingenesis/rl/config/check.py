"""What one option cannot know of the others: parts not built yet, contradictions, options that would do nothing.

`check` raises the first it finds, in that order: a missing part first, so that no cure leads to another refusal. Only a
value that differs from its default can do nothing: a run's own config.yaml, with all defaults written out, loads again.
A new rule is a new line in one of the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from palingenesis.rl.config.builtin_rewards import BUILTIN_REWARDS
from palingenesis.rl.config.not_built import NOT_BUILT
from palingenesis.rl.config.schema import LOSSES, RLConfig
from palingenesis.rl.config.values import OptionError, show


@dataclass(frozen=True, slots=True)
class Acts:
    """An option and when it acts. `when` receives the config, or for `rewards.*` that reward."""

    option: str
    when: Callable[[Any], bool]
    with_: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Options that contradict each other. `says` may use the config as `{c}`; the first option set is blamed."""

    options: tuple[str, ...]
    holds: Callable[[RLConfig], bool]
    says: str


def _turn_budget(c: RLConfig) -> int:
    return min(c.rollout.max_new_tokens, c.rollout.resolved_max_completion_tokens)


def _is_hub(name: str) -> bool:
    endings = {suffix.lower() for suffix in PurePath(name).suffixes}
    return bool(name) and endings.isdisjoint({".jsonl", ".ndjson", ".json", ".parquet"})


def _has_eval_rows(c: RLConfig) -> bool:
    return bool(c.data.eval_dataset) or c.data.eval_size > 0


def _may_use_sandbox(c: RLConfig) -> bool:
    """The code reward does; a user's own function or environment may; without rewards, they come from Python."""
    fns = [reward.fn for reward in c.rewards.values()]
    return not fns or "code" in fns or any(":" in fn for fn in fns) or c.env.type != "single_turn"


def _tools_or_class(c: RLConfig) -> bool:
    return c.env.type != "single_turn"


def _env_class(c: RLConfig) -> bool:
    return ":" in c.env.type


def _loss(*types: str) -> Callable[[RLConfig], bool]:
    """A loss of the user's own may read any option of its section."""
    return lambda c: c.loss.type in types or c.loss.type not in LOSSES


def _sandbox(*backends: str) -> Callable[[RLConfig], bool]:
    return lambda c: c.sandbox.backend in backends


VLLM_ONLY = (
    "rollout.gpu_memory_utilization",
    "rollout.prefix_caching",
    "rollout.sleep",
    "rollout.kv_cache_dtype",
    "rollout.quantization",
    "rollout.vllm_args",
)

TURNS = "tools or an environment in env.type"

ACTS: tuple[Acts, ...] = (
    Acts("data.split", lambda c: _is_hub(c.data.dataset), "a Hugging Face id in data.dataset (a file has no splits)"),
    Acts("data.args", lambda c: _is_hub(c.data.dataset) or _is_hub(c.data.eval_dataset), "a Hugging Face dataset id"),
    Acts("data.eval_split", lambda c: _is_hub(c.data.eval_dataset), "a Hugging Face id in data.eval_dataset"),
    Acts("data.eval_size", lambda c: not c.data.eval_dataset, "data.eval_dataset empty (it holds the held-out rows)"),
    Acts("data.prompt_field", lambda c: c.data.format != "nemo_gym", "data.format chat or auto"),
    Acts("data.tools_field", lambda c: c.env.type != "tools", "an env.type without tools of its own"),
    *(Acts(option, lambda c: c.rollout.backend == "vllm", "rollout.backend vllm") for option in VLLM_ONLY),
    Acts("rollout.sleep", lambda c: c.rollout.max_staleness == 0, "rollout.max_staleness 0"),
    Acts(
        "rollout.max_new_tokens",
        lambda c: c.rollout.max_new_tokens <= c.rollout.resolved_max_completion_tokens,
        "a rollout.max_completion_tokens that is not smaller",
    ),
    Acts(
        "rollout.max_completion_tokens",
        lambda c: _tools_or_class(c) or c.rollout.max_completion_tokens <= c.rollout.max_new_tokens,
        f"{TURNS} (a single turn ends at the smaller rollout.max_new_tokens)",
    ),
    Acts("env.tools", lambda c: c.env.type == "tools", "env.type tools"),
    Acts("env.args", _env_class, "an environment class in env.type"),
    Acts("env.max_turns", _tools_or_class, TURNS),
    Acts("env.max_tool_output_tokens", _tools_or_class, TURNS),
    Acts("env.tool_timeout", _tools_or_class, TURNS),
    Acts("env.max_concurrent", _tools_or_class, TURNS),
    Acts("env.allowed_tools", _tools_or_class, TURNS),
    Acts("rewards.*.style", lambda reward: reward.fn not in BUILTIN_REWARDS, "a function of your own in fn"),
    Acts("sandbox.*", _may_use_sandbox, "a reward or environment that runs programs, such as fn: code"),
    Acts("sandbox.image", _sandbox("docker"), "sandbox.backend docker"),
    Acts("sandbox.allow_unsafe", _sandbox("subprocess"), "sandbox.backend subprocess"),
    Acts("sandbox.warmpool", _sandbox("agent_sandbox"), "sandbox.backend agent_sandbox"),
    Acts("sandbox.namespace", _sandbox("agent_sandbox"), "sandbox.backend agent_sandbox"),
    Acts("sandbox.connection", _sandbox("agent_sandbox"), "sandbox.backend agent_sandbox"),
    Acts("loss.eps_low", _loss("masked_is"), "loss.type masked_is"),
    Acts("loss.eps_high", _loss("masked_is"), "loss.type masked_is"),
    Acts("loss.is_cap", _loss("masked_is", "cispo"), "loss.type masked_is or cispo"),
    Acts("loss.icepop_low", _loss("icepop"), "loss.type icepop"),
    Acts("loss.icepop_high", _loss("icepop"), "loss.type icepop"),
    Acts("loss.gspo_eps", _loss("gspo"), "loss.type gspo"),
    Acts("loss.seq_mask", _loss("masked_is", "cispo", "icepop"), "loss.type masked_is, cispo or icepop"),
    Acts("loss.overlong_penalty", lambda c: c.loss.overlong_buffer > 0, "loss.overlong_buffer above 0"),
    Acts("train.eval_every", _has_eval_rows, "held-out rows (data.eval_dataset or data.eval_size)"),
    Acts("train.eval_samples", _has_eval_rows, "held-out rows (data.eval_dataset or data.eval_size)"),
    Acts("train.eval_temperature", _has_eval_rows, "held-out rows (data.eval_dataset or data.eval_size)"),
    Acts("train.keep_checkpoints", lambda c: c.train.save_steps > 0, "train.save_steps above 0"),
    Acts("logging.project", lambda c: c.logging.wandb or c.logging.trackio, "logging.wandb or logging.trackio"),
    Acts("logging.run_name", lambda c: c.logging.wandb or c.logging.trackio, "logging.wandb or logging.trackio"),
)

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        ("rollout.max_model_len", "rollout.max_new_tokens", "rollout.max_completion_tokens"),
        lambda c: _turn_budget(c) >= c.rollout.max_model_len,
        "rollout.max_model_len {c.rollout.max_model_len} leaves no room for a prompt beside rollout.max_new_tokens "
        "{c.rollout.max_new_tokens}; raise the one or lower the other",
    ),
    Conflict(
        ("data.max_prompt_tokens", "rollout.max_model_len"),
        lambda c: c.data.max_prompt_tokens >= c.rollout.max_model_len,
        "prompts of data.max_prompt_tokens {c.data.max_prompt_tokens} fill rollout.max_model_len "
        "{c.rollout.max_model_len}; lower the one or raise the other",
    ),
    Conflict(
        ("loss.overlong_buffer", "rollout.max_completion_tokens", "rollout.max_new_tokens"),
        lambda c: c.loss.overlong_buffer > c.rollout.resolved_max_completion_tokens,
        "loss.overlong_buffer {c.loss.overlong_buffer} is longer than a rollout may be "
        "({c.rollout.resolved_max_completion_tokens} tokens); lower it or raise that limit",
    ),
    Conflict(
        ("env.type",),
        lambda c: c.env.type == "tools" and not c.env.tools,
        "tools needs functions; list them in env.tools, such as [my_tools.py:search]",
    ),
    Conflict(
        ("env.max_concurrent", "rollout.group_size"),
        lambda c: 0 < c.env.max_concurrent < c.rollout.group_size,
        "the {c.rollout.group_size} rollouts of a group (rollout.group_size) are open until they are scored together, and "
        "only {c.env.max_concurrent} environments may be alive; raise the one or lower the other",
    ),
    Conflict(
        ("sandbox.backend",),
        lambda c: c.sandbox.backend == "subprocess" and not c.sandbox.allow_unsafe,
        "subprocess isolates nothing; set sandbox.allow_unsafe: true, or use docker or bubblewrap",
    ),
    Conflict(
        ("sandbox.backend",),
        lambda c: c.sandbox.backend == "agent_sandbox" and not c.sandbox.warmpool,
        "agent_sandbox claims its pods from a pool; name it in sandbox.warmpool",
    ),
    Conflict(
        ("train.optimizer",),
        lambda c: c.train.optimizer != "adamw" and (c.train.fsdp is True or c.train.cpu_offload),
        "{c.train.optimizer} works on one GPU without FSDP; use adamw, or unset train.fsdp and train.cpu_offload",
    ),
    Conflict(
        ("train.cpu_offload",),
        lambda c: c.train.cpu_offload and c.train.fsdp is False,
        "offloading is FSDP's; set train.fsdp to auto or true, or cpu_offload to false",
    ),
)


def check(config: RLConfig) -> None:
    """Raise a `ConfigError` for the first thing that cannot stand, with the place where it was set."""
    refuse_not_built(config)
    refuse_conflicts(config)
    refuse_no_effect(config)


def refuse_not_built(config: RLConfig) -> None:
    """An option asks for a part that does not exist yet."""
    for option, value, default in config.options():
        for entry in NOT_BUILT:
            if entry.refuses(option, value, default, config.is_set(option)):
                problem = f"{show(value)} asks for {entry.part}, which is not built yet; {entry.instead}"
                raise OptionError(option, problem, config.place(option))


def refuse_conflicts(config: RLConfig) -> None:
    """Options contradict each other."""
    for entry in CONFLICTS:
        if entry.holds(config):
            option = next((name for name in entry.options if config.is_set(name)), entry.options[0])
            raise OptionError(option, entry.says.format(c=config), config.place(option))


def refuse_no_effect(config: RLConfig) -> None:
    """An option differs from its default and would do nothing."""
    for option, value, default in config.options():
        if value == default:
            continue
        scope = config.rewards[option.split(".")[1]] if option.startswith("rewards.") else config
        for rule in ACTS:
            if fnmatchcase(option, rule.option) and not rule.when(scope):
                problem = f"{show(value)} does nothing: it acts only with {rule.with_}; set that or remove this"
                raise OptionError(option, problem, config.place(option))


def unused_on_hf(config: RLConfig) -> list[str]:
    """vLLM's options that differ from their defaults: what a run lists when it takes `hf` for lack of a GPU."""
    return [option for option, value, default in config.options() if option in VLLM_ONLY and value != default]
