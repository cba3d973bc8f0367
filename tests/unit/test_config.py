"""The schema against its promised defaults, loading, overrides, provenance, dumping, and the generated reference."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from palingenesis.rl.config import BUILTIN_REWARDS, RewardConfig, RLConfig, TrainConfig, check, unused_on_hf
from palingenesis.rl.config.check import ACTS, CONFLICTS, VLLM_ONLY, refuse_conflicts, refuse_no_effect
from palingenesis.rl.config.docs import help_text, options_markdown
from palingenesis.rl.config.load import split_overrides
from palingenesis.rl.config.schema import SECTIONS
from palingenesis.rl.errors import ConfigError
from palingenesis.rl.plugins import resolve
from palingenesis.rl.rewards import BUILTIN

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {"model": {"policy": "p"}, "data": {"dataset": "d"}}

# The promised defaults. `...` stands for a required option.
DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "policy": ...,
        "chat_template_kwargs": {},
        "stop_tokens": [],
        "gradient_checkpointing": "auto",
        "attention": "auto",
    },
    "data": {
        "dataset": ...,
        "split": "train",
        "eval_dataset": "",
        "eval_split": "test",
        "eval_size": 0,
        "system_prompt": "",
        "prompt_field": "",
        "max_prompt_tokens": 0,
        "retire_above": 0.0,
        "format": "auto",
        "tools_field": "tools",
        "seed": 0,
        "args": {},
    },
    "rollout": {
        "backend": "vllm",
        "batch_prompts": 32,
        "group_size": 8,
        "temperature": 1.0,
        "max_new_tokens": 2048,
        "max_completion_tokens": 0,
        "max_model_len": 8192,
        "max_staleness": 0,
        "max_refill": 2.0,
        "max_num_seqs": 0,
        "gpu_memory_utilization": 0.3,
        "prefix_caching": True,
        "sleep": True,
        "kv_cache_dtype": "",
        "quantization": "",
        "vllm_args": {},
    },
    "env": {
        "type": "single_turn",
        "tools": [],
        "max_turns": 8,
        "tool_parser": "auto",
        "max_tool_output_tokens": 512,
        "tool_timeout": 30.0,
        "max_concurrent": 0,
        "allowed_tools": [],
        "args": {},
    },
    "rewards": {"fn": ..., "weight": 1.0, "args": {}, "style": "plain"},
    "sandbox": {
        "backend": "docker",
        "image": "python:3.12-slim",
        "workers": 4,
        "memory_mb": 1024,
        "timeout": 6.0,
        "max_processes": 64,
        "allow_unsafe": False,
        "warmpool": "",
        "namespace": "default",
        "connection": "in_cluster",
    },
    "loss": {
        "type": "masked_is",
        "eps_low": 0.2,
        "eps_high": 0.28,
        "is_cap": 5.0,
        "icepop_low": 0.5,
        "icepop_high": 5.0,
        "gspo_eps": 4e-3,
        "seq_mask": 0.1,
        "advantage_std": "batch",
        "aggregation": "prompt",
        "truncation": "score",
        "overlong_buffer": 0,
        "overlong_penalty": 1.0,
    },
    "train": {
        "output_dir": "runs/rl",
        "steps": 200,
        "learning_rate": 1e-6,
        "lr_scheduler": "constant",
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": None,
        "optimizer": "adamw",
        "micro_tokens": 16384,
        "fsdp": "auto",
        "cpu_offload": False,
        "prompt_sharing": "auto",
        "seed": 0,
        "eval_every": 0,
        "eval_samples": 256,
        "eval_temperature": 0.0,
        "save_steps": 0,
        "keep_checkpoints": 2,
        "save_final": True,
        "resume_from": "",
        "max_skipped": 0.5,
        "guard": "off",
    },
    "logging": {
        "log_every": 1,
        "dump_trajectories": 0,
        "wandb": False,
        "tensorboard": False,
        "trackio": False,
        "project": "palingenesis",
        "run_name": "",
    },
}

CHOICES: dict[str, list[str]] = {
    "model.gradient_checkpointing": ["auto", "none", "selective", "full"],
    "data.format": ["auto", "chat", "nemo_gym"],
    "rollout.backend": ["vllm", "hf"],
    "rewards.style": ["plain", "trl"],
    "sandbox.backend": ["docker", "bubblewrap", "agent_sandbox", "subprocess"],
    "loss.advantage_std": ["batch", "group", "none"],
    "loss.aggregation": ["prompt", "token", "constant"],
    "loss.truncation": ["score", "mask"],
    "train.lr_scheduler": ["constant", "cosine"],
    "train.optimizer": ["adamw", "adamw8bit", "paged_adamw8bit"],
    "train.guard": ["off", "warn", "act"],
}


def config_of(**sections: Any) -> RLConfig:
    """A config with these options beside the required ones; not checked across sections."""
    merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
    return RLConfig(**merged)


def write(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text("model: {policy: p}\ndata: {dataset: d}\n" + text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------------- schema


def test_every_option_and_its_default_is_the_promised_one() -> None:
    there = {
        section: {
            name: ... if field.is_required() else field.get_default(call_default_factory=True)
            for name, field in cls.model_fields.items()
        }
        for section, cls in SECTIONS.items()
    }
    assert there == DEFAULTS
    for section, options in DEFAULTS.items():
        for name, value in options.items():
            assert type(there[section][name]) is type(value), f"{section}.{name}"


@pytest.mark.parametrize("option", CHOICES)
def test_choices(option: str) -> None:
    section, name = option.split(".")
    assert SECTIONS[section].model_fields[name].annotation.__args__ == tuple(CHOICES[option])  # type: ignore[union-attr]


def test_every_option_is_documented() -> None:
    for section, cls in SECTIONS.items():
        for name, field in cls.model_fields.items():
            assert (field.description or "").rstrip().endswith("."), f"{section}.{name}"


def test_defaults_are_not_shared_between_configs() -> None:
    one, two = RLConfig(**BASE), RLConfig(**BASE)
    one.model.stop_tokens.append("x")
    one.rewards["a"] = RewardConfig(fn="math")
    assert two.model.stop_tokens == []
    assert two.rewards == {}


def test_sections_may_be_objects_or_mappings() -> None:
    config = RLConfig(**BASE, train=TrainConfig(steps=3), rewards={"a": RewardConfig(fn="math", weight=0.5)})
    assert config == RLConfig(**BASE, train={"steps": 3}, rewards={"a": {"fn": "math", "weight": 0.5}})
    assert config != RLConfig(**BASE)


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("train", {"steps": 0}, "train.steps: must be a whole number, at least 1, not 0"),
        ("rollout", {"temperature": 0}, "rollout.temperature: must be a number, above 0, not 0"),
        ("loss", {"eps_low": 1}, "loss.eps_low: must be a number, at least 0 and below 1, not 1"),
        ("train", {"fsdp": "maybe"}, "train.fsdp: must be one of auto, true, false, not 'maybe'"),
        ("train", {"stepz": 1}, "train.stepz: there is no such option; did you mean train.steps?"),
        (
            "env",
            {"tools": ["search"]},
            "env.tools: 'search' is no tool; use `package.module:Name` or `path/file.py:Name`",
        ),
        ("sandbox", {"connection": "url:"}, "sandbox.connection: 'url:' is not a connection"),
    ],
)
def test_python_construction_answers_in_one_line(section: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**{section: value})
    assert str(caught.value).startswith(message)


def test_assignment_is_checked() -> None:
    config = RLConfig(**BASE)
    config.train.steps = 7
    assert config.train.steps == 7
    with pytest.raises(ConfigError, match="steps: must be a whole number, at least 1, not 0"):
        config.train.steps = 0
    with pytest.raises(ConfigError, match=r"stepz: there is no such option \(did you mean 'steps'\?\)"):
        config.train.stepz = 3  # type: ignore[attr-defined]


def test_false_turns_gradient_checkpointing_off() -> None:
    assert config_of(model={"gradient_checkpointing": False}).model.gradient_checkpointing == "none"


def test_resolved_values() -> None:
    assert TrainConfig().resolved_adam_eps == 1e-15
    assert TrainConfig(optimizer="adamw8bit").resolved_adam_eps == 1e-8
    assert TrainConfig(optimizer="paged_adamw8bit", adam_eps=1e-6).resolved_adam_eps == 1e-6
    assert config_of(rollout={"max_new_tokens": 7}).rollout.resolved_max_completion_tokens == 7
    assert config_of(rollout={"max_completion_tokens": 9}).rollout.resolved_max_completion_tokens == 9
    assert config_of().resolved_gradient_checkpointing == "none"
    assert config_of(train={"cpu_offload": True}).resolved_gradient_checkpointing == "full"
    assert config_of(model={"gradient_checkpointing": "selective"}).resolved_gradient_checkpointing == "selective"


# ------------------------------------------------------------------------------------------------------------ loading


def test_options_remember_where_they_were_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "rollout:\n  group_size: 4\n  temperature: 0.7\nrewards:\n  a:\n    fn: math\n")
    config = RLConfig.from_yaml(
        "c.yaml", ["--rollout.temperature", "0.9", "--rewards.a.weight=2", "--data.args.x", "1"]
    )
    assert dict(config.provenance) == {
        "model.policy": "c.yaml:1",
        "data.dataset": "c.yaml:2",
        "data.args": "command line",
        "rollout.group_size": "c.yaml:4",
        "rollout.temperature": "command line",
        "rewards.a.fn": "c.yaml:8",
        "rewards.a.weight": "command line",
    }
    assert config.rollout.temperature == 0.9
    assert config.data.args == {"x": 1}
    assert not config.is_set("rollout.backend")


def test_a_value_changed_by_code_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    config = RLConfig.from_yaml(write(tmp_path, "train: {save_steps: 5, keep_checkpoints: 3}\n"))
    assert config.place("train.save_steps").endswith("c.yaml:3")
    config.train.save_steps = 0
    assert config.place("train.save_steps") == "Python"
    with pytest.raises(ConfigError, match=r"c\.yaml:3: train\.keep_checkpoints: 3 does nothing"):
        check(config)
    config.train.keep_checkpoints = 4
    with pytest.raises(ConfigError, match=r"^Python: train\.keep_checkpoints: 4 does nothing"):
        check(config)


def test_values_of_a_file_are_read_by_yaml_1_2(tmp_path: Path) -> None:
    text = """
