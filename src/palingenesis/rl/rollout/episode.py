"""One rollout: from a row to a frozen trajectory.

    row ── template ──> prompt ids ── engine ──> sampled ids ── split ──> Trajectory

Invariants: what was sampled is kept as the ids the engine returned and never tokenized again; text exists for rewards
and people only. The prompt is rendered once for a group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from palingenesis.rl.chat.reasoning import split_reasoning
from palingenesis.rl.chat.template import ChatTemplate, RenderedPrompt
from palingenesis.rl.observe.waits import waiting
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.types import Engine, Finish, Message, Row, SamplingParams, Segment, Trajectory

# Seconds an engine with requests may go without a step: a step takes milliseconds, but the first ones of new shapes may
# compile for minutes.
ENGINE_S = 300.0


def request_seed(*key: object) -> int:
    """A 63-bit seed that is a function of what is sampled (run seed, group, rollout, turn) and of nothing else."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Episodes:
    """Runs single-turn rollouts. `stop_token_ids` end a turn."""

    engine: Engine
    template: ChatTemplate
    stop_token_ids: tuple[int, ...]
    budget: Budget

    def render(self, row: Row) -> RenderedPrompt:
        """The prompt as the policy meets it."""
        return self.template.render(row.messages, row.tools, source=row.source)

    async def run(self, row: Row, prompt: RenderedPrompt, *, temperature: float, seed: int) -> Trajectory:
        """Sample one trajectory.

        Raises:
            EngineError: generation failed.
        """
        started = time.monotonic()
        tokens, if_spent = self.budget.next_turn(sampled=0, total=len(prompt.ids))
        params = SamplingParams(tokens, temperature, self.stop_token_ids, seed)
        request = f"a request of row {row.id} ({row.source}), prompt {len(prompt.ids)} tokens, at most {tokens} more"
        with waiting("engine", request, ENGINE_S):
            completion = await self.engine.generate(prompt.ids, params)
        raw = self.template.decode(self._without_stop(completion.token_ids))
        reasoning, answer = split_reasoning(raw, prompt.reasoning_open)
        turn = Segment(
            role="assistant",
            token_ids=completion.token_ids,
            text=raw,
            sampled=True,
            logprobs=completion.logprobs,
            versions=completion.versions,
            seconds=time.monotonic() - started,
        )
        return Trajectory(
            row=row,
            segments=(Segment("prompt", prompt.ids, prompt.text, sampled=False), turn),
            messages=(*row.messages, Message("assistant", answer, reasoning=reasoning)),
            completion=answer,
            reasoning=reasoning,
            raw=raw,
            finish=if_spent if completion.finish is Finish.LENGTH else completion.finish,
            reasoning_open=prompt.reasoning_open,
        )

    def _without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
