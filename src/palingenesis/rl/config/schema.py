"""Every option of a run: its name, default, bounds and documentation. The schema is the only list of options there is.

    YAML file ──┐
                ├── load.py ──> RLConfig ──> check.py: what contradicts, does nothing or is not built yet
    --a.b v  ───┘                  │
                                   └── docs.py: docs/options.md and `pgs rl --help`

The text below an option is its documentation. Construction, assignment and loading fail with a `ConfigError` of one
line, never with pydantic's report. Sections import nothing heavy: a config is read and checked without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from palingenesis.rl.config.builtin_rewards import BUILTIN_REWARDS
from palingenesis.rl.config.values import OptionError, default_of, first_problem, show
from palingenesis.rl.plugins import nearest


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "true and false are not numbers")
    return value


def _false_is_none(value: Any) -> Any:
    return "none" if value is False or value in ("false", "False") else value


def _known_or_import(kind: str, known: Sequence[str], value: str) -> str:
    where, _, attribute = value.rpartition(":")
    if value in known or (where and attribute):
        return value
    names = "".join(f"{name}, " for name in known)
    raise ValueError(
        f"{value!r} is no {kind}{nearest(value, known)}; use {names}`package.module:Name` or `path/file.py:Name`"
    )


Text = Annotated[str, Field(min_length=1)]
Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[Int, Field(ge=0)]
AtLeastOne = Annotated[Int, Field(ge=1)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
AutoOrBool = bool | Literal["auto"]


class Options(BaseModel):
    """One section. Unknown names and bad values raise an `OptionError`, at construction and on assignment."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise first_problem(type(self), error) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in type(self).model_fields:
            raise OptionError(name, f"there is no such option{nearest(name, type(self).model_fields)}")
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise first_problem(type(self), error) from None


class ModelConfig(Options):
    """The policy and how it is loaded."""

    policy: Text
    """Checkpoint to train: a Hugging Face id, a directory, or a packaged policy, `builtin:tiny` or `builtin:tiny-tools`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra variables for the chat template, for example `{enable_thinking: false}`."""
    stop_tokens: list[Text] = []
    """Tokens that end a turn besides the checkpoint's own end-of-turn tokens."""
    gradient_checkpointing: Annotated[Literal["auto", "none", "selective", "full"], BeforeValidator(_false_is_none)] = (
        "auto"
    )
    """Trades compute for activation memory: `selective` keeps the outputs of matrix multiplications, `full` recomputes
    everything, `none` (or `false`) nothing. `auto` is `full` with `train.cpu_offload`, else `none`."""
    attention: Text = "auto"
    """Attention implementation of transformers, such as `sdpa` or `flash_attention_2`; `auto` takes the best one."""


class DataConfig(Options):
    """The prompts. Every column beside the prompt travels to the rewards and the environment."""

    dataset: Text
    """Training rows: a JSONL, JSON or parquet file, or a Hugging Face dataset id."""
    split: Text = "train"
    """Split of a Hugging Face dataset to train on."""
    eval_dataset: str = ""
    """Held-out rows: a file or a dataset id. Empty means none, or those of `data.eval_size`."""
    eval_split: Text = "test"
    """Split of `data.eval_dataset`."""
    eval_size: Count = 0
    """Number of training rows to hold out instead, chosen by the hash of their content."""
    system_prompt: str = ""
    """System message put before prompts that have none."""
    prompt_field: str = ""
    """Column that holds the prompt. Empty takes the first of `messages`, `prompt`, `question` and `problem`."""
    max_prompt_tokens: Count = 0
    """Prompts of more tokens are dropped at load and counted. 0 keeps what fits into `rollout.max_model_len`."""
    retire_above: NonNegative = 0.0
    """A prompt is no longer drawn once its group's mean reward reaches this. 0 never retires one."""
    format: Literal["auto", "chat", "nemo_gym"] = "auto"
    """How rows are written: `chat` (a prompt column) or `nemo_gym` (NeMo Gym rows). `auto` looks at them."""
    tools_field: Text = "tools"
    """Column of tool schemas for each row, used when the environment has no tools of its own."""
    seed: Count = 0
    """Seed of the order in which prompts are drawn."""
    args: dict[str, Any] = {}
    """Keyword arguments for `datasets.load_dataset`, for example `{name: main}`."""


