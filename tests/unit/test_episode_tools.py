"""Episodes with tools over the scripted engine: what the engine sees, what is trained, how they end, what is closed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer
from palingenesis.rl.config.schema import EnvConfig
from palingenesis.rl.data import Sampler
from palingenesis.rl.engines.scripted import ScriptedEngine
from palingenesis.rl.envs import Environments
from palingenesis.rl.envs.classes import ClassEnvironment
from palingenesis.rl.errors import DataError, EngineError, RewardError, SkipSample
from palingenesis.rl.observe.metrics import batch_metrics
from palingenesis.rl.observe.records import rollout_line
from palingenesis.rl.rewards import RewardSet, bind
from palingenesis.rl.rewards.bind import PER_SAMPLE
from palingenesis.rl.rewards.trl import trl_arguments
from palingenesis.rl.rollout.budget import Budget
from palingenesis.rl.rollout.collect import Collector
from palingenesis.rl.rollout.episode import Episodes, request_seed
from palingenesis.rl.rollout.producer import Producer
from palingenesis.rl.rollout.score import Scorer, sample_of
from palingenesis.rl.types import Completion, Finish, Group, Message, Rollout, Row, SamplingParams, ScoredBatch
from tests.unit.tool_families import SMOLLM2_TEMPLATE

TINY = Path(__file__).parents[2] / "src/palingenesis/rl/policy/builtin/tiny"
END = "<|im_end|>"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 7}}\n</tool_call>'
SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "11"}}\n</tool_call>'
ROW = Row("r0", (Message("user", "What is 4 + 7?"),), {"answer": "11"}, source="rows.jsonl:1")


@cache
def template() -> ChatTemplate:
    return ChatTemplate(load_tokenizer(str(TINY)))


@cache
def stop() -> int:
    return int(template().tokenizer.convert_tokens_to_ids(END))


def encode(text: str) -> tuple[int, ...]:
    return tuple(template().tokenizer(text, add_special_tokens=False)["input_ids"])


class Sums:
    """`alive` and `made` count over a test; `add` may be made to wait or fail by the row."""

    alive: ClassVar[int] = 0
    made: ClassVar[int] = 0
    ran: ClassVar[list[str]] = []

    def __init__(self) -> None:
        Sums.alive += 1
        Sums.made += 1
        self.done = False
        self.given = ""

    def reset(self, answer: str) -> str | None:
        self.answer = answer

    async def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.ran.append("add")
        return a + b

    def submit(self, answer: str) -> str:
        """Hand in the answer.

        Args:
            answer: The number.
        """
        self.ran.append("submit")
        self.given, self.done = answer, True
        return "thank you"

    def get_reward(self) -> dict[str, float]:
        assert Sums.alive > 0
        return {"correct": float(self.given == self.answer), "handed_in": 0.5 * bool(self.given)}

    def close(self) -> None:
        Sums.alive -= 1


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    Sums.alive = Sums.made = 0
    Sums.ran = []
    yield
    assert Sums.alive == 0, "an environment was not closed"


class Policy(ScriptedEngine):
    """Says `turns` one after another, `<|im_end|>` after each that does not end in `...`; remembers what it saw."""

    def __init__(self, *turns: str, delay: float = 0.0) -> None:
        self.turns = turns
        self.seen: list[tuple[int, ...]] = []
        self.params: list[SamplingParams] = []
        super().__init__(self._say, delay)

    def _say(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        self.seen.append(prompt)
        self.params.append(params)
        text = template().tokenizer.decode(list(prompt))
        turn = self.turns[min(text.count("<|im_start|>assistant") - 1, len(self.turns) - 1)]
        return [*encode(turn), stop()]


def episodes(
    engine: Any, cls: type | None = Sums, *, budget: Budget | None = None, chat: Any = None, **env: Any
) -> Episodes:
    made = None
    stops = env.pop("stops", (stop(),))
    config = EnvConfig(type="m:C" if cls else "single_turn", **env)
    if cls:
        made = Environments(ClassEnvironment(cls, config.args, allowed=config.allowed_tools), config)
    return Episodes(
        engine,
        chat or template(),
        stops,
        budget or Budget(400, 4000, 8000),
        made,
        max_turns=config.max_turns,
        max_tool_output_tokens=config.max_tool_output_tokens,
    )


def play(
    made: Episodes, row: Row = ROW, rewards: Sequence[Callable[..., Any]] = (), size: int = 1
) -> tuple[Rollout, ...]:
    scorer = Scorer(RewardSet([bind(f.__name__, f) for f in rewards]), made.budget.completion)

    async def run() -> tuple[Rollout, ...]:
        seeds = [request_seed(0, "train", 0, index, 0) for index in range(size)]
        async with made.group(row, seeds, temperature=1.0) as group:
            return await scorer.score(group)

    return asyncio.run(run())


def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


# ------------------------------------------------------------------------------------------------------------- tokens


def test_the_engine_saw_the_segments_and_only_sampled_tokens_are_trained() -> None:
    torch = pytest.importorskip("torch")
    from palingenesis.rl.objective.tokens import train_sequences

    policy = Policy("Let me add.\n" + ADD, ADD + "\n" + ADD, "It is 11.")
    (rollout,) = play(episodes(policy))
    trajectory = rollout.trajectory
    assert [s.role for s in trajectory.segments] == ["prompt", "assistant", "tool", "assistant", "tool", "assistant"]
    ids: list[int] = []
    turns = iter(policy.seen)
    for segment in trajectory.segments:
        if segment.sampled:
            assert tuple(ids) == next(turns)
        ids += segment.token_ids
    assert next(turns, None) is None
    assert trajectory.finish is Finish.STOP

    # This template is prefix-preserving, so the whole is what it renders of the whole conversation.
    schemas = ClassEnvironment(Sums, {}).tools
    assert schemas is not None
    whole = template().render(trajectory.messages, [t.schema for t in schemas], add_generation_prompt=False)
    assert template().tokenizer.decode(ids) + "\n" == whole.text

    group = Group(ROW, (rollout, rollout), 0)
    sequence = train_sequences(ScoredBatch(1, (group,)))[0]
    assert sequence.input_ids.tolist() == ids
    expected = [s.sampled for s in trajectory.segments for _ in s.token_ids]
    assert sequence.sampled.tolist() == expected
    assert sequence.sampled_tokens == trajectory.sampled_tokens == sum(expected)
    assert torch.all(sequence.sampler_logprobs == -sequence.sampled.float())


def ends_turns_with(text: str, *turns: str) -> tuple[Policy, int]:
    """A policy whose turns end with the token `text`."""
    (end,) = encode(text)

    class Other(Policy):
        def _say(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
            return [*super()._say(prompt, params)[:-1], end]

    return Other(*turns), end


def test_a_turn_that_another_stop_token_ends_is_ended_as_the_template_does() -> None:
    policy, end = ends_turns_with("<|endoftext|>", ADD, "11")
    (rollout,) = play(episodes(policy, stops=(stop(), end)))
    assert rollout.trajectory.messages[2].content == "11"
    prompt, turn, given, _ = rollout.trajectory.segments
    assert policy.seen == [prompt.token_ids, prompt.token_ids + turn.token_ids + given.token_ids]
    assert turn.token_ids[-1] == end
    assert given.text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n11\n")


def test_the_end_of_a_call_may_be_a_stop_token() -> None:
    policy, end = ends_turns_with("</tool_call>", ADD.removesuffix("</tool_call>"))
    (rollout,) = play(episodes(policy, stops=(stop(), end), max_turns=1))
    assert Sums.ran == ["add"]
    assert rollout.trajectory.segments[1].text == ADD
    assert rollout.trajectory.segments[2].text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n11\n")


def test_rewards_see_what_an_environment_opened_with_as_the_prompts() -> None:
    class Opens(Sums):
        def reset(self, answer: str) -> str:
            super().reset(answer)
            return "You stand in a room."

    rows = [ROW, Row("s", (Message("system", "Add."),), ROW.columns)]
    seen = []

    for row in rows:
        made = episodes(Policy(ADD, "11"), Opens)

        async def group(made: Episodes = made, row: Row = row) -> None:
            async with made.group(row, [1], temperature=1.0) as found:
                seen.append(sample_of(found[0]))

        asyncio.run(group())
    for sample in seen:
        told = trl_arguments([sample])
        assert PER_SAMPLE["prompt"](sample).endswith("You stand in a room.")
        assert told["prompts"][0][-1]["content"].endswith("You stand in a room.")
        assert [message["role"] for message in told["completions"][0]] == ["assistant", "tool", "assistant"]


def test_each_turn_has_a_seed_of_its_own_and_the_first_has_the_rollouts() -> None:
    policy = Policy(ADD, ADD, "11")
    play(episodes(policy))
    seed = request_seed(0, "train", 0, 0, 0)
    assert [p.seed for p in policy.params] == [seed, request_seed(seed, 1), request_seed(seed, 2)]


def test_messages_metrics_and_dump() -> None:
    seen: list[Any] = []

    def look(completion: str, messages: list[dict[str, Any]], env: Any) -> float:
        seen.append((completion, messages, env))
        return 0.25

    (rollout,) = play(episodes(Policy("<think>\nhm\n</think>\n\nAdding." + ADD, "It is 11.")), rewards=[look])
    (completion, messages, env) = seen[0]
    assert completion == "It is 11."
    assert isinstance(env, Sums)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 4, "b": 7}}}
    assert messages[1:] == [
        {"role": "assistant", "content": "Adding.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "11", "name": "add"},
        {"role": "assistant", "content": "It is 11."},
    ]
    assert rollout.score.rewards == {"look": 0.25, "env/correct": 0.0, "env/handed_in": 0.0}
    assert rollout.score.reward == 0.25
    group = Group(ROW, (rollout,), 0)
    metrics = batch_metrics(ScoredBatch(1, (), (group,)))
    assert {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0, "env/correct": 0.0, "rewards/look": 0.25}.items() <= (
        metrics.items()
    )
    turns = rollout_line(1, group, rollout, False, None, None)["turns"]
    assert turns[1]["tool_calls"] == [{"name": "add", "arguments": {"a": 4, "b": 7}}]
    assert turns[2]["tool_name"] == "add"
    assert "11" in turns[2]["text"]


def test_the_prompt_is_rendered_once_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[int] = []
    original = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, tools: Any = (), **options: Any) -> Any:
        count.append(1)
        return original(self, messages, tools, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    play(episodes(Policy("11")), size=6)
    assert len(count) == 1

    class Opens(Sums):
        def reset(self, answer: str) -> str:
            self.answer = answer
            return f"Room {Sums.made % 2}."

    Sums.made = 0
    policy = Policy("11")
    rollouts = play(episodes(policy, Opens), size=4)
    assert {r.trajectory.messages[0].content.split("\n\n")[0] for r in rollouts} == {"What is 4 + 7?"}
    assert all(re.search(r"\?\n\nRoom \d\.$", r.trajectory.messages[0].content) for r in rollouts)
    assert Opens.alive == 0


def test_a_template_without_tools_has_them_in_the_system_message() -> None:
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.chat_template = SMOLLM2_TEMPLATE
    made = episodes(Policy("11"), chat=ChatTemplate(tokenizer))
    made.check_tools()
    row = Row("r", (Message("system", "Be brief."), *ROW.messages), ROW.columns)
    (rollout,) = play(made, row)
    system = rollout.trajectory.segments[0].text.split(END)[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou have access to")
    assert '"submit"' in system
    assert system.endswith("</tool_call>")
    assert texts(rollout.trajectory.messages)[0] == ("system", "Be brief.")


# ------------------------------------------------------------------------------------------------------------- calls


def test_calls_of_a_turn_run_at_once_and_are_answered_in_order() -> None:
    class Meets(Sums):
        def reset(self, answer: str) -> None:
            self.answer, self.first = answer, asyncio.Event()

        async def wait(self) -> str:
            """Wait for the other."""
            await self.first.wait()
            return "waited"

        async def go(self) -> str:
            """Let it go."""
            self.first.set()
            return "went"

    both = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("wait", "go"))
    (rollout,) = play(episodes(Policy(both, "ok"), Meets, tool_timeout=5.0))
    assert texts(rollout.trajectory.messages)[2:4] == [("tool", "waited"), ("tool", "went")]
    assert rollout.trajectory.segments[2].tool_name == "wait, go"


def test_a_turn_cut_off_in_a_call_runs_nothing() -> None:
    whole_call_then_cut = ADD + "\n<tool_call>\n" + "x" * 500
    made = episodes(Policy(whole_call_then_cut), budget=Budget(len(encode(ADD)) + 30, 4000, 8000))
    (rollout,) = play(made)
    assert Sums.ran == []
    assert rollout.trajectory.finish is Finish.LENGTH
    assert [s.role for s in rollout.trajectory.segments] == ["prompt", "assistant"]
    assert rollout.trajectory.segments[1].tool_calls == ()


def test_what_goes_wrong_is_answered_and_counted() -> None:
    bad = (
        '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": \n</tool_call>\n' + ADD
    )
    (rollout,) = play(episodes(Policy(bad, "ok")))
    answers = [m.content for m in rollout.trajectory.messages if m.role == "tool"]
    assert len(answers) == 3
    assert answers[0].startswith("Error: unknown tool 'nothing'")
    assert answers[1] == "11"
    assert answers[2].startswith("Error: ")
    assert "JSON" in answers[2]
    assert rollout.trajectory.segments[2].tool_errors == 2
    assert Sums.ran == ["add"]


def test_a_long_answer_keeps_head_and_tail() -> None:
    class Talks(Sums):
        def talk(self) -> str:
            """Talk."""
            return "a" * 3000 + "z"

    call = '<tool_call>\n{"name": "talk", "arguments": {}}\n</tool_call>'
    (rollout,) = play(episodes(Policy(call, "ok"), Talks, max_tool_output_tokens=80))
    answer = rollout.trajectory.messages[2].content
    assert answer.startswith("a")
    assert answer.endswith("z")
    assert "characters left out" in answer
    assert len(encode(answer)) <= 80


def test_tools_of_a_row_end_the_episode_and_are_in_the_messages() -> None:
    tools = (
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}},
    )
    row = Row("r", ROW.messages, {}, tools=tools)
    policy = Policy("So: " + ADD, "never")

    def called(messages: list[dict[str, Any]]) -> float:
        return float(messages[-1]["tool_calls"][0]["function"]["name"] == "add")

    (rollout,) = play(episodes(policy, None), row, [called])
    assert rollout.score.reward == 1.0
    assert rollout.trajectory.finish is Finish.STOP
    assert (len(policy.seen), rollout.trajectory.completion) == (1, "So:")
    (plain,) = play(episodes(Policy("So: " + ADD), None), ROW, [lambda_zero])
    assert plain.trajectory.completion == "So: " + ADD, "without tools, it is text"


def lambda_zero() -> float:
    return 0.0


def test_tools_of_a_row_are_shown_where_the_environment_has_none() -> None:
    class Grades:
        def reset(self, answer: str) -> None:
            self.answer = answer

        def get_reward(self, messages: list[dict[str, Any]]) -> float:
            return float(messages[-1]["tool_calls"][0]["function"]["arguments"] == {"a": 4, "b": 7})

    tools = (
        {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}},
    )
    row = Row("r", ROW.messages, ROW.columns, tools=tools)
    policy = Policy(ADD, "never")
    (rollout,) = play(episodes(policy, Grades), row)
    assert '"Add."' in rollout.trajectory.segments[0].text
    assert (len(policy.seen), rollout.trajectory.finish, rollout.score.reward) == (1, Finish.STOP, 1.0)
    (own,) = play(episodes(Policy(ADD, "11")), row)
    assert '"Add."' not in own.trajectory.segments[0].text, "the environment has tools of its own"
    assert own.trajectory.messages[2].content == "11"


# ------------------------------------------------------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("turns", "budget", "env", "finish", "taken"),
    [
        ([ADD, SUBMIT, "never"], Budget(400, 4000, 8000), {}, Finish.DONE, 2),
        ([ADD], Budget(400, 4000, 8000), {"max_turns": 3}, Finish.MAX_TURNS, 3),
        ([SUBMIT], Budget(400, 4000, 8000), {"max_turns": 1}, Finish.DONE, 1),
        (["11"], Budget(400, 4000, 8000), {"max_turns": 1}, Finish.STOP, 1),
        ([ADD], Budget(400, 400, 8000), {"max_turns": 99}, Finish.LENGTH, None),
        ([ADD], Budget(400, 4000, 1800), {"max_turns": 99}, Finish.CONTEXT, None),
    ],
)
def test_endings(turns: list[str], budget: Budget, env: Mapping[str, Any], finish: Finish, taken: int | None) -> None:
    policy = Policy(*turns)
    (rollout,) = play(episodes(policy, budget=budget, **env))
    trajectory = rollout.trajectory
    assert trajectory.finish is finish
    assert taken in (None, len(policy.seen))
    assert trajectory.total_tokens <= budget.max_model_len
    assert trajectory.sampled_tokens <= budget.completion
    if trajectory.segments[-1].role == "tool":
        assert trajectory.segments[-1].token_ids == (), "no turn read it"
        assert trajectory.segments[-1].text
        assert trajectory.messages[-1].role == "tool"
    assert trajectory.finish.is_truncated == (finish not in (Finish.DONE, Finish.STOP))
    assert rollout_line(1, Group(ROW, (rollout,), 0), rollout, False, None, None)["finish"] == finish.value


def test_answers_that_do_not_fit_end_the_episode_in_the_context() -> None:
    policy = Policy(ADD, "never")
    prompt = len(play(episodes(Policy("1")))[0].trajectory.segments[0].token_ids)
    room = prompt + len(encode(ADD)) + 1
    (rollout,) = play(episodes(policy, budget=Budget(room - prompt, 4000, room + 5)))
    assert rollout.trajectory.finish is Finish.CONTEXT
    assert (len(policy.seen), rollout.trajectory.total_tokens) == (1, room)
    assert rollout.trajectory.messages[-1].content == "11"


def test_the_reward_of_the_environment_is_added_and_named() -> None:
    (rollout,) = play(episodes(Policy(ADD, SUBMIT)))
    assert rollout.score.rewards == {"env/correct": 1.0, "env/handed_in": 0.5}
    assert rollout.score.reward == 1.5


# ------------------------------------------------------------------------------------------------------------- failures


class Flaky(Sums):
    """Fails where the test says: every second environment, in `where`."""

    where: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.bad = Sums.made % 2 == 0

    def fail(self, place: str) -> None:
        if self.bad and place == self.where:
            raise SkipSample(f"{place} is away")

    def reset(self, answer: str) -> None:
        self.answer = answer
        self.fail("reset")

    async def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: The other.
        """
        self.fail("call")
        return a + b

    def get_reward(self) -> float:
        self.fail("reward")
        return 1.0


