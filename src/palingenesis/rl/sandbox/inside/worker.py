"""PID 1 of a room, and the supervisor it forks for each job.

    host ──frames──> PID 1: waits until its stdin is readable, and reads nothing
                       └─fork─> supervisor: reads the order ──fork──> the program's process (harness.py)
                                   │            ├── stdout, stderr (capped), questions and answers, the deadline
                                   │            └── memory and process count of everything, where no cgroup does that
                                   └── writes the end event, exits
                     PID 1: kills all that is left, empties the scratch folder, waits again

One message down, one event up:  {"run": order} | {"answer": data}   ->  {"ask": text} | {"end": {...}}
                                 {"stop": true}                      ->  {"end": {...}}

Invariants
- A program is forked from a process that never saw another job's data, and nothing of a job outlives PID 1's sweep.
- EOF on stdin (the host has gone) ends the room at once, also in the middle of a job.
- PID 1's exit code says why a room ended: BROKE, the job killed or stopped its supervisor; else it was not the job.
- What a job has running is killed before its end is told, so that reporting never wants for memory.
- The program holds no descriptor of the room, and PID 1 and the supervisor cannot be looked into.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from palingenesis.rl.sandbox.inside import harness, limits, values

BROKE = 70  # exit code: the job ended its supervisor
FAULT = 71  # exit code: a failure of ours; stderr says more
FRAME_CAP = 128 * 2**20
QUESTION_CAP = values.MAX_TEXT  # bytes of what a program says in one go
OUTPUT_CAP = 8 * 2**20  # bytes of stdout, and of stderr
SHOWN_STDERR = 32 * 2**10  # of which the last are reported
TICK = 0.025  # seconds between two looks at memory and processes
GRACE = 10.0  # seconds past the deadline in which the supervisor must have ended, and the host have spoken
LOOK = 0.5  # seconds between two looks whether the supervisor was stopped
HOST = 30.0  # seconds an answer may take: the host's, and those of the other room
SWEEP = 10.0  # seconds in which everything killed must be gone

_IN, _OUT = 0, 1
_DEADLINE = struct.Struct("d")  # of one size, since many may wait in the pipe when it is read

# What programs commonly import; here once, shared by every fork.
WARM = (
    "abc array ast base64 bisect calendar cmath collections collections.abc contextlib copy csv dataclasses datetime "
    "decimal enum fractions functools hashlib heapq inspect io itertools json linecache math numbers operator os pprint "
    "queue random re shutil statistics string struct subprocess sys tempfile textwrap threading time traceback types "
    "typing unicodedata uuid warnings weakref zlib"
)


def main(settings: Mapping[str, Any]) -> NoReturn:
    """Be a room until stdin ends."""
    me = os.getpid()
    _prepare(settings)
    _send({"ready": {"pid": me, "python": sys.version.split()[0]}})
    while _wait_for_order():
        life, held = os.pipe()  # the supervisor holds the other end; it says its deadline, and then that it is gone
        supervisor = os.fork()
        if supervisor == 0:
            os.close(life)
            _guarded(_supervise, held, settings)
        os.close(held)
        why = _watch(life, supervisor)
        os.close(life)
        if why:
            _end(me, settings, why)
        if not limits.kill_all(me, SWEEP):
            print("processes of the last job do not die", file=sys.stderr, flush=True)
            _end(me, settings, FAULT)
        _empty_folders(settings)
    _end(me, settings, 0)


def _prepare(settings: Mapping[str, Any]) -> None:
    os.umask(0o077)
    os.environ.clear()
    os.environ.update(settings["environment"])
    os.chdir("/")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the host ends a room by its stdin; a program may not at all
    if os.getpid() != 1:
        limits.adopt_orphans()
    limits.hide()
    limits.refuse_calls()
    for name in WARM.split():
        try:
            __import__(name)
        except ImportError:
            continue  # a small image may lack it
    _empty_folders(settings)
    gc.collect()
    gc.disable()
    gc.freeze()


def _empty_folders(settings: Mapping[str, Any]) -> None:
    for folder in (settings["scratch"], *settings["also_emptied"]):
        limits.empty_folder(folder)


def _end(me: int, settings: Mapping[str, Any], code: int) -> NoReturn:
    """Leave nothing behind, and go."""
    if limits.kill_all(me, SWEEP):
        _empty_folders(settings)
    os._exit(code)


def _supervise(life: int, settings: Mapping[str, Any]) -> None:
    Supervisor(life, settings).run()


def _guarded(work: Callable[..., object], *args: Any) -> NoReturn:
    """Run a forked process's work; it never returns into its parent's code."""
    try:
        work(*args)
        os._exit(0)
    except BaseException:  # noqa: BLE001 ours; the room reports it
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(FAULT)


def _wait_for_order() -> bool:
    """False when the host has gone."""
    poll = select.poll()
    poll.register(_IN, select.POLLIN)
    ((_, event),) = poll.poll()
    return bool(event & select.POLLIN) and not event & (select.POLLHUP | select.POLLERR)


def _watch(life: int, supervisor: int) -> int:
    """Wait for the supervisor's end. 0 when it did its work, else the exit code of the room."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(_IN, 0)  # hang-up only
    latest = float("inf")
    while True:
        events = dict(poll.poll(LOOK * 1000))
        if not events:
            if limits.is_stopped(supervisor):
                return BROKE
            if time.monotonic() > latest:
                return FAULT
            continue
        if _IN in events:
            return FAULT
        said = os.read(life, 512 * _DEADLINE.size)
        if not said:
            break
        (deadline,) = _DEADLINE.unpack(said[-_DEADLINE.size :])
        latest = deadline + GRACE
    status = os.waitpid(supervisor, 0)[1]
    if os.WIFSIGNALED(status):
        return BROKE
    return FAULT if status else 0


