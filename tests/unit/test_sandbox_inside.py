"""What runs inside rooms: what it may import, how it is shipped, its frames, its filter, and how a scratch is emptied."""

from __future__ import annotations

import ast
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.sandbox import orders, room
from palingenesis.rl.sandbox.inside import harness, limits, values, worker
from palingenesis.rl.sandbox.inside.values import NotPlainError

INSIDE = Path(worker.__file__).parent
PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable


@pytest.mark.parametrize("path", sorted(INSIDE.glob("*.py")), ids=lambda path: path.name)
def test_it_is_standard_library_and_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Match)
        if isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            own = node.module == "palingenesis.rl.sandbox.inside"
            assert own or node.module.partition(".")[0] in sys.stdlib_module_names


def test_both_sides_agree_on_numbers() -> None:
    assert room.BROKE == worker.BROKE
    assert room.FRAME_CAP == worker.FRAME_CAP
    assert worker.QUESTION_CAP == values.MAX_TEXT
    assert orders.GRACE > worker.GRACE > orders.CHECKER_GRACE
    assert 2 * 6 * worker.OUTPUT_CAP < worker.FRAME_CAP, "output as escaped JSON fits a frame"


class Worker:
    """A worker, spoken to by hand."""

    def __init__(self, scratch: Path) -> None:
        settings = room.WorkerSettings(str(scratch), memory_mb=512, max_processes=32, watch=True)
        command = room.worker_argv(PYTHON, settings)
        assert all(len(argument) < 128 * 1024 for argument in command), "the kernel's limit of one argument"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=room.ENVIRONMENT)
        self.ready = self.hear()["ready"]

    def say(self, **message: Any) -> None:
        assert self.process.stdin is not None
        text = json.dumps(message).encode()
        self.process.stdin.write(len(text).to_bytes(4, "big") + text)
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        length = int.from_bytes(self.process.stdout.read(4), "big")
        return dict(json.loads(self.process.stdout.read(length)))

    def run(self, source: str, mode: str = "script", **order: Any) -> dict[str, Any]:
        self.say(run={"mode": mode, "source": source, "prelude": "", "timeout": 10.0, "stdin": ""} | order)
        return self.hear()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Worker]:
    started = Worker(tmp_path)
    yield started
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(20) in (0, worker.FAULT, worker.BROKE)  # FAULT where it had not swept up yet
    assert not list(tmp_path.iterdir())
    started.process.stdout.close()  # type: ignore[union-attr]


def test_nothing_of_ours_can_be_imported_in_a_program(made: Worker) -> None:
    source = "import sys; print([name for name in sys.modules if 'palingenesis' in name or 'harness' in name])"
    assert made.run(source)["end"]["stdout"] == "[]\n"
    assert made.ready["pid"] == made.process.pid


def test_an_end_answers_a_message_even_when_it_came_before_it(made: Worker) -> None:
    """The program dies while the host has the word: that is told when the host has spoken, and the next job is sound."""
    source = "import threading, os, time\ndef f():\n  threading.Timer(0.2, os._exit, (3,)).start()\n  return 1"
    request = json.dumps({"do": "call", "path": ["f"], "args": [], "kwargs": {}})
    said = json.loads(made.run(source, "serve", request=request)["ask"])
    assert said["value"] == 1
    time.sleep(0.6)
    assert made.process.poll() is None
    made.say(answer=request)
    end = made.hear()["end"]
    assert (end["how"], end["code"]) == ("exited", 3)
    assert made.run("print('next')")["end"]["stdout"] == "next\n"


def test_a_supervisor_that_is_killed_ends_the_room_with_its_code(made: Worker) -> None:
    """Forked from PID 1, a program's parent; here both are the same user."""
    source = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(5)"
    made.say(run={"mode": "script", "source": source, "prelude": "", "timeout": 10.0, "stdin": ""})
    assert made.process.wait(20) == worker.BROKE


def test_a_host_that_goes_ends_the_room_in_the_middle_of_a_job(tmp_path: Path) -> None:
    started = Worker(tmp_path)
    source = "open('file', 'w').close(); import time; time.sleep(99)"
    started.say(run={"mode": "script", "source": source, "prelude": "", "timeout": 100.0})
    while not (tmp_path / "file").exists():
        time.sleep(0.01)
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert started.process.wait(20) == worker.FAULT
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------- the filter


