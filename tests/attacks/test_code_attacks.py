"""Programs that want a reward they did not earn, or want out. The tables in `code/` only grow.

    cheats.txt   face a row's tests through `pgs rl score`: stdin, calls, asserts, HumanEval's check      -> 0, never skipped
    escapes.txt  try what a sandbox must refuse; print REACHED where it did not (isolating backends only) -> not printed
    harm.txt     exhaust, kill, outlive, litter                                                 -> one of the stated ends
                 (`alone`: isolating backends only, it would kill what else runs as this user)
    forged.txt   take the harness over and answer for it, in a call and in a check              -> at most a wrong answer
    HIDDEN       search all they can reach for what they are tested against                     -> find nothing

After every job but the cheats', the next one in the same room must find what the first job of all found: the same
processes, files, limits and priorities; and a right program must pass there.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import RLConfig
from palingenesis.rl.config.schema import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.rewards.offline import score_file
from palingenesis.rl.sandbox import open_sandbox
from palingenesis.rl.sandbox.job import Call, Check, Job, Program, Result, Sandbox, Status

pytestmark = pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")

IMAGE = os.environ.get("SANDBOX_IMAGE", "palingenesis-sandbox:local")  # scripts/sandbox-image makes it
ISOLATING = ("docker", "bubblewrap")
BACKENDS = (*ISOLATING, "subprocess")

DONE, FAILED, TIMEOUT, LIMIT = Status.DONE, Status.FAILED, Status.TIMEOUT, Status.LIMIT
BAD = frozenset({FAILED, TIMEOUT, LIMIT, Status.BROKE})
ENDS = {
    "done": frozenset({DONE}),
    "failed": frozenset({FAILED, TIMEOUT}),  # on a busy machine a program may not get that far
    "limit": frozenset({LIMIT, TIMEOUT}),
    "timeout": frozenset({TIMEOUT}),
    "bad": BAD,
    "harmless": BAD | {DONE},
    "alone": frozenset(),
}

# ---------------------------------------------------------------------------------------------------------- the tables


def read(table: str) -> Iterator[tuple[str, str, str]]:
    """(what stands before the bar, the title, the source) of each program. A line `@NAME` stands for an earlier part."""
    text = (Path(__file__).parent / "code" / f"{table}.txt").read_text(encoding="utf-8")
    for block in ("\n" + text).split("\n=== ")[1:]:
        head, _, body = block.partition("\n")
        kind, _, title = head.rpartition(" | ")
        if not title.startswith("# "):
            yield kind, title, expanded(body)


def expanded(source: str) -> str:
    lines = source.rstrip("\n").split("\n")
    return "\n".join(PARTS[line[1:]] if line[:1] == "@" and line[1:] in PARTS else line for line in lines) + "\n"


PARTS: dict[str, str] = {}
for _, _title, _source in read("parts"):
    PARTS[_title] = _source
ADD, SUM, HUNT = PARTS["ADD"], PARTS["SUM"], PARTS["HUNT"]

CHEATS = [
    *read("cheats"),
    ("stdin", "source that is too deep for the parser", "(" * 5000 + ")" * 5000),
    ("stdin", "source that crashes an old compiler", "-" * 200_000 + "1"),
    ("stdin", "source with a NUL", "print(7)\0"),
]

ASSERTS = [
    "assert add(3, 4) == 7",
    "assert abs(add(10, 20) - 30) < 1e-6",
    "assert sorted(str(add(1, 1))) == ['2']",
    "assert isinstance(add(2, 2), int) and len(str(add(2, 2))) == 1 and add(2, 2) == 4",
    "assert all(add(i, i) == 2 * i for i in range(3)) and not any(add(i, 1) == i for i in range(3))",
    "assert all(map(lambda case: add(*case[0]) == case[1], [((1, 1), 2), ((1, 2), 3)]))",
    "assert set([add(1, 2)]) == {3}",
    "assert round(add(1.5, 1.5), 3) == 3 and tuple([add(0, 3)]) == (3,)",
    "import math\nassert math.isclose(add(1, 5), 6)",
    "assert add(1, 2) != 4 and not add(1, 2) == 4 and add(1, 2) not in (4, 5)",
]
RAISES = [
    "try:\n    add('a', 1)\nexcept TypeError:\n    pass\nelse:\n    assert False\nassert add(1, 1) == 2",
    "try:\n    result = add(2, 3)\nexcept BaseException:\n    result = 5\nassert result == 5\nassert add(1, 1) == 2",
]
STACK = "s = Stack()\ns.push(4)\ns.push(5)\nassert s.pop() == 5\nassert s.pop() == 4\nassert s.size == 0"
CHECK = """
METADATA = {}