data: {dataset: d, split: 2024, system_prompt: 1e3, args: {on: off, clock: 1:30, day: 2024-01-01, rate: 1e-6, n: 1_000}}
model: {policy: 123, gradient_checkpointing: false, stop_tokens: [</s>, 7, null_]}
train: {learning_rate: 1e-5, steps: 1e2, guard: off, save_final: no, fsdp: false, resume_from: 010}
loss: {advantage_std: none}
"""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    config = RLConfig.from_yaml(path)
    assert config.data.split == "2024"
    assert config.data.system_prompt == "1e3"
    assert config.data.args == {"on": "off", "clock": "1:30", "day": "2024-01-01", "rate": 1e-6, "n": 1000}
    assert config.model.policy == "123"
    assert config.model.gradient_checkpointing == "none"
    assert config.model.stop_tokens == ["</s>", "7", "null_"]
    assert (config.train.learning_rate, config.train.steps, config.train.guard) == (1e-5, 100, "off")
    assert (config.train.save_final, config.train.fsdp, config.train.resume_from) == (False, False, "010")
    assert config.loss.advantage_std == "none"


@pytest.mark.parametrize(
    ("tokens", "option", "value"),
    [
        (["--train.learning_rate", "1e-6"], "train.learning_rate", 1e-6),
        (["--train.learning_rate=1e-6"], "train.learning_rate", 1e-6),
        (["--train.resume_from", "1"], "train.resume_from", "1"),
        (["--data.split", "2024"], "data.split", "2024"),
        (["--data.split", "null"], "data.split", "null"),
        (["--model.policy", "1e3"], "model.policy", "1e3"),
        (["--data.system_prompt", "Answer: yes # really"], "data.system_prompt", "Answer: yes # really"),
        (["--data.system_prompt=--x=y"], "data.system_prompt", "--x=y"),
        (["--data.system_prompt", ""], "data.system_prompt", ""),
        (["--data.system_prompt", "\\${x}"], "data.system_prompt", "${x}"),
        (["--rewards.a.weight", "-0.5"], "rewards.a.weight", -0.5),
        (
            ["--model.chat_template_kwargs", "{enable_thinking: false}"],
            "model.chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (["--model.stop_tokens", "[a, 1]"], "model.stop_tokens", ["a", "1"]),
        (["--rewards.a.args.field", "target"], "rewards.a.args", {"field": "target"}),
        (["--rewards.b", "{fn: exact}"], "rewards.b.fn", "exact"),
        (["--data.args.deep.x", "1", "--data.args.deep.y", "[1e-3]"], "data.args", {"deep": {"x": 1, "y": [1e-3]}}),
        (["--train.seed", "1", "--train.seed", "2"], "train.seed", 2),
        (["--model.gradient_checkpointing", "false"], "model.gradient_checkpointing", "none"),
        (["--train.fsdp", "false"], "train.fsdp", False),
        (["--train.guard", "off"], "train.guard", "off"),
        (["--train.adam_eps", "null"], "train.adam_eps", None),
    ],
)
def test_overrides(tokens: list[str], option: str, value: Any, tmp_path: Path) -> None:
    config = RLConfig.from_yaml(write(tmp_path, "rewards:\n  a: {fn: math}\ntrain:\nloss: {}\n"), tokens)
    found = config.get(option)
    assert found == value
    assert type(found) is type(value)


def test_an_override_replaces_a_mapping_and_its_places(tmp_path: Path) -> None:
    path = write(tmp_path, "rewards:\n  a: {fn: math, weight: 2}\n")
    config = RLConfig.from_yaml(path, ["--rewards.a", "{fn: exact}"])
    assert config.rewards == {"a": RewardConfig(fn="exact")}
    assert config.place("rewards.a.fn") == "command line"


def test_merge_keys_and_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGS_TEST_SEED", "7")
    text = "train: {<<: {seed: 1, steps: 5}, seed: '${oc.env:PGS_TEST_SEED}', output_dir: 'runs/${train.seed}'}\n"
    config = RLConfig.from_yaml(write(tmp_path, text))
    assert (config.train.seed, config.train.steps, config.train.output_dir) == (7, 5, "runs/7")


option_names = st.sampled_from(["train.steps", "rewards.a.weight", "model.chat_template_kwargs.x"])
values = st.text(max_size=8).filter(lambda text: not text.startswith("--"))


@given(st.lists(st.tuples(option_names, values, st.booleans()), max_size=5))
def test_both_spellings_of_an_override_are_the_same(pairs: list[tuple[str, str, bool]]) -> None:
    tokens = [
        token for name, value, glued in pairs for token in ([f"--{name}={value}"] if glued else [f"--{name}", value])
    ]
    assert list(split_overrides(tokens)) == [(name, value) for name, value, _ in pairs]


# -------------------------------------------------------------------------------------------------------------- dump

printable = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
awkward = st.sampled_from(
    ["1e-6", "off", "null", "~", "true", "1:30", "2024-01-01", "${x}", "\\${x}", "\\\\${", "a: b", "", "???", "<<"]
)
scalars = st.one_of(printable, awkward, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b.c", "1", "on", "x y"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@example(prompt="\x85 and \u2028", args={"a": "\ufeff", "b": {"on": ["1e3", None, float("inf")]}}, rate=1e-7)
@example(prompt="${x}", args={"a": "\\${y}", "b": "c\\\\${z} $${w}$"}, rate=0.5)
@given(
    prompt=st.one_of(printable, awkward),
    args=st.dictionaries(st.sampled_from(["a", "b"]), trees, max_size=2),
    rate=st.floats(0, 1),
)
def test_a_dump_loads_as_an_equal_config(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, args: dict[str, Any], rate: float
) -> None:
    config = config_of(
        data={"system_prompt": prompt, "args": args, "eval_size": 3},
        rollout={"gpu_memory_utilization": 0.5},
        train={"learning_rate": rate, "eval_every": 2},
        rewards={"a": {"fn": "mine.py:score", "args": args}},
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(config.dump({"palingenesis": "1.0", "git": "two\nlines"}), encoding="utf-8")
    again = RLConfig.from_yaml(path)
    assert again == config
    assert not again.is_set("rollout.backend")
    assert again.dump() == config.dump()


def test_a_dump_holds_the_documented_sections_and_its_header() -> None:
    text = config_of().dump({"torch": "2.11", "note": "a\nb"})
    assert text.startswith("# torch: 2.11\n# note: a b\nmodel:\n")
    assert list(yaml.safe_load(text)) == list(SECTIONS)
    assert yaml.safe_load(text)["train"]["guard"] == "off"  # also for readers of YAML 1.1
    assert "backend" in yaml.safe_load(config_of(rollout={"backend": "hf"}).dump())["rollout"]


def test_what_yaml_cannot_hold_is_said() -> None:
    with pytest.raises(ConfigError, match="cannot be written as YAML"):
        config_of(data={"args": {"x": object()}}).dump()


def test_configs_copy_and_pickle(tmp_path: Path) -> None:
    config = RLConfig.from_yaml(write(tmp_path, "train: {steps: 3}\n"))
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy(deep=True)):
        assert same == config
        assert same.provenance == config.provenance


# ------------------------------------------------------------------------------------------------------------- checks


def test_rules_name_options_that_exist() -> None:
    options = [
        f"{'rewards.x' if s == 'rewards' else s}.{name}" for s, cls in SECTIONS.items() for name in cls.model_fields
    ]
    for rule in ACTS:
        assert any(fnmatchcase(option, rule.option) for option in options), rule.option
    for conflict in CONFLICTS:
        assert set(conflict.options) <= set(options)
    assert set(VLLM_ONLY) <= set(options)


# (sections, the option that would do nothing); parts that are not built yet included, whose rules wait for them
NO_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"data": {"eval_dataset": "e", "eval_size": 3}}, "data.eval_size"),
    ({"data": {"dataset": "d.jsonl.gz", "args": {"name": "main"}}}, "data.args"),
    ({"data": {"format": "nemo_gym", "prompt_field": "q"}}, "data.prompt_field"),
    ({"data": {"tools_field": "t"}, "env": {"type": "tools", "tools": ["a.py:f"]}}, "data.tools_field"),
    ({"rollout": {"max_staleness": 1, "sleep": False}}, "rollout.sleep"),
    ({"rollout": {"backend": "hf", "vllm_args": {"x": 1}}}, "rollout.vllm_args"),
    ({"env": {"tools": ["a.py:f"]}}, "env.tools"),
    ({"env": {"type": "tools", "args": {"x": 1}}}, "env.args"),
    ({"env": {"max_turns": 2}}, "env.max_turns"),
    ({"env": {"allowed_tools": ["x"]}}, "env.allowed_tools"),
    ({"rewards": {"a": {"fn": "math"}}, "sandbox": {"timeout": 9}}, "sandbox.timeout"),
    ({"sandbox": {"backend": "bubblewrap", "image": "x"}}, "sandbox.image"),
    ({"sandbox": {"warmpool": "x"}}, "sandbox.warmpool"),
    ({"sandbox": {"allow_unsafe": True}}, "sandbox.allow_unsafe"),
    ({"logging": {"tensorboard": True, "project": "x"}}, "logging.project"),
]


@pytest.mark.parametrize(("sections", "option"), NO_EFFECT, ids=[option for _, option in NO_EFFECT])
def test_an_option_without_effect_is_refused(sections: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=r"does nothing: it acts only with .+; set that or remove this") as caught:
        refuse_no_effect(config_of(**sections))
    assert str(caught.value).startswith(f"{option}: ")


ACTING: list[dict[str, Any]] = [
    {"loss": {"type": "icepop", "icepop_low": 0.3, "icepop_high": 3, "seq_mask": 0}},
    {"loss": {"type": "gspo", "gspo_eps": 1e-3}},
    {"loss": {"type": "cispo", "is_cap": 3}},
    {"loss": {"overlong_buffer": 100, "overlong_penalty": 0.5}},
    {
        "data": {"split": "a", "args": {"name": "main"}, "eval_dataset": "e", "eval_split": "b"},
        "train": {"eval_samples": 9},
    },
    {"data": {"dataset": "d.jsonl", "eval_size": 3}, "train": {"eval_every": 2, "eval_temperature": 1}},
    {"train": {"save_steps": 5, "keep_checkpoints": 9}},
    {"rollout": {"max_completion_tokens": 100, "max_num_seqs": 4, "backend": "hf"}},
    {"rollout": {"prefix_caching": False, "sleep": False, "gpu_memory_utilization": 0.5}},
    {"env": {"type": "e.py:Env", "args": {"x": 1}, "max_turns": 3}, "rollout": {"max_completion_tokens": 8000}},
    {"rewards": {"a": {"fn": "r.py:f", "style": "trl"}}, "sandbox": {"workers": 2, "image": "x"}},
    {"rewards": {"a": {"fn": "code"}}, "sandbox": {"backend": "agent_sandbox", "warmpool": "w", "namespace": "n"}},
    {"logging": {"trackio": True, "project": "x", "run_name": "y"}},
]


@pytest.mark.parametrize("sections", ACTING, ids=str)
def test_an_option_that_acts_passes(sections: dict[str, Any]) -> None:
    refuse_conflicts(config_of(**sections))
    refuse_no_effect(config_of(**sections))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"env": {"type": "tools"}}, "env.type: tools needs functions; list them in env.tools"),
        (
            {"sandbox": {"backend": "subprocess"}},
            "sandbox.backend: subprocess isolates nothing; set sandbox.allow_unsafe",
        ),
        ({"sandbox": {"backend": "agent_sandbox"}}, "sandbox.backend: agent_sandbox claims its pods from a pool"),
        ({"train": {"optimizer": "adamw8bit", "fsdp": True}}, "train.optimizer: adamw8bit works on one GPU"),
        ({"train": {"cpu_offload": True, "fsdp": False}}, "train.cpu_offload: offloading is FSDP's"),
        ({"rollout": {"max_new_tokens": 9000}}, "rollout.max_new_tokens: rollout.max_model_len 8192 leaves no room"),
    ],
)
def test_contradictions(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_conflicts(config_of(**sections))
    assert str(caught.value).startswith(message)


def test_vllm_options_are_listed_when_hf_takes_its_place() -> None:
    config = RLConfig.from_dict({**BASE, "rollout": {"sleep": False, "gpu_memory_utilization": 0.5, "max_num_seqs": 3}})
    assert unused_on_hf(config) == ["rollout.gpu_memory_utilization", "rollout.sleep"]
    assert unused_on_hf(RLConfig(**BASE)) == []


# ---------------------------------------------------------------------------------------------------------- reference


def test_the_page_of_options_is_current() -> None:
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == options_markdown(), (
        "run python -m palingenesis.rl.config.docs"
    )


def test_the_table_of_built_in_rewards_is_that_of_their_classes() -> None:
    assert set(BUILTIN_REWARDS) == set(BUILTIN)
    for name, target in BUILTIN.items():
        arguments = inspect.signature(resolve(target, {}, "fn")).parameters.values()
        said = {each.name: ... if each.default is each.empty else each.default for each in arguments}
        assert dict(BUILTIN_REWARDS[name].args) == said, name


@pytest.mark.parametrize("width", [60, 100])
def test_help_lists_every_option_and_keeps_to_the_width(width: int) -> None:
    text = help_text(width)
    for section, options in DEFAULTS.items():
        for name in options:
            assert f"--{section}.{'NAME.' if section == 'rewards' else ''}{name} [" in text
    assert all(len(line) <= width for line in text.splitlines() if line.startswith("      "))


def test_the_config_loads_without_torch() -> None:
    code = (
        "import sys, palingenesis.rl.config, palingenesis.rl.config.load, palingenesis.rl.config.docs\n"
        "print(*sorted({'torch', 'transformers', 'vllm', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