@pytest.mark.parametrize("error", [AttributeError("no sum"), ValueError("no sum")])
def test_a_done_that_fails_skips_its_rollout(error: Exception) -> None:
    class Unsure(Sums):
        @property
        def done(self) -> bool:
            raise error

        @done.setter
        def done(self, _: bool) -> None:
            pass

    (rollout,) = play(episodes(Policy(ADD, "11"), Unsure))
    assert not rollout.score.scored
    assert rollout.score.skip_reason.startswith(f"done of Unsure failed: {type(error).__name__}: no sum")


@pytest.mark.parametrize("where", ["reset", "call", "reward"])
def test_an_environment_that_fails_skips_its_rollout_only(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flaky, "where", where)
    asked: list[str] = []

    def look(completion: str) -> float:
        asked.append(completion)
        return 0.0

    rollouts = play(episodes(Policy(ADD, "11"), Flaky), rewards=[look], size=6)
    assert Flaky.alive == 0
    skipped = [r for r in rollouts if not r.score.scored]
    assert len(skipped) == 3
    assert {(r.score.skip_source, r.score.skip_reason) for r in skipped} == {("environment", f"{where} is away")}
    assert len(asked) == 3
    assert all(r.score.reward == 1.0 for r in rollouts if r.score.scored)
    turns = {"reset": 0, "call": 1, "reward": 2}[where]
    assert {sum(s.sampled for s in r.trajectory.segments) for r in skipped} == {turns}
    if where != "reward":
        assert {r.trajectory.finish for r in skipped} == {Finish.FAILED}
    group = Group(ROW, rollouts, 0)
    assert batch_metrics(ScoredBatch(1, (), (group,)))["skipped"] == 0.5
    assert rollout_line(1, group, skipped[0], False, None, None)["skip_reason"] == f"environment: {where} is away"


