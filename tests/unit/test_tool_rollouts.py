"""Rollouts with tools, random ones of every family: what the engine saw is what the trainer scores, and no more is trained.

Each plays through the package: a row, sampled turns in the model's own form and in tokens that no tokenizer would choose,
tools that answer with anything, Episodes, and the training records. The whole decodes to the conversation as the template
renders it: both sides are the same string but for what the template itself adds or leaves out:

- the newline it writes behind the last turn's stop token (`Family.after`), which nobody samples;
- Qwen3's empty think block, which it writes into the last turn only (`Family.same`);
- where it never reads `tool_calls`, the conversation holds the calls as content (`Family.keeps_calls`);
- Llama 3.1 leaves out the content of a turn that calls (`Family.one_call`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from palingenesis.rl.chat import ParsedTurn, RenderedPrompt
from palingenesis.rl.config.schema import EnvConfig
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.envs import Environments
from palingenesis.rl.envs.classes import ClassEnvironment
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.episode import Episodes
from palingenesis.rl.types import (
    Completion,
    Finish,
    Group,
    Message,
    Outcome,
    Rollout,
    Row,
    SamplingParams,
    Score,
    ScoredBatch,
    ToolCall,
    Trajectory,
)
from tests.unit.tool_chance import Chance, sampled, strings
from tests.unit.tool_families import FAMILIES, TOOLS, Family, Model, Turn, model

CONVERSATIONS = 160  # of a family


class Llama31:
    """The form of Llama 3.1, as a parser of a user's own: a turn is a call or is not."""

    marks = ()

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> ParsedTurn:
        if not text.startswith('{"name": '):
            return ParsedTurn(text, (), ())
        call = json.loads(text)
        return ParsedTurn("", (ToolCall(call["name"], call["parameters"]),), ())

    def matches(self, template: str) -> bool:
        return False

    def how(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        raise AssertionError("its template shows the tools")


LLAMA31 = Llama31()


class Replies:
    """Lists the tools of the tests; what one answers depends on the row and on the call."""

    def reset(self, family: str, seed: int) -> None:
        self.family, self.seed = FAMILIES[family], seed

    def tool_schemas(self) -> list[dict[str, Any]]:
        return TOOLS

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        return reply(self.family, self.seed, name, arguments)


def reply(family: Family, seed: int, name: str, arguments: Mapping[str, Any]) -> str:
    return Chance(f"{seed} {name} {json.dumps(arguments)}").said(strings(family), 6)


class Replay(ScriptedEngine):
    """Samples `turns`, whatever it is asked; remembers what it saw."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, params: ())
        self.turns: list[tuple[int, ...]] = []
        self.seen: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.seen.append(tuple(prompt_ids))
        ids = self.turns[len(self.seen) - 1]
        return Completion(ids, tuple(-1.0 - n for n in range(len(ids))), (0,) * len(ids), Finish.STOP)


def player(subject: Model) -> tuple[Episodes, Replay]:
    engine = Replay()
    config = EnvConfig(type="m:C", max_turns=9, tool_parser="auto" if subject.family.parser else f"{__file__}:LLAMA31")
    environments = Environments(ClassEnvironment(Replies, {}), config)
    budget = Budget(10**6, 10**6, 10**6)
    return (
        Episodes(engine, subject.template, (subject.stop,), budget, environments, 9, 10**5, config.tool_parser),
        engine,
    )


def test_there_are_two_thousand_rollouts() -> None:
    assert {"Qwen3", "Qwen3.5", "Qwen2.5", "SmolLM2", "Llama 3", "Llama 3.1", "ChatML"} <= set(FAMILIES)
    assert CONVERSATIONS * len(FAMILIES) >= 2000


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_saw_what_the_trainer_scores_and_only_sampled_tokens_are_trained(name: str) -> None:
    pytest.importorskip("torch")
    subject = model(name)
    made, engine = player(subject)

    async def play_all() -> None:
        for seed in range(CONVERSATIONS):
            await play(subject, made, engine, seed)

    asyncio.run(play_all())


async def play(subject: Model, made: Episodes, engine: Replay, seed: int) -> None:
    family, chance = subject.family, Chance(f"{subject.family.name} {seed}")
    row = Row(f"r{seed}", tuple(chance.prompt(family)), {"family": family.name, "seed": seed})
    turns = [drawn(chance, family, calls=True) for _ in range(chance.randint(1, 3))]
    turns.append(drawn(chance, family, calls=False))
    engine.turns, engine.seen = [sampled(subject, turn, chance) for turn in turns], []
    async with made.group(row, [seed], temperature=1.0) as episodes:
        (episode,) = episodes
    assert not episode.skip_reason
    trajectory = episode.trajectory
    assert trajectory.finish is Finish.STOP
    assert [s.token_ids for s in trajectory.segments if s.sampled] == engine.turns
    assert_the_trainer_scores_what_the_engine_saw(trajectory, engine)
    answers = [[reply(family, seed, call.name, call.arguments) for call in turn.calls] for turn in turns]
    assert_the_messages_say_what_was_said(subject, row, turns, answers, trajectory)
    assert_the_whole_is_the_conversation(subject, made, row, turns, answers, trajectory)


def drawn(chance: Chance, family: Family, *, calls: bool) -> Turn:
    """A turn. Outside of the package's own call formats a closing mark in an argument ends the reasoning."""
    turn = chance.turn(family, calls=calls)
    return turn if family.parser or "</think>" not in family.writes(turn) else drawn(chance, family, calls=calls)


def assert_the_trainer_scores_what_the_engine_saw(trajectory: Trajectory, engine: Replay) -> None:
    from palingenesis.rl.objective.tokens import train_sequences

    rollout = Rollout(trajectory, Score({}, 1.0, Outcome.SCORED), 0)
    sequence = train_sequences(ScoredBatch(1, (Group(trajectory.row, (rollout, rollout), 0),)))[0]
    ids = tuple(sequence.input_ids.tolist())
    trained = sequence.sampled.tolist()
    logprobs = sequence.sampler_logprobs.tolist()
    expected = [False] * len(ids)
    for prompt, turn in zip(engine.seen, engine.turns, strict=True):
        start, end = len(prompt), len(prompt) + len(turn)
        assert ids[:end] == prompt + turn
        assert logprobs[start:end] == [-1.0 - n for n in range(len(turn))]
        expected[start:end] = [True] * len(turn)
    assert len(ids) == end
    assert trained == expected
    assert sequence.sampled_tokens == sum(expected)


def assert_the_messages_say_what_was_said(
    subject: Model, row: Row, turns: Sequence[Turn], answers: Sequence[Sequence[str]], trajectory: Trajectory
) -> None:
    expected = list(row.messages)
    for turn, told in zip(turns, answers, strict=True):
        content = "" if subject.family.one_call and turn.calls else turn.content
        expected.append(Message("assistant", content, turn.calls, reasoning=turn.reasoning))
        expected += subject.results.messages(turn.calls, told)
    assert list(trajectory.messages) == expected


def assert_the_whole_is_the_conversation(
    subject: Model,
    made: Episodes,
    row: Row,
    turns: Sequence[Turn],
    answers: Sequence[Sequence[str]],
    trajectory: Trajectory,
) -> None:
    family = subject.family
    messages, ids = list(row.messages), list(trajectory.segments[0].token_ids)

    def whole(more: bool) -> RenderedPrompt:
        shown = with_system_text(messages, made.prompts.calls.how(TOOLS))
        return subject.template.render(shown, TOOLS, add_generation_prompt=more)

    def decoded() -> str:
        return family.same(subject.decode(ids))

    assert tuple(ids) == whole(more=True).ids
    given = [segment for segment in trajectory.segments[1:] if not segment.sampled]
    for turn, told, segment, spoken in zip(turns, answers, given, made_turns(trajectory), strict=False):
        ids += [*spoken, *segment.token_ids]
        messages += [family.message(turn), *subject.results.messages(turn.calls, told)]
        so_far = whole(more=True)
        assert family.normal(so_far.text) == decoded()
        assert so_far.ids[-len(segment.token_ids) :] == segment.token_ids
        harmless = subject.results.render(turn.calls, ["x"] * len(told)).ids
        assert control_ids(subject, segment.token_ids) == control_ids(subject, harmless)
    ids += made_turns(trajectory)[-1]
    messages.append(family.message(turns[-1]))
    assert family.normal(whole(more=False).text) == decoded() + family.after


def made_turns(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [segment.token_ids for segment in trajectory.segments if segment.sampled]


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """What the package says on tools where the template does not, at the end of the system message."""
    if not text:
        return list(messages)
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def control_ids(subject: Model, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token in subject.template.control.ids]