def _send(message: Mapping[str, Any]) -> None:
    text = json.dumps(message).encode("ascii")
    view = memoryview(len(text).to_bytes(4, "big") + text)
    while view:
        view = view[os.write(_OUT, view) :]


def _receive() -> dict[str, Any]:
    """One message of the host's, and not a byte more: what follows may be for the next supervisor."""
    length = int.from_bytes(_exactly(4), "big")
    if length > FRAME_CAP:
        raise ValueError(f"a message of {length} bytes")
    message: dict[str, Any] = json.loads(_exactly(length))
    return message


def _exactly(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(_IN, min(count, 2**20))
        if not part:
            raise EOFError("the host has gone")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Output:
    """What a program writes to one stream."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0
        self.open = True  # until its last writer has gone
        self._parts: list[bytes] = []
        os.set_blocking(fd, False)

    def drain(self) -> None:
        """Take what is there, up to the cap."""
        while self.open and self.size <= OUTPUT_CAP:
            try:
                part = os.read(self.fd, 2**16)
            except BlockingIOError:
                return
            self.open = bool(part)
            self.size += len(part)
            self._parts.append(part)

    def head(self, size: int) -> str:
        return b"".join(self._parts)[:size].decode("utf-8", "replace")

    def tail(self, size: int) -> str:
        return b"".join(self._parts)[-size:].decode("utf-8", "replace")


class Supervisor:
    """One job: the program's process, its streams, its deadline."""

    def __init__(self, life: int, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._me, self._room = os.getpid(), os.getppid()
        limits.die_with(self._room)
        self._order = _receive()["run"]
        self._begun = time.monotonic()
        self._deadline: float = self._begun + self._order["timeout"]
        self._life = life
        self._tell_deadline()
        self._ended = _child_signals()
        self._said = bytearray()  # of the program's questions, not yet passed on
        self._reply = memoryview(b"")  # of an answer, not yet written
        self._asked = False  # the host is to speak; the program is not listened to meanwhile
        self._since = 0.0  # when it was asked
        self._looked = self._begun  # when memory and processes were last looked at
        self._own_memory = limits.usage([self._me])[1] if settings["watch"] else 0  # every fork begins with it, shared
        self._start()

    def run(self) -> None:
        while True:
            how, reason, code = self._step()
            if how:
                limits.kill_others(self._room, self._me)
                if self._asked and how != "stopped":
                    _receive()  # an end answers a message, as all events do: the host is about to send one
                return self._report(how, reason, code)

    def _start(self) -> None:
        """Fork the program's process and wait until it is confined."""
        stdin = limits.nameless_file(self._order.pop("stdin", "").encode("utf-8", "replace"), self._settings["scratch"])
        (out, their_out), (err, their_err), (self._questions, their_questions), (their_answers, self._answers) = (
            os.pipe() for _ in range(4)
        )
        theirs = [stdin, their_out, their_err, their_answers, their_questions]  # to be 0, 1, 2, 3, 4
        self._program = os.fork()
        if self._program == 0:
            _guarded(self._be_program, theirs)
        for fd in theirs:
            os.close(fd)
        self._stdout, self._stderr = Output(out), Output(err)
        if os.read(self._questions, 1) != b"+":
            raise RuntimeError(f"the program's process could not be confined: {os.read(err, 2**12).decode()}")
        os.set_blocking(self._questions, False)
        os.set_blocking(self._answers, False)
        self._hears = True

    def _be_program(self, fds: list[int]) -> None:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in fds]
        for at, fd in enumerate(high):
            os.dup2(fd, at, inheritable=at < 3)
        os.closerange(len(fds), 256)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        limits.confine(self._settings, self._me)
        harness.run(self._order, harness.Channel(3, 4), self._settings["scratch"])

    def _step(self) -> tuple[str, str, int | None]:
        """Wait until something happens, and deal with it: (how the job ended or nothing, a reason, the exit code)."""
        if not self._asked and self._pass_question():
            self._asked, self._since = True, time.monotonic()
        ready = self._wait()
        if self._left() <= 0.0:
            return "timeout", f"took longer than {self._order['timeout']:g} s", None
        self._stdout.drain()
        self._stderr.drain()
        if self._answers in ready:
            self._write_answer()
        if self._questions in ready:
            self._hear()
        if self._asked and _IN in ready and not self._obey(_receive()):
            return "stopped", "", None
        if self._ended in ready:
            _drain(self._ended)
            pid, status = os.waitpid(self._program, os.WNOHANG)
            if pid:
                return self._exited(os.waitstatus_to_exitcode(status))
        excess = self._excess()
        return ("limit" if excess else "", excess, None)

    def _wait(self) -> dict[int, int]:
        """Descriptors that are ready."""
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if self._asked:
            poll.register(_IN, select.POLLIN)
        elif self._hears:
            poll.register(self._questions, select.POLLIN)
        if self._reply:
            poll.register(self._answers, select.POLLOUT)
        for output in (self._stdout, self._stderr):
            if output.open:
                poll.register(output.fd, select.POLLIN)
        left = self._left()
        return dict(poll.poll(1000 * max(0.0, min(left, TICK) if self._settings["watch"] else left) + 1))

    def _left(self) -> float:
        """Seconds until the job is over. A busy host, and the other room, are not this program's doing."""
        return self._deadline + (HOST if self._asked else 0.0) - time.monotonic()

    def _tell_deadline(self) -> None:
        os.write(self._life, _DEADLINE.pack(self._deadline + HOST))

    def _hear(self) -> None:
        part = _read_some(self._questions)
        self._hears = part != b""
        self._said += part or b""

    def _pass_question(self) -> bool:
        """Tell the host what the program says, once it is whole."""
        length = int.from_bytes(self._said[:4], "big")
        if len(self._said) < 4 or len(self._said) < 4 + length <= 4 + QUESTION_CAP:
            return False
        text = bytes(self._said[4 : 4 + length])
        del self._said[: 4 + length]
        if length > QUESTION_CAP or not text.isascii():
            text = b""  # which is no JSON: a fault of the program's, as the host will find
        _send({"ask": text.decode("ascii")})
        return True

    def _obey(self, message: Mapping[str, Any]) -> bool:
        """Take the host's answer for the program; false when it has heard enough."""
        if "answer" not in message:
            return False
        text = message["answer"].encode("ascii")
        self._reply = memoryview(len(text).to_bytes(4, "big") + text)
        self._asked = False
        self._deadline += time.monotonic() - self._since
        self._tell_deadline()
        return True

    def _write_answer(self) -> None:
        try:
            self._reply = self._reply[os.write(self._answers, self._reply) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._reply = memoryview(b"")  # it closed its end; it will be seen to exit, or time out

    def _exited(self, code: int) -> tuple[str, str, int | None]:
        """The main process has ended; what else still runs, or holds its stdout, is not waited for."""
        self._stdout.drain()
        self._stderr.drain()
        excess = self._too_much_output()
        return ("limit" if excess else "exited", excess, code)

    def _excess(self) -> str:
        """What the job has too much of, if anything."""
        if self._settings["watch"] and time.monotonic() - self._looked >= TICK:
            self._looked = time.monotonic()
            return self._too_much_output() or self._too_much_memory()
        return self._too_much_output()

    def _too_much_output(self) -> str:
        too_much = max(self._stdout.size, self._stderr.size) > OUTPUT_CAP
        return f"more than {OUTPUT_CAP // 2**20} MiB of output" if too_much else ""

    def _too_much_memory(self) -> str:
        pids = limits.processes(self._room, self._me)
        threads, memory = limits.usage(pids)
        if threads > self._settings["max_processes"]:
            return f"more than {self._settings['max_processes']} processes and threads"
        most = self._settings["memory_mb"] * 2**20
        if memory - len(pids) * self._own_memory > most and limits.shared_usage(pids) > most:
            return f"more than {self._settings['memory_mb']} MiB of memory"
        return ""

    def _report(self, how: str, reason: str, code: int | None) -> None:
        end = {
            "how": how,
            "reason": reason,
            "code": code,
            "stdout": self._stdout.head(OUTPUT_CAP if how != "limit" else SHOWN_STDERR),
            "stderr": self._stderr.tail(SHOWN_STDERR),
            "seconds": time.monotonic() - self._begun,
        }
        _send({"end": end})


def _child_signals() -> int:
    """A descriptor that becomes readable when a child ends."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reads


def _read_some(fd: int) -> bytes | None:
    """None when nothing is there, empty at the end."""
    try:
        return os.read(fd, 2**16)
    except BlockingIOError:
        return None


def _drain(fd: int) -> None:
    while _read_some(fd):
        pass
