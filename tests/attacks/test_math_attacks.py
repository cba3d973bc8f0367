"""What a policy may write instead of the answer, and what it may write for it. The table only grows.

Each line is (what the completion states in its box, the reference, equal). `EQUAL` and `UNEQUAL` are about values,
`COMPLETIONS` about which part of a completion is its answer. Where plain math-verify differs, ours is right.
"""

import asyncio
import random
import time

import pytest

from palingenesis.rl.rewards.math import Math, Undecided, close_workers, compare, extract, golds

pytest.importorskip("math_verify", reason="needs the rl extra: pip install 'palingenesis[rl]'")

EQUAL = [
    # numbers
    ("42", "42"),
    ("42.", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("42.0", "42"),
    ("-0", "0"),
    ("0.0", "-0"),
    (".5", "0.5"),
    ("0.50", r"\frac{1}{2}"),
    ("−3", "-3"),
    ("–3", "-3"),
    ("1,234", "1234"),
    ("1,234,567.5", "1234567.5"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    (r"12,\!345", "12345"),
    ("1 234 567", "1234567"),
    ("１２", "12"),
    ("70000", "70,000"),
    # fractions and mixed numbers
    (r"\frac12", "1/2"),
    (r"\frac{1}2", "1/2"),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
    ("2/4", "1/2"),
    ("½", "1/2"),
    ("-1/2", r"-\frac{1}{2}"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"-\frac{-1}{2}", "1/2"),
    ("2 1/2", "2.5"),
    (r"2\frac{1}{2}", "5/2"),
    (r"2 \frac12", "2.5"),
    ("2½", "2.5"),
    (r"-1\frac{1}{2}", "-1.5"),
    ("1/3", "0.333333"),
    ("0.3333333", "1/3"),
    ("66.6667", "200/3"),
    ("0.33333333", "0.33333334"),
    # percentages, currency, degrees, units
    ("50%", "50"),
    (r"50\%", "0.5"),
    ("50 percent", "1/2"),
    ("12.5%", "0.125"),
    ("50%", "50%"),
    (r"\$18", "18"),
    ("$18", "18"),
    ("$18$", "18"),
    ("18 dollars", "18"),
    ("$1,234.50", "1234.5"),
    ("€5", "5"),
    ("-$5", "-5"),
    (r"45^\circ", "45"),
    ("45°", r"45^{\circ}"),
    ("45 degrees", "45"),
    (r"5 \text{ cm}", "5"),
    ("5 cm", "5 cm"),
    ("5cm", "5 cm"),
    (r"5\mathrm{cm}", "5 centimeters"),
    (r"12 \text{ cm}^2", "12 square centimeters"),
    ("60 miles per hour", "60 mph"),
    ("3 apples", "3"),
    (r"12\text{ km/h}", "12"),
    (r"2516_8", "2516_{8}"),
    ("5 million", "5,000,000"),
    (r"2.5 \text{ million dollars}", "2500000"),
    ("2 dozen", "24"),
    (r"\approx 5", "5"),
    # scientific notation and powers
    (r"1.5\times10^{3}", "1500"),
    ("1.5e3", "1500"),
    (r"1.5 \cdot 10^{3}", "1500"),
    ("1.5 × 10^3", "1500"),
    (r"3\times 10^{-4}", "0.0003"),
    ("10^{2}", "100"),
    ("2^{10}", "1024"),
    ("6.02e23", r"6.02\times 10^{23}"),
    # roots, constants, expressions
    (r"2\pi", "2π"),
    (r"2\pi", r"2 \cdot \pi"),
    (r"2\pi", "6.283185"),
    ("6.283185307", r"2\pi"),
    (r"\sqrt{8}", r"2\sqrt2"),
    ("2√2", r"\sqrt{8}"),
    ("2sqrt(2)", r"2\sqrt{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt[3]{8}", "2"),
    (r"\left(\frac{1}{2}\right)", "0.5"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x(x+1)", "x^2+x"),
    ("2x+3", "3+2x"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    (r"\log_2 8", "3"),
    ("2+2", "4"),
    ("3+2i", "2i+3"),
    (r"e^{2}", r"e^2"),
    # equations
    ("x=5", "5"),
    ("5", "x=5"),
    ("x = 5", "x=5.0"),
    (r"x = \frac{1}{2}", "0.5"),
    ("2+2=4", "4"),
    ("y=2x+1", "2x+1"),
    ("y=2x+1", "y=1+2x"),
    ("2x+3y=6", "3y+2x=6"),
    # tuples, intervals, sets
    ("(1,2)", "(1, 2)"),
    (r"\left(1,2\right)", "(1,2)"),
    ("(1/2, 3)", "(0.5,3)"),
    ("1, 2, 3", "1,2,3"),
    ("[1,2)", "[1, 2)"),
    (r"(-\infty, 3]", r"(-∞,3]"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\{1, 1, 2\}", r"\{1,2\}"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"x \in [1,2]", "[1,2]"),
    ("x<3", r"(-\infty,3)"),
    (r"x \ge 3", r"3 \le x"),
    (r"\pm 3", r"\{3,-3\}"),
    ("5 or 7", "7 or 5"),
    ("1,000, 2,000", "1000, 2000"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("3:4", "3 : 4"),
    (r"\emptyset", "∅"),
    # words and letters
    (r"\text{Monday}", "monday"),
    ("Monday", r"\textbf{Monday}"),
    ("No solution", "no solution"),
    (r"\text{(B)}", "B"),
    ("(C)", "C"),
    (r"\textbf{(B)}\ 5", "B"),
    (r"\textbf{(B)}\ 5", "5"),
    ("**42**", "42"),
    # identical, however large
    ("9^{9^{9^9}}", "9^{9^{9^9}}"),
    ("1" * 300, "1" * 300),
]

UNEQUAL = [
    ("41", "42"),
    ("-5", "5"),
    ("4.2", "42"),
    ("1.234", "1,234"),
    ("1/3", "0.33"),
    ("0.33333", "1/3"),
    ("3.14", r"\pi"),
    ("22/7", r"\pi"),
    ("0.0000001", "0.0000002"),
    ("1e-9", "2e-9"),
    ("123456.7", "123456.8"),
    ("1000000", "1000000.4"),
    ("e^{-50}", "e^{-60}"),
    ("10^{-20}", "10^{-21}"),
    ("10^{100}", "10^{101}"),
    ("2 1/2", "3/2"),
    (r"2\frac{1}{2}", "1"),
    ("50%", "5000%"),
    ("0.5%", "50%"),
    ("5 million", "5"),
    ("5 squared", "5"),
    ("5 thirds", "5"),
    ("5 " + "a" * 50 + "!", "6"),
    ("5 " + "a." * 28 + "!", "6"),
    ("5%", "0.5"),
    ("5 m", "5 km"),
    ("5 cm", r"5 \text{ cm}^2"),
    ("5 apples", "5 oranges"),
    ("$5", "5 euros"),
    ("5x", "5"),
    ("5", "5x"),
    (r"2\pi", "2"),
    (r"3\sqrt{2}", "3"),
    ("x^2", "2x"),
    ("x=5", "y=5"),
    ("x=5", "x=6"),
    ("x+1", "y+1"),
    # kinds
    ("1,2,3", "3,2,1"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2]", "[1,2)"),
    ("[1,2]", "1,2"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("5 or 7", "5"),
    ("5, 7", "5"),
    ("5", "5, 7"),
    ("(5)(7)", "5"),
    ("12", "1,2"),
    ("1,2", "12"),
    (r"\pm 3", "3"),
    (r"x \ge 3", "x > 3"),
    ("x<3", r"(-\infty,3]"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"),
    # words are not products of letters
    ("cab", "abc"),
    (r"\text{tac}", r"\text{cat}"),
    ("on", "no"),
    ("listen", "silent"),
    ("Monday", "Tuesday"),
    ("true", "false"),
    ("B", "C"),
    ("C", "c"),
    (r"\text{no solution}", "0"),
    # nothing, everything, nonsense
    ("", "0"),
    (" ", "0"),
    ("?", "0"),
    (r"\text{}", "0"),
    ("{}", "0"),
    ("nan", "5"),
    (r"\infty", "5"),
    ("0/0", "0"),
    ("1/0", r"\infty"),
    ("5 5", "5"),
    ("5 = 6", "5"),
    ("the answer is the reference", "5"),
    ("answer", "5"),
    ("x", "5"),
    ("x=x", "5"),
    ("0 1 2 3 4 5 6 7 8 9", "5"),
    ("1|2|3|4|5", "5"),
    (r"5\text{ or }6", "5"),
    (r"\color{red}5 \text{ or not}", "7"),
    ("__import__('os').getpid()", "1"),
    ("exec('x=5')", "5"),
    ("lambda: 5", "5"),
    (r"\sum_{n=1}^{5} n", "5"),
    ("[" * 500 + "5" + "]" * 500, "5"),
    ("(" * 3000, "5"),
    ("{" * 900 + "}" * 900, "5"),
    ("1" * 5000, "5"),
    ("1e999999999", "5"),
    ("5" + "0" * 390, "5"),
    (r"\frac{" * 100 + "1" + "}{2}" * 100, "5"),
    ("²" * 100, "5"),
    ("٥", "6"),
    ("5\u200b6", "5"),
    ("5,", "6"),
]

BOMBS = [
    "9^{9^{9^9}}",
    "(9^{9^9})!",
    r"10^{10^{10}}",
    r"\int_0^1 x^{x^{x^x}} dx",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^n}",
    r"(x+1)^{99999}",
    r"\binom{10^{9}}{5 \cdot 10^{8}}",
    r"99999999!",
    r"\prod_{n=1}^{10^{9}} n",
]

COMPLETIONS = [
    # (completion, reference, equal)
    (r"So \boxed{5}.", "5", True),
    (r"First \boxed{4}, no: \boxed{5}.", "5", True),
    (r"First \boxed{5}, no: \boxed{4}.", "5", False),
    (r"\boxed{1} and \boxed{2} and \boxed{3}", r"\{1,2,3\}", False),
    (r"\boxed{1}, \boxed{2}", "1,2", False),
    (r"\boxed{5} \boxed{}", "5", False),
    (r"\boxed{}", "0", False),
    (r"\boxed{5", "5", False),
    (r"It is 5. So \boxed{\frac{1}{2", "5", True),
    (r"\boxed{7} then \boxed{5", "7", True),
    (r"\boxed{\boxed{5}}", "5", True),
    (r"\fbox{5}", "5", True),
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
    (r"$$\boxed{5}$$ Answer: 6", "5", True),
    ("Answer: 5", "5", True),
    ("**Answer:** $5$", "5", True),
    ("Final Answer: 5 apples", "5", True),
    ("Answer: 4\nAnswer: 5", "5", True),
    ("Answer: 5\nAnswer: 4", "5", False),
    ("Answer:\n5", "5", True),
    ("Answer:", "5", False),
    ("5 or so. Answer:", "5", False),
    ("Answer: the total is 5 dollars", "5", True),
    ("Answer: 1 2 3 4 5 6", "5", False),
    ("so\n#### 5", "5", True),
    ("#### 70,000", "70000", True),
    ("There are 3 left, so the total is 5.", "5", True),
    ("There are 5 left, so the total is 3.", "5", False),
    ("It costs $5.", "5", True),
    ("It costs $1,250.50 in all", "1250.5", True),
    ("so we get 10-5", "-5", False),
    ("so x = -5.", "-5", True),
    ("about 1/2", "0.5", True),
    (r"Therefore $\frac{3}{4}$.", "0.75", True),
    (r"Therefore $3\sqrt{2}$.", "2", False),
    (r"Therefore $3\sqrt{2}$.", r"3\sqrt{2}", True),
    (r"so $2+3=5$.", "5", True),
    ("It rose by 50%.", "0.5", True),
    ("no number here", "5", False),
    ("", "5", False),
    ("x^2+1", "x^2+1", True),
    (r"\frac{1}{2}", "1/2", True),
    ("Monday", "Monday", True),
    ("v2a5", "5", False),
]


@pytest.fixture(scope="module", autouse=True)
def _workers():
    yield
    close_workers()


def score(completion: str, reference: object, seconds: float = 5.0) -> float:
    return asyncio.run(Math(timeout=seconds)(completion, answer=reference))


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal(answer: str, reference: str) -> None:
    assert score(rf"\boxed{{{answer}}}", reference) == 1.0


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_unequal(answer: str, reference: str) -> None:
    assert score(rf"\boxed{{{answer}}}", reference) == 0.0


@pytest.mark.parametrize(("completion", "reference", "equal"), COMPLETIONS)
def test_where_the_answer_stands(completion: str, reference: str, equal: bool) -> None:
    assert score(completion, reference) == float(equal)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_one_time_out(bomb: str) -> None:
    score(r"\boxed{\sqrt{16}}", "4")  # a worker is up
    began = time.monotonic()
    assert score(rf"\boxed{{{bomb}}}", "5", seconds=1.0) == 0.0
    assert time.monotonic() - began < 8
    assert score(r"\boxed{\sqrt{25}}", "5") == 1.0


def test_a_group_with_one_bomb_costs_it_once() -> None:
    async def group() -> list[float]:
        return await asyncio.gather(*(Math(timeout=1.0)(r"\boxed{8^{8^{8^8}}}", answer="5") for _ in range(32)))

    score(r"\boxed{\sqrt{16}}", "4")
    began = time.monotonic()
    assert asyncio.run(group()) == [0.0] * 32
    assert time.monotonic() - began < 6


def test_extraction_is_linear() -> None:
    """Text made to be slow to search: unclosed boxes, braces, dollars, digits, "Answer:"."""
    for text in (
        r"\boxed{" * 50_000,
        "{" * 200_000,
        "$" * 100_000,
        "1," * 100_000,
        "Answer: " * 50_000,
        "1 " * 100_000,
        "answer" + " " * 100_000,
        "answer:" + " " * 100_000,
        "5" + " " * 100_000,
        r"\frac" * 50_000,
    ):
        began = time.monotonic()
        extract(text)
        assert time.monotonic() - began < 2, text[:10]


@pytest.mark.parametrize(
    ("reference", "read"),
    [
        (18, ["18"]),
        (18.5, ["18.5"]),
        ("18", ["18"]),
        ("he has 3 * 6\n#### 18", ["18"]),
        (r"so \boxed{18}", ["18"]),
        (r"so $\boxed 3$.", ["3"]),
        (["18", "9+9"], ["18", "9+9"]),
        ('["18"]', ["18"]),
        ("Monday", ["Monday"]),
        ("", []),
        ("   ", []),
        (None, []),
        ([], []),
        (float("nan"), []),
        (r"\boxed{5", []),
        (r"\boxed{}", []),
        ("####", []),
        ("???", []),
        (r"\frac{1}{", []),
        ({"a": 1}, []),
        ("This is a long proof in many words that nobody could ever hope to compare with anything", []),
    ],
)
def test_references(reference: object, read: list[str]) -> None:
    assert golds(reference) == read


def test_random_soup_is_read_quickly_and_never_raises() -> None:
    """8,000 pairs of answer-like strings: each is decided or undecided, quickly, and the same both ways."""
    soup = random.Random(1)
    slowest = 0.0
    for _ in range(8_000):
        said, gold = ("".join(soup.choices(PIECES, k=soup.choice((1, 2, 3, 5, 8, 13, 40)))) for _ in range(2))
        began = time.process_time()
        verdicts = {decide(said, gold), decide(gold, said)}
        extract(said)
        golds(said)
        slowest = max(slowest, time.process_time() - began)
        assert len(verdicts) == 1, (said, gold)
    assert slowest < 0.5


@pytest.mark.parametrize(
    "piece", ["(", "1,", r"\pm", "{", r"\{1,", "x=", "1 or ", "(1 or ", r"\frac{1}", r"\text{", "a ", "1:", "²"]
)
def test_the_longest_text_is_read_quickly(piece: str) -> None:
    text = (piece * 4000)[:3999]
    began = time.process_time()
    decide(text, "5")
    decide(text, text + "1")
    assert time.process_time() - began < 1


PIECES = ["\\frac", "{", "}", "(", ")", "[", "]", "1", "2", "0", "5", ",", ".", ";", "+", "-", "/", "^", "_", "x", "y"]
PIECES += ["\\pi", "\\sqrt", "\\text{", "cm", "=", "<", "\\le", "\\cup", "\\pm", "\\{", "\\}", "$", "%", "e", "10^"]
PIECES += [
    " ",
    " or ",
    " and ",
    r"\times",
    "°",
    "½",
    "²",
    "−",
    "\\",
    r"\boxed{",
    "abc",
    "Monday",
    "⟨",
    "⟩",
    ":",
    "|",
    "!",
    "**",
]
PIECES += [
    "9" * 30,
    "million",
    "#### ",
    "Answer: ",
    "\n",
    r"\begin{pmatrix}",
    "&",
    r"\\",
    "\u200b",
    "٣",
    "１",
    "∞",
    "\ue000",
]


def decide(said: str, gold: str) -> bool | None:
    try:
        return compare(said, gold)
    except Undecided:
        return None


def test_any_reference_of_a_list_may_match() -> None:
    assert score(r"\boxed{9+9}", ["17", "18"]) == 1.0
    assert score(r"\boxed{19}", ["17", "18"]) == 0.0