class RolloutConfig(Options):
    """How the policy samples."""

    backend: Literal["vllm", "hf"] = "vllm"
    """Generation engine: `vllm`, in the trainer's process, or `hf`, plain transformers. Left unset: `hf` where there is no
    GPU."""
    batch_prompts: AtLeastOne = 32
    """Prompts a step trains on, over all ranks."""
    group_size: Annotated[Int, Field(ge=2)] = 8
    """Rollouts of each prompt; their rewards are compared with each other."""
    temperature: Positive = 1.0
    """Sampling temperature. The only sampling control: top-p and top-k would bias the importance ratios."""
    max_new_tokens: AtLeastOne = 2048
    """Most tokens the policy samples in one turn."""
    max_completion_tokens: Count = 0
    """Most tokens the policy samples in a rollout, over all its turns. 0 is `rollout.max_new_tokens`."""
    max_model_len: Annotated[Int, Field(ge=2)] = 8192
    """Most tokens of a rollout in all: prompt, sampled tokens and tool results."""
    max_staleness: Count = 0
    """Policy versions a rollout may lag behind. 0 samples and trains in turn; 1 overlaps the next step's rollouts with
    this step's training."""
    max_refill: NonNegative = 2.0
    """Extra prompts a step may draw to replace groups without a gradient, as a factor of `rollout.batch_prompts`."""
    max_num_seqs: Count = 0
    """Most sequences decoded at once. 0 is all of a step's, and with vLLM at least 256."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0, le=1)] = 0.3
    """Share of the GPU's memory for vLLM; the trainer has the rest."""
    prefix_caching: bool = True
    """The rollouts of a group share the computation of their prompt in vLLM."""
    sleep: bool = True
    """vLLM gives its memory back while the trainer steps."""
    kv_cache_dtype: str = ""
    """Type of vLLM's key-value cache, such as `fp8`. Empty is the model's own."""
    quantization: str = ""
    """vLLM's quantization. `fp8`: of the weights alone, and the trainer's become the same values. Empty is none."""
    vllm_args: dict[str, Any] = {}
    """Further arguments for vLLM's engine, as the `EngineArgs` of its documentation names them."""

    @property
    def resolved_max_completion_tokens(self) -> int:
        """The budget of sampled tokens of one rollout."""
        return self.max_completion_tokens or self.max_new_tokens


ENV_TYPES = ("single_turn", "tools")


class EnvConfig(Options):
    """What stands between the policy's turns."""

    type: Annotated[str, AfterValidator(partial(_known_or_import, "environment", ENV_TYPES))] = "single_turn"
    """`single_turn`, `tools` (the functions of `env.tools`), or a class: `module:Name` or `path/file.py:Name`."""
    tools: list[Annotated[str, AfterValidator(partial(_known_or_import, "tool", ()))]] = []
    """Tool functions for `env.type: tools`, each `module:name` or `path/file.py:name`."""
    max_turns: AtLeastOne = 8
    """Most turns of the policy in a rollout; the calls of the last one still run."""
    tool_parser: Text = "auto"
    """Format of the model's tool calls: `hermes`, `xml` or `json_list`. `auto` reads it off the chat template."""
    max_tool_output_tokens: AtLeastOne = 512
    """A tool's result is cut to this many tokens."""
    tool_timeout: Positive = 30.0
    """Seconds a tool call may take; after that the policy reads an error."""
    max_concurrent: Count = 0
    """Most environments alive at once. 0 is no limit."""
    allowed_tools: list[Text] = []
    """The tools the policy gets, as names or shell-style patterns; one that matches nothing is an error. Empty exposes
    all."""
    args: dict[str, Any] = {}
    """Keyword arguments for the environment class."""


