"""Between a pod's runtime and the worker, where nothing else than commands and files reaches a pod.

    host ──/execute──> caller ──abstract socket──> relay ──pipes──> worker ──fork──> program
                       (a process a message)       (a daemon, started once)

A pod's runtime, files and user are the program's as well. So a message and its event count only with a MAC under a key
that arrived before the first program did, and that no other process holds: the worker is started by exec, and the relay
cannot be looked into. And a filter keeps the worker, and with it all programs, from sockets (the runtime listens on one,
and would run commands outside of the room) and from signals to the runtime and the relay. What is left to a program is
to end its own room.

Invariants
- The relay ends when the worker does, and the worker when the relay does.
- Messages are numbered, and a number counts once.
- Between two jobs the pod's writable folders hold what they held before the first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from palingenesis.rl.sandbox.inside import limits

FOLDERS = (".", "/tmp", "/var/tmp", "/dev/shm")  # where programs of an ordinary image may write
START = 50.0  # seconds for the worker to be ready
PATIENCE = 5.0  # seconds for a caller to say all it has to say, and for a worker to end or to finish an event
COMPLAINT = 2000  # characters of the worker's stderr
UNHEARD = 3  # the caller's exit code when nobody listened

# One message, through a runtime that knows no stdin: `python3 -I -S -c CALLER name seconds text`; text that begins with @
# names a file. A process a message, so it imports little.
CALLER = f"""
import os, socket, sys
name, seconds, text = sys.argv[1:]
data = text.encode()
if text[0] == "@":
    with open(text[1:], "rb") as file:
        data = file.read()
    os.unlink(text[1:])
link = socket.socket(socket.AF_UNIX)
link.settimeout(float(seconds))
try:
    link.connect(chr(0) + name)
except OSError:
    sys.exit({UNHEARD})
link.sendall(data)
link.shutdown(socket.SHUT_WR)
while True:
    data = link.recv(65536)
    if not data:
        break
    sys.stdout.buffer.write(data)
"""


def seal(key: bytes, way: str, number: int, text: str) -> str:
    """`text` with its number and MAC; `way` is `>` to the worker and `<` from it."""
    mac = hmac.new(key, f"{way} {number} {text}".encode(), hashlib.sha256).hexdigest()
    return f"{mac} {number} {text}"


def unseal(key: bytes, way: str, sealed: str) -> tuple[int, str] | None:
    """Number and text, or None for what the other end did not write."""
    parts = sealed.split(" ", 2)
    if len(parts) != 3 or len(parts[1]) > 18 or not parts[1].isdigit():
        return None
    number = int(parts[1])
    if not hmac.compare_digest(seal(key, way, number, parts[2]).encode(), sealed.encode()):
        return None
    return number, parts[2]


# ------------------------------------------------------------------------------------------------------------ the filter

# name: (x86_64, aarch64)
_SOCKET, _TKILL = (41, 198), (200, 130)
_TO_A_PROCESS = {
    "kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}  # fmt: skip


def keep_from(protected: Iterable[int]) -> None:
    """Deny this process, and all it will start, sockets other than Unix ones and signals to `protected` and their groups.

    `limits.refuse_calls`, which the worker adds, sees to calls under other numbers.
    """
    architecture, column = limits.machine()
    everybody = 0xFFFFFFFF  # kill's -1
    values = sorted({everybody, *protected, *(everybody + 1 - pid for pid in protected)})
    argument, allow, refuse = limits.argument(0), limits.ALLOW, limits.fail(errno.EPERM)
    is_protected = [(limits.EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    code = [limits.LOAD_ARCHITECTURE, (limits.EQUAL, 1, 0, architecture), allow, limits.LOAD_NUMBER]
    for numbers in _TO_A_PROCESS.values():
        code += limits.when(numbers[column], argument, *is_protected, allow, refuse)
    code += limits.when(_TKILL[column], refuse)
    is_unix = (limits.EQUAL, 0, 1, int(socket.AF_UNIX))
    code += limits.when(_SOCKET[column], argument, is_unix, allow, limits.fail(errno.EAFNOSUPPORT))
    limits.install([*code, allow])


# ------------------------------------------------------------------------------------------------------------- the relay


def main(order: Mapping[str, Any]) -> NoReturn:
    """Start the relay in the background and print what the worker says when it is ready, or what went wrong.

    `order`: `key` (hex), `name` of the socket, `worker` (arguments for its interpreter, the settings last), `environment`.
    """
    os.unlink(sys.argv[0])  # it holds the key
    heard, said = os.pipe()
    runtime = os.getppid()
    if os.fork() == 0:
        os.close(heard)
        _relay(order, runtime, said)
    os.close(said)
    with os.fdopen(heard) as reader:
        answer = reader.read()
    print(answer)
    sys.exit(0 if answer.startswith("{") else 1)


def _relay(order: Mapping[str, Any], runtime: int, said: int) -> NoReturn:
    """The forked process. It holds nothing of the command that started it: the runtime waits for those."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        relay = Relay(order, runtime)
        os.write(said, relay.ready)
        os.close(said)
        relay.serve()
        os._exit(0)
    except BaseException:  # noqa: BLE001 there is no terminal here: the host is told, if it still listens
        with contextlib.suppress(OSError):
            os.write(said, traceback.format_exc().encode())
    finally:
        os._exit(1)


