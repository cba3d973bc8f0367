"""Train a policy: the one module that knows both halves.

    config ── build ──> Run ─┬─ rollout half (its own thread): Collector ──> ScoredBatch ──┐
                             └─ policy half (this thread):   PolicyStep <──────────────────┘ ──> Weights ──> engine

With `rollout.max_staleness` 0 the halves take turns, and the engine may sleep while the policy steps. With more, the
rollout half goes on: it learns only that new weights are in the engine.

Invariants:
- A step is whole or it did not happen: signals are noticed while rollouts run and between steps, never inside a policy
  step, and what is saved then is the state after the last whole step.
- Nothing waits without a deadline (observe/waits.py); one that passes ends the run like any other error.
- The collector's state, the weights and the optimizer in a checkpoint are of the same step.
- Whatever ends the run, what it has learned is saved first.

    RLTrainer(RLConfig.from_yaml("configs/rl_math.yaml"), rewards=[correct]).train()
    torchrun -m palingenesis.rl.trainer --config configs/rl_math.yaml
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from palingenesis.rl.config import RLConfig, check, unused_on_hf
from palingenesis.rl.data import RowSet, Sampler
from palingenesis.rl.data import build as build_rows
from palingenesis.rl.envs import Environments, wants_sandbox
from palingenesis.rl.envs import build as build_environments
from palingenesis.rl.errors import ConfigError, StallError, StopRun, UsageError
from palingenesis.rl.observe.clock import Clock
from palingenesis.rl.observe.exits import exit_code, leave
from palingenesis.rl.observe.log import Log
from palingenesis.rl.observe.metrics import batch_metrics, eval_metrics
from palingenesis.rl.observe.records import RunFiles, lock, set_aside_old_run, write_rollouts
from palingenesis.rl.rewards import RewardSet
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.collect import Collector
from palingenesis.rl.rollout.episode import Episodes
from palingenesis.rl.rollout.outages import most_skipped
from palingenesis.rl.rollout.producer import Producer
from palingenesis.rl.rollout.prompts import Prompts, shown_tools
from palingenesis.rl.rollout.score import Scorer
from palingenesis.rl.types import Engine, Row, ScoredBatch, Sink

Reward = Callable[..., Any]
CLOSE_S = 30.0  # seconds the environments have, at the end, to close


class RLTrainer:
    """Trains the policy of a config.

    Args:
        config: checked again here, so a config built in Python meets the same rules as a file.
        rewards: further reward functions, each under its own name with weight 1.
    """

    def __init__(self, config: RLConfig, rewards: Sequence[Reward] = ()) -> None:
        check(config)
        if callable(rewards) or not all(callable(reward) for reward in rewards):
            raise ConfigError(
                "RLTrainer(rewards=...) takes a list of functions; built-in rewards are named in the config."
            )
        self.config = config
        self.rewards = tuple(rewards)

    def train(self) -> Path | None:
        """Run to `train.steps` and return the folder of the final policy (None with `save_final: false`).

        Raises:
            PalingenesisError: with one message for the user; what was learned is saved first.
            StopRun: a signal stopped the run after saving.
        """
        with build(self.config, self.rewards) as run, Interrupts() as interrupts, run.saved_on_the_way_out(interrupts):
            if run.done == 0 or run.is_due(self.config.train.eval_every, run.done):
                run.evaluate(interrupts.check)
            run.clock.lap()  # the first step is not charged for it
            for step in range(run.done + 1, self.config.train.steps + 1):
                if run.collector.exhausted:
                    run.log.say("  every prompt is retired (data.retire_above): the policy has learned this data set.")
                    break
                with run.clock("rollout"):
                    batch = run.producer.run(run.collector.collect(step), interrupts.check)
                result = run.learn(batch)
                run.report(batch, result)
                if run.is_due(self.config.train.eval_every, step):
                    run.evaluate(interrupts.check)
                if run.is_due(self.config.train.save_steps, step):
                    run.save()
                interrupts.check()
            run.producer.soon(run.collector.close)  # what was launched ahead and no step needs
            run.evaluate(interrupts.check)
            return run.finish()


@dataclass
class Run:
    """Everything a run is made of, and how far it is.

    Attributes:
        done: whole steps behind us.
        folder: `train.output_dir`, absolute: a reward may change the working directory.
        boundary: the collector's state after step `done`.
        evaluated, saved: the step of the last evaluation and of the last checkpoint; -1 when there is none.
    """

    config: RLConfig
    rows: RowSet
    tokenizer: Any
    policy: Any
    masters: Any
    policy_step: Any
    engine: Any
    rewards: RewardSet
    collector: Collector
    producer: Producer
    files: RunFiles
    log: Log
    done: int
    folder: Path
    clock: Clock = field(default_factory=Clock)
    boundary: Mapping[str, Any] = field(default_factory=dict)
    evaluated: int = -1
    saved: int = -1

    @property
    def sinks(self) -> tuple[Sink, ...]:
        return self.files, self.log

    def __enter__(self) -> Run:
        self.boundary = self.collector.state_dict()
        # A collection walks everything that was loaded: 0.2 to 0.6 s, in which the rollout loop does not come round.
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        gc.unfreeze()
        with ExitStack() as parts:  # each is closed whatever becomes of the others
            for close in (
                self.files.close,
                self.log.close,
                self.rewards.close,
                self._close_producer,
                self.stop_rollouts,
            ):
                parts.callback(close)

    def stop_rollouts(self) -> None:
        """Cancel what is in flight and end the engine, in this order: nobody waits for what the engine then cuts short."""
        self.producer.soon(self.collector.close)
        self.engine.close()

    def _close_producer(self) -> None:
        if not close_rollouts(self.producer, self.collector.episodes.environments, self.rewards):
            self.log.say(
                "  a reward or environment that blocks the event loop, or ignores its cancellation, was left behind"
            )

    @property
    def overlaps(self) -> bool:
        """Rollouts go on while the policy steps."""
        return self.config.rollout.max_staleness > 0

    def is_due(self, every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    def learn(self, batch: ScoredBatch) -> Any:
        """The policy step, after which the step is whole, and its weights to the engine."""
        from palingenesis.rl.policy.weights import PolicyWeights

        sleeps = self.config.rollout.sleep and not self.overlaps
        with self.clock("weights"):
            if sleeps:
                self.engine.sleep()
        with self.clock("train"):
            result = self.policy_step.run(batch)
        self.boundary = self.collector.state_dict()
        self.done = batch.step
        self.policy_step.torn = False
        with self.clock("weights"):
            self.engine.load(PolicyWeights(batch.step, self.policy.model))
            if sleeps:
                self.engine.wake()
        self.producer.soon(self.collector.published, batch.step)
        return result

    def report(self, batch: ScoredBatch, result: Any) -> None:
        """Write the step's rollouts where they are asked for, close its clock, and tell the sinks."""
        with self.clock("log"):
            if self.is_due(self.config.logging.dump_trajectories, batch.step):
                write_rollouts(self.folder, batch, result.advantages, result.mask_reasons)
        if not result.stepped:
            rollouts = [rollout for group in (*batch.groups, *batch.set_aside) for rollout in group.rollouts]
            self.log.no_step(batch.step, len(rollouts), *most_skipped(rollouts))
        values = {**batch_metrics(batch), **result.metrics, **self.clock.lap()}
        generating = values["time/step" if self.overlaps else "time/rollout"]
        usage = self.rewards.usage()
        values |= usage.metrics
        values["tokens/s"] = values.get("tokens/generated", 0.0) / max(generating, 1e-9)
        for sink in self.sinks:
            sink.metrics(batch.step, values | self.utilization(batch, values["time/train"]))
            for example in usage.examples:
                sink.record("failures", batch.step, example)

    def utilization(self, batch: ScoredBatch, seconds: float) -> dict[str, float]:
        """`mfu`, on a device whose peak is known."""
        from palingenesis.rl.policy.flops import peak_flops, step_flops

        peak = peak_flops(self.policy.device)
        trained = [r.trajectory for g in batch.groups for r in g.rollouts if r.score.scored]
        if not peak or not trained:
            return {}
        tokens, sampled = sum(t.total_tokens for t in trained), sum(t.sampled_tokens for t in trained)
        return {"mfu": step_flops(self.policy.model, tokens, sampled) / (seconds * peak)}

    def evaluate(self, interrupted: Callable[[], None]) -> None:
        """Score the held-out rows with the weights of step `done`, unless that was done already."""
        rows = eval_rows(self.config, self.rows)
        if not rows or self.evaluated == self.done:
            return
        with self.clock("eval"):
            work = self.collector.evaluate(rows, temperature=self.config.train.eval_temperature)
            rollouts = [rollout for group in self.producer.run(work, interrupted) for rollout in group]
        self.evaluated = self.done
        for sink in self.sinks:
            sink.record("eval", self.done, eval_metrics(rollouts))

    def save(self) -> Path | None:
        """Write a resumable checkpoint of the last whole step; None before the first, and in the middle of one."""
        from palingenesis.rl.policy import checkpoint

        if self.done == 0 or self.policy_step.torn:
            return None
        folder = self.folder / "checkpoints" / f"step_{self.done}"
        if self.saved != self.done:
            with self.clock("save"):
                folder = checkpoint.save(
                    self.folder,
                    self.done,
                    policy=self.policy,
                    masters=self.masters,
                    tokenizer=self.tokenizer,
                    optimizer=self.policy_step.state_dict(),
                    collector=self.boundary,
                    keep=self.config.train.keep_checkpoints,
                )
            self.saved = self.done
        return folder

    @contextmanager
    def saved_on_the_way_out(self, interrupts: Interrupts) -> Iterator[None]:
        """Save before an error or a signal leaves the run, and say where. A save that fails does not hide the error."""
        try:
            yield
        except BaseException as error:
            interrupts.saving = True
            self.stop_rollouts()  # a wave under way has bent the model's generation config
            if isinstance(error, StallError):
                self.write_stall(error)
            try:
                folder = self.save()
            except Exception as failure:  # noqa: BLE001 - a full disk, a GPU that failed: the first error is the news
                self.log.say(f"  stopped after step {self.done}: {failure}")
                raise error from None
            cut = "the step under way was cut in half and not saved" if self.policy_step.torn else "nothing to save yet"
            where = f"saved {folder}\n  continue with --train.resume_from auto" if folder else cut
            self.log.say(f"  stopped after step {self.done}: {where}")
            if isinstance(error, KeyboardInterrupt):
                raise StopRun(f"interrupted after step {self.done}") from error
            raise

    def write_stall(self, error: StallError) -> None:
        """Write `stalled.txt` and have the error say where it is."""
        path = self.folder / "stalled.txt"
        try:
            path.write_text(error.report, encoding="utf-8")
        except OSError as failure:
            self.log.say(f"  {path} cannot be written ({failure.strerror}):\n{error.report}")
        else:
            error.args = (f"{error} What was waited for and the stacks of all threads are in {path}.",)

    def finish(self) -> Path | None:
        """Export the policy and say how to load it."""
        from palingenesis.rl.policy.checkpoint import export

        self.log.close()
        if not self.config.train.save_final:
            self.log.say(f"done: {self.done} steps. save_final is off, so no policy was written.")
            return None
        export(self.folder / "final", self.policy, self.masters, self.tokenizer, self.policy.export_dtype)
        folder = Path(self.config.train.output_dir) / "final"
        self.log.say(f"done: {self.done} steps; the policy is in {folder} and loads with")
        self.log.say(f'AutoModelForCausalLM.from_pretrained("{folder}")')
        return folder


