"""The records that cross the seams of the trainer, and the protocols of the seams. Standard library only.

    Row ──draw──> Trajectory (segments of token ids) ──score──> Rollout ──gather──> Group ──batch──> ScoredBatch
                                                                                                        │
                           trainer.py hands it to the policy half, which answers with Weights <─────────┘

Everything is frozen: a record is written once by the part that makes it, and no later part can change what the sampler
saw. Token ids, log-probs and weight versions are tuples of equal length, one entry a token. Log-probs are natural
logarithms at the sampling temperature. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

# Rewards that differ by less than this share of the larger are equal: 0.1 + 0.2 is not 0.3 in binary.
EQUAL_WITHIN = 1e-12


class Finish(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"  # the policy ended a turn and called nothing
    DONE = "done"  # the environment ended the episode
    LENGTH = "length"  # max_new_tokens or max_completion_tokens ran out
    CONTEXT = "context"  # max_model_len ran out
    MAX_TURNS = "max_turns"  # env.max_turns ran out: the policy had called a tool and could not read the answer
    FAILED = "failed"  # the environment could not go on; the rollout is skipped

    @property
    def is_truncated(self) -> bool:
        """A budget cut the rollout; the policy or its environment did not end it."""
        return self in (Finish.LENGTH, Finish.CONTEXT, Finish.MAX_TURNS)


class Outcome(StrEnum):
    """What became of a rollout's score."""

    SCORED = "scored"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call a turn makes, e.g. `ToolCall("search", {"query": "Etna"})`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. `content` is text; `reasoning` is what stood inside the think block, if it was split off."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    reasoning: str = ""
    tool_call_id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The message in the form chat templates and reward functions read; empty fields are left out."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": call.id} if call.id else {}),
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.name:
            out["name"] = self.name
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        return out


@dataclass(frozen=True, slots=True)
class Row:
    """One data row, read and checked.

    Attributes:
        id: the row's own `id`, else 16 hex digits of SHA-256 over its key-sorted JSON.
        messages: the prompt; never empty, never ends with an assistant turn.
        columns: every column but the prompt's own; what `**row` receives.
        prompt_column: `(name, value)` of the prompt's own column: may be asked for by name, is not in `columns`.
        tools: per-row tool schemas in chat-template form.
        verifier: names of the only rewards that score this row; empty means all.
        source: where it stands, for errors: `train.jsonl:12`.
        reasoning_open: the prompt already opened the think block (only `score` reads this from a row).
    """

    id: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any]
    prompt_column: tuple[str, Any] = ("", None)
    tools: tuple[Mapping[str, Any], ...] = ()
    verifier: tuple[str, ...] = ()
    source: str = ""
    reasoning_open: bool = False

    @property
    def last_user_text(self) -> str:
        """Text of the last user turn; empty when there is none."""
        return last_user_text(self.messages)


def where(row: Row) -> str:
    """The row's name for errors: its id and where it stands."""
    return f"row {row.id} ({row.source})" if row.source else f"row {row.id}"


