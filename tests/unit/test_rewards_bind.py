"""What a reward function receives for the names it asks for, and what becomes of whatever it does."""

import asyncio
import functools
import itertools
import threading
import time

import pytest

from palingenesis.rl.config import RewardConfig
from palingenesis.rl.errors import ConfigError, DataError, RewardError, SkipSample
from palingenesis.rl.rewards import RewardSet, bind
from palingenesis.rl.types import Message, Outcome, Row, Sample


def make_row(number: int = 0, **columns: object) -> Row:
    prompt = (Message("system", "Be brief."), Message("user", f"question {number}"))
    own = ("messages", [{"role": "user", "content": f"question {number}"}])
    return Row(f"r{number}", prompt, {"answer": "5", **columns}, own, source=f"rows.jsonl:{number + 1}")


def make_sample(number: int = 0, completion: str = "5", **columns: object) -> Sample:
    row = make_row(number, **columns)
    turns = (*row.messages, Message("assistant", completion))
    return Sample(row, turns, completion, "because", f"because</think>{completion}", "length", (1, 2), "ENV", "BOX")


def score(*functions: object, samples: list[Sample] | None = None, **kwargs: object):
    rewards = RewardSet.from_config({}, functions, **kwargs)
    try:
        return asyncio.run(rewards.score(samples if samples is not None else [make_sample(0), make_sample(1)]))
    finally:
        rewards.close()


def test_per_sample_names() -> None:
    seen = []

    def f(completion, reasoning, prompt, messages, completion_ids, finish_reason, env, sandbox, answer, **row):
        seen.append(
            (completion, reasoning, prompt, messages[-1], completion_ids, finish_reason, env, sandbox, answer, row)
        )
        return 1

    assert score(f, samples=[make_sample(0, other=7)])[0].reward == 1.0
    turn = {"role": "assistant", "content": "5"}
    assert seen == [("5", "because", "question 0", turn, [1, 2], "length", "ENV", "BOX", "5", {"other": 7})]


def test_batched_names_and_rest() -> None:
    seen = []

    def f(prompts, completions, reasonings, finish_reasons, envs, messages, completion_ids, answer, sandbox, **row):
        seen.append((prompts, completions, reasonings, finish_reasons, envs, completion_ids, answer, sandbox, row))
        assert [m[-1]["content"] for m in messages] == completions
        return [0.25, None]

    scores = score(f, samples=[make_sample(0, "a", x=1), make_sample(1, "b")])
    assert [s.rewards for s in scores] == [{"f": 0.25}, {"f": None}]
    assert scores[1].outcome is Outcome.SKIPPED
    assert seen == [
        (["question 0", "question 1"], ["a", "b"], ["because"] * 2, ["length"] * 2, ["ENV"] * 2, [[1, 2]] * 2,
         ["5", "5"], "BOX", {"x": [1, None]})
    ]  # fmt: skip


def test_trl_signature_is_batched() -> None:
    def correct(prompts, completions, answer):
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    assert [s.reward for s in score(correct, samples=[make_sample(0, "it is 5"), make_sample(1, "4")])] == [1.0, 0.0]


def test_the_prompts_own_column_by_name_only() -> None:
    def f(messages, **row):  # `messages` is the whole conversation, not the column
        return float(len(messages) == 3 and "messages" not in row)

    def g(question, **row):
        return float(question == "why?" and "question" not in row)

    row = Row("1", (Message("user", "why?"),), {"answer": "5"}, ("question", "why?"))
    asked = Sample(row, row.messages, "5", "", "5")
    assert score(f)[0].reward == 1.0
    assert score(g, samples=[asked])[0].reward == 1.0


def test_async_ones_run_at_once_and_threads_do_not_block_the_loop() -> None:
    async def slow(completion):
        await asyncio.sleep(0.3)
        return 1

    def blocking(completion):
        time.sleep(0.3)
        return 1

    async def awaitable_from_sync():
        return 2

    def hidden(completion):
        return awaitable_from_sync()

    ticks = []

    async def watch(rewards: RewardSet) -> list:
        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.01)

        ticker = asyncio.ensure_future(tick())
        scores = await rewards.score([make_sample(i) for i in range(20)])
        ticker.cancel()
        return scores

    rewards = RewardSet.from_config({}, [slow, blocking, hidden])
    began = time.monotonic()
    scores = asyncio.run(watch(rewards))
    assert time.monotonic() - began < 2.0
    assert all(s.reward == 4.0 for s in scores)
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.25
    assert rewards.seconds["slow"] >= 0.3
    rewards.close()