def test_an_opening_that_fills_the_context_skips_the_rollout() -> None:
    class Talks(Sums):
        def reset(self, answer: str) -> str:
            self.answer = answer
            return "blah " * 2000

    (rollout,) = play(episodes(Policy("11"), Talks))
    assert not rollout.score.scored
    assert "leaves no room in rollout.max_model_len 8000" in rollout.score.skip_reason
    assert Talks.alive == 0


def test_a_missing_column_stops_the_run_and_closes_what_was_opened() -> None:
    with pytest.raises(DataError, match="answer"):
        play(episodes(Policy("11")), Row("r", ROW.messages, {}), size=3)


def test_a_defective_reward_of_the_environment_stops_the_run() -> None:
    class Bad(Sums):
        def get_reward(self) -> Any:
            return "good"

    with pytest.raises(RewardError, match="get_reward"):
        play(episodes(Policy("11"), Bad), size=3)
    assert Bad.alive == 0


def test_an_engine_that_fails_in_a_later_turn_closes_the_environments() -> None:
    class Broken(Policy):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            if len(self.seen) >= 4:
                raise EngineError("out of memory")
            return await super().generate(prompt_ids, params)

    with pytest.raises(EngineError, match="out of memory"):
        play(episodes(Broken(ADD)), size=3)