def last_user_text(messages: Sequence[Message]) -> str:
    """Text of the last user turn; empty when there is none."""
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Plain temperature only: top-p and top-k would bias the importance ratios.

    `temperature` 0 is greedy (log-probs are then at temperature 1). `seed` makes the request's draw a function of the
    seed and the logits alone.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled for one request; the stop token is the last id when `finish` is STOP."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.token_ids)} tokens, {len(self.logprobs)} log-probs, {len(self.versions)} versions"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens in a trajectory: given (the prompt, a tool's answer) or sampled (one turn of the policy).

    `logprobs` and `versions` are empty for given segments. `text` is the decoded run, control tokens left out of sampled
    ones. `tool_calls` are those of a sampled turn. A given segment with tools' answers names the tools in `tool_name` and
    counts in `tool_errors` the answers that say a call failed; it has no tokens where no turn follows that could read it.
    """

    role: str
    token_ids: tuple[int, ...]
    text: str
    sampled: bool
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    seconds: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str = ""
    tool_errors: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of the policy: what it saw and what it sampled, never re-tokenized.

    Attributes:
        segments: in order; the first is the prompt.
        messages: the whole conversation in chat form, the prompt's turns and the answers of tools included.
        completion: what the final turn of the policy says, reasoning and well-formed calls removed.
        reasoning: the final turn's reasoning.
        raw: the final turn as sampled, reasoning included.
        reasoning_open: what stands before the final turn had already opened the think block.
        prompt_turns: how many of `messages` are the prompt's; None: as many as the row has.
    """

    row: Row
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    completion: str
    reasoning: str
    raw: str
    finish: Finish
    reasoning_open: bool = False
    prompt_turns: int | None = None

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """Every token after the prompt, tool results included."""
        return tuple(token for segment in self.segments[1:] for token in segment.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Sample:
    """What reward functions may ask for about one rollout (or one row of a completions file).

    `prompt_turns`: how many of `messages` are the prompt's, with what an environment opened it with; None: as many as the
    row has.
    """

    row: Row
    messages: tuple[Message, ...]
    completion: str
    reasoning: str
    raw: str
    finish_reason: str = "stop"
    completion_ids: tuple[int, ...] = ()
    env: Any = None
    sandbox: Any = None
    reasoning_open: bool = False
    prompt_turns: int | None = None

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        return self.messages[: self._prompt_turns]

    @property
    def answer_messages(self) -> tuple[Message, ...]:
        """The policy's turns and the answers of tools."""
        return self.messages[self._prompt_turns :]

    @property
    def _prompt_turns(self) -> int:
        return len(self.row.messages) if self.prompt_turns is None else self.prompt_turns


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one sample. `reward` is None exactly when `outcome` is SKIPPED.

    `rewards` maps each reward's name to its number, or None where it does not apply. `skip_source` names the reward or
    environment that could not score it.
    """

    rewards: Mapping[str, float | None]
    reward: float | None
    outcome: Outcome
    skip_source: str = ""
    skip_reason: str = ""

    @property
    def scored(self) -> bool:
        return self.outcome is Outcome.SCORED


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trajectory and its score; `index` is its place in the group."""

    trajectory: Trajectory
    score: Score
    index: int


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt. `number` counts the groups of a run from 0."""

    row: Row
    rollouts: tuple[Rollout, ...]
    number: int

    @property
    def scored_rewards(self) -> tuple[float, ...]:
        return tuple(r.score.reward for r in self.rollouts if r.score.reward is not None)

    @property
    def informative(self) -> bool:
        """At least two scored rollouts whose rewards differ, by more than rounding: the group carries a gradient."""
        rewards = self.scored_rewards
        if len(rewards) < 2:
            return False
        low, high = min(rewards), max(rewards)
        return high - low > EQUAL_WITHIN * max(abs(low), abs(high))


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """What one policy step receives.

    Attributes:
        groups: the informative groups to train on.
        set_aside: groups that are not trained (kept for metrics and dumps): they carried no gradient, or at staleness 0
            came on top of a full batch.
        metrics: measured by the rollout half, by their logged names.
        timeline: the engine's concurrency, `(seconds since the step's first token, sequences decoding)`.
    """

    step: int
    groups: tuple[Group, ...]
    set_aside: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[tuple[float, int], ...] = ()


class Weights(Protocol):
    """The policy's parameters for an engine to load."""

    @property
    def version(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Checkpoint names and full tensors, one at a time. A collective when the policy is sharded."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Generates tokens. `generate` and `usage` are called from the rollout loop, the others from the trainer's thread.

    While it has requests it calls `observe.waits.progress("engine", note)` at least at every step of decoding; one that
    does not for `rollout.episode.ENGINE_S` seconds has stood still, and the run ends.
    """

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one continuation. Raises EngineError when generation failed."""
        ...

    def load(self, weights: Weights) -> None:
        """Take new weights, between two tokens; running requests go on, and what they sample carries the new version."""
        ...

    def sleep(self) -> None:
        """Give memory back while the trainer steps; no request may be running."""
        ...

    def wake(self) -> None: ...

    def usage(self) -> EngineUsage:
        """What was done since the last call."""
        ...

    @property
    def fp8_groups(self) -> Sequence[tuple[str, ...]]:
        """Names of the weights that the engine rounds to FP8, those under one scale together; the trainer rounds its own
        alike. Empty where there are none."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """An engine's work since it was last asked.

    Attributes:
        timeline: `(time.monotonic(), sequences decoding)` at each change.
        prefill_tokens: prompt tokens computed.
        cached_tokens: prompt tokens served from the prefix cache.
        generated_tokens: tokens sampled.
    """

    timeline: tuple[tuple[float, int], ...] = ()
    prefill_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def __add__(self, later: EngineUsage) -> EngineUsage:
        return EngineUsage(
            (*self.timeline, *later.timeline),
            self.prefill_tokens + later.prefill_tokens,
            self.cached_tokens + later.cached_tokens,
            self.generated_tokens + later.generated_tokens,
        )


class Sink(Protocol):
    """Receives a run's numbers: the console, the JSONL files, a tracker."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