def build(config: RLConfig, functions: Sequence[Reward] = ()) -> Run:
    """Load everything a run needs, cheapest first, so that a mistake is told before a model is loaded.

    Raises:
        PalingenesisError: what is wrong and how to mend it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("train.fsdp: training over several processes is not built yet; start one, without torchrun.")
    rewards = RewardSet.from_config(config.rewards, functions)
    try:
        return _build(config, rewards)
    except BaseException:
        rewards.close()
        raise


def _build(config: RLConfig, rewards: RewardSet) -> Run:
    from palingenesis.rl.objective import build_loss
    from palingenesis.rl.policy import checkpoint
    from palingenesis.rl.policy.masters import Masters
    from palingenesis.rl.policy.step import PolicyStep

    folder = Path(config.train.output_dir).expanduser().absolute()
    build_loss(config.loss)  # a loss of the user's own is found before a model is loaded
    resumed = checkpoint.find(config.train.resume_from, folder)
    parts = load_parts(config, rewards, resumed.policy if resumed else config.model.policy)
    masters = Masters(parts.policy.model, parts.master_values, parts.fp8)
    policy_step = PolicyStep(
        parts.policy,
        masters,
        config.loss,
        config.train,
        temperature=config.rollout.temperature,
        max_completion_tokens=parts.budget.completion,
    )
    if resumed:
        restore(resumed, parts, policy_step)
    inside = resumed is not None and resumed.folder.resolve().is_relative_to(folder.resolve())
    done = resumed.step if resumed else 0
    try:
        if folder.is_dir():
            lock(folder).close()  # nobody is writing to what is about to be moved
        old = None if inside else set_aside_old_run(folder)
        abandoned = checkpoint.abandon_newer(folder, resumed.step) if resumed else []
        files = RunFiles(folder, resumed_at=done)
    except OSError as error:
        raise ConfigError(f"train.output_dir: {folder} cannot be written ({error.strerror}); name another.") from error
    log = Log(config.train.steps, done, config.logging.log_every)
    files.write_config(
        config.dump(header=versions() | {"backend": backend(config), "rewards": ", ".join(rewards.names)})
    )
    log.start(facts(config, parts, rewards))
    for line in notes(config, parts, old, resumed.folder if resumed else None, abandoned):
        log.say(line)
    return Run(
        config=config,
        rows=parts.rows,
        tokenizer=parts.tokenizer,
        policy=parts.policy,
        masters=masters,
        policy_step=policy_step,
        engine=parts.engine,
        rewards=rewards,
        collector=parts.collector,
        producer=Producer(),
        files=files,
        log=log,
        done=done,
        folder=folder,
        evaluated=files.last_eval,
        saved=done if inside else -1,
    )


def close_rollouts(producer: Producer, environments: Environments | None, rewards: RewardSet) -> bool:
    """End the rollout half: environments first, for they may use the sandbox. False when something was left behind."""

    async def close() -> None:
        if environments is not None:
            await environments.aclose()
        await rewards.aclose()

    return producer.close(close(), patience=CLOSE_S if environments is not None else 0.0)


@dataclass
class Parts:
    """What generating and scoring needs: everything but the optimizer and the files."""

    rows: RowSet
    tokenizer: Any
    policy: Any
    master_values: Mapping[str, Any]
    fp8: Any
    engine: Any
    budget: Budget
    environments: Environments | None
    collector: Collector


def load_parts(config: RLConfig, rewards: RewardSet, source: str) -> Parts:
    """Template, environment, data, sandbox, model, engine and collector.

    Args:
        source: the checkpoint to load: the config's policy, or the one a run resumes from.
    """
    from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer, stop_token_ids
    from palingenesis.rl.policy.model import policy_path

    if not rewards.names and config.env.type == "single_turn":
        raise ConfigError("rewards: there is none; add one to the config, such as `rewards: {correct: {fn: math}}`.")
    path = policy_path(source)
    tokenizer = load_tokenizer(path)
    template = ChatTemplate(tokenizer, config.model.chat_template_kwargs)
    budget = Budget(config.rollout.max_new_tokens, config.rollout.max_completion_tokens, config.rollout.max_model_len)
    environments = load_environments(config, rewards)
    rows = load_rows(config, rewards, Prompts(template, config.env.tool_parser), environments)
    rewards.start_sandbox(config.sandbox)

    import torch

    from palingenesis.rl.policy.fp8 import FP8Weights
    from palingenesis.rl.policy.model import load_policy
    from palingenesis.rl.policy.weights import PolicyWeights

    torch.manual_seed(config.train.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, master_values = load_policy(
        path,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        attention=config.model.attention,
        gradient_checkpointing=config.resolved_gradient_checkpointing == "full",
    )
    stop = stop_token_ids(tokenizer, policy.model.generation_config.eos_token_id, config.model.stop_tokens)
    engine = build_engine(config, policy, policy_path(config.model.policy), tokenizer, stop)
    episodes = Episodes(
        engine,
        template,
        stop,
        budget,
        environments,
        max_turns=config.env.max_turns,
        max_tool_output_tokens=config.env.max_tool_output_tokens,
        tool_parser=config.env.tool_parser,
    )
    try:
        episodes.check_tools()
        fp8 = FP8Weights(policy.model, engine.fp8_groups)
        fp8.round()
        engine.load(PolicyWeights(0, policy.model))
    except BaseException:
        engine.close()
        raise
    scorer = Scorer(rewards, budget.completion, config.loss.overlong_buffer, config.loss.overlong_penalty)
    collector = Collector(
        episodes,
        scorer,
        Sampler(rows.train, seed=config.data.seed, retire_above=config.data.retire_above),
        batch_prompts=config.rollout.batch_prompts,
        group_size=config.rollout.group_size,
        max_refill=config.rollout.max_refill,
        max_staleness=config.rollout.max_staleness,
        steps=config.train.steps,
        max_skipped=config.train.max_skipped,
        temperature=config.rollout.temperature,
        seed=config.train.seed,
    )
    return Parts(rows, tokenizer, policy, master_values, fp8, engine, budget, environments, collector)


def load_environments(config: RLConfig, rewards: RewardSet) -> Environments | None:
    """The environment of `env.type`, with the sandbox running where it asks for one; None for `single_turn`.

    Raises:
        ConfigError: it cannot be used, or would score nothing where there is no reward. SandboxError: it cannot start.
    """
    if config.env.type == "single_turn":
        return None
    if wants_sandbox(config.env):
        rewards.start_sandbox(config.sandbox, needed=True)
    environments = build_environments(config.env, rewards.sandbox)
    if not rewards.names and not environments.has_reward:
        raise ConfigError(
            f"rewards: there is none, and {config.env.type} has no get_reward; give it one, or add a reward to the "
            "config, such as `rewards: {correct: {fn: math}}`."
        )
    return environments


def build_engine(config: RLConfig, policy: Any, path: str, tokenizer: Any, stop: tuple[int, ...]) -> Engine:
    """The engine of `rollout.backend`.

    Args:
        policy: the loaded model.
        path: `model.policy`, whose class the engine builds; the weights of a checkpoint are loaded into it.
        stop: token ids that end a turn.
    """
    rollout = config.rollout
    all_rollouts = rollout.batch_prompts * rollout.group_size * (1 + rollout.max_staleness)
    max_num_seqs = rollout.max_num_seqs or max(256, all_rollouts)
    if backend(config) == "hf":
        from palingenesis.rl.engines.hf import HFEngine

        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop[0]
        return HFEngine(policy.model, pad, max_num_seqs, own_copy=rollout.max_staleness > 0)
    from palingenesis.rl.engines.vllm import VLLMEngine, VLLMOptions

    return VLLMEngine(
        VLLMOptions(
            model=path,
            dtype=str(policy.model.dtype).removeprefix("torch."),
            device=policy.device.type,
            max_model_len=rollout.max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            prefix_caching=rollout.prefix_caching,
            sleep=rollout.sleep and rollout.max_staleness == 0 and policy.device.type == "cuda",
            kv_cache_dtype=rollout.kv_cache_dtype,
            quantization=rollout.quantization,
            seed=config.train.seed,
            extra=rollout.vllm_args,
        )
    )


def backend(config: RLConfig) -> str:
    """`rollout.backend`; left unset, `hf` takes vLLM's place where there is no GPU."""
    import torch

    if config.is_set("rollout.backend") or torch.cuda.is_available():
        return config.rollout.backend
    return "hf"