def check(candidate):
    assert candidate(3, 4) == 7, 'first'
    assert candidate(10, 20) == 30
    values = [3, 1]
    assert candidate(values, [2]) == [3, 1, 2]
    assert values == [3, 1]
    assert True
"""

TESTS: dict[str, dict[str, Any]] = {
    "stdin": {"tests": {"inputs": ["3 4\n", "10 20\n"], "outputs": ["7\n", "30\n"]}},
    "call": {"tests": {"fn_name": "add", "inputs": [[3, 4], [10, 20]], "outputs": [7, 30]}},
    "one": {"tests": {"fn_name": "add", "inputs": [[0, 1]], "outputs": [1]}},
    "list": {"tests": {"fn_name": "add", "inputs": [[[3], [4]]], "outputs": [[3, 4]]}},
    "asserts": {"tests": ASSERTS},
    "raises": {"tests": RAISES},
    "differs": {
        "tests": ["assert add(3, 4) != add(10, 20)", "assert not add(1, 1) == 5", "assert add(1, 1) not in (3,)"]
    },
    "maps": {"tests": ["assert all(map(lambda case: add(*case[0]) == case[1], [((1, 1), 2), ((1, 2), 3)]))"]},
    "class": {"tests": [STACK]},
    "truth": {"tests": ["s = Stack()\nassert s.empty\ns.push(4)\nassert not s.empty"]},
    "check": {"tests": CHECK, "entry_point": "add", "prompt": "def add(a, b):\n    '''Add.'''\n"},
}
"""Kind -> the columns of a row."""

RIGHT = {kind: PARTS["STACK" if kind in ("class", "truth") else "SUM" if kind == "stdin" else "ADD"] for kind in TESTS}

# What no program contains as a whole, so that one that prints it found it.
SECRET = "S3CRET" + secrets.token_hex(16)
HUNTER = HUNT + "def add(x):\n    return hunt()\n"
HIDDEN: list[tuple[str, str, dict[str, Any]]] = [
    ("an expected output", HUNT + "print(hunt())", {"tests": {"inputs": ["x\n"], "outputs": [SECRET]}}),
    ("an expected value", HUNTER, {"tests": {"fn_name": "add", "inputs": [["x"]], "outputs": [SECRET]}}),
    ("an assert", HUNTER, {"tests": [f"assert add('x') == '{SECRET}'"]}),
    ("a comment", HUNTER, {"tests": [f"assert add('x') == '{SECRET[:4]}' + '{SECRET[4:]}'  # {SECRET}"]}),
    (
        "a check",
        HUNTER,
        {"tests": f"def check(candidate):\n    assert candidate('x') == '{SECRET}'", "entry_point": "add"},
    ),
]
FOUND = {"tests": {"fn_name": "add", "inputs": [[SECRET]], "outputs": [SECRET]}}  # the hunt finds what is there

CATCHES = "try:\n    f()\nexcept BaseException:\n    pass"
ENDLESS = "def f():\n    x = []\n    while True: x.append(bytearray(1 << 20))"
KILL = "import os\ndef f():\n    try: os.kill({})\n    except OSError: pass\n    while True: pass"
CALLS: list[tuple[str, str, Job]] = [
    ("failed", "a list a million deep", Call("def f():\n    x = []\n    for _ in range(10**6): x = [x]\n    return x", "f")),
    ("bad", "a list that contains itself", Call("def f():\n    x = []\n    x.append(x)\n    return x", "f")),
    ("harmless", "colliding keys", Call("def f(): return {i * (2**61 - 1): 0 for i in range(3000)}", "f")),
    ("bad", "kill the parent", Call("import os\ndef f():\n    os.kill(os.getppid(), 9)\n    while True: pass", "f")),
    ("bad", "stop the parent", Call("import os\ndef f():\n    os.kill(os.getppid(), 19)\n    while True: pass", "f")),
    ("harmless", "a daemon", Call("import os, time\ndef f():\n    if os.fork() == 0: time.sleep(100)\n    return 7", "f")),
    ("harmless", "two returns", Call("import os\ndef f():\n    os.fork()\n    return 7", "f")),
    ("harmless", "two returns, twice", Check("import os\ndef f():\n    os.fork()\n    return 7", "f(); f()", ("f",))),
    ("limit", "output without end", Check("def f():\n    while True: print('7' * 1000)", CATCHES, ("f",))),
    ("timeout", "sleep", Check("import time\ndef f(): time.sleep(100)", CATCHES, ("f",))),
    ("bad", "stop the parent, caught", Check(KILL.format("os.getppid(), 19"), CATCHES, ("f",))),
    ("bad", "kill the parent, caught", Check(KILL.format("os.getppid(), 9"), CATCHES, ("f",))),
    ("bad", "memory, caught", Check(ENDLESS, CATCHES + "\nassert False", ("f",))),
    ("failed", "source that is no text", Program("print(7)  # \ud800")),
    ("harmless", "a value that is no text", Check("def f(): return '\ud800'", "assert f() == '\ud800'", ("f",))),
    ("bad", "exit, caught", Check("import os\ndef f(): os._exit(0)", CATCHES, ("f",))),
]  # fmt: skip


def titles(table: list[tuple[str, str, Any]]) -> Any:
    """Run a test for each entry, named by its title."""
    return pytest.mark.parametrize(
        ("kind", "entry"), [(k, e) for k, _, e in table], ids=[title for _, title, _ in table]
    )


# ------------------------------------------------------------------------------------------------------------ the rooms


def config(backend: str, **options: Any) -> SandboxConfig:
    """Small limits, so that they are reached soon."""
    small = {"workers": 1, "memory_mb": 256, "timeout": 0.6, "max_processes": 16}
    return SandboxConfig(backend=backend, image=IMAGE, allow_unsafe=backend == "subprocess", **(small | options))


class Room:
    """A sandbox of one worker, and the state its programs should find."""

    def __init__(self, backend: str, sandbox: Sandbox) -> None:
        self.backend, self.sandbox = backend, sandbox
        self.state = self.look()

    def run(self, *jobs: Job) -> list[Result]:
        return asyncio.run(self.sandbox.run(jobs))

    def look(self) -> dict[str, Any]:
        [result] = self.run(Program(PARTS["STATE"], prelude=f"ALONE = {self.backend in ISOLATING}", timeout=10))
        assert result.status is DONE, result
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def check(self) -> None:
        """The room is as it was, and right programs pass in it."""
        wanted, self.state = self.state, self.look()  # so that one program's litter fails one test
        end = time.monotonic() + 10
        while self.state != wanted and self.state == wanted | {"sockets": self.state.get("sockets")}:
            assert time.monotonic() < end, "sockets are left"
            self.state = self.look()  # the kernel takes down sockets that are in flight in its own time
        assert self.state == wanted
        program, call = self.run(Program(SUM, "3 4\n", timeout=10), Call(ADD, "add", (3, 4), timeout=10))
        assert (program.status, program.stdout) == (DONE, "7\n")
        assert (call.status, call.value) == (DONE, 7)


@pytest.fixture(scope="module", params=BACKENDS)
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    sandbox = open_sandbox(config(request.param))
    try:
        sandbox.start()
    except SandboxError as missing:
        pytest.skip(f"{request.param}: {missing}")
    yield Room(request.param, sandbox)
    sandbox.close()


isolated = pytest.mark.parametrize("room", ISOLATING, indirect=True)


@dataclass(frozen=True)
class Host:
    """What a program may look for outside: names for its prelude. `reached` is who got to a listener."""

    prelude: str
    reached: list[Any]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A file that all may read, TCP, unix and abstract listeners, a process and an environment variable with secrets."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    file, path, abstract = folder / "file", folder / "socket", secrets.token_hex(8)
    file.write_text(SECRET)
    reached: list[Any] = []
    listeners = [socket.create_server(("", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
    listeners[1].bind(str(path))
    listeners[2].bind("\0" + abstract)
    path.chmod(0o777)
    for listener in listeners:
        listener.listen()
        threading.Thread(target=_accept, args=(listener, reached), daemon=True).start()
    process = subprocess.Popen([sys.executable, "-c", "input()", SECRET], stdin=subprocess.PIPE, env={"X": SECRET})
    os.environ["PGS_TEST_SECRET"] = SECRET
    names = {
        "HOST_FILE": str(file),
        "HOST_SOCKET": str(path),
        "HOST_ABSTRACT": abstract,
        "HOST_PORT": listeners[0].getsockname()[1],
        "HOST_ADDRESSES": _addresses(),
        "HOST_PID": process.pid,
    }
    yield Host("".join(f"{name} = {value!r}\n" for name, value in names.items()), reached)
    del os.environ["PGS_TEST_SECRET"]
    process.kill()
    process.wait()
    for listener in listeners:
        listener.close()
    shutil.rmtree(folder)


def _accept(listener: socket.socket, reached: list[Any]) -> None:
    while True:
        try:
            reached.append(listener.accept())
        except OSError:
            return


def _addresses() -> list[str]:
    """IPv4 addresses of this machine, docker's bridge among them."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return [address for address in found if ":" not in address][:4]


