"""Read a row's tests, in whatever shape its data set has them, and say what each asks of a program.

    APPS, TACO       {"inputs": [...], "outputs": [...], "fn_name"?}             -> StdinTest, CallTest
    LiveCodeBench    [{"input", "output", "testtype"}], or packed by pickle       -> StdinTest, CallTest
    MBPP             ["assert f(1) == 2", ...], with set-up and imports           -> SourceTest, one an assert
    HumanEval        source with `check(candidate)`, with a column `entry_point`  -> SourceTest

The shape is told by structure, never by a data set's name. A column holds it as JSON text or as values.

Invariants: whatever cannot be read, or could be passed by a program that does nothing, raises UnreadableTestsError with
the reason; nothing in a row is executed here, and its pickles load no globals; only `job` decides what a program's room
receives, and no expected value is in it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import functools
import io
import json
import pickle
import re
import symtable
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from palingenesis.rl.rewards.grading.compare import INT_TEXT, same_output, same_value
from palingenesis.rl.rewards.grading.extract import ROW, complete, defined, helpers_of, parse, prompt_code
from palingenesis.rl.sandbox.inside import values
from palingenesis.rl.sandbox.job import Call, Check, Job, Program, Result

MAX_STDIN = 60 * 2**20  # bytes; a room has 64 MiB of files, and takes messages of 128, where a character may be escaped
MAX_UNPACKED = 256 * 2**20  # bytes of a packed column; LiveCodeBench's largest are some 100 MB
MAX_STDOUT = 8 * 2**20  # bytes a program may print
ENVELOPE = 1024  # bytes of an order or an answer beside the values in it
SHOWN, SHOWN_PARTS = 200, 6  # characters of a text, and parts of a list, in a reason

# What LiveCodeBench's harness imports before a program, in its order; APPS's does the like. Starter code writes `List[int]`.
_STAR = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in (*_STAR.split(), "builtins", "typing")),
        *(f"import {name}" for name in _STAR.split()),
        "sys.setrecursionlimit(50_000)",
        "getattr(sys, 'set_int_max_str_digits', id)(50_000)",
    ]
)


class UnreadableTestsError(ValueError):
    """The row has no tests, or they cannot be read; the message says why."""


# Every kind of test has `size`, the length of its input; `idle`, whether a program that does nothing passes it;
# `job(answer, timeout)`, what to run, or None when the answer defines nothing that the test calls; and
# `difference(result)`, how the result of a job that ended well differs from what is expected, empty when it does not.


@dataclass(frozen=True, slots=True)
class StdinTest:
    """A program reads `stdin` and prints `expected`."""

    stdin: str
    expected: str

    @property
    def size(self) -> int:
        return len(self.stdin)

    @property
    def idle(self) -> bool:
        return not self.expected.strip()

    def job(self, answer: str, timeout: float | None) -> Job | None:
        return Program(answer, stdin=self.stdin, prelude=PRELUDE, timeout=timeout)

    def difference(self, result: Result) -> str:
        if same_output(result.stdout, self.expected):
            return ""
        return f"input {show(self.stdin)}: printed {show(result.stdout)}, expected {show(self.expected)}"


@dataclass(frozen=True, slots=True)
class CallTest:
    """`function(*args)` returns one of `accepted`."""

    function: str
    args: tuple[Any, ...]
    accepted: tuple[Any, ...]
    size: int

    @property
    def idle(self) -> bool:
        return None in self.accepted

    def job(self, answer: str, timeout: float | None) -> Job | None:
        return Call(answer, self.function, self.args, prelude=PRELUDE, timeout=timeout)

    def difference(self, result: Result) -> str:
        if any(same_value(result.value, expected) for expected in self.accepted):
            return ""
        call = f"{self.function}{show(self.args)}"
        return f"{call}: returned {show(result.value)}, expected {show(self.accepted[0])}"


@dataclass(frozen=True, slots=True)
class SourceTest:
    """Test source, run where the program is not.

    Attributes:
        source: set-up and asserts, or the definition of `check`.
        helpers: source both the tests and the program may use: imports, and what the prompt defines.
        names: what the source reads and neither it, nor Python, nor `helpers` defines: the program's.
        builtin: with no such name, the one built-in function that the source calls: MBPP 126 has an answer `sum`. Where
            several are called none is under test, so a program's own `len` or `abs` never serves the tests.
        entry_point: what `check` is called with; empty for asserts.
        code: the prompt's code, which a mere function body continues.
    """

    source: str
    helpers: str
    names: tuple[str, ...]
    builtin: str
    entry_point: str
    code: str

    @property
    def size(self) -> int:
        return len(self.source)

    @property
    def idle(self) -> bool:
        return False

    def job(self, answer: str, timeout: float | None) -> Job | None:
        if not self.names and self.builtin not in defined(answer):
            return None
        return Check(
            complete(answer, self.code, self.entry_point),
            self.source,
            names=self.names or (self.builtin,),
            helpers=self.helpers,
            entry_point=self.entry_point,
            prelude=self.helpers,
            timeout=timeout,
        )

    def difference(self, result: Result) -> str:
        return ""


Test = StdinTest | CallTest | SourceTest


def show(value: Any, depth: int = 2) -> str:
    """A value in a line of some hundred characters. Cheap for whatever a program returned, and it never raises."""
    if isinstance(value, (list, tuple)) and depth:
        more = ["..."] if len(value) > SHOWN_PARTS else []
        parts = ", ".join([*(show(part, depth - 1) for part in value[:SHOWN_PARTS]), *more])
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 512:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, range):
        return f"range({', '.join(show(end) for end in (value.start, value.stop, value.step))})"
    try:
        return repr(value[:SHOWN]) if isinstance(value, (str, bytes)) else repr(value)[:SHOWN]
    except Exception:  # noqa: BLE001 whatever the row holds
        return f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------------------------- shapes


def read_tests(columns: Mapping[str, Any], field: str, prompt: str) -> Sequence[Test]:
    """The tests in column `field`.

    Args:
        columns: of the row. Beside `field` these are read where the shape needs them: `entry_point`, `metadata` or
            `starter_code` (the function's name), `test_imports` and `test_setup_code`.
        prompt: the user's text; its code helps the tests and is continued by answers that are a function's body.

    Raises:
        UnreadableTestsError: there are none, or they cannot be read.
    """
    try:
        return _read(columns, field, prompt)
    except UnreadableTestsError:
        raise
    except (ValueError, RecursionError) as error:  # values that were no JSON: integers past Python's limit, deep lists
        raise UnreadableTestsError(f"cannot be read: {error}") from error


def _read(columns: Mapping[str, Any], field: str, prompt: str) -> Sequence[Test]:
    value = columns.get(field)
    if isinstance(value, str):
        value = _decode(value)
    if isinstance(value, Mapping):
        return _read_pairs(value)
    if isinstance(value, str):
        return _read_source(value, columns, prompt)
    if not isinstance(value, (list, tuple)) or not value:
        _refuse(f"holds no tests: {show(value)}")
    if all(isinstance(part, Mapping) for part in value):
        return _read_cases(value, columns)
    if all(isinstance(part, str) for part in value):
        return _read_asserts(value, columns, prompt)
    _refuse("is a list that mixes texts and other things")


def check_arguments(tests: Sequence[Test]) -> None:
    """Raise UnreadableTestsError for what no room takes or gives: too large, or nested too deeply."""
    for test in tests:
        if isinstance(test, StdinTest):
            _check_texts(test)
        if isinstance(test, CallTest):
            _check_values(test)


def _check_texts(test: StdinTest) -> None:
    if max(len(test.stdin.encode("utf-8", "replace")), len(json.dumps(test.stdin)) // 2) > MAX_STDIN:
        _refuse(f"has an input of more than {MAX_STDIN >> 20} MiB, which no room takes")
    if len(test.expected.strip().encode("utf-8", "replace")) > MAX_STDOUT:
        _refuse(f"expects an output of more than {MAX_STDOUT >> 20} MiB, which no program may print")


def _check_values(test: CallTest) -> None:
    try:
        _travels(list(test.args))
    except values.NotPlainError as error:
        raise UnreadableTestsError(f"has for {test.function} {error}") from error
    refused = [why for expected in test.accepted if (why := _why_it_stays(expected))]
    if len(refused) == len(test.accepted):
        _refuse(f"expects of {test.function} {refused[0]}")


def _travels(value: Any) -> None:
    """Raise NotPlainError unless the value fits into an order or an answer."""
    values.dumps([values.encode(value), " " * ENVELOPE])


def _why_it_stays(value: Any) -> str:
    try:
        _travels(value)
        return ""
    except values.NotPlainError as error:
        return str(error)


def _refuse(why: str) -> NoReturn:
    raise UnreadableTestsError(why)


# Samples of one group ask for the same row, all at once. Under the lock the first reads it and the others find it.
_lock = threading.Lock()


def _decode(text: str) -> Any:
    with _lock:
        return _decode_once(text)


@functools.lru_cache(maxsize=4)
def _decode_once(text: str) -> Any:
    """The values a column's text stands for: JSON, a packed LiveCodeBench list, or the text itself (Python source)."""
    stripped = text.strip()
    if not stripped:
        _refuse("is empty")
    if stripped[0] in "{[":
        return _json(stripped)
    if _BASE64.match(stripped):
        return _json(_unpack(stripped))
    return text


_BASE64 = re.compile(r"eJ|eN|eA|eF")  # what the first bytes of any zlib stream are in base64


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableTestsError(f"is not JSON: {error}") from error


class _NoGlobals(pickle.Unpickler):
    """Reads data and nothing else: a pickle that names any class or function is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        _refuse(f"is a pickle that asks for {module}.{name}")


def _unpack(text: str) -> str:
    """LiveCodeBench's private tests: base64 of zlib of a pickle of one JSON text."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise UnreadableTestsError(f"is neither JSON, nor packed tests, nor Python source: {error}") from error
    if not stream.eof:
        _refuse(f"is cut off, or unpacks to more than {MAX_UNPACKED >> 20} MiB")
    try:
        value = _NoGlobals(io.BytesIO(data)).load()
    except UnreadableTestsError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise UnreadableTestsError(f"holds a damaged pickle: {type(error).__name__}: {error}") from error
    if not isinstance(value, str):
        _refuse(f"holds a pickle of a {type(value).__name__} instead of one JSON text")
    return value


# ---------------------------------------------------------------------------------------------------- inputs, outputs


def _read_pairs(tests: Mapping[str, Any]) -> Sequence[Test]:
    """APPS and TACO."""
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)):
        _refuse(f"has no lists 'inputs' and 'outputs'; its keys: {', '.join(map(str, tests)) or 'none'}")
    if len(inputs) != len(outputs):
        _refuse(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    if function is not None and not isinstance(function, str):
        _refuse(f"has the fn_name {show(function)}")
    pairs = list(zip(inputs, outputs, strict=True))
    if function:
        return _checked([_call_of_pair(_identifier(function), *pair) for pair in pairs])
    return _checked([StdinTest(_lines(given), _lines(wanted)) for given, wanted in pairs])


def _call_of_pair(function: str, given: Any, wanted: Any) -> Test:
    """Arguments are a list, or JSON lines, and then the result is JSON too; the result may be wrapped in a list of one."""
    if isinstance(given, str):
        return _call_of_lines(function, given, wanted)
    if not isinstance(given, (list, tuple)):
        _refuse(f"has the input {show(given)} for {function}, which is no list of arguments")
    wrapped = (wanted[0],) if isinstance(wanted, (list, tuple)) and len(wanted) == 1 else ()
    return CallTest(function, _int_keys(given), (wanted, *wrapped), len(repr(given)))


def _int_keys(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with a lone dict's keys as the integers they were before JSON made text of them, as APPS does."""
    if len(args) == 1 and isinstance(args[0], Mapping) and all(INT_TEXT.fullmatch(str(key)) for key in args[0]):
        return ({int(key): value for key, value in args[0].items()},)
    return tuple(args)


def _call_of_lines(function: str, given: str, wanted: Any) -> Test:
    """One JSON value a line is one argument; the result is JSON."""
    args = tuple(_json(line) for line in given.split("\n") if line.strip())
    result = _json(wanted) if isinstance(wanted, str) else wanted
    return CallTest(function, args, (result,), len(given))


def _lines(value: Any) -> str:
    """Text for standard input or output: a text, or a list of lines, with their line feeds or without."""
    if isinstance(value, (list, tuple)):
        return "\n".join(_line(part).removesuffix("\n").removesuffix("\r") for part in value)
    return _line(value)


def _line(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        _refuse(f"has {show(value)} where a text or a list of lines belongs")
    return value if isinstance(value, str) else str(value)


def _read_cases(cases: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Sequence[Test]:
    """LiveCodeBench."""
    tests: list[Test] = []
    for case in cases:
        given, wanted, kind = case.get("input"), case.get("output"), case.get("testtype") or "stdin"
        if given is None or wanted is None:
            _refuse(f"has a test without 'input' or 'output'; its keys: {', '.join(map(str, case)) or 'none'}")
        if kind == "functional":
            tests.append(_call_of_lines(_function_name(columns), _line(given), wanted))
        elif kind == "stdin":
            tests.append(StdinTest(_lines(given), _lines(wanted)))
        else:
            _refuse(f"has a test of the testtype {show(kind)}; it is stdin or functional")
    return _checked(tests)


def _function_name(columns: Mapping[str, Any]) -> str:
    """`func_name` of column `metadata`, else the method that `starter_code` begins."""
    metadata = columns.get("metadata")
    if isinstance(metadata, str) and metadata.strip():
        metadata = _json(metadata)
    if isinstance(metadata, Mapping) and metadata.get("func_name"):
        return _identifier(metadata["func_name"])
    starter = columns.get("starter_code")
    found = re.findall(r"def[ \t]+(?!__)(\w+)", starter) if isinstance(starter, str) else []
    if not found:
        _refuse("has functional tests, and neither 'metadata' nor 'starter_code' names the function")
    return str(found[-1])


def _identifier(name: Any) -> str:
    """A function's name; `Solution().f` and `Solution.f` are `f`."""
    short = re.sub(r"^Solution(\(\))?\.", "", str(name))
    return short if short.isidentifier() else _refuse(f"calls {show(name)}, which is no function's name")


def _checked(tests: Sequence[Test]) -> Sequence[Test]:
    """The tests, unless there are none or a program that does nothing would pass them all."""
    if not tests:
        _refuse("has no tests")
    if all(test.idle for test in tests):
        _refuse("expects nothing but empty output, which a program that does nothing prints")
    return tests


# ---------------------------------------------------------------------------------------------------- test source


def _read_asserts(asserts: Sequence[str], columns: Mapping[str, Any], prompt: str) -> Sequence[Test]:
    """MBPP: every assert is a test of its own."""
    imports, setup = _setup(columns)
    tests = []
    for source in asserts:
        tree = _parsed(source)
        if not _asserts(tree):
            _refuse(f"has the test {show(source)}, which asserts nothing")
        tests.append(_source_test(_joined(setup, source), imports, prompt, ""))
    return tests


def _read_source(source: str, columns: Mapping[str, Any], prompt: str) -> Sequence[Test]:
    """HumanEval; or a text of asserts."""
    tree = _parsed(source)
    imports, setup = _setup(columns)
    entry_point = ""
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        if not columns.get("entry_point"):
            _refuse("defines check(candidate), and column 'entry_point' does not say which function that is")
        entry_point = _identifier(columns["entry_point"])
        asserts = any(isinstance(node, _FAILS) for node in ast.walk(tree))
    else:
        asserts = _asserts(tree)
    if not asserts:
        _refuse("is source that asserts nothing when it runs")
    return [_source_test(_joined(setup, source), imports, prompt, entry_point)]


def _setup(columns: Mapping[str, Any]) -> tuple[str, str]:
    """MBPP's set-up as the imports, which the program may rely on, and the rest, which may rely on the program."""
    parts = [columns.get("test_imports"), columns.get("test_setup_code")]
    lines = [line for part in parts if part for line in (part if isinstance(part, (list, tuple)) else [part])]
    if not all(isinstance(line, str) for line in lines):
        _refuse("comes with 'test_imports' or 'test_setup_code' that are no text")
    body = _parsed("\n".join(lines)).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return _unparse(imports), _unparse([node for node in body if node not in imports])


def _parsed(source: str) -> ast.Module:
    tree = parse(source.replace("\r\n", "\n"))
    return tree if tree is not None else _refuse(f"has test source that is not Python: {show(source)}")


def _unparse(nodes: Sequence[ast.stmt]) -> str:
    return "\n".join(ast.unparse(node) for node in nodes)


def _joined(*sources: str) -> str:
    """The sources one below another; what they import from __future__ first, where alone Python takes it."""
    parts = [source for source in sources if source]
    trees = [_parsed(part).body for part in parts]
    if not any(_is_future(node) for body in trees for node in body):
        return "\n".join(parts)
    return _unparse(sorted((node for body in trees for node in body), key=lambda node: not _is_future(node)))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


_FAILS = (ast.Assert, ast.Raise)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _asserts(tree: ast.Module) -> bool:
    """An assert that runs when the source does: in the module's own code, or in functions that such code names."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    running: list[ast.AST] = [tree]
    while running:
        node = running.pop()
        if isinstance(node, _FAILS):
            return True
        named = functions.pop(node.id, None) if isinstance(node, ast.Name) else None
        named = functions.pop(node.attr, None) if isinstance(node, ast.Attribute) else named
        inner = ast.iter_child_nodes(node)
        running += [child for child in inner if not isinstance(child, (*_FUNCTIONS, ast.Lambda))]
        running += named.body if named else []
    return False


@functools.lru_cache(maxsize=512)  # all answers to a prompt meet the same few tests
def _source_test(source: str, imports: str, prompt: str, entry_point: str) -> SourceTest:
    code = prompt_code(prompt)
    helpers = _joined(imports, helpers_of(code))
    read = _names(source, _reads) - _names(source, _binds) - _names(helpers, _binds)
    nodes = list(ast.walk(_parsed(source)))
    modules = {name for name in read & sys.stdlib_module_names if _only_as_module(name, nodes)}
    names = read - modules - set(dir(builtins)) | ({entry_point} if entry_point else set())
    called = _called(nodes) & read
    if not names and len(called) != 1:
        _refuse(f"has the test {show(source)}, which calls nothing that a program could define")
    return SourceTest(
        source=source,
        helpers="\n".join([helpers, *(f"import {name}" for name in sorted(modules))]).strip(),
        names=tuple(sorted(names)),
        builtin="" if names else called.pop(),
        entry_point=entry_point,
        code=code,
    )


def _names(source: str, of: Any) -> set[str]:
    """What a module's source reads from, or binds in, its global namespace."""
    try:
        compile(source, ROW, "exec", dont_inherit=True)  # finds what the parser lets pass, such as a lone `return`
        return set(of(symtable.symtable(source, ROW, "exec"), True))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableTestsError(f"has test source that is not Python: {error}") from error


def _reads(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
    for child in table.get_children():
        yield from _reads(child, False)


def _binds(table: symtable.SymbolTable, top: bool) -> Iterator[str]:
    for symbol in table.get_symbols():
        if (symbol.is_assigned() or symbol.is_imported()) and (top or symbol.is_declared_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _binds(child, False)


def _called(nodes: Sequence[ast.AST]) -> set[str]:
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _only_as_module(name: str, nodes: Sequence[ast.AST]) -> bool:
    """The source reads only attributes of the name, as of a module it forgot to import (`math.isclose`)."""
    bases = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    return all(id(n) in bases for n in nodes if isinstance(n, ast.Name) and n.id == name)