def decide(machine: str, number: int, *arguments: int, architecture: int = 0) -> str:
    """What the filter says about a call: the classic BPF machine, as far as the filter uses it."""
    audit, column = limits._MACHINES[machine]
    program = limits._filter(audit, column)
    data = {0: number, 4: architecture or audit} | {16 + 8 * at: value for at, value in enumerate(arguments)}
    value = at = 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == limits._RETURN:
            ends = {limits.ALLOW: "allow", limits.fail(errno.EPERM): "refuse", limits.fail(errno.ENOSYS): "unknown"}
            return ends[code, 0, 0, k]
        if code == limits._LOAD:
            value = data.get(k, 0)
        else:
            test = {limits.EQUAL: value == k, limits._AT_LEAST: value >= k, limits._ANY_BIT: bool(value & k)}[code]
            at += if_true if test else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter(machine: str, column: int) -> None:
    for numbers in limits._REFUSED.values():
        assert decide(machine, numbers[column]) == "refuse"
    for numbers in limits._SELF_ONLY.values():
        assert decide(machine, numbers[column], 0) == "allow"
        assert decide(machine, numbers[column], 1) == "refuse"
    priority, clone, clone3 = (n[column] for n in (limits._SETPRIORITY, limits._CLONE, limits._CLONE3))
    assert decide(machine, priority, 0, 0) == "allow"
    assert decide(machine, priority, 0, 1) == "refuse"
    assert decide(machine, priority, 2, 0) == "refuse", "PRIO_USER"
    assert decide(machine, clone, 0x003D0F00) == "allow", "a thread"
    assert decide(machine, clone, 17) == "allow", "a fork"
    for namespace in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, namespace | 17) == "refuse"
    assert decide(machine, clone3) == "unknown"
    assert decide(machine, 0) == "allow"
    assert decide(machine, 0, architecture=0x40000003) == "unknown", "32 bits"
    if machine == "x86_64":
        assert decide(machine, 0x40000000 + 1) == "unknown", "x32"


def test_the_tables_name_each_call_once() -> None:
    for column in (0, 1):
        tables = [
            limits._REFUSED,
            limits._SELF_ONLY,
            {"p": limits._SETPRIORITY, "c": limits._CLONE, "3": limits._CLONE3},
        ]
        numbers = [entry[column] for table in tables for entry in table.values()]
        assert len(numbers) == len(set(numbers))


# ---------------------------------------------------------------------------------------------------------- the scratch


def test_a_deep_tree_is_emptied_without_recursion(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(10_000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    limits.empty_folder(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    (outside / "kept").mkdir(parents=True)
    (scratch / "d").mkdir(parents=True)
    for place in (scratch, scratch / "d"):
        (place / "link").symlink_to(outside)
        (place / "up").symlink_to("..")
        (place / "file").write_text("x")
    (scratch / "d" / "e").mkdir(mode=0)
    (scratch / "d").chmod(0)
    limits.empty_folder(str(scratch))
    assert os.listdir(scratch) == []
    assert (outside / "kept").is_dir()


# ------------------------------------------------------------------------------------------------- answers and in-place


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"value": {"t": [1]}, "changed": {}}', ((1,), "")),
        ('{"value": null}', (None, "")),
        ('{"method": true}', (None, "")),
        ('{"raised": [["ValueError"], ["x"]], "trace": "ValueError: x"}', (None, "ValueError: x")),
        ('{"raised": 1}', (None, "an exception")),
    ],
)
def test_an_answer_is_read(text: str, answer: Any) -> None:
    assert orders.read_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", '{"value": 1, "raised": 1}', '{"value": {"x": 1}}', '{"value": 1, "changed": [1]}',
        '{"value": 1, "changed": {"0": {"s": [[]]}}}', '{"refused": "a Foo, not a plain value"}', '{"verdict": ""}',
        '{"end": {"how": "exited", "code": 0}}', '{"value": {"h": [0, "A"]}}', "[" * 10**5,
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(NotPlainError):
        orders.read_answer(text)


def test_changes_keep_the_identity_of_what_is_inside() -> None:
    inner, old = [1], {"a": [1], "b": 2}
    old["a"] = inner
    harness._apply(old, {"b": 3, "a": [1, 2], "c": {4}})
    assert list(old.items()) == [("b", 3), ("a", [1, 2]), ("c", {4})]
    assert old["a"] is inner
    with pytest.raises(TypeError, match="a list into a dict"):
        harness._apply([], {})


def test_an_exception_becomes_the_nearest_builtin() -> None:
    class Mine(KeyError):
        pass

    error = harness._nearest(harness._described(Mine("a", 1)))
    assert (type(error), error.args) == (KeyError, ("a", 1))
    assert type(harness._nearest([["SystemExit", "int", "nothing", "LookupError"], [1, "x"]])) is LookupError
    assert harness._nearest([[], ["x"]]).args == ("x",)
