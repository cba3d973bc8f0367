"""A control group for each room: what all its processes together may use, held by the kernel.

    find_groups ──> FolderGroups   a folder a room (cgroup v2, or v1's memory, pids and cpu), where one can be made
                    ScopeGroups    a transient scope a room, made by the user's systemd
                    NoGroups       where neither can be: the worker watches instead

A group is words to put before a room's command; the command joins the group before it becomes what follows, so that
nothing of a room was ever outside.

Invariants: no process of ours but a room's is moved. Folders carry the trainer's process id; those of trainers that have
ended are removed by the next one (a room that still ran would keep its folder: a group with processes cannot be removed).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from palingenesis.rl.sandbox.room import ROOM_MB

NAME = "palingenesis"
ROOM_PROCESSES = 3  # of a room itself: bwrap, the worker, its supervisor
PATIENCE = 10.0  # seconds for systemd to answer, or a process to enter a group: half a second is usual
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 97; shift; done; shift; exec "$@"'

_PERIOD = 100_000  # microseconds: the kernel's default
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the programs of one room may use at once, scratch files included; one CPU beside it."""

    memory_mb: int
    processes: int

    @property
    def room_bytes(self) -> int:
        return (self.memory_mb + ROOM_MB) * 2**20

    @property
    def room_processes(self) -> int:
        return self.processes + ROOM_PROCESSES


class Group(Protocol):
    """One room's control group."""

    @property
    def words(self) -> list[str]:
        """Go before a command and run it inside."""
        ...

    def kills(self) -> int | None:
        """How often the kernel killed in it for want of memory; None when that cannot be known."""
        ...

    def remove(self) -> bool:
        """Try to remove it. False while something is in it."""
        ...


class Groups(Protocol):
    """Makes control groups.

    Attributes:
        name: what limits a room, for the log.
        limit: they limit memory and processes.
    """

    @property
    def name(self) -> str: ...

    @property
    def limit(self) -> bool: ...

    def make(self, bounds: Bounds) -> Group:
        """Raises OSError."""
        ...


def find_groups(bounds: Bounds) -> Groups:
    """The first kind of group that was tried out and holds. A user's own systemd, where there is one, owns its groups."""
    mounts, own = _mounts(), _own_groups()
    reasons = []
    for attempt in (_systemd, _version2, _version1) if os.geteuid() else (_version2, _version1, _systemd):
        found = attempt(mounts, own, bounds)
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return NoGroups(
        "rlimits and a look at memory and processes every 25 ms, and not in CPU, as no control group can be made: "
        + "; ".join(reasons)
    )


