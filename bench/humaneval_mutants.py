#!/usr/bin/env python3
"""Do the verdicts of `code` equal plain execution of HumanEval's own tests? On its 164 solutions and 1,000 mutants.

    python bench/humaneval_mutants.py HumanEval.jsonl.gz [--backends docker bubblewrap subprocess]

    canonical solution ──one change in its syntax tree──> mutants ──> truth: program + test + check(f), `python` each
                                                              └─────> `pgs rl score`, once for each backend

The change is a wrong constant, an off by one, an early return, swapped branches or a negated condition, another
comparison or operator, or swapped operands. A mutant is named by its text, and the draw is seeded.

Truth is what a reader of HumanEval would run: an interpreter of its own for every program, three times, each with its own
hash seed and random state (three tests draw unseeded random numbers, and the order of a set of strings depends on
the hash seed). Left out, and counted, is a mutant without a truth: the three runs differ, or it needs between `QUICK`
and `PATIENCE` seconds, so that its verdict would be the machine's.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from record import record
from scoring import prepared, score

MUTANTS = 1000
MOST_CRASHES = MUTANTS // 5
SEED = 0
DRAWS = (1, 2, 3)  # hash seed and random state of each plain run
QUICK = 0.5  # CPU seconds
TIMEOUT = 10.0  # the sandbox's, seconds: three tests make 100 calls, which takes long on a busy machine
PATIENCE = 30.0  # seconds until plain execution counts as endless
MEMORY = 2**30

Row = dict[str, str]


# --- mutants: a rule yields what may stand in a node's place


def constant(node: ast.AST) -> Iterator[ast.expr]:
    if not isinstance(node, ast.Constant):
        return
    match node.value:
        case bool():
            yield ast.Constant(not node.value)
        case int() | float():
            yield ast.Constant(node.value * 2 + 3)
            yield ast.UnaryOp(ast.USub(), node)
        case str():
            yield ast.Constant(node.value + " ")
            yield ast.Constant(node.value[1:])


def off_by_one(node: ast.AST) -> Iterator[ast.expr]:
    whole = isinstance(node, ast.Constant) and type(node.value) is int
    length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    if whole or length:
        yield ast.BinOp(node, ast.Add(), ast.Constant(1))  # type: ignore[arg-type]
        yield ast.BinOp(node, ast.Sub(), ast.Constant(1))  # type: ignore[arg-type]


def swapped_branch(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test, body, orelse) if orelse:
            yield ast.If(test, orelse, body)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)


def negated_condition(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test, body, orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(target, source, [first, *rest]):
            yield ast.comprehension(target, source, [ast.UnaryOp(ast.Not(), first), *rest], 0)


OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.FloorDiv, ast.FloorDiv: ast.Div, ast.Mod: ast.FloorDiv,
}  # fmt: skip


def other_operator(node: ast.AST) -> Iterator[ast.AST]:
    if type(node) in OTHER:
        yield OTHER[type(node)]()


def swapped_operands(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp(left, op, right):
            yield ast.BinOp(right, op, left)
        case ast.Compare(left, [op], [right]) if not isinstance(op, ast.Eq | ast.NotEq):
            yield ast.Compare(right, [op], [left])
        case ast.Call(func, [first, second, *rest], keywords):
            yield ast.Call(func, [second, first, *rest], keywords)


RULES: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    rule.__name__: rule
    for rule in (constant, off_by_one, swapped_branch, negated_condition, other_operator, swapped_operands)
}
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def early_returns(block: list[Any], values: list[ast.expr]) -> Iterator[list[Any]]:
    """The block with a `return` of one of the values put before, between or after its statements."""
    for at in range(len(block) + 1):
        if at and isinstance(block[at - 1], ENDS):
            return
        here = [ast.Return(value) for value in values]
        known = ast.unparse(block[at]) if at < len(block) else ""
        yield from ([*block[:at], new, *block[at:]] for new in here if ast.unparse(new) != known)


def changes(function: ast.FunctionDef) -> Iterator[str]:
    """The kind of each possible change; the tree holds the change until the next one is asked for."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    values = list({ast.unparse(value): value for value in returned}.values())
    documented = ast.get_docstring(function, clean=False) is not None
    for parent in [function, *(node for part in function.body[documented:] for node in ast.walk(part))]:
        for name, old in list(ast.iter_fields(parent)):
            if (parent is function and name != "body") or isinstance(parent, ast.JoinedStr):
                continue
            if isinstance(old, list) and old and isinstance(old[0], ast.stmt):
                start = int(documented) if parent is function else 0
                for block in early_returns(old[start:], values):
                    setattr(parent, name, [*old[:start], *block])
                    yield "early_return"
                setattr(parent, name, old)
            yield from _replacements(parent, name, old)