def load_rows(config: RLConfig, rewards: RewardSet, prompts: Prompts, environments: Environments | None) -> RowSet:
    """Training and held-out rows that fit the context and that the rewards can score.

    Raises:
        DataError: rows that cannot be used, too many unreadable references, or nothing left to train on.
        ConfigError: `env.tool_parser` does not fit the model, or there is nothing to call.
    """
    schemas = environments.schemas if environments is not None else ()  # None: a reset lists them, and measures again

    def count_tokens(row: Row) -> int:
        return len(prompts.render(row, shown_tools(row, schemas)).ids)

    fits = config.rollout.max_model_len - 1
    longest = min(config.data.max_prompt_tokens or fits, fits)
    rows = build_rows(config.data, count_tokens=count_tokens, max_prompt_tokens=longest)
    rewards.check(rows.rows)
    if environments is not None:
        for row in rows.rows:
            environments.check_columns(row)
    elif config.env.tool_parser != "auto" and not any(row.tools for row in rows.rows):
        raise ConfigError(
            f"env.tool_parser: {config.env.tool_parser} does nothing: no row has tools (data.tools_field "
            f"{config.data.tools_field}), and env.type is single_turn; remove it."
        )
    _, unreadable = rewards.readable(rows.rows)
    why = {id(one.row): f"reference that reward {one.reward!r} cannot read" for one in unreadable}
    return rows.without(lambda row: why.get(id(row)))


