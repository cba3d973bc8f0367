"""The rollouts of one prompt: from a row to frozen trajectories.

    group: environments opened together ──> prompts ──> episodes, all at once ──> scored by the caller ──> all closed

    episode: prompt ids ── engine ──> sampled turn ── split, parse ──┬─ no call ──────────────────────────> Trajectory
                ^                                                    ├─ calls, tools of the row alone ────>
                └── given: the answers, as the template adds them <──┴─ calls run at once ── done, spent ──>

A rollout without an environment has one turn; that is the same loop, left after its first round.

Invariants:
- What was sampled is kept as the ids the engine returned and never tokenized again. The ids the engine sees at a turn are
  those of the segments before it, in order; text exists for rewards and people only.
- A turn that a budget cut runs nothing. Answers that no turn will read are in the messages, and their segment has no
  tokens: they would cost the trainer time and teach nothing.
- Draws are a function of the seed: turn 0 has the rollout's own, turn n one made of it and n.
- Every environment that was opened is closed when the group ends, however it ends.
- An environment that fails makes a skipped rollout and nothing else; what there is of the trajectory is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property

from palingenesis.rl.chat.calls import ParsedTurn
from palingenesis.rl.chat.reasoning import split_reasoning
from palingenesis.rl.chat.results import ToolResults
from palingenesis.rl.chat.template import ChatTemplate
from palingenesis.rl.envs.session import Environments, EnvSession, ToolAnswer
from palingenesis.rl.errors import SkipSample
from palingenesis.rl.observe.pace import pace
from palingenesis.rl.observe.waits import waiting
from palingenesis.rl.rewards.bind import gather
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.prompts import Prompt, Prompts, Schemas
from palingenesis.rl.types import Completion, Engine, Finish, Message, Row, SamplingParams, Segment, Trajectory

# Seconds an engine with requests may go without a step: a step takes milliseconds, but the first ones of new shapes may
# compile for minutes.
ENGINE_S = 300.0


def request_seed(*key: object) -> int:
    """A 63-bit seed that is a function of what is sampled (run seed, group, rollout, turn) and of nothing else."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished rollout, to be scored.

    Attributes:
        session: its environment, open until the group's block ends; None where there is none or it did not open.
        skip_reason: why the environment could not go on; empty when it could.
    """

    trajectory: Trajectory
    session: EnvSession | None = None
    skip_reason: str = ""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where an episode starts. Without a prompt it has ended before it began."""

    row: Row
    schemas: Schemas
    session: EnvSession | None = None
    prompt: Prompt | None = None
    skip_reason: str = ""


