"""The `bubblewrap` backend: rooms made of the kernel's namespaces, without a daemon and, as a rule, without privileges.

    open() ──> a control group's words ──> bwrap ──────────────> enter() ──────exec──────> the worker
               join the group              namespaces, a         scratch, no rights,       PID 1 of the room
               (cgroups.py)                read-only root        nobody

A room sees the standard library of the interpreter that runs this, what that interpreter's libraries need, /usr/bin and
/usr/lib, a /proc of its own, five devices, and 64 MiB of scratch at /tmp. Packages that pip put beside palingenesis are
hidden: a benchmark among them would hand its answers out.

Two ways to be nobody; `find_standing` chooses:
- An ordinary user makes a user namespace, in which it is uid 65534 and may make no other namespace.
- Root makes none and becomes the real uid 65534. Never both: in a user namespace of root's, "nobody" would be the
  machine's root to every file that checks the owner alone, such as /proc/sys/kernel/core_pattern (measured).

Invariants: what runs in a room is never the machine's uid 0; nothing but PID 1 ends a room, and PID 1 ends when its
stdin does, so that a trainer that was killed leaves nothing (bwrap's --die-with-parent would fire when the *thread* that
started it ends, and its signal does not reach another uid).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox.cgroups import Bounds, Group, Groups, NoGroup, find_groups
from palingenesis.rl.sandbox.inside.limits import NOBODY
from palingenesis.rl.sandbox.room import (
    ENVIRONMENT,
    KILLED,
    SCRATCH_FILES,
    SCRATCH_MB,
    START_TIMEOUT,
    PipeRoom,
    RoomLostError,
    WorkerSettings,
    worker_argv,
)

ROOT_NEEDS = (6, 7, 8, 12, 21)  # SETGID, SETUID, SETPCAP, NET_ADMIN (bwrap starts the loopback), SYS_ADMIN
SCRATCH = "/tmp"

# Of the system, where they exist; links stay links. Not /usr/local, /usr/share, /etc, /sys, /run, /var, /home.
SYSTEM = (
    *("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo"),
    *("/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"),
)
COVERED = ("/proc/keys", "/proc/key-users")  # name the keyrings of the user that started this
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {  # under /dev
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "shm": SCRATCH,  # one place to empty after a job, and multiprocessing's locks work
}
OUTSIDE = ("PATH", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")  # what finds systemd; a room gets none of them


class BubblewrapBackend:
    """Rooms that bubblewrap makes.

    Raises:
        SandboxError: bwrap is not installed.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._bounds = Bounds(config.memory_mb, config.max_processes)
        self._bwrap = _find_bwrap()
        self._plan: Plan | None = None

    async def open(self) -> BubblewrapRoom:
        """Start a room. The first call finds out what this machine allows and says it; it takes up to a second."""
        if self._plan is None:
            self._plan = make_plan(self._bwrap, self._bounds)
            print(f"sandbox: {self._plan.about}", file=sys.stderr, flush=True)
        plan = self._plan
        try:
            group = plan.groups.make(self._bounds)
        except OSError as error:
            raise SandboxError(f"sandbox.backend: bubblewrap: no control group: {error}") from error
        try:
            room = await BubblewrapRoom.start([*group.words, *plan.command], plan.environment, "the bubblewrap room")
        except BaseException as error:
            await _remove(group)
            if isinstance(error, RoomLostError):
                raise SandboxError(f"sandbox.backend: bubblewrap: {error}") from error
            raise
        room.group = group
        return room

    async def close(self) -> None:
        """The rooms share nothing."""


