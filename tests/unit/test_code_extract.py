"""Where an answer's program is, what a prompt's code gives, and how a function's body continues it."""

from __future__ import annotations

import ast
import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from palingenesis.rl.rewards.grading.extract import (
    answer_block,
    complete,
    defined,
    defines,
    helpers_of,
    parse,
    prompt_code,
)

# (completion, the program in it)
ANSWERS: list[tuple[str, str | None]] = [
    ("", None),
    ("print(1)", None),
    ("`print(1)`", None),
    ("``` print(1) ```", None),
    ("```python print(1)```", None),
    ("```python\nprint(1)\n```", "print(1)\n"),
    ("```py\nprint(1)\n```", "print(1)\n"),
    ("```python3\nprint(1)\n```", "print(1)\n"),
    ("```PYTHON\nprint(1)\n```", "print(1)\n"),
    ("```Py title=a.py\nprint(1)\n```", "print(1)\n"),
    ("``` python\nprint(1)\n```", "print(1)\n"),
    ("```\nprint(1)\n```", "print(1)\n"),
    ("~~~python\nprint(1)\n~~~", "print(1)\n"),
    ("````python\nprint(1)\n````", "print(1)\n"),
    ("```python\nprint(1)\n`````  ", "print(1)\n"),
    ("```python\r\nprint(1)\r\nx = 2\r\n```\r\n", "print(1)\nx = 2\n"),
    ("```python\n```", ""),
    # other languages
    ("```bash\nls\n```", None),
    ("```python2\nprint 1\n```", None),
    ("```pycon\n>>> 1\n```", None),
    ("```json\n{}\n```\n```python\nx\n```", "x\n"),
    ("```python\nx\n```\n```text\n5\n```", "x\n"),
    # what has no tag is the program only where nothing has one
    ("```python\nx\n```\n```\n5\n```", "x\n"),
    ("```py\nx\n```\nprints\n```\n5\n```\nand\n~~~\n6\n~~~", "x\n"),
    ("```\n5\n```\n```python\nx\n```\n```\n6\n```", "x\n"),
    ("```\nx\n```\n```\ny\n```", "y\n"),
    ("```\nx\n```\n```text\n5\n```", "x\n"),
    ("```\nx\n```\n```python\ny", "x\n"),  # a fence that is cut off is none
    # the last closed one
    ("```python\na\n```\nor\n```python\nb\n```", "b\n"),
    ("```python\na\n```\nor\n```python\nb", "a\n"),
    ("```python\na", None),
    ("```python\na\n``", None),
    ("```python\na\n~~~", None),
    ("````python\na\n```\n", None),
    ("````python\n```\na\n```\n````", "```\na\n```\n"),
    ("```python\na\n``` done", None),  # a closing fence stands alone
    ("text ```python\na\n```", None),
    ("```python\nx = 1\n```python\ny = 2\n```", "x = 1\n```python\ny = 2\n"),
    # indentation
    ("1. So:\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
    ("   ```python\n   a\n b\n   ```", "a\nb\n"),
    (
        '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```',
        'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
    ),
    # what is inside stays as it is
    ("```python\n\n\nx = '`'  \n\n```", "\n\nx = '`'  \n\n"),
    ("```python\nx = '\x0c\u2028'\n```", "x = '\x0c\u2028'\n"),
    ("```python\n\tx\n```", "\tx\n"),
]


@pytest.mark.parametrize(("completion", "program"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers(completion: str, program: str | None) -> None:
    assert answer_block(completion) == program


@pytest.mark.parametrize(
    "text",
    [
        "`" * 1_000_000,
        "```" + " " * 1_000_000 + "x",
        " " * 1_000_000 + "```",
        "```\n" * 300_000,
        "~~~`\n" * 300_000,
        "x" + " " * 1_000_000 + "y",
        "x" + " " * 1_000_000 + "==",
        "(" + "x " * 500_000 + ")" + " " * 500_000 + "y",
        "x=" * 500_000 + "=",
        "x:" * 500_000,
        "x;" * 300_000,
        "'\\" * 300_000 + '"' + "\\'" * 300_000,
        "x = 1;" + "'\"" * 300_000,
        "import (" * 200_000,
        "from x import (\n" * 100_000,
        "import" + " " * 1_000_000 + "x",
        "from" + " x" * 300_000,
        "import " + "x," * 300_000,
        "def" + " " * 1_000_000 + "(",
        "\\\n" * 500_000,
    ],
    ids=range(20),
)
def test_hostile_completions_are_cheap(text: str) -> None:
    began = time.perf_counter()
    answer_block(text)
    defined(text)
    complete(text, STUB, "f")
    assert time.perf_counter() - began < 3.0


STUB = 'import math\n\n\ndef area(r):\n    """The area of a circle."""\n'
FENCED = f"Complete this function.\n\n```python\n{STUB}```\n\nAnswer with the whole function."


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (STUB, STUB),
        (FENCED, STUB),
        ("Write a function that adds.", ""),
        ("sum", ""),  # Python, but it defines nothing
        ("```\nassert f(1) == 2\n```", ""),
        ("```python\ndef f(x):\n    pass\n```\nFor example:\n```python\n>>> f(1)\n```", "def f(x):\n    pass\n"),
        ("```python\ndef f(x):\n```", "def f(x):\n"),
        ("```json\n{}\n```", ""),
        ("```python\ndef f(x)\n```", ""),
        ("", ""),
        ("(" * 10_000, ""),
    ],
    ids=range(11),
)
def test_the_code_of_a_prompt(prompt: str, code: str) -> None:
    assert prompt_code(prompt) == code


@pytest.mark.parametrize(
    ("code", "helpers"),
    [
        ("", ""),
        (STUB, "import math"),
        ("def f(x):\n    return x\n\ndef g(x):\n", "def f(x):\n    return x"),
        ("def f(x):\n    ...\ndef g(x):\n    pass\ndef h(x):\n    raise NotImplementedError", ""),
        ("N = 3\nx: int = 4\nprint(N)\nfor i in range(3):\n    pass\nimport os", "N = 3\nx: int = 4\nimport os"),
        (
            "class Node:\n    def __init__(self, x):\n        self.x = x",
            "class Node:\n\n    def __init__(self, x):\n        self.x = x",
        ),
        ("class Stack:\n    def push(self, x):\n        '''Push.'''", ""),
        ("class Full(Exception):\n    pass", "class Full(Exception):\n    pass"),
        (
            "from typing import List\n\n@cache\ndef f(x):\n    return x\n",
            "from typing import List\n\n@cache\ndef f(x):\n    return x",
        ),
    ],
    ids=range(9),
)
def test_what_a_prompt_gives(code: str, helpers: str) -> None:
    assert helpers_of(code).replace("\n\n", "\n") == helpers.replace("\n\n", "\n")


WHOLES = [
    "from shapes import area\n",
    "from shapes import disc as area\n",
    "from shapes import (\n    side,\n    disc as area,  # round\n)\n",
    "from shapes import side, \\\n    area\n",
    "import area\n",
    "import shapes.disc as area\n",
    "import math; area = lambda r: r\n",
    "x = 'a;b'; from shapes import area  # ';'\n",
    "disc = area = lambda r: r\n",
    "disc, area = make()\n",
    "(disc, area) = make()\n",
    "area: Callable[[float], float] = lambda r: r\n",
    "class area:\n    pass\n",
    "if True:\n    def area(r):\n        return r\n",
]
WHOLE = "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (WHOLE, WHOLE),
        ("    return math.pi * r * r\n", STUB.rstrip() + "\n    return math.pi * r * r\n"),
        ("return math.pi * r * r\n", STUB.rstrip() + "\n    return math.pi * r * r\n"),
        ("\n    x = r\n    return x\n", STUB.rstrip() + "\n\n    x = r\n    return x\n"),
        ("if r:\n    return 1\nreturn 2\n", STUB.rstrip() + "\n    if r:\n        return 1\n    return 2\n"),
        ("area = lambda r: r\n", "area = lambda r: r\n"),
        (
            "class Solution:\n    def area(self, r):\n        return r\n",
            "class Solution:\n    def area(self, r):\n        return r\n",
        ),
        ("async def area(r):\n    return r\n", "async def area(r):\n    return r\n"),
        (
            "    return half(r)\n\ndef half(r):\n    return r\n",
            STUB.rstrip() + "\n    return half(r)\n\ndef half(r):\n    return r\n",
        ),
        # whole, in other words than `def`
        *((whole, whole) for whole in WHOLES),
        # an inner function that has the name
        (
            "    def area(r):\n        return r\n    return area(r)\n",
            STUB.rstrip() + "\n    def area(r):\n        return r\n    return area(r)\n",
        ),
    ],
    ids=range(10 + len(WHOLES)),
)
def test_a_body_continues_the_prompt_and_a_whole_function_replaces_it(answer: str, program: str) -> None:
    assert complete(answer, STUB, "area") == program
    assert complete(answer, "", "area") == answer
    assert complete(answer, STUB, "") == answer


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        ("s = 0\n    for i in x:\n        s += i\n    return s\n", None),
        ("for i in x:\n        if i:\n            return 1\n    return 0\n", None),
        ("for i in x:\n        if i: return g(i)\n    return 0\n\ndef g(i):\n    return i\n", None),
        ("# Sum.\ns = 0\n    return s\n", "# Sum.\n    s = 0\n    return s\n"),
        ("import math\n    return math.pi\n", None),
        ("return g(x)\n\n@cache\ndef g(x):\n    return x\n", None),
        ("s = 0  # of:\n    return s\n", None),
        ("return sum(\n        x)\n", None),
        ("s = 0\n\treturn s\n", "\ts = 0\n\treturn s\n"),
        ("s = 0\n  return s\n", "  s = 0\n  return s\n"),
        # not indented at all
        ("s = 0\nfor i in x:\n    s += i\nreturn s\n", "    s = 0\n    for i in x:\n        s += i\n    return s\n"),
        ("if x:\n    return 1\n", "    if x:\n        return 1\n"),
        ("if x:\n  if y:\n    return 1\n  return 2\n", "    if x:\n      if y:\n        return 1\n      return 2\n"),
        ("s = [\n    1,\n]\nreturn s\n", "    s = [\n        1,\n    ]\n    return s\n"),
        ("s = 0\ndef g(y):\n    return y\nreturn g(s)\n", "    s = 0\n    def g(y):\n        return y\n    return g(s)\n"),
        ("\n", "\n"),
    ],
    ids=range(16),
)  # fmt: skip
def test_a_body_is_placed_below_its_signature(answer: str, body: str | None) -> None:
    code = "def f(x):\n"
    assert complete(answer, code, "f") == code + (f"    {answer}" if body is None else body)
    ast.parse(complete(answer, code, "f") if answer.strip() else "")