@dataclass(frozen=True)
class Episodes:
    """Runs rollouts.

    Attributes:
        stop_token_ids: they end a turn.
        environments: what acts between the turns; None: a rollout is one turn.
        max_turns: most turns of a rollout that has an environment. The calls of the last one still run.
        max_tool_output_tokens: longer answers lose their middle.
        tool_parser: `env.tool_parser`.
    """

    engine: Engine
    template: ChatTemplate
    stop_token_ids: tuple[int, ...]
    budget: Budget
    environments: Environments | None = None
    max_turns: int = 1
    max_tool_output_tokens: int = 512
    tool_parser: str = "auto"

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.template, self.tool_parser)

    @cached_property
    def results(self) -> ToolResults:
        """Raises ModelError when the template cannot show what tools answer."""
        return ToolResults(self.template, self.stop_token_ids)

    def check_tools(self) -> None:
        """Have a model that cannot be given tools be an error at start.

        Raises:
            ConfigError: no call format fits. ModelError: the template cannot show what tools answer.
        """
        if self.environments is not None and self.environments.schemas != ():
            _ = self.prompts.calls, self.results

    @asynccontextmanager
    async def group(self, row: Row, seeds: Sequence[int], *, temperature: float) -> AsyncIterator[list[Episode]]:
        """One episode of `row` for each seed, in order. Their environments are closed when the block ends.

        Raises:
            EngineError: generation failed.
            ConfigError, DataError, ModelError: the environment, the row or the template cannot be used.
        """
        sessions: list[EnvSession] = []
        try:
            starts = await self._rendered(await gather(self._open(row, sessions) for _ in seeds))
            yield await gather(
                self._episode(start, temperature, seed) for start, seed in zip(starts, seeds, strict=True)
            )
        finally:
            await asyncio.gather(*(session.close() for session in sessions))

    async def aclose(self) -> None:
        """Close every environment that is still open."""
        if self.environments is not None:
            await self.environments.aclose()

    # --- before the first turn ---

    async def _open(self, row: Row, sessions: list[EnvSession]) -> _Start:
        if self.environments is None:
            return _Start(row, row.tools)
        try:
            session = await self.environments.open(row)
        except SkipSample as error:
            return _Start(row, (), skip_reason=_reason(error))
        sessions.append(session)
        return _Start(row, session.schemas or row.tools, session)

    async def _rendered(self, starts: Sequence[_Start]) -> list[_Start]:
        """The starts with their prompts; equal ones are rendered once."""
        known: dict[tuple[str, str], Prompt] = {}
        return [start if start.skip_reason else await self._with_prompt(start, known) for start in starts]

    async def _with_prompt(self, start: _Start, known: dict[tuple[str, str], Prompt]) -> _Start:
        opening = start.session.opening if start.session else ""
        key = (opening, json.dumps(start.schemas, default=str) if start.schemas else "")
        if key not in known:
            await pace()
            known[key] = self.prompts.render(start.row, start.schemas, opening)
        prompt = known[key]
        if start.session and len(prompt.ids) >= self.budget.max_model_len:  # rows alone were measured at load
            reason = (
                f"with what its environment opens with, the prompt has {len(prompt.ids)} tokens and leaves no room in "
                f"rollout.max_model_len {self.budget.max_model_len}"
            )
            return _Start(start.row, start.schemas, start.session, skip_reason=reason)
        return _Start(start.row, start.schemas, start.session, prompt)

    # --- turns ---

    async def _episode(self, start: _Start, temperature: float, seed: int) -> Episode:
        so_far = _SoFar(start)
        if start.skip_reason:
            return Episode(so_far.trajectory(Finish.FAILED), start.session, start.skip_reason)
        try:
            finish = await self._turns(so_far, temperature, seed)
        except SkipSample as error:
            return Episode(so_far.trajectory(Finish.FAILED), start.session, _reason(error))
        return Episode(so_far.trajectory(finish), start.session)

    async def _turns(self, so_far: _SoFar, temperature: float, seed: int) -> Finish:
        """Take turns until one ends the episode; how it ended.

        Raises:
            SkipSample: the environment cannot go on.
        """
        session = so_far.start.session
        room, if_spent = self.budget.next_turn(sampled=0, total=len(so_far.ids))
        turn = 0
        while True:
            turn_seed = request_seed(seed, turn) if turn else seed
            params = SamplingParams(room, temperature, self.stop_token_ids, turn_seed)
            completion, seconds = await self._sample(so_far, params)
            await pace()
            parsed = self._read(so_far, completion, seconds)
            turn += 1
            if completion.finish is Finish.LENGTH:
                return if_spent
            if session is None or not session.schemas or not (parsed.calls or parsed.errors):
                return Finish.STOP
            began = time.monotonic()
            answers = await self._answers(session, parsed)
            await pace()
            given = self.results.render(parsed.calls, [answer.text for answer in answers], completion.token_ids[-1])
            room, if_spent = self.budget.next_turn(so_far.sampled, len(so_far.ids) + len(given.ids))
            ended = self._ended(session, turn, room, if_spent)
            segment = Segment(
                role="tool",
                token_ids=() if ended else given.ids,
                text=given.text,
                sampled=False,
                seconds=time.monotonic() - began,
                tool_name=", ".join(dict.fromkeys(call.name for call in parsed.calls)),
                tool_errors=sum(answer.is_error for answer in answers),
            )
            so_far.add(segment, *self.results.messages(parsed.calls, [answer.text for answer in answers]))
            if ended:
                return ended
            so_far.reasoning_open = given.reasoning_open

    def _ended(self, session: EnvSession, turn: int, room: int, if_spent: Finish) -> Finish | None:
        """Why there is no turn after the answers to turn number `turn`; None when there is one."""
        if session.done:
            return Finish.DONE
        if turn >= self.max_turns:
            return Finish.MAX_TURNS
        return None if room else if_spent

    async def _sample(self, so_far: _SoFar, params: SamplingParams) -> tuple[Completion, float]:
        """One turn, and how many seconds it took."""
        row, prompt, limit = so_far.start.row, tuple(so_far.ids), params.max_new_tokens
        began = time.monotonic()
        request = f"a request of row {row.id} ({row.source}), prompt {len(prompt)} tokens, at most {limit} more"
        with waiting("engine", request, ENGINE_S):
            completion = await self.engine.generate(prompt, params)
        return completion, time.monotonic() - began

    def _read(self, so_far: _SoFar, completion: Completion, seconds: float) -> ParsedTurn:
        """Take a sampled turn down; what it says and calls."""
        schemas = so_far.start.schemas
        raw = self._text(completion.token_ids, self.prompts.calls.marks if schemas else ())
        reasoning, answer = split_reasoning(raw, so_far.reasoning_open)
        parsed = ParsedTurn(answer, (), ())
        if schemas and completion.finish is not Finish.LENGTH:
            parsed = self.prompts.calls.parse(answer, schemas)
        segment = Segment(
            role="assistant",
            token_ids=completion.token_ids,
            text=raw,
            sampled=True,
            logprobs=completion.logprobs,
            versions=completion.versions,
            seconds=seconds,
            tool_calls=parsed.calls,
        )
        so_far.add(segment, Message("assistant", parsed.content, tool_calls=parsed.calls, reasoning=reasoning))
        so_far.raw = raw
        return parsed

    async def _answers(self, session: EnvSession, parsed: ParsedTurn) -> list[ToolAnswer]:
        """The answers to the calls of a turn, which run at once, then those to its malformed calls; cut to their limit."""
        ran: list[ToolAnswer] = await gather(session.call(call) for call in parsed.calls)
        refused = [ToolAnswer(f"Error: {error}", is_error=True) for error in parsed.errors]
        return [await self._cut(answer) for answer in (*ran, *refused)]

    async def _cut(self, answer: ToolAnswer) -> ToolAnswer:
        await pace()
        return ToolAnswer(self.results.cut(answer.text, self.max_tool_output_tokens), answer.is_error)

    def _text(self, ids: Sequence[int], marks: Sequence[str]) -> str:
        """A turn decoded, without the token that ended it; but where that is a mark of a call, it closes the call."""
        ends = bool(ids) and ids[-1] in self.stop_token_ids and self.template.decode(ids[-1:], marks) not in marks
        return self.template.decode(ids[:-1] if ends else ids, marks)