class BubblewrapRoom(PipeRoom):
    """A worker in namespaces and a control group of its own."""

    group: Group = NoGroup()
    _kills_before: int | None = 0

    async def exchange(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """A worker outlives the bwrap that was killed outside of it, until it is closed; it gets no further job."""
        if self.process.returncode is not None:
            raise await self.cause(self.process.returncode)
        if "run" in message:
            self._kills_before = self.group.kills()
        return await super().exchange(message, limit)

    async def cause(self, code: int | None) -> RoomLostError:
        """A job can end its room by taking all its memory in ways that spare the job."""
        if code == KILLED:
            kills = self.group.kills()
            if kills is None or kills != self._kills_before:
                return RoomLostError("the program took the memory of its room, and the worker with it", broke=True)
        return await super().cause(code)

    async def close(self) -> None:
        await super().close()
        await _remove(self.group)


async def _remove(group: Group) -> None:
    """The kernel takes a moment to empty a group. What does not get empty, the next start removes."""
    for _ in range(500):
        if group.remove():
            break
        await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------- what is possible here


@dataclass(frozen=True, slots=True)
class Plan:
    """How rooms start on this machine; found once, by starting one."""

    groups: Groups
    command: Sequence[str]
    environment: dict[str, str]
    about: str


def make_plan(bwrap: str, bounds: Bounds) -> Plan:
    """Raises SandboxError when no room starts, with the cure."""
    standing, interpreter, groups = find_standing(), find_interpreter(), find_groups(bounds)
    library_path = {"LD_LIBRARY_PATH": interpreter.library_path} if interpreter.library_path else {}
    by_namespace = not standing.root and _counts_processes_by_namespace()
    settings = WorkerSettings(
        scratch=SCRATCH,
        memory_mb=bounds.memory_mb,
        max_processes=bounds.processes,
        watch=not groups.limit,
        user_processes=bounds.room_processes if by_namespace else 0,
        environment=library_path,
    )
    worker = worker_argv(interpreter.executable, settings)
    outside = {name: os.environ[name] for name in OUTSIDE if name in os.environ}
    complaints = []
    for mounts in (True, False):
        recipe = Recipe(bwrap, interpreter, standing, mounts)
        trial = _run(recipe.command([interpreter.executable, "-S", "-c", ""], library_path), outside)
        if trial.returncode == 0:
            about = f"bubblewrap rooms are limited by {groups.name}"
            about += "" if mounts else f"; files in {SCRATCH} can be executed"
            return Plan(groups, recipe.command(worker, {**ENVIRONMENT, **library_path}), outside, about)
        complaints.append(trial.stderr.strip())
    raise SandboxError(_why_not(complaints[0]))


def _run(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Raises SandboxError when it cannot be started, or does not end."""
    try:
        return subprocess.run(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"sandbox.backend: bubblewrap: {words[0]} cannot be used: {error}") from error


def _find_bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "sandbox.backend: bubblewrap needs the program bwrap, which is not in PATH; install the package bubblewrap "
            "(apt install bubblewrap, dnf install bubblewrap), or use sandbox.backend: docker"
        )
    return found


@dataclass(frozen=True, slots=True)
class Standing:
    """What this process is on its machine, and so how it makes others nobody.

    Attributes:
        root: it has root's rights, not only its name as in an ordinary container.
        drop: words before bwrap that make an ordinary user of one who is not.
    """

    root: bool
    drop: tuple[str, ...] = ()


def find_standing() -> Standing:
    """Raises SandboxError for a root who can be nobody else, and would be the machine's root in a room."""
    if os.geteuid():
        return Standing(root=False)
    ids = [tuple(map(int, line.split())) for line in _proc("uid_map").splitlines()]
    if any(first <= NOBODY < first + count for first, _, count in ids):
        rights = int(_proc("status").partition("CapEff:")[2].split()[0], 16)
        if all(rights >> right & 1 for right in ROOT_NEEDS):
            return Standing(root=True)
        return Standing(False, ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"))
    if (0, 0) in [(first, outside) for first, outside, _ in ids]:
        raise SandboxError(
            "sandbox.backend: bubblewrap: this is a user namespace in which root is the machine's root and nobody else "
            "exists; run as an ordinary user, or outside of it"
        )
    return Standing(root=False)


def _proc(name: str) -> str:
    return Path("/proc/self", name).read_text(encoding="ascii")


def _counts_processes_by_namespace() -> bool:
    """RLIMIT_NPROC in a user namespace counts what is in it, and not all that the user runs elsewhere."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


# --------------------------------------------------------------------------------------------------------- the interpreter


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter and the folders of this machine that it cannot do without.

    Attributes:
        folders: its standard library, and where its shared libraries lie.
        hidden: of those, what must not be seen: the packages installed beside palingenesis.
        library_path: what it needs in LD_LIBRARY_PATH.
    """

    executable: str
    folders: tuple[str, ...]
    hidden: tuple[str, ...]
    library_path: str


# Its own words on where it lies, and what the extension modules that link to libraries made the loader map.
_ASK = """
import importlib, json, os, sys, sysconfig
names = "_bz2 _ctypes _curses _dbm _decimal _hashlib _lzma _sqlite3 _ssl _uuid readline zlib"
for name in names.split():
    try:
        importlib.import_module(name)
    except ImportError:
        pass
with open("/proc/self/maps") as maps:
    mapped = {line.split(None, 5)[5].strip() for line in maps if "/" in line and ".so" in line}
print(json.dumps({
    "standard": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "libraries": sorted({os.path.dirname(path) for path in mapped}),
}))
"""


def find_interpreter() -> Interpreter:
    """The interpreter below this process's virtual environment, if it runs in one.

    Raises:
        SandboxError: it does not run, or cannot be shown without the user's files.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    path = os.environ.get("LD_LIBRARY_PATH", "")
    asked = _run([executable, "-I", "-S", "-c", _ASK], {"LD_LIBRARY_PATH": path})
    if asked.returncode:
        raise SandboxError(f"sandbox.backend: bubblewrap: {executable} does not run by itself: {asked.stderr.strip()}")
    answer = json.loads(asked.stdout)
    folders = sorted({os.path.realpath(folder) for folder in (*answer["standard"], *answer["libraries"])})
    for place in (executable, *folders):
        if _within(place, SCRATCH) or _within(os.path.expanduser("~"), place):
            raise SandboxError(
                f"sandbox.backend: bubblewrap: the interpreter {executable} needs {place}, and a room cannot show that: "
                f"it is in {SCRATCH}, where programs have their scratch files, or contains a home folder; "
                "use an environment made from an interpreter elsewhere"
            )
    packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return Interpreter(
        executable,
        tuple(folders),
        tuple(sorted(folder for folder in packages if os.path.isdir(folder))),
        ":".join(entry for entry in path.split(":") if entry and os.path.realpath(entry) in folders),
    )


def _within(path: str, *folders: str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


# -------------------------------------------------------------------------------------------------------------- the room


@dataclass(frozen=True, slots=True)
class Recipe:
    """A room's command.

    Attributes:
        mounts: what enters a room may mount the scratch there, as bwrap's own cannot be noexec; refused by some policies.
    """

    bwrap: str
    interpreter: Interpreter
    standing: Standing
    mounts: bool

    def command(self, inner: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Run `inner`, an interpreter's command, with this environment in a room, as its PID 1."""
        order = {
            "mounts": self.mounts,
            "scratch": SCRATCH,
            "options": f"mode=0700,uid={NOBODY},gid={NOBODY},size={SCRATCH_MB}m,nr_inodes={SCRATCH_FILES}",
            "nobody": NOBODY,
            "argv": list(inner),
            "environment": dict(environment),
        }
        source = f"{inspect.getsource(enter)}\nenter()"
        first = [self.interpreter.executable, "-I", "-S", "-B", "-c", source, json.dumps(order)]
        return [*self.standing.drop, self.bwrap, *self._namespaces(), *self._rights(), *self._tree(), "--", *first]

    def _namespaces(self) -> list[str]:
        shared = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        user = [] if self.standing.root else ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
        return [*shared, *user, "--hostname", "room", "--new-session", "--as-pid-1", "--chdir", "/"]

    def _rights(self) -> list[str]:
        """What `enter` needs, and gives up."""
        names = ["SYS_ADMIN", "SETPCAP"] if self.mounts else []
        names += ["SETUID", "SETGID"] if self.standing.root else ["SYS_RESOURCE"] if self.mounts else []
        library_path = self.interpreter.library_path
        setting = ["--setenv", "LD_LIBRARY_PATH", library_path] if library_path else []
        return [*setting, "--cap-drop", "ALL", *(word for name in names for word in ("--cap-add", f"CAP_{name}"))]

    def _tree(self) -> list[str]:
        """The files of a room: a root of its own that cannot be written to, and what is shown in it."""
        wanted = (*SYSTEM, *self.interpreter.folders, self.interpreter.executable)
        shown = [path for at, path in enumerate(wanted) if os.path.lexists(path) and not _within(path, *wanted[:at])]
        parents = {str(parent): None for path in shown for parent in reversed(Path(path).parents[:-1])}
        words = [word for path in parents for word in ("--dir", path)]  # those that bwrap makes are closed to nobody
        for path in shown:
            words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
        for path in self.interpreter.hidden:
            if _within(path, *shown):
                words += ["--tmpfs", path, "--remount-ro", path]
        words += ["--proc", "/proc", "--dir", "/dev"]
        for path in filter(os.path.exists, COVERED):
            words += ["--ro-bind", "/dev/null", path]
        for name in DEVICES:
            words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for name, target in LINKS.items():
            words += ["--symlink", target, f"/dev/{name}"]
        if self.mounts:
            words += ["--dir", SCRATCH]
        else:
            words += ["--ro-bind", "/proc/sys", "/proc/sys", "--size", str(SCRATCH_MB * 2**20), "--tmpfs", SCRATCH]
        return [*words, "--remount-ro", "/"]


def enter() -> None:
    """The first thing that runs in a room, as source text: finish the room, give up every right, become the worker."""
    import ctypes
    import json
    import os
    import sys

    order = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")

    read_only, nosuid, nodev, noexec, remount, bind = 1, 2, 4, 8, 32, 4096
    drop_from_bounding = 24
    if order["mounts"]:
        call(
            "mount", b"scratch", order["scratch"].encode(), b"tmpfs", nosuid | nodev | noexec, order["options"].encode()
        )
        if os.getuid():
            with open("/proc/sys/user/max_user_namespaces", "w") as limit:
                limit.write("0")  # of this room's namespace
        call("mount", b"/proc/sys", b"/proc/sys", None, bind, None)
        call("mount", None, b"/proc/sys", None, bind | remount | read_only | nosuid | nodev | noexec, None)
        for right in range(64):
            if libc.prctl(drop_from_bounding, right, 0, 0, 0):
                break  # the kernel knows no more
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(order["nobody"])
        os.setuid(order["nobody"])
    none = bytes(24)
    call("capset", (0x20080522).to_bytes(4, sys.byteorder) + bytes(4), none)
    os.execve(order["argv"][0], order["argv"], order["environment"])


# ---------------------------------------------------------------------------------------------------- when none can start


def _sysctl(name: str) -> str:
    path = Path("/proc/sys", name)
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _in_container() -> bool:
    marks = (
        os.path.exists("/.dockerenv"),
        os.path.exists("/run/.containerenv"),
        "KUBERNETES_SERVICE_HOST" in os.environ,
    )
    return any(marks)


_PROFILE = (
    "allow it for bwrap with an AppArmor profile, or as root: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
)

# (does it hold, given bwrap's words; cause; cure): the first that holds
_OBSTACLES: tuple[tuple[Callable[[str], bool], str, str], ...] = (
    (
        lambda said: "Unknown option" in said,
        "this bwrap is too old",
        "install bubblewrap 0.4 or newer",
    ),
    (
        lambda said: "setuid mode" in said,
        "this bwrap is setuid, and then gives no user rights inside a room",
        "put a copy of it that is not setuid into PATH",
    ),
    (
        lambda said: _sysctl("user/max_user_namespaces") == "0",
        "user namespaces are disabled (user.max_user_namespaces is 0)",
        "as root: sysctl user.max_user_namespaces=15000",
    ),
    (
        lambda said: _sysctl("kernel/unprivileged_userns_clone") == "0",
        "user namespaces are disabled (kernel.unprivileged_userns_clone is 0)",
        "as root: sysctl kernel.unprivileged_userns_clone=1",
    ),
    (
        lambda said: _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1",
        "AppArmor keeps user namespaces from programs without a profile (Ubuntu 23.10 and newer)",
        _PROFILE,
    ),
    (
        lambda said: said.startswith("bwrap:") and _in_container(),
        "this is a container that may not make namespaces or mount /proc",
        "start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
        "--security-opt systempaths=unconfined (docker; in Kubernetes procMount: Unmasked and seccompProfile Unconfined), "
        "or use sandbox.backend: agent_sandbox",
    ),
    (
        lambda said: "Invalid argument" in said or "not implemented" in said,
        "this kernel lacks namespaces that bubblewrap needs",
        "use a kernel with user, pid, network, IPC and UTS namespaces (4.18 and newer have them)",
    ),
)


def _why_not(said: str) -> str:
    for holds, cause, cure in _OBSTACLES:
        if holds(said):
            return f"sandbox.backend: bubblewrap cannot start a room: {cause}; {cure}. It said: {said[-500:]}"
    return (
        f"sandbox.backend: bubblewrap cannot start a room: {said[-1000:]}; sandbox.backend: docker needs no such rights"
    )


__all__ = ["BubblewrapBackend", "BubblewrapRoom"]
