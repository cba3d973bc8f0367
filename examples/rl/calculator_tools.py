"""A calculator for the policy, as a function tool.

    env: {type: tools, tools: [examples/rl/calculator_tools.py:calculator]}

The policy writes the expression, so it is untrusted: only numbers, + - * / and brackets are read, and nothing is
handed to `eval`. What is raised here is the tool's answer, which the policy reads.

It is asynchronous although it awaits nothing. Synchronous tools run in threads, and CPython 3.11 cannot parse in two
threads at once: `ast.parse` then raises "SystemError: AST constructor recursion depth mismatch". An asynchronous tool
runs on the event loop, one call after the other; this one takes microseconds and never waits, so it holds up nobody.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200  # characters


async def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / and brackets, such as (12 + 7) * 3.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    return f"{_value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError(f"only numbers, + - * / and brackets can be computed, not {ast.unparse(node)!r}")