def _replacements(parent: ast.AST, name: str, old: Any) -> Iterator[str]:
    places = enumerate(old) if isinstance(old, list) else [(None, old)]
    for index, child in list(places):
        if not isinstance(child, ast.AST):
            continue
        for kind, rule in RULES.items():
            for new in rule(child):
                setattr(parent, name, new if index is None else [*old[:index], new, *old[index + 1 :]])
                yield kind
    setattr(parent, name, old)


@dataclass(frozen=True)
class Mutant:
    task: str
    kind: str
    program: str


def mutants(row: Row) -> list[Mutant]:
    """All mutants of a row's solution, shuffled, and in turn of each kind."""
    tree = ast.parse(row["prompt"] + row["canonical_solution"])
    [function] = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == row["entry_point"]]
    seen = {ast.unparse(tree)}
    kinds: dict[str, list[Mutant]] = {}
    for kind in changes(function):
        text = ast.unparse(ast.fix_missing_locations(tree))
        if text not in seen:
            seen.add(text)
            kinds.setdefault(kind, []).append(Mutant(row["task_id"], kind, text + "\n"))
    draw = random.Random(f"{SEED} {row['task_id']}")
    order = sorted(kinds)
    draw.shuffle(order)
    for kind in order:
        draw.shuffle(kinds[kind])
    turns = itertools.zip_longest(*(kinds[kind] for kind in order))
    return [mutant for turn in turns for mutant in turn if mutant is not None]


# --- truth


RUNNER = """
import random, sys
random.seed(int(sys.argv[2]))
with open(sys.argv[1], encoding="utf-8") as file:
    source = file.read()
try:
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
except AssertionError:
    sys.exit(3)
except BaseException:
    sys.exit(4)
"""
ENDINGS = {0: "pass", 3: "fail"}  # any other way to end, signals included, is a crash