# ---------------------------------------------------------------------------------------------------------------- tests


def test_cheats(room: Room, tmp_path: Path) -> None:
    """What solves scores 1, what cheats scores 0, and nothing is skipped."""
    rows = [("right: " + kind, 1.0, source, TESTS[kind]) for kind, source in RIGHT.items()]
    rows += [(f"{kind}: {title}", 0.0, source, TESTS[kind]) for kind, title, source in CHEATS]
    assert surprises(rows, config(room.backend, workers=2, timeout=2.0), tmp_path) == []


@isolated
def test_hidden(room: Room, tmp_path: Path) -> None:
    """A program does not find what it is tested against."""
    rows = [("the hunt finds what is there", 1.0, HUNTER, FOUND)]
    rows += [(title, 0.0, source, tests) for title, source, tests in HIDDEN]
    assert surprises(rows, config(room.backend, timeout=20.0), tmp_path) == []


def surprises(rows: list[tuple[str, float, str, dict[str, Any]]], sandbox: SandboxConfig, folder: Path) -> list[Any]:
    """The rows, (title, due, source, columns), whose reward by `pgs rl score` is not what is due."""
    completions = folder / "completions.jsonl"
    lines = [{**columns, "completion": f"```python\n{source}\n```"} for _, _, source, columns in rows]
    completions.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = RLConfig(
        model={"policy": "none"},
        data={"dataset": str(completions)},
        rewards={"correct": {"fn": "code"}},
        sandbox=sandbox.model_dump(),
    )
    scored = score_file(options, completions=str(completions))
    return [
        (title, row["reward"], row.get("skip_reason"))
        for (title, due, *_), row in zip(rows, scored.rows, strict=True)
        if row["reward"] != due
    ]


