"""TRL's own reward functions, through `style: trl` and called directly, must give the same numbers."""

import asyncio
import time
from pathlib import Path

import pytest

from palingenesis.rl.config import RewardConfig
from palingenesis.rl.errors import ConfigError, RewardError
from palingenesis.rl.rewards import RewardSet, bind
from palingenesis.rl.types import Message, Outcome, Row, Sample

FRACTIONS = [r"\frac{1}{3}", "$4$", r"$\sqrt{2}$", "plain words", r"$(1,2)$", "12", r"$x^2+1$", r"$10\%$"]
SHAPES = [
    "<think>\nhm\n</think>\nIt is $\\boxed{%s}$.",
    "hm</think>$\\boxed{%s}$",
    "<think>hm $%s$",
    "The answer is $%s$.",
    "\\boxed{%s}",
]


def rows_and_samples(count: int = 100) -> list[Sample]:
    samples = []
    for number in range(count):
        solution = FRACTIONS[number % len(FRACTIONS)]
        guess = FRACTIONS[(number // 3) % len(FRACTIONS)].strip("$")
        raw = SHAPES[number % len(SHAPES)] % guess
        row = Row(
            f"r{number}", (Message("user", f"q{number}"),), {"solution": solution, "level": number}, ("prompt", "q")
        )
        ids = tuple(n % (2 + number % 7) for n in range(number))
        opened = "</think>" in raw and "<think>" not in raw
        messages = (*row.messages, Message("assistant", raw))
        samples.append(Sample(row, messages, raw, "", raw, completion_ids=ids, reasoning_open=opened))
    return samples


def trl(fn: str, **args: object) -> RewardConfig:
    return RewardConfig(fn=fn, args=args, style="trl")


def direct(samples: list[Sample]) -> dict[str, list[float | None]]:
    import trl.rewards as theirs

    completions = []
    for sample in samples:
        content = "<think>\n" * sample.reasoning_open + sample.raw
        completions.append([{"role": "assistant", "content": content}])
    given = {
        "prompts": [[m.to_dict() for m in s.row.messages] for s in samples],
        "completions": completions,
        "completion_ids": [list(s.completion_ids) for s in samples],
        "solution": [s.row.columns["solution"] for s in samples],
        "level": [s.row.columns["level"] for s in samples],
        "trainer_state": None,
    }
    return {
        "accuracy": theirs.accuracy_reward(**given),
        "reasoning": theirs.reasoning_accuracy_reward(**given),
        "format": theirs.think_format_reward(**given),
        "overlong": theirs.get_soft_overlong_punishment(60, 20)(**given),
        "repetition": theirs.get_repetition_penalty_reward(ngram_size=2)(**given),
        "cosine": theirs.get_cosine_scaled_reward(max_len=80)(**given),
    }


def test_trl_functions_give_trls_numbers_on_100_rows() -> None:
    pytest.importorskip("trl", reason="needs trl==1.16.0")
    pytest.importorskip("math_verify", reason="needs the rl extra")
    samples = rows_and_samples()
    rewards = RewardSet.from_config(
        {
            "accuracy": trl("trl.rewards:accuracy_reward"),
            "reasoning": trl("trl.rewards:reasoning_accuracy_reward"),
            "format": trl("trl.rewards:think_format_reward"),
            "overlong": trl("trl.rewards:get_soft_overlong_punishment", max_completion_len=60, soft_punish_cache=20),
            "repetition": trl("trl.rewards:get_repetition_penalty_reward", ngram_size=2),
            "cosine": trl("trl.rewards:get_cosine_scaled_reward", max_len=80),
        }
    )
    try:
        scores = asyncio.run(rewards.score(samples))
    finally:
        rewards.close()
    expected = direct(samples)
    for name, values in expected.items():
        assert [score.rewards[name] for score in scores] == values, name
        assert len({str(value) for value in values}) > 1, f"{name} is the same everywhere: the rows test nothing"


FILE = """
import asyncio, signal, threading, time

def shapes(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    assert threading.current_thread() is threading.main_thread()
    signal.alarm(0)
    log_extra("a", [1]); log_metric("b", 1.0)
    assert trainer_state is None
    assert prompts[0] == [{"role": "user", "content": "q0"}], prompts
    assert sorted(columns) == ["level", "solution"], columns
    return [float(c[-1]["content"].startswith("<think>")) for c in completions]

async def later(completions, level, **kwargs):
    await asyncio.sleep(0)
    return [None if n % 2 else n for n in level]

def slow(completions, **kwargs):
    time.sleep(60)

def broken(completions, **kwargs):
    raise KeyError("oh")

def short(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["a"] * len(completions)

def skips(completions, **kwargs):
    from palingenesis.rl import SkipSample
    raise SkipSample("down")

def wants(completions, solutoin):
    return [1.0] * len(completions)

def own(prompt, completions):
    return [float(p == "q") for p in prompt]

def dies(completions, **kwargs):
    import os
    os._exit(1)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def run(file: str, name: str, samples: list[Sample], **args: object):
    rewards = RewardSet.from_config({"r": trl(f"{file}:{name}", **args)})
    try:
        rewards.check([sample.row for sample in samples])
        return asyncio.run(rewards.score(samples))
    finally:
        rewards.close()


def test_shapes_async_and_own_column(file: str) -> None:
    samples = rows_and_samples(5)
    assert [s.reward for s in run(file, "shapes", samples)] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [s.rewards["r"] for s in run(file, "later", samples)] == [0.0, None, 2.0, None, 4.0]
    assert [s.reward for s in run(file, "own", samples)] == [1.0] * 5


def test_the_opened_block_is_restored_when_it_was_never_closed(file: str) -> None:
    row = Row("1", (Message("user", "q0"),), {"solution": "1", "level": 0}, ("prompt", "q0"))
    cut = Sample(row, row.messages, "", "still thinking", "still thinking", "length", reasoning_open=True)
    plain = Sample(row, row.messages, "an answer", "", "an answer")
    assert [s.reward for s in run(file, "shapes", [cut, plain])] == [1.0, 0.0]


def test_failures(file: str) -> None:
    samples = rows_and_samples(3)
    began = time.monotonic()
    late = run(file, "slow", samples, timeout=1)
    assert [s.outcome for s in late] == [Outcome.SKIPPED] * 3
    assert late[0].skip_reason == "no answer within 1 s"
    assert time.monotonic() - began < 15
    assert run(file, "skips", samples)[0].skip_reason == "down"
    assert run(file, "dies", samples)[0].outcome is Outcome.SKIPPED
    with pytest.raises(RewardError, match=r"reward 'r' failed on a batch of 3 samples .*KeyError: 'oh'") as caught:
        run(file, "broken", samples)
    assert "mine.py" in str(caught.value.__cause__.__notes__)
    with pytest.raises(RewardError, match="returned 1 values for 3 samples"):
        run(file, "short", samples)
    with pytest.raises(RewardError, match="'a'"):
        run(file, "words", samples)
    with pytest.raises(RewardError, match=r"asks for 'solutoin' \(did you mean 'solution'\?\)"):
        run(file, "wants", samples)


def test_what_cannot_be_loaded(file: str) -> None:
    for fn, args, message in (
        (f"{file}:shape", {}, "did you mean 'shapes'"),
        ("nowhere:f", {}, "cannot import"),
        (f"{file}:shapes", {"timeout": 0}, "args.timeout"),
        (f"{file}:short", {"foo": 1}, "rewards.r.args.foo"),
    ):
        with pytest.raises(ConfigError, match=message):
            bind("r", fn, args=args, style="trl")
    with pytest.raises(ConfigError, match="named in the config"):
        bind("r", print, style="trl")
