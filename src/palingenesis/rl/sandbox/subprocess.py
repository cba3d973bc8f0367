"""The `subprocess` backend: a worker as a child of this process. The same limits, no isolation; for development.

A program here sees this machine's files and network. Where we are root it runs as `nobody`; else it is the trainer's own
user, and could end the trainer.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox.inside.limits import NOBODY, empty_folder
from palingenesis.rl.sandbox.room import ENVIRONMENT, PipeRoom, RoomLostError, WorkerSettings, worker_argv

EXPLOSION = 4096  # processes of nobody's, in all rooms: what bounds a fork bomb between two looks


class SubprocessBackend:
    """Rooms that isolate nothing.

    Raises:
        SandboxError: `sandbox.allow_unsafe` is not set, or this is not Linux.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if not config.allow_unsafe:
            raise SandboxError(
                "sandbox.backend: subprocess isolates nothing; set sandbox.allow_unsafe: true, or use docker or bubblewrap"
            )
        if sys.platform != "linux":
            raise SandboxError("sandbox.backend: subprocess needs Linux; use docker")
        warnings.warn(
            "sandbox.backend is subprocess: it isolates nothing. Programs can read this machine's files and use its "
            "network; use docker or bubblewrap for anything but development.",
            stacklevel=2,
        )
        self._config = config
        self._root = os.getuid() == 0
        self._python = _interpreter(self._root)
        self._folder = Path(tempfile.mkdtemp(prefix="pgs-sandbox-"))
        self._folder.chmod(0o711)
        self._made = 0

    async def open(self) -> PipeRoom:
        self._made += 1
        scratch = self._folder / str(self._made)
        scratch.mkdir(mode=0o700)
        if self._root:
            os.chown(scratch, NOBODY, NOBODY)
        settings = WorkerSettings(
            scratch=str(scratch),
            memory_mb=self._config.memory_mb,
            max_processes=self._config.max_processes,
            watch=True,
            uid=NOBODY if self._root else None,
            user_processes=EXPLOSION if self._root else 0,
        )
        try:
            return await PipeRoom.start(worker_argv(self._python, settings), ENVIRONMENT, "the worker process")
        except RoomLostError as lost:
            raise SandboxError(f"sandbox.backend: subprocess: {lost}") from lost

    async def close(self) -> None:
        for scratch in self._folder.iterdir():
            empty_folder(str(scratch))
        shutil.rmtree(self._folder)


def _interpreter(root: bool) -> str:
    """This Python; where programs run as nobody and its library is out of their reach (under /root), the system's."""
    if not root or all(folder.stat().st_mode & 0o001 for folder in Path(os.__file__).resolve().parents):
        return sys.executable
    found = shutil.which("python3", path=ENVIRONMENT["PATH"])
    if found is None:
        raise SandboxError(
            f"sandbox.backend: subprocess runs programs as nobody, who cannot read {Path(os.__file__).parent}, and there "
            "is no system Python; install python3, or do not run as root"
        )
    return found


__all__ = ["SubprocessBackend"]