@isolated
def test_hunts(room: Room) -> None:
    """A program finds nothing of the jobs before it in its room."""
    [found] = room.run(Program(HUNT + f"kept = '{SECRET}'\nprint(hunt())", timeout=20))
    assert found.stdout == SECRET + "\n", "the hunt finds what is there"
    room.run(
        Program(f"kept = '{SECRET}' * 1000\nopen('file', 'w').write(kept)\nprint(kept)", SECRET),
        Call(f"# {SECRET}\ndef f(x): return x", "f", (SECRET,)),
        Check(f"# {SECRET}\ndef f(x): return x", f"assert f('{SECRET}') == '{SECRET}'", ("f",), helpers=f"# {SECRET}"),
        Program(f"raise Exception('{SECRET}')"),
        Program(f"import os\nx = '{SECRET}' * 1000\nos.kill(os.getpid(), 9)"),
    )
    [program, call] = room.run(
        Program(HUNT + "print(hunt())", timeout=20), Call(HUNT + "def f(): return hunt()", "f", timeout=20)
    )
    assert (program.status, program.stdout) == (DONE, "\n")
    assert (call.status, call.value) == (DONE, "")


@isolated
@titles(list(read("escapes")))
def test_escapes(room: Room, host: Host, kind: str, entry: str) -> None:
    [result] = room.run(Program(PARTS["TRY"] + entry, prelude=host.prelude, timeout=10))
    assert "REACHED" not in result.stdout
    assert SECRET not in result.stdout + result.stderr
    assert (result.status, result.stderr) == (DONE, "")
    assert host.reached == []
    room.check()