class RewardConfig(Options):
    """One reward, under the name it is logged by."""

    fn: Annotated[str, AfterValidator(partial(_known_or_import, "reward", tuple(BUILTIN_REWARDS)))]
    """A built-in reward, or a function: `module:name` or `path/file.py:name`."""
    weight: Float = 1.0
    """Factor of this reward in the sum. Negative makes it a penalty, 0 only logs it."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function."""
    style: Literal["plain", "trl"] = "plain"
    """`trl` hands a batched function the shapes TRL hands it (lists of messages)."""


def _connection(value: str) -> str:
    kind, _, target = value.partition(":")
    if value == "in_cluster" or (kind in ("gateway", "url") and target):
        return value
    raise ValueError(f"{value!r} is not a connection; use in_cluster, gateway:<name> or url:<router>")


class SandboxConfig(Options):
    """Where untrusted programs run."""

    backend: Literal["docker", "bubblewrap", "agent_sandbox", "subprocess"] = "docker"
    """`docker` (containers), `bubblewrap` (namespaces, no daemon), `agent_sandbox` (Kubernetes pods), or `subprocess`:
    the same limits without isolation, for development only."""
    image: Text = "python:3.12-slim"
    """Container image of the docker backend."""
    workers: AtLeastOne = 4
    """Containers, pods or processes kept warm; each runs one program at a time."""
    memory_mb: AtLeastOne = 1024
    """Memory of one program, in MiB."""
    timeout: Positive = 6.0
    """Seconds one program may run."""
    max_processes: AtLeastOne = 64
    """Most processes and threads of one program."""
    allow_unsafe: bool = False
    """Permits the subprocess backend, which isolates nothing."""
    warmpool: str = ""
    """Name of the `SandboxWarmPool` that the agent_sandbox backend claims pods from."""
    namespace: Text = "default"
    """Kubernetes namespace of the pool."""
    connection: Annotated[str, AfterValidator(_connection)] = "in_cluster"
    """How the pods are reached: `in_cluster`, `gateway:<name>` or `url:<router>`."""


LOSSES = ("masked_is", "cispo", "icepop", "gspo")


class LossConfig(Options):
    """The objective."""

    type: Annotated[str, AfterValidator(lambda value: _known_or_import("loss", LOSSES, value))] = "masked_is"
    """Policy gradient weighted by the importance ratio between trainer and sampler: masked outside the clip range
    (`masked_is`), capped (`cispo`), kept inside a band (`icepop`), one ratio a rollout (`gspo`), or a class of your own:
    `module:Name` or `path/file.py:Name`."""
    eps_low: BelowOne = 0.2
    """`masked_is`: a token with negative advantage has no gradient once its ratio is below 1 - this."""
    eps_high: NonNegative = 0.28
    """`masked_is`: a token with positive advantage has no gradient once its ratio is above 1 + this."""
    is_cap: Positive = 5.0
    """`masked_is`, `cispo`: largest weight the importance ratio may give a token."""
    icepop_low: Fraction = 0.5
    """`icepop`: tokens with a smaller ratio have no gradient."""
    icepop_high: Annotated[Float, Field(ge=1)] = 5.0
    """`icepop`: tokens with a larger ratio have no gradient."""
    gspo_eps: Annotated[Float, Field(gt=0, lt=1)] = 4e-3
    """`gspo`: half-width of the clip range of a rollout's ratio."""
    seq_mask: NonNegative = 0.1
    """A rollout whose mean |ratio - 1| exceeds this is dropped. 0 turns it off; `gspo` has none."""
    advantage_std: Literal["batch", "group", "none"] = "batch"
    """What a reward minus its group's mean is divided by: the standard deviation of the batch, of the group, or 1."""
    aggregation: Literal["prompt", "token", "constant"] = "prompt"
    """How token losses are averaged: over each prompt's tokens and then over prompts, over all tokens, or over rollouts
    times `rollout.max_completion_tokens`."""
    truncation: Literal["score", "mask"] = "score"
    """Rollouts that a budget cut, of tokens (`rollout.max_new_tokens`, `rollout.max_completion_tokens`,
    `rollout.max_model_len`) or of turns (`env.max_turns`, while the policy still called): scored like any other, or kept
    out of the gradient."""
    overlong_buffer: Count = 0
    """Tokens before `rollout.max_completion_tokens` over which the overlong penalty grows. 0 is no penalty."""
    overlong_penalty: Positive = 1.0
    """Penalty at the full length; logged as `rewards/overlong`."""