def test_callable_objects_classes_and_builders(tmp_path) -> None:
    class Longer:
        def __init__(self, than: int = 1) -> None:
            self.than = than

        def __call__(self, completion):
            return float(len(completion) > self.than)

    def build(than: int):
        return lambda completion: float(len(completion) > than)

    async def call(reward, completion):
        rewards = RewardSet([reward])
        return (await rewards.score([make_sample(0, completion)]))[0].reward

    for fn, args in ((Longer, {"than": 3}), (build, {"than": 3}), (Longer(3), {})):
        reward = bind("r", fn, args=args)
        assert asyncio.run(call(reward, "abcd")) == 1.0
        assert asyncio.run(call(reward, "abc")) == 0.0
    file = tmp_path / "mine.py"
    file.write_text("def f(completion, answer, factor=1.0):\n    return factor * (answer in completion)\n")
    assert asyncio.run(call(bind("r", f"{file}:f", args={"factor": 2}), "5")) == 2.0


def test_weights_none_and_partial() -> None:
    def one(completion):
        return 1

    def nothing(completion):
        return None

    config = {"w": RewardConfig(fn="exact", weight=0.5)}
    named = functools.partial(one)
    rewards = RewardSet.from_config(config, [named, nothing])
    assert rewards.listing == "0.5 x w, one, nothing"
    (score_,) = asyncio.run(rewards.score([make_sample()]))
    assert score_.rewards == {"w": 1.0, "one": 1.0, "nothing": None}
    assert score_.reward == 1.5
    (with_env,) = asyncio.run(rewards.score([make_sample()], extra=[{"env/ok": 0.25}]))
    assert with_env.reward == 1.75
    assert with_env.rewards["env/ok"] == 0.25
    rewards.close()
    (skipped,) = score(nothing, samples=[make_sample()])
    assert (skipped.outcome, skipped.reward, skipped.skip_reason[:18]) == (Outcome.SKIPPED, None, "no reward applies:")


def test_skip_sample_names_the_reward_and_keeps_the_others() -> None:
    def outage(completion):
        if completion == "down":
            raise SkipSample("the service is down")
        return 1

    def fine(completion):
        return 0.5

    first, second = score(outage, fine, samples=[make_sample(0, "down"), make_sample(1, "up")])
    assert (first.reward, first.skip_source, first.skip_reason) == (None, "outage", "the service is down")
    assert first.rewards == {"outage": None, "fine": 0.5}
    assert second.reward == 1.5


def test_a_batched_skip_skips_every_sample() -> None:
    def f(completions):
        raise SkipSample

    assert [s.outcome for s in score(f)] == [Outcome.SKIPPED] * 2


@pytest.mark.parametrize("value", ["1", [1.0], float("nan"), float("inf"), {"a": 1}, object(), 1j, b"1"])
def test_what_is_no_number_is_a_defect(value: object) -> None:
    def f(completion):
        return value

    with pytest.raises(RewardError, match=r"reward 'f' returned .* row r0 \(rows.jsonl:1\)"):
        score(f)


@pytest.mark.parametrize("value", [None, 1.0, "ab", [1.0], [1, 2, 3], {"a": 1, "b": 2}, [1, "x"], [1, float("nan")]])
def test_what_is_no_list_of_numbers_is_a_defect(value: object) -> None:
    def f(completions):
        return value

    with pytest.raises(RewardError, match="reward 'f' returned"):
        score(f)


def test_true_is_one_and_array_scalars_are_numbers() -> None:
    import numpy

    def f(completion):
        return True

    def g(completions):
        return numpy.array([0.5, 0.25])

    assert [s.reward for s in score(f, g)] == [1.5, 1.25]


@pytest.mark.parametrize("kind", [ValueError, KeyError, SystemExit, AssertionError])
def test_any_other_exception_stops_with_names(kind: type[BaseException]) -> None:
    def f(completion):
        raise kind("boom")

    with pytest.raises(
        RewardError, match=rf"reward 'f' failed on row r0 .*{kind.__name__}: .*boom.*test_rewards_bind"
    ) as e:
        score(f)
    assert isinstance(e.value.__cause__, kind)


def test_signals_in_threads_get_a_hint() -> None:
    def f(completion):
        from math_verify import parse

        return len(parse(completion))

    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="style: trl"):
        score(f)


def test_an_unknown_argument_names_reward_row_and_the_near_one() -> None:
    def f(completion, anwser):
        return 1

    with pytest.raises(RewardError, match=r"'f' asks for 'anwser' \(did you mean 'answer'\?\).*rows.jsonl:1.*messages"):
        score(f)
    with pytest.raises(RewardError, match="anwser"):
        RewardSet.from_config({}, [f]).check([make_row()])