@titles([entry for entry in read("harm") if "alone" not in entry[0].split()])
def test_harm(room: Room, kind: str, entry: str) -> None:
    ends_as_stated(room, kind, Program(entry))


@isolated
@titles([entry for entry in read("harm") if "alone" in entry[0].split()])
def test_harm_to_all(room: Room, kind: str, entry: str) -> None:
    ends_as_stated(room, kind, Program(entry))


@titles(CALLS)
def test_calls(room: Room, kind: str, entry: Job) -> None:
    ends_as_stated(room, kind, entry)


def ends_as_stated(room: Room, kind: str, job: Job) -> None:
    began = time.monotonic()
    [result] = room.run(job)
    assert any(result.status in ENDS[word] for word in kind.split()), result
    assert time.monotonic() - began < 30
    assert len(result.stdout) + len(result.stderr) < 1 << 27
    room.check()


@titles(list(read("forged")))
def test_forged(room: Room, kind: str, entry: str) -> None:
    """A forged answer is at most a wrong answer, of that program alone."""
    body = textwrap.indent(entry, "    ")
    source = f"{PARTS['CHANNEL']}\ndef f(*args):\n{body}    time.sleep(0.05)\n    return 0\n"
    tests = "try:\n    result = f([1], 2)\nexcept Exception:\n    result = 0\nassert result == 7, result\n"
    began = time.process_time()
    call, check = room.run(Call(source, "f"), Check(source, tests, ("f",)))
    assert time.process_time() - began < 10, "the trainer's process was kept busy"
    assert call.status in ENDS["harmless"], call
    assert call.value != 7
    assert check.status in BAD, check
    room.check()


NOISY = {
    "a fork bomb",
    "busy threads",
    "memory in one process",
    "lines without end",
    "a full disk",
    "files without end",
}


def test_a_neighbour(room: Room) -> None:
    """While one room holds an attack, the other's programs pass."""
    attacks = [Program(source) for _, title, source in read("harm") if title in NOISY]
    assert len(attacks) == len(NOISY)
    sandbox = open_sandbox(config(room.backend, workers=2))
    sandbox.start()
    try:
        right = [Program(SUM, f"{n} {n}\n", timeout=10) for n in range(10)]
        for attack in attacks:
            bad, *good = asyncio.run(sandbox.run([attack, *right]))
            assert bad.status in ENDS["harmless"]
            assert [(one.status, one.stdout) for one in good] == [(DONE, f"{2 * n}\n") for n in range(10)]
    finally:
        sandbox.close()