class Relay:
    """The worker's owner."""

    def __init__(self, order: Mapping[str, Any], runtime: int) -> None:
        limits.hide()
        self._key = bytes.fromhex(order["key"])
        self._last = 0  # number of the last message
        self._early: bytes | None = None  # an event nobody has asked for yet: the job's time was up
        self._caller = 0  # process id of the last
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + order["name"])
        self._listener.listen(16)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 for as long as the worker
        keep_from({1, runtime, os.getpgid(runtime), os.getpid()} - {0})
        self._worker = self._start(order)
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._to_worker, self._from_worker = self._worker.stdin.fileno(), self._worker.stdout.fileno()
        self._user = limits.NOBODY if os.geteuid() == 0 else os.geteuid()  # who programs are
        self._kept = {folder: self._names(folder) for folder in FOLDERS}
        ready = self._event(START)
        if ready is None:
            raise RuntimeError(f"the worker did not start: {self._obituary().decode()}")
        self.ready = ready

    def _start(self, order: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """The worker, with a scratch folder of this pod's and with nobody's rights where this is root."""
        scratch = tempfile.mkdtemp(prefix="scratch-", dir=os.getcwd())
        *arguments, told = order["worker"]
        settings = json.loads(told)
        settings["scratch"] = settings["environment"]["HOME"] = settings["environment"]["TMPDIR"] = scratch
        if os.geteuid() == 0:
            settings["uid"] = limits.NOBODY
            os.chown(scratch, limits.NOBODY, limits.NOBODY)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *arguments, json.dumps(settings)],
            stdin=pipe,
            stdout=pipe,
            stderr=self._complaints,
            env=order["environment"],
        )

    def serve(self) -> None:
        """Pass messages until the worker ends or the pod cannot be made clean."""
        while True:
            sources: list[Any] = [self._listener, self._from_worker] if self._early is None else [self._listener]
            heard, _, _ = select.select(sources, [], [])
            if self._from_worker in heard:
                self._early = self._event(PATIENCE)
                self._wake_caller()
                if self._early is None:
                    return
            if self._listener in heard:
                with self._listener.accept()[0] as caller:
                    message = self._message(caller)
                    if message is not None and not self._serve(message, caller):
                        return

    def _message(self, caller: socket.socket) -> str | None:
        """What a caller says, if the host said it and for the first time."""
        message = unseal(self._key, ">", _all_of(caller))
        if message is None or message[0] <= self._last:
            return None
        self._last = message[0]
        self._caller = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return message[1]

    def _serve(self, text: str, caller: socket.socket) -> bool:
        """Answer a message, which comes after its limit in seconds; false when it was the last."""
        limit, _, message = text.partition(" ")
        event = self._exchange(message.encode("ascii"), float(limit))
        text = (event or self._obituary()).decode("ascii")
        goes_on = event is not None and (event.startswith(b'{"ask"') or self._tidy())
        self._wake_caller()
        with contextlib.suppress(OSError):  # the caller was killed; the host hears that from the runtime
            caller.sendall(seal(self._key, "<", self._last, text).encode())
        self._wake_caller()
        return goes_on

    def _wake_caller(self) -> None:
        """A program may have stopped it, to look like a pod that does not answer."""
        with contextlib.suppress(OSError):
            os.kill(self._caller, signal.SIGCONT)

    def _exchange(self, message: bytes, limit: float) -> bytes | None:
        """The worker's event, or None when it is gone, or silent, because a program stopped it."""
        if self._early is not None:
            event, self._early = self._early, None
            return event
        view = memoryview(len(message).to_bytes(4, "big") + message)
        try:
            while view:
                view = view[os.write(self._to_worker, view) :]
        except BrokenPipeError:
            return None
        return self._event(limit)

    def _event(self, limit: float) -> bytes | None:
        end = time.monotonic() + limit
        size = self._exactly(4, end)
        return size and self._exactly(int.from_bytes(size, "big"), end)

    def _exactly(self, size: int, end: float) -> bytes | None:
        parts = []
        while size:
            heard, _, _ = select.select([self._from_worker], [], [], max(0.0, end - time.monotonic()))
            if not heard:
                self._worker.kill()
                return None
            part = os.read(self._from_worker, min(size, 2**20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _obituary(self) -> bytes:
        """An event of the relay's own: how the worker ended."""
        try:
            code = self._worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # it closed its stdout
            self._worker.kill()
            code = self._worker.wait()
        self._complaints.seek(0)
        return json.dumps(
            {"gone": code, "errors": self._complaints.read().decode(errors="replace")[-COMPLAINT:]}
        ).encode()

    def _tidy(self) -> bool:
        """Remove what a job left outside its scratch folder; false when something would not go."""
        for folder, kept in self._kept.items():
            for name in self._names(folder) - kept:
                _remove(os.path.join(folder, name))
        return all(self._names(folder) <= kept for folder, kept in self._kept.items())

    def _names(self, folder: str) -> set[str]:
        """What in a folder could be a program's."""
        try:
            with os.scandir(folder) as entries:
                return {entry.name for entry in entries if entry.stat(follow_symlinks=False).st_uid == self._user}
        except OSError:
            return set()  # there is none, or it is not ours to see


def _remove(path: str) -> None:
    try:
        if not os.path.isdir(path) or os.path.islink(path):
            return os.unlink(path)
        os.chmod(path, 0o700)
        limits.empty_folder(path)
        os.rmdir(path)
    except OSError:
        pass  # seen by who looks whether it is gone


def _all_of(caller: socket.socket) -> str:
    """What a caller says until it stops; empty when it takes too long."""
    caller.settimeout(PATIENCE)
    parts: list[bytes] = []
    try:
        while True:
            part = caller.recv(2**16)
            if not part:
                return b"".join(parts).decode("ascii", "replace")
            parts.append(part)
    except OSError:
        return ""
