"""What runs inside a worker process: read a task, do it, answer; nothing else is ever written to the pipe.

    parent  --4-byte length + pickle-->  stdin   (the first frame names the task, the rest are its payloads)
    parent  <--4-byte length + JSON----  a private copy of stdout

The answer is JSON because the child reads hostile text: whatever happens here, the parent only ever parses data.
Anything printed goes to stderr. The process ends when its stdin closes, and on Linux is killed with its parent.
Signals that ask a run to stop are for the trainer: the worker goes on answering, because the rollouts that the
trainer finishes before it saves still need scores.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1


def main(parent: int) -> None:
    """Serve the process `parent` until it closes the pipe or dies."""
    _die_with(parent)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), _stay)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    handler: Any = None
    while (frame := read_frame(requests)) is not None:
        try:
            payload = pickle.loads(frame)
            if handler is None:
                module, _, name = payload["task"].partition(":")
                handler = getattr(importlib.import_module(module), name)(payload["init"])
                answer: dict[str, Any] = {"value": None}
            else:
                answer = {"value": handler(payload)}
            data = json.dumps(answer).encode()
        except BaseException as error:  # noqa: BLE001 - told to the parent, which decides whose fault it is
            data = json.dumps({"error": _describe(error)}).encode()
        write_frame(answers, data)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None when the stream ended."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def limit_memory(gib: float) -> None:
    """Allocations past `gib` raise MemoryError here instead of waking the kernel's out-of-memory killer."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def _describe(error: BaseException) -> dict[str, str]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _stay(signum: int, frame: object) -> None:
    """A handler rather than SIG_IGN, which programs started by a reward function would inherit."""


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request above
        os._exit(1)
