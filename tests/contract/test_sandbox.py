"""What every sandbox promises, run over every backend. `docker` and `bubblewrap` skip where they are not to be had."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from bench.kills import KILLS, gone, kill_one, kill_trainer, living, unique

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox import Call, Check, Job, Program, Result, Sandbox, Status, open_sandbox
from tests.agent_sandbox_server import KUBECONFIG, Cluster, missing

IMAGE = os.environ.get("SANDBOX_IMAGE", "palingenesis-sandbox:local")  # scripts/sandbox-image makes it
BACKENDS = ("docker", "bubblewrap", "agent_sandbox", "subprocess")
SHARING = ("agent_sandbox", "subprocess")  # programs may write wherever the pod's, or this machine's, user may
DONE, FAILED, TIMEOUT, LIMIT = Status.DONE, Status.FAILED, Status.TIMEOUT, Status.LIMIT

pytestmark = pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")


def make(backend: str, **options: Any) -> Sandbox:
    """A started sandbox; skips with the reason where the backend has no service here."""
    config = SandboxConfig(
        **(
            {"backend": backend, "image": IMAGE, "allow_unsafe": backend == "subprocess", "workers": 2}
            | ({"warmpool": "python"} if backend == "agent_sandbox" else {})
            | options
        )
    )
    try:
        sandbox = open_sandbox(config)
        sandbox.start()
    except SandboxError as error:
        if backend == "subprocess":
            raise
        pytest.skip(str(error))
    return sandbox


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "agent_sandbox":
        yield str(request.param)
        return
    if why := missing():
        pytest.skip(why)
    with Cluster("split") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        patch.setattr(KUBECONFIG, str(cluster.kubeconfig))
        yield "agent_sandbox"


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[Sandbox]:
    made = make(backend)
    yield made
    made.close()


@pytest.fixture
def sandbox(shared: Sandbox) -> Sandbox:
    shared.usage()
    return shared


@pytest.fixture
def one_room(backend: str) -> Iterator[Sandbox]:
    made = make(backend, workers=1)
    yield made
    made.close()


def play(sandbox: Sandbox, *jobs: Job) -> list[Result]:
    return asyncio.run(sandbox.run(jobs))


def script(sandbox: Sandbox, source: str, stdin: str = "", **options: Any) -> Result:
    return play(sandbox, Program(textwrap.dedent(source), stdin, **options))[0]


def call(sandbox: Sandbox, source: str, *args: Any, function: str = "f", **options: Any) -> Result:
    return play(sandbox, Call(textwrap.dedent(source), function, args, **options))[0]


def check(sandbox: Sandbox, source: str, tests: str, names: tuple[str, ...] = ("f",), **options: Any) -> Result:
    return play(sandbox, Check(textwrap.dedent(source), textwrap.dedent(tests), names, **options))[0]


def assert_works(sandbox: Sandbox) -> None:
    """The pool is sound: rooms as many as there are, and more."""
    for result in play(sandbox, *[Program("print(input())", str(n)) for n in range(6)]):
        assert (result.status, result.reason) == (DONE, "")


# ------------------------------------------------------------------------------------------------------------- programs


def test_a_program_reads_and_prints(sandbox: Sandbox) -> None:
    result = script(sandbox, "a, b = map(int, input().split())\nprint(a + b)", "2 40\n")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == (DONE, "42\n", "", 0)
    assert 0 < result.seconds < 5


@pytest.mark.parametrize(
    "read",
    [
        "import sys; text = sys.stdin.read()",
        "text = open(0).read()",
        "text = open('/dev/stdin').read()",
        "import os; text = os.read(0, os.fstat(0).st_size).decode()",
        "import sys; text = ''.join(sys.stdin)",
        "import mmap; text = mmap.mmap(0, 0, prot=mmap.PROT_READ).read().decode()",
        "import sys; text = sys.stdin.buffer.read().decode()",
    ],
)
def test_every_way_to_read_stdin(sandbox: Sandbox, read: str) -> None:
    stdin = "grüße\n" * 30_000
    result = script(sandbox, f"{read}\nprint(len(text), text[:5])", stdin)
    assert (result.status, result.stdout) == (DONE, f"{len(stdin)} grüße\n")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("exit(7)", 7),
        ("import os; os._exit(0)", 0),
        ("1 / 0", 1),
        ("def (", 1),
        ("raise KeyboardInterrupt", 1),
        ("\0", 1),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", 0),
        ("import atexit; atexit.register(print, 'late')", 0),
        ("import sys; sys.stdout.close()", 0),
        ("import os; os.close(1); os.close(2)", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)", 0),
    ],
)
def test_the_exit_code_is_pythons(sandbox: Sandbox, source: str, code: int) -> None:
    result = script(sandbox, source)
    assert (result.exit_code, result.status) == (code, DONE if code == 0 else FAILED), result
    assert (result.reason == "") == (code == 0)


def test_a_failure_is_told_with_its_line(sandbox: Sandbox) -> None:
    result = script(sandbox, "x = 1\nprint('so far')\nraise ValueError('what is wrong')")
    assert result.reason == "ValueError: what is wrong"
    assert "line 3" in result.stderr
    assert "raise ValueError('what is wrong')" in result.stderr
    assert "harness" not in result.stderr
    assert result.stdout == "so far\n"


def test_a_program_is_main_and_has_its_prelude(sandbox: Sandbox) -> None:
    prelude = "from typing import List\nimport math"
    source = "from __future__ import annotations\nif __name__ == '__main__': print(List[int], math.pi > 3, __name__)"
    result = play(sandbox, Program(source, prelude=prelude))[0]
    assert result.stdout == "typing.List[int] True __main__\n", result


@pytest.mark.parametrize(
    "source",
    [
        "out = open(1, 'w')\nprint(7, file=out)",
        "import os\nout = os.fdopen(1, 'w')\nout.write('7\\n')",
        "def main():\n    global out\n    out = open(1, 'w', closefd=False)\n    print(7, file=out)\nmain()",
        "import io, sys\nprint(7)\nsys.stdout = io.StringIO()",
        "import sys\nprint(7)\nsys.stdout = None",
        "import sys\nclass Out:\n    write = sys.stdout.write\n    def flush(self): pass\nsys.stdout = Out()\nprint(7)",
        "class A:\n    def __del__(self): print(VALUE)\nVALUE = 7\na = A()",
        "class A:\n    def __init__(self): self.me = self\n    def __del__(self): print(7)\nA()",
        "import atexit\nout = open(1, 'w')\natexit.register(out.write, '7\\n')",
    ],
)
def test_what_python_would_print_at_its_end_is_there(sandbox: Sandbox, source: str) -> None:
    result = script(sandbox, source)
    assert (result.status, result.stdout) == (DONE, "7\n"), result


def test_exit_handlers_and_threads_are_waited_for(sandbox: Sandbox) -> None:
    source = """
        import atexit, threading, time
        atexit.register(print, "last")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("main")
    """
    assert script(sandbox, source).stdout == "main\nthread\nlast\n"


def test_the_same_program_does_the_same_in_every_room(sandbox: Sandbox) -> None:
    source = "import random; print(hash('a'), random.random(), list({'x', 'y', 'z'}))"
    results = play(sandbox, *[Program(source)] * 6)
    assert len({result.stdout for result in results}) == 1


def test_a_program_sees_a_bare_environment(sandbox: Sandbox) -> None:
    source = "import json, os; print(json.dumps([dict(os.environ), open('/proc/self/environ').read()]))"
    now, born = json.loads(script(sandbox, source).stdout)
    allowed = {"PATH", "LANG", "HOME", "TMPDIR", "MALLOC_ARENA_MAX"}
    names = {*now, *(entry.partition("=")[0] for entry in born.split("\0") if entry)}
    assert {name for name in names if not name.startswith("PYTHON")} <= allowed | {"PWD", "OLDPWD", "SHLVL", "_"}


# --------------------------------------------------------------------------------------------------------- time, output


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()",
        "import atexit, time; atexit.register(time.sleep, 100)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "print('answer', flush=True)\nwhile True: pass",
    ],
)
def test_the_deadline(sandbox: Sandbox, source: str) -> None:
    began = time.monotonic()
    result = script(sandbox, source, timeout=0.4)
    assert result.status is TIMEOUT
    assert time.monotonic() - began < 5
    assert result.reason == "took longer than 0.4 s"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("text", ["'x' * 1000 + chr(10)", "'y' * 1000", "chr(0) * 1000"])
def test_endless_output(sandbox: Sandbox, stream: str, text: str) -> None:
    result = script(sandbox, f"import sys\nwhile True: sys.{stream}.write({text})")
    assert result.status is LIMIT
    assert "output" in result.reason
    assert len(result.stdout) < 2**17


def test_much_output_comes_whole(sandbox: Sandbox) -> None:
    result = script(sandbox, "print('ü' * 1_000_000); print('end')")
    assert result.status is DONE
    assert result.stdout == "ü" * 1_000_000 + "\nend\n"


def test_bytes_that_are_no_text(sandbox: Sandbox) -> None:
    result = script(sandbox, "import os; os.write(1, bytes([255, 65, 0, 10]))")
    assert (result.status, result.stdout) == (DONE, "\ufffdA\0\n")


def test_a_child_that_keeps_stdout_open_is_not_waited_for(sandbox: Sandbox) -> None:
    source = """
        import os, time
        print("main", flush=True)
        if os.fork() == 0:
            time.sleep(100)
    """
    began = time.monotonic()
    result = script(sandbox, source, timeout=5)
    assert (result.status, result.stdout) == (DONE, "main\n")
    assert time.monotonic() - began < 4


# ------------------------------------------------------------------------------------------------------ what is left over


@pytest.mark.parametrize("way", ["child", "daemon", "stopped", "deaf"])
def test_nothing_outlives_its_job(sandbox: Sandbox, way: str) -> None:
    mark = unique()
    prepare = {
        "child": "",
        "daemon": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)",
        "stopped": "stop = True",
        "deaf": "[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]",
    }[way]
    source = f"""
        import os, signal, subprocess, time
        stop = False
        if os.fork() == 0:
            {prepare}
            child = subprocess.Popen(["sleep", "{mark}"])
            if stop: os.kill(child.pid, signal.SIGSTOP)
            time.sleep(100)
        time.sleep(0.3)
    """
    assert script(sandbox, source).status is DONE
    assert gone(mark), living(mark)
    assert_works(sandbox)
    assert "replaced" not in sandbox.usage().counts


def test_a_job_finds_nothing_of_the_one_before(one_room: Sandbox) -> None:
    leave = """
        import builtins, json, os, sys
        open("left", "w").write("here")
        os.makedirs("a/b/c")
        os.symlink("/etc/passwd", "a/link")
        for note in (os.setxattr, (".", "user.left", b"here")), (os.utime, (".", (7, 7))), (os.chmod, (".", 0)):
            try: note[0](*note[1])
            except OSError: pass
        os.environ["LEFT"] = "here"
        sys.modules["left"] = sys
        builtins.left = json.left = 1
    """
    look = """
        import builtins, json, os, sys
        print(os.listdir("."), os.environ.get("LEFT"), "left" in sys.modules)
        print(hasattr(builtins, "left"), hasattr(json, "left"), os.listxattr("."), 7 in os.stat(".")[7:9])
    """
    assert script(one_room, leave).status is DONE
    assert script(one_room, look).stdout == "[] None False\nFalse False [] False\n"
    assert "replaced" not in one_room.usage().counts


@pytest.mark.parametrize(
    "litter",
    [
        "for n in range(3000):\n    os.mkdir('d'); os.chdir('d')",
        "for n in range(10000):\n    open(f'{n:0200}', 'w').close()",
        "for n in range(300):\n    os.mkdir(f'{n}'); open(f'{n}/x', 'w').close(); os.chmod(f'{n}', 0)",
        "os.mkdir('d'); os.mkdir('d/e'); open('d/e/f', 'w').close(); os.chmod('d/e', 0); os.chmod('d', 0)",
        "os.symlink('/', 'root'); os.symlink('.', 'self'); os.mkdir('d'); os.symlink('../..', 'd/up')",
        "os.mkfifo('fifo'); open(b'\\xff\\xfe', 'w').close(); open('-rf', 'w').close(); open('new\\nline', 'w').close()",
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind('sock')",
    ],
)
def test_scratch_is_emptied_whatever_is_in_it(one_room: Sandbox, litter: str) -> None:
    assert script(one_room, f"import os\n{litter}").status is DONE
    assert script(one_room, "import os; print(os.listdir('.'))").stdout == "[]\n"
    assert "replaced" not in one_room.usage().counts


def test_only_what_is_emptied_can_be_written_to(backend: str, one_room: Sandbox) -> None:
    """Where files can be made in a room, they are gone for the next job. SHARING promise it for scratch alone."""
    walk = f"os.walk({'.' if backend in SHARING else '/'!r})"
    leave = f"""
        import os
        for place in [top for top, _, _ in {walk} if not top.startswith("/proc/")]:
            for make in (os.mkdir, os.mkfifo, lambda path: open(path, "w"), lambda path: os.symlink("/", path)):
                try: make(f"{{place}}/left-{{id(make)}}")
                except OSError: pass
    """
    look = f"import os; print([n for top, d, f in {walk} if top[:6] != '/proc/' for n in d + f if n[:5] == 'left-'])"
    assert script(one_room, leave, timeout=60).status is DONE
    assert script(one_room, look, timeout=60).stdout == "[]\n"
    assert "replaced" not in one_room.usage().counts


def test_locks_of_multiprocessing(sandbox: Sandbox) -> None:
    source = """
        import multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                print(sum(pool.map(abs, range(-10, 1))))
    """
    result = script(sandbox, source)
    assert (result.status, result.stdout) == (DONE, "55\n"), result


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_thread_with_a_large_stack(sandbox: Sandbox) -> None:
    """As programs that recurse deeply make it; with `memory_mb` of 1024, the default."""
    source = """
        import sys, threading
        threading.stack_size(2**29)
        thread = threading.Thread(target=lambda: print(7))
        thread.start()
        thread.join()
    """
    result = script(sandbox, source)
    assert (result.status, result.stdout) == (DONE, "7\n"), result


def test_memory(backend: str) -> None:
    sandbox = make(backend, workers=1, memory_mb=200)
    bombs = [
        "x = bytearray(10**9)",
        "x = []\nwhile True: x.append(bytes(10**6))",
        "import os\nfor _ in range(8): os.fork()\nx = []\nwhile True: x.append(b'x' * 10**6)",
        "import os\nfor _ in range(12):\n  if os.fork() == 0: break\nx = b'x' * (50 * 10**6)\nimport time; time.sleep(3)",
    ]
    for bomb in bombs[:3]:
        result = script(sandbox, bomb, timeout=60)
        assert result.status in (LIMIT, FAILED), (bomb, result)
    assert script(sandbox, bombs[3], timeout=60).status in (LIMIT, FAILED, DONE)  # a cgroup may choose the children
    assert_works(sandbox)
    assert script(sandbox, "x = bytearray(100 * 10**6); print(len(x))").status is DONE
    sandbox.close()


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
        "import os\nwhile True:\n  if os.fork(): os._exit(0)",
    ],
)
def test_processes(sandbox: Sandbox, bomb: str) -> None:
    result = script(sandbox, bomb, timeout=2)
    assert result.status is not Status.UNAVAILABLE
    assert result.status is not DONE or "_exit(0)" in bomb
    assert_works(sandbox)


def test_files(sandbox: Sandbox) -> None:
    result = script(sandbox, "f = open('big', 'wb')\nwhile True: f.write(bytes(2**20))")
    assert result.status is FAILED
    result = script(sandbox, "x = [open('/dev/null') for _ in range(5000)]")
    assert "Too many open files" in result.reason
    assert_works(sandbox)


@pytest.mark.parametrize("sign", ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"])
def test_a_program_that_fights_its_supervisor(backend: str, sandbox: Sandbox, sign: str) -> None:
    """It may end its supervisor where both are the same user; then it is tried in another room, and that is its score."""
    everything = "" if backend == "subprocess" else "-1"  # there it would reach what other tests run as nobody
    source = f"""
        import os, signal
        for pid in (os.getppid(), 1, {everything}):
            try: os.kill(pid, signal.{sign})
            except OSError: pass
        raise SystemExit(5)
    """
    result = script(sandbox, source, timeout=1)
    assert result.status in (Status.BROKE, FAILED), result
    assert_works(sandbox)


# ---------------------------------------------------------------------------------------------------------------- calls

PLAIN: list[Any] = [
    None, True, 0, -1, 2**53, -(2**64), 10**5000, 1.5, -0.0, float("inf"), 1e-320, 1 + 2j, complex("inf"), "",
    "grüße\0\n", "\ud800", "\ud83d\ude00", "😀", b"\0\xff", [], [1, [2, [3]]], (), (1,), ((), []),
    set(), {1, "a", (2, 3)}, frozenset({1}),
    {}, {1: 2, "a": {"b": []}, (1, 2): None, None: True}, range(5), range(10, 0, -3), [{"t": [1]}], {"i": "0x1"},
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b) if not isinstance(a, int) else a == b


def test_plain_values_go_in_and_come_out(sandbox: Sandbox) -> None:
    results = play(sandbox, *(Call("def f(x): return x", "f", (value,)) for value in PLAIN))
    for value, result in zip(PLAIN, results, strict=True):
        assert result.status is DONE, result
        if isinstance(value, set | frozenset):
            assert (type(value), value) == (type(result.value), result.value)
        else:
            assert same(result.value, value), (result.value, value)


def test_not_a_number_comes_back(sandbox: Sandbox) -> None:
    value = call(sandbox, "def f(): return float('nan')").value
    assert value != value


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from collections import deque\ndef f(): return deque([1])", "f returned a deque, not a plain value"),
        ("class A(int): pass\ndef f(): return [A(1)]", "f returned an A, not a plain value"),
        (
            "class Yes:\n  def __eq__(self, o): return True\ndef f(): return Yes()",
            "f returned a Yes, not a plain value",
        ),
        ("def f(): return (i for i in [1])", "f returned a generator, not a plain value"),
        ("def f(): return f", "f returned a function, not a plain value"),
        ("def f():\n  x = []\n  x.append(x)\n  return x", "f returned a value that is nested too deeply"),
        ("def f():\n  x = []\n  for _ in range(60): x = [x, x]\n  return x", "f returned a value that is too large"),
        ("def f(): return 'x' * 10**7", "f returned a value that is too large"),
    ],
)
def test_values_that_are_not_plain(sandbox: Sandbox, source: str, reason: str) -> None:
    result = call(sandbox, source, timeout=60)
    assert (result.status, result.reason, result.value) == (FAILED, reason, None)


def test_functions_and_methods(sandbox: Sandbox) -> None:
    assert call(sandbox, "f = lambda a, b: a * b", 6, 7).value == 42
    method = "class Solution:\n  def f(self, a): return self.g(a)\n  def g(self, a): return a + 1"
    assert call(sandbox, method, 1).value == 2
    assert call(sandbox, "if __name__ == 'solution': f = lambda: __name__").value == "solution"
    assert call(
        sandbox, "def f(x: List[int]): return math.pi > x[0]", [3], prelude="from typing import *; import math"
    ).value


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def g(): pass", "NameError: name 'f' is not defined"),
        ("def f(): raise KeyError('x')", "KeyError: 'x'"),
        ("def f(a): pass", "TypeError: f() missing 1 required positional argument: 'a'"),
        ("1 / 0\ndef f(): pass", "ZeroDivisionError: division by zero"),
        ("import os\ndef f(): os._exit(0)", "exited before it answered"),
        ("import sys\ndef f(): sys.exit(0)", "exited before it answered"),
        ("raise SystemExit", "exited before it answered"),
        ("def f(): return f()", "RecursionError: maximum recursion depth exceeded"),
        ("import os, signal\ndef f(): os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
    ],
)
def test_calls_that_fail(sandbox: Sandbox, source: str, reason: str) -> None:
    result = call(sandbox, source)
    assert (result.status, result.value) == (FAILED, None)
    assert result.reason.startswith(reason)


METHODS = (
    "class Solution:\n    def search(self, x): return x + 1\n    def both(self, x): return 1\ndef both(x): return 2\n"
)


@pytest.mark.parametrize(
    ("prelude", "source", "function", "value"),
    [
        ("from re import *", METHODS, "search", 4),
        ("", METHODS, "both", 1),  # as the harnesses of APPS and LiveCodeBench do
        ("from math import *", "from math import isqrt", "isqrt", 1),
        ("from math import *", "".join(f"a{n} = {n}\n" for n in range(300)) + "from math import isqrt", "isqrt", 1),
        ("from math import *", "isqrt = lambda x: x * x", "isqrt", 9),
        ("from math import *", "pass", "isqrt", None),
        ("from builtins import *", "x = 1", "abs", None),
    ],
)
def test_a_call_finds_what_the_program_defines(
    sandbox: Sandbox, prelude: str, source: str, function: str, value: int | None
) -> None:
    """Never what the prelude imported: an empty answer would pass where it has the right name."""
    result = call(sandbox, source, 3, function=function, prelude=prelude)
    assert (result.status, result.value) == ((FAILED, None) if value is None else (DONE, value)), result
    assert value is not None or result.reason == f"NameError: name {function!r} is not defined"


def test_a_call_has_the_deadline_of_a_program(sandbox: Sandbox) -> None:
    assert call(sandbox, "while True: pass\ndef f(): pass", timeout=0.3).status is TIMEOUT
    assert call(sandbox, "def f():\n  while True: pass", timeout=0.3).status is TIMEOUT


def test_patched_modules_do_not_trip_the_harness(sandbox: Sandbox) -> None:
    source = """
        import builtins, json, os, sys
        json.dumps = json.loads = os.write = os.read = None
        for name in ("callable", "print", "open", "enumerate", "zip", "vars", "exec"): setattr(builtins, name, None)
        sys.stdout = sys.stderr = sys.stdin = None
        sys.setrecursionlimit(200)
        def f(x): return {"x": [x, (1.5,)]}
    """
    assert call(sandbox, source, 3).value == {"x": [3, (1.5,)]}


@pytest.mark.parametrize(
    "forged",
    [
        "b'garbage'",
        "b'\\xff\\xff\\xff\\xff' + b'x' * 100",
        "b'\\x00\\x00\\x00\\x02{}'",
        "b'\\x00\\x00\\x00\\x03\\xff\\xff\\xff'",
        "(lambda t: len(t).to_bytes(4, 'big') + t)(b'[' * 100000)",
        "(lambda t: len(t).to_bytes(4, 'big') + t)(b'{\"value\": {\"z\": [[]]}}')",
        '(lambda t: len(t).to_bytes(4, \'big\') + t)(b\'{"value": {"h": [0, "A"]}}\')',
        "(lambda t: len(t).to_bytes(4, 'big') + t)(b'{\"value\": ' + b'9' * 100000 + b'}')",
        "(lambda t: len(t).to_bytes(4, 'big') + t)(b'{\"value\": 1, \"raised\": 1}')",
        "(lambda t: len(t).to_bytes(4, 'big') + t)(b'{\"verdict\": \"\"}')",
        '(lambda t: len(t).to_bytes(4, \'big\') + t)(b\'{"end": {"how": "exited", "code": 0}}\')',
    ],
)
def test_forged_answers_fail_the_call(sandbox: Sandbox, forged: str) -> None:
    write = f"try: os.write(fd, {forged})\n  except OSError: pass"
    source = f"import os, time\nfor fd in range(3, 10):\n  {write}\ntime.sleep(60)"
    result = call(sandbox, source, timeout=1)
    assert result.status in (FAILED, TIMEOUT), result
    assert_works(sandbox)
    assert "replaced" not in sandbox.usage().counts


def test_keys_that_collide_do_not_hold_up_the_host(sandbox: Sandbox) -> None:
    source = """
        import os
        keys = ",".join('{"i":"%s"}' % hex(n * (2**61 - 1)) for n in range(1, 150_000))
        text = ('{"value":{"s":[' + keys + ']}}').encode()
        data = len(text).to_bytes(4, "big") + text
        while data: data = data[os.write(4, data):]
        while True: pass
    """
    began = time.monotonic()
    result = call(sandbox, source, timeout=5)
    assert (result.status, result.reason) == (FAILED, "f returned a value whose keys collide")
    assert time.monotonic() - began < 10


def test_arguments_must_be_plain(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="a function, not a plain value"):
        call(sandbox, "def f(x): pass", print_nothing)


def print_nothing() -> None: ...


# --------------------------------------------------------------------------------------------------------------- checks


def test_tests_pass_and_fail(sandbox: Sandbox) -> None:
    tests = "assert f(2) == 4\nassert f(3) == 9, 'three'"
    assert check(sandbox, "def f(x): return x * x", tests).status is DONE
    result = check(sandbox, "def f(x): return x * 2", tests)
    assert result.status is FAILED
    assert result.reason == "AssertionError: three (tests.py, line 2: assert f(3) == 9, 'three')"


def test_an_entry_point_and_helpers(sandbox: Sandbox) -> None:
    helpers = "import math\ndef poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))\ndef f(xs): '''A stub.'''"
    tests = "def check(candidate):\n  for n in range(20): assert math.fabs(poly([-n, 1], candidate([-n, 1]))) < 1e-9"
    options: dict[str, Any] = {"helpers": helpers, "entry_point": "f"}
    assert check(sandbox, "def f(xs): return -xs[0]", tests, **options).status is DONE
    assert check(sandbox, "def f(xs): return 1", tests, **options).status is FAILED
    assert check(sandbox, "def poly(xs, x): return 0\ndef f(xs): return 1", tests, **options).status is FAILED


def test_arguments_changed_in_place_are_changed_in_the_tests(sandbox: Sandbox) -> None:
    source = """
        def f(xs, d, s, kept):
            xs[0].append(3); xs.append([4]); d["new"] = d.pop("old"); s.add(9); return xs
    """
    tests = """
        inner = [1]
        xs, d, s, kept = [inner], {"old": [1]}, {1}, [0]
        got = f(xs, d, s, kept)
        assert inner == [1, 3] and xs == [[1, 3], [4]] and xs[0] is inner
        assert d == {"new": [1]} and s == {1, 9} and kept == [0]
        assert got == xs
    """
    assert check(sandbox, source, tests).status is DONE


def test_objects_of_the_programs_classes(sandbox: Sandbox) -> None:
    source = """
        class Node:
            kinds = 1
            def __init__(self, value, next=None): self.value, self.next = value, next
            def push(self, *values): self.value += sum(values); return self
            def __eq__(self, other): return True
        def total(node): return node.value + (total(node.next) if node.next else 0)
        def f(a): return [a, Node(7)]
    """
    tests = """
        a = Node(1, next=Node(2))
        assert total(a) == 3 and a.next.value == 2 and a.next.next is None
        assert a.push(5, 6) is a and a.value == 12
        a.value = 20
        assert total(a) == 22 and Node.kinds == 1
        pair = f(a)
        assert pair[0] is a and pair[1].value == 7
        assert a != None and not (a == None) and a is a
        for wrong in ("a == a", "a != 1", "a == 1", "a in [1]", "a not in [1]", "bool(a)", "not a.push", "a < a", "len(a)",
                      "list(a)", "a()", "a[0]", "str(a)", "f'{a}'", "repr(a)", "int(a)", "Node == 1", "a.push != 1"):
            try: eval(wrong)
            except TypeError: pass
            else: raise ValueError(wrong)
        try: a._secret
        except AttributeError: pass
        else: raise ValueError
    """
    result = check(sandbox, source, tests, ("Node", "total", "f"))
    assert result.status is DONE, result


def test_an_object_that_equals_everything_passes_nothing(sandbox: Sandbox) -> None:
    source = "class Yes:\n  def __eq__(self, o): return True\n  def __bool__(self): return True\ndef f(x): return Yes()"
    equal = ("assert f(1) == 1", "assert f(1)", "assert f(1) in [1, 2]", "assert not f(1) != 1")
    different = (
        "assert f(1) != 1",
        "assert f(1) not in [1]",
        "assert f(1) != f(2)",
        "assert str(f(1)) != '1'",
        "assert f.g",
    )
    for tests in equal + different:
        assert check(sandbox, source, tests).status is FAILED, tests


def test_an_exception_of_the_program_does_not_end_a_loop_of_the_tests(sandbox: Sandbox) -> None:
    tests = "assert all(map(lambda n: f(n) == n, [1, 2]))"
    for error in ("StopIteration", "StopAsyncIteration", "type('Mine', (StopIteration,), {})", "GeneratorExit"):
        assert check(sandbox, f"def f(n): raise {error}", tests).status is FAILED


def test_exceptions_of_the_program_are_raised_in_the_tests(sandbox: Sandbox) -> None:
    source = """
        class Mine(LookupError): pass
        def f(kind):
            if kind == "mine": raise Mine("own", 3)
            if kind == "unicode": b"\\xff".decode()
            raise {"value": ValueError("bad"), "key": KeyError("k")}[kind]
    """
    tests = """
        def raised(kind):
            try: f(kind)
            except Exception as error: return type(error), error.args
        assert raised("value") == (ValueError, ("bad",))
        assert raised("key") == (KeyError, ("k",))
        assert raised("mine") == (LookupError, ("own", 3))
        assert raised("unicode")[0] is UnicodeDecodeError
    """
    result = check(sandbox, source, tests)
    assert result.status is DONE, result


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("def f(x):\n  raise SystemExit(0)", FAILED),
        ("import os\ndef f(x): os._exit(0)", FAILED),
        ("def f(x):\n  while True: pass", TIMEOUT),
        ("def f(x): return {1}.__iter__()", FAILED),
        ("import os, signal\ndef f(x): os.kill(os.getpid(), 9)", LIMIT),
        ("raise SystemExit(0)", FAILED),
        ("def f(", FAILED),
        ("def f(x): print('x' * 10**8)", LIMIT),
        ("import os\ndef f(x): os.write(4, b'\\0\\0\\0\\x0e' + b'{\"verdict\":\"\"}')", FAILED),
    ],
)
def test_tests_cannot_catch_the_end_of_the_program(sandbox: Sandbox, source: str, status: Status) -> None:
    tests = "try:\n  f(1)\nexcept BaseException: pass\nfinally:\n  pass"
    result = check(sandbox, source, tests, timeout=1 if status is TIMEOUT else 30)
    assert result.status is status, result
    assert_works(sandbox)


def test_tests_of_many_calls(one_room: Sandbox) -> None:
    result = check(one_room, "def f(x): return x", "for i in range(1500): assert f(i) == i", timeout=20)
    assert result.status is DONE, result
    usage = one_room.usage()
    assert usage.counts == {"done": 1}


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("import numpyx\nassert f(1) == 1", "numpyx"),
        ("assert f(len) == 1", "pass a builtin_function_or_method to the program"),
        ("assert f(iter([1])) == 1", "pass a list_iterator to the program"),
    ],
)
def test_tests_that_no_program_could_pass_are_no_score(sandbox: Sandbox, tests: str, reason: str) -> None:
    result = check(sandbox, "def f(x): return x", tests)
    assert result.status is Status.UNAVAILABLE
    assert result.reason.startswith("the tests cannot be run here: ")
    assert reason in result.reason


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): raise ImportError('no numpy')",
        "def f(x): import numpyx",
        "class Untestable(Exception): pass\ndef f(x): raise Untestable('really')",
        "class A:\n    def __call__(self): return 1\nclass B: pass\nB.m = A()\ndef f(x): return B()",
    ],
)
def test_a_program_cannot_call_its_tests_untestable(sandbox: Sandbox, source: str) -> None:
    result = check(sandbox, source, "x = f(1).m\nassert f(x) == 1")
    assert result.status is FAILED, result


def test_tests_that_end_early_or_use_nothing_do_not_pass(sandbox: Sandbox) -> None:
    good = "def f(x): return x"
    assert check(sandbox, good, "f(1)\nraise SystemExit(0)").status is FAILED
    assert check(sandbox, good, "import os; f(1); os._exit(0)").status is FAILED
    assert check(sandbox, good, "assert True").status is FAILED
    assert check(sandbox, good, "f(1)\nwhile True: pass", timeout=0.5).status is TIMEOUT
    assert check(sandbox, good, "f(1)\ndef (").status is FAILED


def test_the_program_is_not_where_the_tests_are(sandbox: Sandbox) -> None:
    source = """
        import gc, sys
        def f():
            mark = "".join(map(chr, (77, 65, 82, 75, 69, 82)))
            held = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
            frame, frames = sys._getframe(1), []
            while frame: frames.append(repr(frame.f_locals)); frame = frame.f_back
            return [sum(mark in text for text in texts) for texts in (held, frames)]
    """
    result = check(sandbox, source, "assert f() == [0, 0], 'MARKER'")
    assert result.status is DONE, result


# ------------------------------------------------------------------------------------------------------------- the pool


def test_results_are_in_order_and_jobs_run_side_by_side(sandbox: Sandbox) -> None:
    jobs = [Program(f"import time; time.sleep({0.3 if n < 2 else 0}); print({n})") for n in range(10)]
    began = time.monotonic()
    results = play(sandbox, *jobs)
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(10)]
    assert time.monotonic() - began < 5


def test_any_thread_and_any_loop(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}

    def ask(n: int) -> None:
        found[n] = script(sandbox, f"print({n})").stdout

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: f"{n}\n" for n in range(8)}


def test_usage_counts_and_keeps_examples(sandbox: Sandbox) -> None:
    play(
        sandbox,
        Program("print(1)"),
        Program("1 / 0"),
        Call("def f(): pass", "f"),
        Program("while True: pass", timeout=0.2),
    )
    usage = sandbox.usage()
    assert usage.counts == {"done": 2, "failed": 1, "timeout": 1}
    assert {example["status"] for example in usage.examples} == {"failed", "timeout"}
    assert usage.examples[0]["source"] == "1 / 0"
    assert "ZeroDivisionError" in usage.examples[0]["stderr"]
    assert sandbox.usage().counts == {}


def test_a_wait_that_is_given_up_leaves_the_pool_sound(sandbox: Sandbox) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.run([Program("import time; time.sleep(5)")] * 3), 0.3)

    asyncio.run(give_up())
    assert_works(sandbox)


def test_close_ends_what_runs(backend: str) -> None:
    sandbox = make(backend)
    mark = unique()
    source = f"import subprocess; subprocess.run(['sleep', '{mark}'])"
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.extend(play(sandbox, *[Program(source, timeout=60)] * 3)))
    thread.start()
    deadline = time.monotonic() + 20
    while len(living(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    sandbox.close()
    thread.join(30)
    assert [result.status for result in found] == [Status.UNAVAILABLE] * 3
    assert gone(mark)
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        script(sandbox, "print(1)")


# ------------------------------------------------------------------------------------------------------------ the kills


# Pods are not this machine's to kill; test_sandbox_agent.py has those that are lost.
here = pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "agent_sandbox"], indirect=True)


@here
@pytest.mark.skipif(os.getuid() != 0, reason="only root may kill what runs as nobody")
@pytest.mark.parametrize("what", KILLS)
def test_rooms_that_are_killed(backend: str, what: str) -> None:
    """Every job is scored rightly or not at all, and the pool goes on."""
    sandbox: Any = make(backend)
    jobs = [Program(f"import time; time.sleep(0.05); print({n} ** 2)") for n in range(60)]
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.extend(play(sandbox, *jobs)))
    thread.start()
    killed = 0
    while thread.is_alive() and killed < 3:
        time.sleep(0.4)
        killed += kill_one(what, list(sandbox.rooms))
    thread.join(120)
    assert killed
    assert len(found) == len(jobs)
    for n, result in enumerate(found):
        if result.status is not Status.UNAVAILABLE:
            assert (result.status, result.stdout) == (DONE, f"{n * n}\n"), result
    assert sum(result.status is DONE for result in found) > 50
    assert sandbox.usage().counts["replaced"] >= 1
    assert_works(sandbox)
    sandbox.close()


@here
def test_a_trainer_that_is_killed_leaves_nothing(shared: Sandbox, backend: str) -> None:
    assert kill_trainer(backend, IMAGE)
