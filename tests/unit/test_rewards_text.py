"""The rewards that compare text."""

import time

import pytest

from palingenesis.rl.rewards.text import BoxedChoice, Choice, Exact, QAMatch, Regex, references
from palingenesis.rl.types import Row


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("5", "5", 1),
        (" 5\n", "5", 1),
        ("5", " 5 ", 1),
        ("5.0", "5", 0),
        ("It is 5", "5", 0),
        ("b", ["a", "b"], 1),
        ("5", 5, 1),
    ],
)
def test_exact(completion: str, answer: object, value: int) -> None:
    assert Exact()(completion, answer=answer) == value


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("The answer is C.", "C"),
        ("the answer is (C)", "C"),
        ("Answer: C", "C"),
        ("**Answer:** C", "C"),
        ("Answer: **C**", "C"),
        ("I pick (C)", "C"),
        ("so **C**", "C"),
        ("**C.** Paris", "C"),
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{C}}", "C"),
        ("Option A is wrong, B too. The answer is C", "C"),
        ("The answer is B. No: the answer is C.", "C"),
        ("(A) is tempting but (C)", "C"),
        ("C", "C"),
        ("It must be C", "C"),
        ("A dog. I think C", "C"),
        ("The correct option is C", "C"),
        ("Option C", "C"),
        ("A", "A"),
        ("Answer I cannot", None),
        ("A dog and I agree", None),
        ("", None),
        ("Cats", None),
        ("answer:" + " " * 50_000 + "x", None),
    ],
)
def test_choice(completion: str, letter: str | None) -> None:
    for candidate in "ABCDI":
        assert Choice()(completion, answer=candidate) == float(candidate == letter)


@pytest.mark.parametrize("gold", ["C", "(C)", "c", "C.", "C) Paris", r"\text{C}", ["B", "C"]])
def test_choice_references(gold: object) -> None:
    assert Choice()("The answer is C", answer=gold) == 1.0
    assert BoxedChoice()(r"\boxed{C}", answer=gold) == 1.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"\boxed{C}", 1),
        (r"\boxed{(C)}", 1),
        (r"\boxed{\text{(C) Paris}}", 1),
        (r"\boxed{c}", 1),
        (r"\boxed{A} then \boxed{C}", 1),
        (r"\boxed{C} then \boxed{A}", 0),
        (r"\boxed{C} \boxed{}", 0),
        (r"\boxed{C", 0),
        ("C", 0),
        (r"\boxed{Cat}", 0),
        (r"\boxed{ABCD}", 0),
        (r"\boxed{" + " " * 50_000 + "}", 0),
    ],
)
def test_boxed_choice(completion: str, value: int) -> None:
    assert BoxedChoice()(completion, answer="C") == value


@pytest.mark.parametrize(
    ("completion", "answer", "em", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1, 1),
        ("blah Answer: Eiffel Tower", "the Eiffel Tower", 1, 1),
        (r"blah \boxed{\text{Eiffel Tower}}", "Eiffel Tower", 1, 1),
        ("Answer: Rome. Answer: Paris", "Paris", 1, 1),
        ("Paris in France", "Paris", 0, 0.5),
        ("Rome", "Paris", 0, 0),
        ("", "Paris", 0, 0),
        ("Paris", ["Rome", "Paris"], 1, 1),
        ("Paris", {"text": ["Paris"], "answer_start": [3]}, 1, 1),
        ("Paris", {"value": "Rome", "aliases": ["Paris"]}, 1, 1),
        ("the", "the", 0, 0),
    ],
)
def test_qa_match(completion: str, answer: object, em: float, f1: float) -> None:
    assert QAMatch()(completion, answer=answer) == em
    assert QAMatch(metric="f1")(completion, answer=answer) == f1


def test_regex() -> None:
    assert Regex(r"\d+")("a 1") == 1.0
    assert Regex(r"\d+")("a") == 0.0
    last = Regex(r"=\s*(\d+)", field="answer")
    assert last("x = 4, x = 5", answer=5) == 1.0
    assert last("x = 5, x = 4", answer=5) == 0.0
    assert last("nothing", answer=5) == 0.0


def test_a_pattern_that_explodes_costs_its_time_limit() -> None:
    began = time.monotonic()
    assert Regex(r"(a|aa|a?)+$", timeout=0.3)("a" * 60 + "b") in (0.0, 1.0)
    assert Regex(r"^(\w+\s?)*$", timeout=0.3)("word " * 40 + "!") == 0.0
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("reward", "value", "fine"),
    [
        (Exact(), "5", True),
        (Exact(), "  ", False),
        (Exact(), None, False),
        (Choice(), "C", True),
        (Choice(), "Paris", False),
        (Choice(), 3, False),
        (QAMatch(), "Paris", True),
        (QAMatch(), "the", False),
        (QAMatch(), [], False),
        (Regex("(a)", field="answer"), "", False),
        (Regex("a"), "", True),
    ],
)
def test_readable_references(reward, value: object, fine: bool) -> None:
    assert (reward.check_reference(Row("1", (), {"answer": value})) is None) == fine


def test_references() -> None:
    assert references(["a", ["b", 3]]) == ["a", "b", "3"]
    assert references(True) == ["True"]
    assert references(None) == []