class TrainConfig(Options):
    """The optimizer, evaluation and checkpoints."""

    output_dir: Text = "runs/rl"
    """Directory of the run."""
    steps: AtLeastOne = 200
    """Optimizer steps."""
    learning_rate: NonNegative = 1e-6
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warmup: constant, or a cosine to 0 at the last step."""
    warmup_steps: Count = 10
    """Steps over which the learning rate rises linearly."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    adam_beta1: BelowOne = 0.9
    """AdamW's decay rate of the first moment."""
    adam_beta2: BelowOne = 0.95
    """AdamW's decay rate of the second moment."""
    adam_eps: Positive | None = None
    """AdamW's epsilon. Unset, it is 1e-15, and 1e-8 for the 8-bit optimizers, whose moments round to 0."""
    optimizer: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = "adamw"
    """`adamw8bit` keeps AdamW's moments in 8 bits (one GPU, without FSDP); the paged one can move them to the CPU."""
    micro_tokens: AtLeastOne = 16384
    """Tokens of one forward and backward pass. Changes memory and speed, not the gradient."""
    fsdp: AutoOrBool = "auto"
    """Shard parameters, gradients and optimizer state over the ranks. `auto` does so under torchrun."""
    cpu_offload: bool = False
    """FSDP2 offload: parameters, gradients and optimizer state live in CPU memory, about 24 bytes a parameter."""
    prompt_sharing: AutoOrBool = "auto"
    """Compute a group's common prompt once in the policy step. `auto` does so where the model allows it."""
    seed: Count = 0
    """Seed of sampling and of everything else that is random in training."""
    eval_every: Count = 0
    """Steps between evaluations of the held-out rows. 0 evaluates only before the first and after the last step."""
    eval_samples: Count = 256
    """Held-out rows of an evaluation. 0 is all."""
    eval_temperature: NonNegative = 0.0
    """Sampling temperature of evaluations. 0 is greedy."""
    save_steps: Count = 0
    """Steps between resumable checkpoints. 0 saves only when a signal stops the run."""
    keep_checkpoints: AtLeastOne = 2
    """Newest checkpoints that are kept."""
    save_final: bool = True
    """Write the trained policy to `final/` at the end."""
    resume_from: str = ""
    """Checkpoint to continue from: a directory, or `auto` for the newest of `train.output_dir`. Empty starts anew."""
    max_skipped: Fraction = 0.5
    """The run stops when a larger share of its rollouts is skipped over three batches."""
    guard: Literal["off", "warn", "act"] = "off"
    """Watch for the signs of a collapse, and warn of them or act on them."""

    @property
    def resolved_adam_eps(self) -> float:
        """AdamW's epsilon: the option, or the optimizer's own default."""
        if self.adam_eps is not None:
            return self.adam_eps
        return 1e-15 if self.optimizer == "adamw" else 1e-8


class LoggingConfig(Options):
    """What a run reports beside `metrics.jsonl`, which is always written."""

    log_every: AtLeastOne = 1
    """Steps between lines on the console."""
    dump_trajectories: Count = 0
    """Every so many steps the rollouts are written to `<output_dir>/rollouts/`. 0 never writes them."""
    wandb: bool = False
    """Report to Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files."""
    trackio: bool = False
    """Report to Trackio."""
    project: Text = "palingenesis"
    """Project that wandb and trackio file the run under."""
    run_name: str = ""
    """Name of the run in wandb and trackio. Empty takes the name of `train.output_dir`."""


SECTIONS: Mapping[str, type[Options]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "rollout": RolloutConfig,
    "env": EnvConfig,
    "rewards": RewardConfig,
    "sandbox": SandboxConfig,
    "loss": LossConfig,
    "train": TrainConfig,
    "logging": LoggingConfig,
}
"""Section names in the order of documentation. `rewards` maps names to sections of its class."""