@dataclass(frozen=True, slots=True)
class NoGroup:
    words: list[str] = field(default_factory=list)

    def kills(self) -> int:
        return 0  # the kernel may kill for the machine's memory, which says nothing about a program

    def remove(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class NoGroups:
    name: str
    limit: bool = False

    def make(self, bounds: Bounds) -> NoGroup:
        return NoGroup()


# ------------------------------------------------------------------------------------------------------------- folders


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder in which groups can be made, and the files that bound one: value, and whether it may be missing."""

    folder: Path
    files: tuple[str, ...]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FolderGroup:
    folders: tuple[Path, ...]

    @property
    def words(self) -> list[str]:
        return ["/bin/sh", "-c", JOIN, "sh", *(str(folder / "cgroup.procs") for folder in self.folders), "--"]

    def kills(self) -> int:
        reports = [folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")]
        lines = [line.split() for report in reports if report.exists() for line in _text(report).splitlines()]
        return sum(int(count) for name, count in lines if name == "oom_kill")

    def remove(self) -> bool:
        left = [folder for folder in self.folders if not _removed(folder)]
        return not left


@dataclass(frozen=True, slots=True)
class FolderGroups:
    name: str
    hierarchies: tuple[Hierarchy, ...]
    limit: bool = True

    def make(self, bounds: Bounds) -> FolderGroup:
        label = f"{NAME}-{os.getpid()}-{next(_serial)}"
        group = FolderGroup(tuple(hierarchy.folder / label for hierarchy in self.hierarchies))
        values = _values(bounds)
        try:
            for hierarchy, folder in zip(self.hierarchies, group.folders, strict=True):
                folder.mkdir()
                for file in (*hierarchy.files, *filter(lambda name: (folder / name).exists(), hierarchy.optional)):
                    (folder / file).write_text(values[file], encoding="ascii")
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove the empty groups of trainers that have ended."""
        for hierarchy in self.hierarchies:
            for folder in hierarchy.folder.glob(f"{NAME}-*-*"):
                if not os.path.exists(f"/proc/{folder.name.split('-')[1]}"):
                    _removed(folder)


def _values(bounds: Bounds) -> Mapping[str, str]:
    """What is written to each file that bounds a group, of both versions."""
    memory, processes = str(bounds.room_bytes), str(bounds.room_processes)
    return {
        "memory.max": memory,
        "memory.swap.max": "0",
        "cpu.max": f"{_PERIOD} {_PERIOD}",
        "pids.max": processes,
        "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory,
        "cpu.cfs_quota_us": str(_PERIOD),
    }


def _text(file: Path) -> str:
    return file.read_text(encoding="ascii")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process is in it, or it is another user's
        return False
    return True


def _version2(mounts: list[Mount], own: Mapping[str, str], bounds: Bounds) -> Groups | str:
    """The nearest folder above the trainer that hands memory and pids to its children and lets us make some.

    Never the trainer's own: version 2 gives no controllers to the children of a group that has processes.
    """
    mount = next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    here = mount.place_of(own.get("", "")) if mount else None
    if mount is None or here is None:
        return "v2 is not mounted"
    why = "no group here gives memory and pids to its children"
    for folder in itertools.takewhile(lambda folder: folder.is_relative_to(mount.point), (here, *here.parents)):
        try:
            given = _text(folder / "cgroup.subtree_control").split()
        except OSError:  # a container may be shown its own part of the tree only
            continue
        if {"memory", "pids"} <= set(given):
            cpu = ("cpu.max",) if "cpu" in given else ()
            hierarchy = Hierarchy(folder, ("memory.max", "pids.max", *cpu), ("memory.swap.max",))
            groups = FolderGroups(
                f"control groups, v2, in {folder}" + ("" if cpu else ", and not in CPU"), (hierarchy,)
            )
            why = _tried(groups, bounds)
            if not why:
                return groups
    return f"v2: {why}"


def _version1(mounts: list[Mount], own: Mapping[str, str], bounds: Bounds) -> Groups | str:
    """Below the trainer's own groups."""
    files = {
        "memory": (("memory.limit_in_bytes",), ("memory.memsw.limit_in_bytes",)),
        "pids": (("pids.max",), ()),
        "cpu": (("cpu.cfs_quota_us",), ()),
    }
    hierarchies = []
    for controller, (required, optional) in files.items():
        mount = next((mount for mount in mounts if mount.kind == "cgroup" and controller in mount.options), None)
        here = mount.place_of(own.get(controller, "")) if mount else None
        if here is None:
            return f"v1 {controller} is not mounted"
        hierarchies.append(Hierarchy(here, required, optional))
    groups = FolderGroups("control groups, v1, below this process's own", tuple(hierarchies))
    why = _tried(groups, bounds)
    return f"v1: {why}" if why else groups


def _tried(groups: FolderGroups, bounds: Bounds) -> str:
    """Why a process cannot be put into a group; empty when it can."""
    groups.sweep()
    try:
        group = groups.make(bounds)
    except OSError as error:
        return str(error.strerror)
    try:
        done = subprocess.run([*group.words, "true"], capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"a process did not enter its group within {PATIENCE:g} s"
    finally:
        group.remove()  # what has ended is out of its group
    return done.stderr.strip() if done.returncode else ""


# ------------------------------------------------------------------------------------------------------------- systemd


@dataclass(frozen=True, slots=True)
class Scope:
    """systemd removes it when its last process ends."""

    words: list[str]

    def kills(self) -> None:
        return None  # asked when the room has ended, and the scope with it

    def remove(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ScopeGroups:
    """`properties` are those beyond the limits."""

    name: str
    properties: tuple[str, ...] = ()
    limit: bool = True

    def make(self, bounds: Bounds) -> Scope:
        limits = (
            f"MemoryMax={bounds.room_bytes}",
            "MemorySwapMax=0",
            f"TasksMax={bounds.room_processes}",
            "CPUQuota=100%",
        )
        words = ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
        return Scope([*words, *(f"--property={setting}" for setting in (*limits, *self.properties)), "--"])


def _systemd(mounts: list[Mount], own: Mapping[str, str], bounds: Bounds) -> Groups | str:
    """A scope's limits are read back from inside: an old systemd leaves out silently what it has no controller for.

    Left to itself a new systemd ends a scope, room and all, when the kernel kills a program in it for its memory; an
    old one does not, and does not know the property.
    """
    mount = next((mount for mount in mounts if mount.kind == "cgroup2"), None)
    if mount is None or shutil.which("systemd-run") is None:
        return "no systemd-run with cgroup v2"
    read = f'cd {mount.point}/"$(sed -n s/^0:://p /proc/self/cgroup)" && cat memory.max pids.max cpu.max; true'
    for properties in (("OOMPolicy=continue",), ()):
        groups = ScopeGroups("control groups, scopes of this user's systemd", properties)
        words = [*groups.make(bounds).words, "/bin/sh", "-c", read]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return f"systemd-run --user did not answer in {PATIENCE:g} s"
        if done.returncode == 0:
            break
    else:
        return f"systemd-run --user: {done.stderr.strip()}"
    found = done.stdout.split()
    if found[:2] != [str(bounds.room_bytes), str(bounds.room_processes)]:
        return "systemd-run --user sets no limits here"
    return groups if found[2:] == [str(_PERIOD)] * 2 else replace(groups, name=f"{groups.name}, and not in CPU")


# -------------------------------------------------------------------------------------------------------- where they are


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted cgroup hierarchy: `root` is the group that shows at `point`."""

    kind: str
    root: str
    point: Path
    options: frozenset[str]

    def place_of(self, group: str) -> Path | None:
        """The folder of a group; None for one that is not below this mount."""
        if not group.startswith("/") or ".." in group:
            return None
        inside = os.path.relpath(group, self.root)
        return None if inside.startswith("..") else self.point / inside


def _mounts() -> list[Mount]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return list(_cgroup_mounts(lines))


def _cgroup_mounts(lines: Iterable[str]) -> Iterable[Mount]:
    for line in lines:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            _, _, _, root, point, *_ = left.split()
            yield Mount(kind, root, Path(point), frozenset(options.split(",")))


def _own_groups() -> Mapping[str, str]:
    """This process's group by controller; that of version 2 is under the empty name."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), group))
    return found