def eval_rows(config: RLConfig, rows: RowSet) -> Sequence[Row]:
    """The held-out rows of every evaluation: all, or the same `train.eval_samples` of them each time."""
    count = config.train.eval_samples
    if not count or count >= len(rows.held_out):
        return rows.held_out
    return random.Random(0).sample(list(rows.held_out), count)


def restore(resumed: Any, parts: Parts, policy_step: Any) -> None:
    """Continue from a checkpoint whose weights are already loaded."""
    import torch

    from palingenesis.rl.policy.weights import PolicyWeights

    state = resumed.state()
    parts.policy.export_dtype = getattr(torch, state["export_dtype"])
    policy_step.load_state_dict(resumed.optimizer())
    parts.collector.load_state_dict(state["collector"])
    parts.engine.load(PolicyWeights(resumed.step, parts.policy.model))
    resumed.restore_rng()


def facts(config: RLConfig, parts: Parts, rewards: RewardSet) -> dict[str, str]:
    """What the header of a run shows."""
    from palingenesis.rl.policy.flops import peak_flops

    model, rollout = parts.policy.model, config.rollout
    size = sum(p.numel() for p in model.parameters()) / 1e6
    peak = peak_flops(parts.policy.device)
    assumed = f", MFU against {peak / 1e12:.0f} TFLOP/s" if peak else ""
    own = "env" if parts.environments and parts.environments.has_reward else ""
    return {
        "policy": f"{config.model.policy} ({size:,.1f} M parameters, {model.dtype}, {parts.policy.device}{assumed})",
        "rows": f"{len(parts.rows.train):,} to train on, {len(parts.rows.held_out):,} held out",
        "rewards": ", ".join(filter(None, [rewards.listing, own])),
        "step": f"{rollout.batch_prompts} prompts x {rollout.group_size} rollouts, at most {parts.budget.completion} tokens",
        **({"tools": parts.environments.listing} if parts.environments else {}),
        "loss": f"{config.loss.type}, learning rate {config.train.learning_rate:g}, {config.train.steps} steps",
        "output": config.train.output_dir,
    }