def test_names_a_source_defines() -> None:
    source = (
        "import a\ndef f(x):\n  y = 1\nasync  def g(): 0\nclass C(B): 0\nv = 1\nw: int = 2\nf(v == 1)\nz == 1\nh(1)"
    )
    assert defined(source) == {"a", "f", "g", "C", "v", "w"}
    assert defines(source, "f")
    assert not defines(source, "h")
    assert not defines("if x: f = 1\nfor f in x: f = 1\nx[0:f] = 1\ng(f=1)\nf: int\nf += 1", "f")
    assert not defines("def g(): x = 1; f = 2\ns = 'a; f = 1'  # ; f = 2\nimport f.g as h, f_2", "f")
    assert not defines("area_2 = 1\nareas = 2\n# def area\nx.area = 3\narea == 2", "area")


class _Slow:
    """Garbage whose collection takes a while, so that another thread runs in the middle of it."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def test_threads_that_parse_at_a_time_do_not_disturb_each_other() -> None:
    source = "def check(candidate):\n" + "".join(f"    assert candidate([{i}, 1, 2, 3]) == {i}\n" for i in range(200))

    def work(_: int) -> bool:
        for _ in range(30):
            _Slow()
        with contextlib.suppress(SystemError):
            ast.parse(source)  # a reward function of the user's, which knows of no lock
        return parse(source) is not None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(work, range(200)))
    finally:
        sys.setswitchinterval(interval)