class RLConfig(Options):
    """Everything a run is told.

    `RLConfig(model={"policy": ...}, data={"dataset": ...}, rewards={"correct": {"fn": "math"}})` checks each value;
    `from_yaml` and `from_dict` also refuse what contradicts, does nothing or is not built yet.
    """

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    env: EnvConfig
    rewards: dict[str, RewardConfig]
    sandbox: SandboxConfig
    loss: LossConfig
    train: TrainConfig
    logging: LoggingConfig

    _origins: dict[str, tuple[str, Any]] = PrivateAttr(default_factory=dict)
    """Option -> (where it was set, the value it had there)."""

    def __init__(self, **values: Any) -> None:
        _refuse_unknown(values)
        built: dict[str, Any] = {
            name: _build(name, cls, values.get(name)) for name, cls in SECTIONS.items() if name != "rewards"
        }
        built["rewards"] = _build_rewards(values.get("rewards"))
        super().__init__(**built)

    @field_validator("rewards")
    @classmethod
    def _reward_names(cls, rewards: dict[str, RewardConfig]) -> dict[str, RewardConfig]:
        for name in rewards:
            _check_reward_name(name)
        return rewards

    def __eq__(self, other: object) -> bool:
        """Equal options; where they were set does not matter."""
        return isinstance(other, RLConfig) and self.to_dict() == other.to_dict()

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, apply `--section.option value` overrides, and check the whole.

        Raises:
            ConfigError: one line that names the option, where it was set, and the cure.
        """
        from palingenesis.rl.config.load import from_yaml

        return from_yaml(cls, path, overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from nested mappings and check the whole, as `from_yaml` does."""
        from palingenesis.rl.config.check import check

        config = cls(**{str(section): held for section, held in values.items()})
        check(config)
        return config

    @property
    def provenance(self) -> Mapping[str, str]:
        """Where each option was set: `{"rollout.group_size": "rl.yaml:12", "train.steps": "command line"}`."""
        return MappingProxyType({option: self.place(option) for option in self._origins})

    def place(self, option: str) -> str:
        """Where `option` was set; empty when it was not, `Python` when code changed it after loading."""
        if option in self._origins:
            place, value = self._origins[option]
            return place if value == self.get(option) else "Python"
        return "Python" if self.is_set(option) and self._origins else ""

    def get(self, option: str) -> Any:
        """The value of `section.option` or `rewards.NAME.option`."""
        holder, name = self._holder(option)
        return getattr(holder, name)

    def is_set(self, option: str) -> bool:
        """Whether the user gave `option` a value, be it the default's."""
        holder, name = self._holder(option)
        return name in holder.model_fields_set

    def options(self) -> Iterator[tuple[str, Any, Any]]:
        """`(option, value, default)` of every option; a required option's default is None."""
        for section in SECTIONS:
            for prefix, part in _parts(section, getattr(self, section)):
                for name, field in type(part).model_fields.items():
                    yield f"{prefix}.{name}", getattr(part, name), default_of(field)

    def to_dict(self) -> dict[str, Any]:
        """Every option, as nested plain values."""
        return self.model_dump()

    def dump(self, header: Mapping[str, str] | None = None) -> str:
        """The config as YAML that loads as an equal config. `header` becomes comment lines at the top.

        `rollout.backend` is left out when the user left it unset, so that loading leaves the choice open again.
        """
        from palingenesis.rl.config.load import dump

        return dump(self, header or {})

    @property
    def resolved_gradient_checkpointing(self) -> Literal["none", "selective", "full"]:
        """What `auto` stands for here."""
        choice = self.model.gradient_checkpointing
        if choice == "auto":
            return "full" if self.train.cpu_offload else "none"
        return choice

    def _holder(self, option: str) -> tuple[Options, str]:
        prefix, _, name = option.rpartition(".")
        section, _, reward = prefix.partition(".")
        held = getattr(self, section)
        return (held[reward] if reward else held), name