def ending(path: Path, draw: int) -> tuple[str, float]:
    """How `python` ends the program in a file, and its CPU seconds."""
    child = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(path), str(draw)],
        env={"PYTHONHASHSEED": str(draw), "PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=path.parent,
    )
    resource.prlimit(child.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
    deadline = time.monotonic() + PATIENCE
    while True:
        pid, status, used = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return ENDINGS.get(child.returncode, "crash"), used.ru_utime + used.ru_stime
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            return "timeout", PATIENCE
        time.sleep(0.002)


def truth(row: Row, program: str) -> str:
    """`pass`, `fail`, `crash` or `timeout`; `random` and `slow` are no truth."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(f"{program}\n{row['test']}\ncheck({row['entry_point']})\n", encoding="utf-8")
        found = set()
        for draw in DRAWS:
            end, seconds = ending(path, draw)
            if end == "timeout":
                return end
            if seconds > QUICK:
                return "slow"
            found.add(end)
    return found.pop() if len(found) == 1 else "random"


def chosen(rows: list[Row], threads: ThreadPoolExecutor) -> tuple[list[Mutant], list[str], Counter[str]]:
    """`MUTANTS` mutants, one task after the other in turn, their truths, and the count of those left out by reason."""
    tasks = {row["task_id"]: row for row in rows}
    turns = itertools.zip_longest(*(mutants(row) for row in rows))
    waiting = deque(mutant for turn in turns for mutant in turn if mutant is not None)
    picked: list[Mutant] = []
    truths: list[str] = []
    left_out: Counter[str] = Counter()
    while len(picked) < MUTANTS:
        batch = [waiting.popleft() for _ in range(64)]
        for mutant, end in zip(batch, threads.map(lambda m: truth(tasks[m.task], m.program), batch), strict=True):
            full = end == "crash" and truths.count("crash") == MOST_CRASHES
            if end in ("slow", "random") or full:
                left_out["crash above a fifth" if full else end] += 1
            elif len(picked) < MUTANTS:
                picked.append(mutant)
                truths.append(end)
    return picked, truths, left_out


# --- verdicts


def verdicts(
    rows: list[dict[str, Any]], programs: list[str], backend: str, image: str
) -> tuple[list[float | None], float]:
    """Rewards that `pgs rl score` gives, and the seconds of the whole command."""
    asked = [{**row, "completion": f"```python\n{program}\n```"} for row, program in zip(rows, programs, strict=True)]
    own = {"subprocess": ", allow_unsafe: true", "docker": f", image: {image!r}"}.get(backend, "")
    workers = len(os.sched_getaffinity(0))
    sandbox = f"sandbox: {{backend: {backend}, timeout: {TIMEOUT}, workers: {workers}{own}}}\n"
    return score(asked, f"rewards: {{correct: {{fn: code}}}}\n{sandbox}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="HumanEval.jsonl.gz")
    parser.add_argument("--backends", nargs="*", default=["docker", "bubblewrap", "subprocess"])
    parser.add_argument(
        "--image", default="palingenesis-sandbox:local", help="of docker's; scripts/sandbox-image makes it"
    )
    parser.add_argument("--save", type=Path, help="also write the mutants and their truths, JSON lines")
    arguments = parser.parse_args()

    with gzip.open(arguments.source, "rt", encoding="utf-8") as file:
        rows: list[Row] = [json.loads(line) for line in file]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        canonical = [Mutant(row["task_id"], "canonical", row["prompt"] + row["canonical_solution"]) for row in rows]
        endings = list(threads.map(lambda row, mutant: truth(row, mutant.program), rows, canonical))
        picked, truths, left_out = chosen(rows, threads)
    everything, endings = canonical + picked, endings + truths
    text = "".join(
        json.dumps({**asdict(mutant), "truth": end}) + "\n" for mutant, end in zip(everything, endings, strict=True)
    )
    if arguments.save:
        arguments.save.write_text(text, encoding="utf-8")

    prepared_rows = prepared("prepare_humaneval.py", arguments.source) if arguments.backends else []
    by_task = {row["id"]: row for row in prepared_rows}
    compared = {}
    for backend in arguments.backends:
        asked, programs = [by_task[m.task] for m in everything], [m.program for m in everything]
        given, seconds = verdicts(asked, programs, backend, arguments.image)
        differ = [
            {"task": mutant.task, "kind": mutant.kind, "truth": end, "reward": reward, "program": mutant.program}
            for mutant, end, reward in zip(everything, endings, given, strict=True)
            if reward != float(end == "pass")
        ]
        compared[backend] = {
            "canonical_passed": given[: len(canonical)].count(1.0),
            "mutants_passed": given[len(canonical) :].count(1.0),
            "skipped": given.count(None),
            "disagreements": differ,
            "seconds": round(seconds, 1),
        }
    kinds = sorted({mutant.kind for mutant in picked})
    record(
        "humaneval_mutants",
        {
            "canonical": dict(Counter(endings[: len(canonical)])),
            "mutants": len(picked),
            "truth": dict(Counter(truths)),
            "by_kind": {
                kind: dict(Counter(end for mutant, end in zip(picked, truths, strict=True) if mutant.kind == kind))
                for kind in kinds
            },
            "left_out": dict(left_out),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "backends": compared,
        },
    )


if __name__ == "__main__":
    main()