def notes(
    config: RLConfig, parts: Parts, old: Path | None, resumed: Path | None, abandoned: Sequence[Path]
) -> list[str]:
    """What the user should know before the first step."""
    lines = [f"  note: {text}" for text in (*map(str, parts.rows.dropped), *parts.rows.notices)]
    if backend(config) == "hf" and (unused := unused_on_hf(config)):
        lines.append(f"  note: generation runs in transformers (rollout.backend hf); unused: {', '.join(unused)}")
    if alone := parts.fp8.left_out:
        more = f" and {len(alone) - 3} more" if len(alone) > 3 else ""
        lines.append(f"  note: FP8 in the engine and not in training: {', '.join(alone[:3])}{more}")
    reach = getattr(parts.policy.model.config.get_text_config(), "max_position_embeddings", None)
    if reach and reach < config.rollout.max_model_len:
        lines.append(
            f"  note: the model was made for {reach} positions, rollout.max_model_len allows {config.rollout.max_model_len}"
        )
    if old:
        lines.append(f"  note: {config.train.output_dir} held an earlier run; it is now {old}")
    if resumed:
        lines.append(f"  resumed from {resumed}")
    lines += [f"  note: a checkpoint of a later step is now {path}" for path in abandoned]
    return lines


def versions() -> dict[str, str]:
    """Package versions and the git revision, for the head of a run's config.yaml."""
    import platform
    import shutil
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("palingenesis", "torch", "transformers", "vllm", "datasets", "math-verify"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    source = Path(__file__).parents[3]
    if (source / ".git").exists() and shutil.which("git"):
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=source)
        found["git"] = git.stdout.strip() or "unknown"
    return found


class Interrupts:
    """Turns SIGINT, SIGTERM and SIGUSR1 into `StopRun` at the next `check`; a second Ctrl-C is an ordinary one.

    Outside the main thread signals cannot be caught; then `check` never raises. While `saving` is set a second Ctrl-C waits.
    A process that a reward forked takes signals as it would without us.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.saving = False
        self._owner = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is not None and number == signal.SIGINT and not self.saving:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def check(self) -> None:
        """Raise `StopRun` when a signal came."""
        if self.received is not None:
            raise StopRun(f"stopped by {self.received.name}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """`python -m palingenesis.rl.trainer --config C [--section.option value ...]`, as torchrun starts it."""
    tokens = list(sys.argv[1:] if argv is None else argv)

    def work() -> None:
        if len(tokens) < 2 or tokens[0] != "--config":
            raise UsageError("usage: python -m palingenesis.rl.trainer --config FILE [--section.option value ...]")
        RLTrainer(RLConfig.from_yaml(tokens[1], tokens[2:])).train()

    leave(exit_code(work))


if __name__ == "__main__":
    main()