def _parts(section: str, held: Any) -> Iterator[tuple[str, Any]]:
    """`(prefix of its options, section)`: one for each reward, else the section itself."""
    if section == "rewards" and isinstance(held, Mapping):
        yield from ((f"rewards.{name}", part) for name, part in held.items())
    else:
        yield section, held


def find_field(option: str) -> FieldInfo | None:
    """The schema of `section.option`, `rewards.NAME.option` or anything inside one of them; None when there is none."""
    section, *rest = option.split(".")
    names = rest[1:] if section == "rewards" else rest
    if section not in SECTIONS or not names:
        return None
    return SECTIONS[section].model_fields.get(names[0])


def _build(option: str, cls: type[Options], values: Any) -> Options:
    if isinstance(values, cls):
        return values
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise OptionError(
            option, f"must hold options, such as {{{next(iter(cls.model_fields))}: ...}}, not {show(values)}"
        )
    try:
        return cls(**{str(key): value for key, value in values.items()})
    except OptionError as error:
        raise OptionError(f"{option}.{error.option}", error.problem) from None


def _build_rewards(values: Any) -> dict[str, Options]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise OptionError("rewards", "must map names to rewards, such as {correct: {fn: math}}")
    return {str(name): _build(f"rewards.{name}", RewardConfig, value) for name, value in values.items()}


def _check_reward_name(name: str) -> None:
    if not name or any(sign in "/." or sign.isspace() for sign in name):
        raise OptionError(f"rewards.{name}", "a reward's name is a word without '/', '.' and spaces; rename it")
    if name == "overlong":
        raise OptionError("rewards.overlong", "is the name of the overlong penalty in the logs; rename the reward")


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    """Unknown sections and options of the whole tree, before any missing or bad value is reported."""
    for section, held in values.items():
        if section not in SECTIONS:
            inner = held if isinstance(held, Mapping) else {}
            raise OptionError(section, unknown((section,), inner=tuple(map(str, inner))))
        for prefix, part in _parts(section, held):
            for name in part if isinstance(part, Mapping) else ():
                if name not in SECTIONS[section].model_fields:
                    option = f"{prefix}.{name}"
                    raise OptionError(option, unknown(tuple(option.split("."))))


BIASES_RATIOS = ("top_p", "top_k", "min_p")


def unknown(path: tuple[str, ...], inner: tuple[str, ...] = ()) -> str:
    """Why `path` is no option, and the nearest one. `inner` are the options found below an unknown section."""
    section, name = path[0], path[-1]
    if find_field(section):
        return f"sections and options are nested in YAML; write {': {'.join(section.split('.'))}: ...}}"
    if name in BIASES_RATIOS:
        return f"{name} would bias the importance ratios; sampling is plain temperature (rollout.temperature)"
    if section not in SECTIONS and (inner or len(path) > 1) and (close := _closest(section, SECTIONS)):
        meant = ".".join((close, *path[1:]))
        known = len(path) == 1 or find_field(meant) is not None
        return f"there is no section {section!r}; did you mean {meant}?" if known else unknown((close, *path[1:]))
    everywhere = [(_option_name(part, field), field) for part, cls in SECTIONS.items() for field in cls.model_fields]
    if places := [option for option, field in everywhere if field == name]:
        return f"there is no such option here; it is {' or '.join(places)}"
    if section in SECTIONS and (close := _closest(name, SECTIONS[section].model_fields)):
        return f"there is no such option; did you mean {'.'.join((*path[:-1], close))}?"
    if close := _closest(name, (*SECTIONS, *(field for _, field in everywhere))):
        where = close if close in SECTIONS else next(option for option, field in everywhere if field == close)
        return f"there is no such option; did you mean {where}?"
    if section in SECTIONS and len(path) > 1:
        return f"there is no such option; those of {section} are {', '.join(SECTIONS[section].model_fields)}"
    return f"there is no such section; there are {', '.join(SECTIONS)}"


def _option_name(section: str, field: str) -> str:
    return f"{section}.{'NAME.' if section == 'rewards' else ''}{field}"


def _closest(name: str, known: Iterable[str]) -> str:
    plain = {option.replace("_", ""): option for option in known}
    found = difflib.get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else ""