def collector(made: Episodes, **options: Any) -> Collector:
    defaults: dict[str, Any] = {"batch_prompts": 2, "group_size": 4, "max_refill": 0.0, "max_staleness": 0}
    defaults |= {"steps": 9, "max_skipped": 1.0, "temperature": 1.0, "seed": 0} | options
    rows = [Row(f"r{n}", ROW.messages, {"answer": "11"}) for n in range(8)]
    return Collector(made, Scorer(RewardSet([]), made.budget.completion), Sampler(rows, seed=0), **defaults)


def test_rollouts_that_are_cancelled_close_their_environments() -> None:
    class Slow(Sums):
        async def add(self, a: int, b: int) -> int:
            """Add.

            Args:
                a: One.
                b: The other.
            """
            self.ran.append("add")
            if len(self.ran) == 8:
                all_called.set()
            await asyncio.sleep(60)
            return a + b

    all_called = asyncio.Event()
    made = collector(episodes(Policy(ADD), Slow))

    async def run() -> None:
        waiting = asyncio.ensure_future(made.collect(1))
        await asyncio.wait_for(all_called.wait(), 10)
        made.close()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await made.episodes.aclose()

    producer = Producer()
    producer.run(run())
    assert producer.close()
    assert Slow.alive == 0


def test_groups_take_turns_where_few_environments_may_be_alive() -> None:
    most = 0

    class Few(Sums):
        def __init__(self) -> None:
            super().__init__()
            nonlocal most
            most = max(most, Few.alive)

    made = collector(episodes(Policy(ADD, SUBMIT), Few, max_concurrent=5), batch_prompts=4)
    batch = asyncio.run(made.collect(1))
    assert len(batch.groups) + len(batch.set_aside) == 4
    assert 4 <= most <= 5
    assert Few.alive == 0
    rollouts = asyncio.run(made.evaluate([ROW] * 3, temperature=0.0))
    assert [r.score.reward for (r,) in rollouts] == [1.5] * 3