class _SoFar:
    """An episode under way.

    Attributes:
        ids: of all segments.
        sampled: how many of them the policy sampled.
        reasoning_open: the think block is open where the next turn begins.
        raw: the last turn as sampled.
    """

    def __init__(self, start: _Start) -> None:
        prompt = start.prompt or Prompt(start.row.messages, (), "", reasoning_open=False)
        self.start = start
        self.segments = [Segment("prompt", prompt.ids, prompt.text, sampled=False)]
        self.messages = list(prompt.messages)
        self.prompt_turns = len(prompt.messages)
        self.ids = list(prompt.ids)
        self.sampled = 0
        self.reasoning_open = prompt.reasoning_open
        self.raw = ""
        self._said = Message("assistant", "")  # the last turn

    def add(self, segment: Segment, *messages: Message) -> None:
        self.segments.append(segment)
        self.ids += segment.token_ids
        self.messages += messages
        if segment.sampled:
            self.sampled += len(segment.token_ids)
            (self._said,) = messages

    def trajectory(self, finish: Finish) -> Trajectory:
        return Trajectory(
            row=self.start.row,
            segments=tuple(self.segments),
            messages=tuple(self.messages),
            completion=self._said.content,
            reasoning=self._said.reasoning,
            raw=self.raw,
            finish=finish,
            reasoning_open=self.reasoning_open,
            prompt_turns=self.prompt_turns,
        )


def _reason(error: SkipSample) -> str:
    return str(error) or "SkipSample without a reason"