def test_signatures_that_cannot_be_served() -> None:
    def both(completion, completions):
        return 1

    def positional(completion, /):
        return 1

    with pytest.raises(RewardError, match=r"'completion' .* 'completions'"):
        bind("r", both)
    with pytest.raises(RewardError, match="positional-only"):
        bind("r", positional)
    with pytest.raises(ConfigError, match=r"has no name|needs a name"):
        RewardSet.from_config({}, [lambda completion: 1])


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        ("math", {"feild": "answer"}, r"rewards.r.args.feild: .* \(did you mean 'field'\?\)"),
        ("regex", {}, r"rewards.r.args.pattern is missing"),
        ("regex", {"pattern": "("}, r"rewards.r.args: .*not a regular expression"),
        ("regex", {"pattern": "a", "field": "answer"}, "first group"),
        ("qa_match", {"metric": "bleu"}, "use em or f1"),
        ("judge", {"url": "nope", "model": "m"}, "give the endpoint's address"),
        ("judge", {"url": "http://x", "model": "m", "template": "hi"}, r"\{completion\}"),
        ("maths", {}, r"did you mean 'math'"),
        ("nowhere.module:f", {}, "cannot import"),
    ],
)
def test_config_errors_name_the_option(fn: str, args: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bind("r", fn, args=args)


def test_arguments_of_functions_are_bound_by_name() -> None:
    def f(completion, bonus, **row):
        return bonus

    def g(completion, completion_ids):
        return 1

    assert bind("r", f, args={"bonus": 3}).asks.constants == {"bonus": 3}
    with pytest.raises(ConfigError, match=r"rewards.r.args.bonsu.*did you mean 'bonus'"):
        bind("r", f, args={"bonsu": 3})
    with pytest.raises(ConfigError, match="comes from the sample"):
        bind("r", g, args={"completion_ids": []})


def test_two_rewards_of_one_name() -> None:
    def exact(completion):
        return 1

    with pytest.raises(ConfigError, match=r"rewards.exact is in the config and"):
        RewardSet.from_config({"exact": RewardConfig(fn="exact")}, [exact])


def test_verifier_restricts_without_calling() -> None:
    calls = []

    def a(completion):
        calls.append("a")
        return 1

    def b(completions):
        calls.append(len(completions))
        return [2] * len(completions)

    rows = [Row("1", (Message("user", "x"),), {}, verifier=("a",)), Row("2", (Message("user", "x"),), {})]
    samples = [Sample(row, row.messages, "c", "", "c") for row in rows]
    scores = score(a, b, samples=samples)
    assert [s.rewards for s in scores] == [{"a": 1.0, "b": None}, {"a": 1.0, "b": 2.0}]
    assert sorted(map(str, calls)) == ["1", "a", "a"]
    with pytest.raises(DataError, match=r"row 1: column 'verifier' names 'math' .*|names 'math'"):
        RewardSet.from_config({}, [a]).check([Row("1", (), {}, verifier=("math",))])


def test_unreadable_references_are_dropped_named_and_bounded() -> None:
    rewards = RewardSet.from_config({"m": RewardConfig(fn="math")})
    rows = [make_row(i) for i in range(99)] + [make_row(99, answer="???")]
    kept, dropped = rewards.readable(rows)
    assert len(kept) == 99
    assert str(dropped[0]) == "row r99 (rows.jsonl:100): column 'answer' holds '???', which reward 'm' cannot read"
    with pytest.raises(DataError, match=r"10 of 100 rows .*rows.jsonl:1\b"):
        rewards.readable([make_row(i, answer="") for i in range(10)] + rows[:90])


def test_a_missing_reference_column_names_row_and_the_near_one() -> None:
    rewards = RewardSet.from_config({"m": RewardConfig(fn="math", args={"field": "anser"})})
    with pytest.raises(DataError, match=r"rows.jsonl:1.*no column 'anser' \(did you mean 'answer'\?\)"):
        rewards.check([make_row()])


def test_a_failure_cancels_the_others_and_no_thread_is_left_waiting() -> None:
    cancelled = threading.Event()

    async def endless(completion):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def broken(completion):
        raise ValueError("boom")

    began = time.monotonic()
    with pytest.raises(RewardError):
        score(endless, broken)
    assert cancelled.is_set()
    assert time.monotonic() - began < 5


WEIRD = [KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit, asyncio.CancelledError, BaseException]


@pytest.mark.parametrize("kind", WEIRD, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["sync", "async", "batched", "generator"])
def test_nothing_a_reward_raises_hangs_or_escapes(how: str, kind: type[BaseException]) -> None:
    def sync(completion):
        raise kind("odd")

    async def later(completion):
        await asyncio.sleep(0)
        raise kind("odd")

    def batched(completions):
        raise kind("odd")

    def generator(completions):
        yield 1.0
        raise kind("odd")

    function = {"sync": sync, "async": later, "batched": batched, "generator": generator}[how]
    if kind is StopIteration and how in ("async", "generator"):
        return  # Python turns it into a RuntimeError by itself
    with pytest.raises(RewardError, match=rf"{function.__name__}.*{kind.__name__}"):
        score(function)


def test_a_generator_may_skip() -> None:
    def generator(completions):
        raise SkipSample("away")
        yield

    assert {s.outcome for s in score(generator)} == {Outcome.SKIPPED}


def test_a_reward_that_changes_its_columns_changes_nobody_elses() -> None:
    def counts(tags, **row):
        tags.append("x")
        row["more"].append("x")
        return len(tags)

    sample = make_sample(0, tags=["a"], more=[])
    assert [s.reward for s in score(counts, samples=[sample] * 4)] == [2.0] * 4
    assert sample.row.columns["tags"] == ["a"]
    assert sample.row.columns["more"] == []
