"""What is bubblewrap's own: the room it makes, for root and for an ordinary user, its control groups, and what it says
when no room can be made. What every backend promises is in `tests/contract/test_sandbox.py`.

`user` is what an ordinary user gets, with no control group to be had; root tests it too, by becoming one before bwrap.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from palingenesis.rl.config import SandboxConfig
from palingenesis.rl.errors import SandboxError
from palingenesis.rl.sandbox import Program, Result, Status, bubblewrap, cgroups, open_sandbox
from palingenesis.rl.sandbox.bubblewrap import (
    BubblewrapBackend,
    BubblewrapRoom,
    Standing,
    find_interpreter,
    find_standing,
)
from palingenesis.rl.sandbox.cgroups import Bounds, FolderGroups, Hierarchy, NoGroups, find_groups

SYSTEM_PYTHON = "/usr/bin/python3"  # which nobody can run, wherever the tests' own lies
NOBODY_WORDS = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture(params=["root", "user"])
def who(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start rooms as root or as an ordinary user from here on."""
    is_root = os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("this is no root")
    if request.param == "user":
        monkeypatch.setattr(bubblewrap, "find_groups", lambda bounds: NoGroups("nothing"))
        if is_root:
            become_user(monkeypatch)
    return str(request.param)


def become_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_standing", lambda: Standing(False, NOBODY_WORDS))
    monkeypatch.setattr(sys, "_base_executable", SYSTEM_PYTHON)


Play = Callable[..., Result]


@pytest.fixture
def play(who: str) -> Iterator[Play]:
    """Runs a program in a room; the room is made for the first."""
    made: list[Any] = []

    def run(source: str, **options: Any) -> Result:
        if not made:
            made.append(open_sandbox(SandboxConfig(backend="bubblewrap", workers=1, **options)))
            made[0].start()
        return asyncio.run(made[0].run([Program(textwrap.dedent(source), timeout=30)]))[0]

    yield run
    for sandbox in made:
        sandbox.close()


def said(result: Result) -> Any:
    assert result.status is Status.DONE, result
    return json.loads(result.stdout)


# -------------------------------------------------------------------------------------------------------------- the room

FACTS = """
    import json, os, socket
    mounts = {}
    for line in open("/proc/self/mountinfo"):
        fields = line.split()
        mounts[fields[4]] = fields[5].split(",")
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    facts = {
        "status": {name: status[name].strip() for name in status if name[:3] in ("Cap", "Uid", "Gid", "NoN", "Sec")},
        "mounts": mounts,
        "root": os.listdir("/"),
        "etc": os.listdir("/etc"),
        "dev": os.listdir("/dev"),
        "usr": os.listdir("/usr"),
        "environment": sorted(os.environ),
        "host": socket.gethostname(),
        "processes": [name for name in os.listdir("/proc") if name.isdigit()],
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
        "map": open("/proc/self/uid_map").read().split(),
        "limit": open("/proc/sys/user/max_user_namespaces").read().strip(),
    }
    print(json.dumps(facts))
"""


@needs_bwrap
def test_a_room(play: Play, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGS_TEST_SECRET", "s3cret")
    facts = said(play(FACTS))
    status, mounts = facts["status"], facts["mounts"]
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
    assert {status[name] for name in status if name.startswith("Cap")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    written = {point for point, options in mounts.items() if "ro" not in options}
    assert written == {"/proc", "/tmp", *(f"/dev/{name}" for name in bubblewrap.DEVICES)}
    assert all("nosuid" in options for options in mounts.values())
    assert set(mounts["/tmp"]) >= {"rw", "nosuid", "nodev", "noexec"}
    home = Path(find_interpreter().executable).parts[1]  # of an interpreter in a home folder, say
    assert set(facts["root"]) <= {"usr", "bin", "lib", "lib32", "lib64", "etc", "dev", "proc", "tmp", home}
    assert set(facts["etc"]) <= {"ld.so.cache", "alternatives"}
    assert set(facts["dev"]) == {*bubblewrap.DEVICES, *bubblewrap.LINKS}
    assert not {"local", "src", "sbin", "include"} & set(facts["usr"])
    assert not [name for name in facts["environment"] if "SECRET" in name or "DBUS" in name or "XDG" in name]
    assert facts["host"] == "room"
    assert len(facts["processes"]) == 3  # the worker, its supervisor, the program
    apart = ["ipc", "mnt", "net", "pid", "uts", "cgroup", *(["user"] if who == "user" else [])]
    assert not [name for name in apart if facts["namespaces"][name] == os.readlink(f"/proc/self/ns/{name}")]
    if who == "user":
        assert facts["map"][0] == "65534"
        assert facts["limit"] == "0"


@needs_bwrap
def test_nobody_in_a_room_is_nobody_on_the_machine(play: Play) -> None:
    """uid 65534 of a user namespace that root made is the machine's root, and may write /proc/sys/kernel/core_pattern."""
    play("print(1)")
    mine = {status.pid: status for status in map(Process.read, descendants(os.getpid()))}
    inside = [process for process in mine.values() if process.is_python]
    assert inside
    assert {process.uid for process in inside} == ({65534} if os.geteuid() == 0 else {os.getuid()})
    writes = "import os; print(1); os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)"
    assert "Read-only file system" in play(writes).reason or "Permission denied" in play(writes).reason


@dataclass(frozen=True)
class Process:
    pid: int
    uid: int
    is_python: bool

    @classmethod
    def read(cls, pid: int) -> Process:
        status = Path(f"/proc/{pid}/status").read_text()
        uid = int(status.partition("Uid:")[2].split()[0])
        return cls(pid, uid, status.partition("Name:")[2].split()[0].startswith("python"))


def descendants(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*found, *(inner for child in found for inner in descendants(child))]


@needs_bwrap
def test_a_file_in_scratch_is_not_executed(play: Play) -> None:
    source = """
        import ctypes, os, shutil, subprocess
        shutil.copy("/usr/bin/true", "file")
        os.chmod("file", 0o755)
        for command in (["./file"], ["/lib64/ld-linux-x86-64.so.2", "./file"]):
            try:
                print(subprocess.run(command, capture_output=True).returncode == 0)
            except OSError as error:
                print(error.strerror)
    """
    assert set(play(source).stdout.split("\n")) <= {"Permission denied", "False", "No such file or directory", ""}


@needs_bwrap
@pytest.mark.parametrize("who", ["user"], indirect=True)
def test_where_a_room_may_not_mount(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Ubuntu's AppArmor profile for bwrap, whose children have no rights: bwrap makes the scratch."""
    wrapper = tmp_path / "bwrap"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("bwrap")} --disable-userns "$@"\n')
    wrapper.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = said(play(FACTS))
    assert "noexec" not in facts["mounts"]["/tmp"]
    assert "ro" in facts["mounts"]["/proc/sys"]
    assert {facts["status"][name] for name in facts["status"] if name.startswith("Cap")} == {"0" * 16}
    filled = play(
        "try:\n    print(open('file', 'wb').write(bytes(65 << 20)))\nexcept OSError as error:\n    print(error.errno)"
    )
    assert filled.stdout in ("27\n", "28\n")


@needs_bwrap
def test_programs_do_not_see_the_packages_of_the_trainer(play: Play) -> None:
    look = """
        import json, os, sys
        print(json.dumps([name for path in sys.path if os.path.isdir(path) for name in os.listdir(path)]))
    """
    seen = said(play(look))
    assert "json" in seen
    assert "palingenesis" not in seen


@needs_bwrap
def test_packages_beside_the_standard_library_are_hidden(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a trainer that runs without a virtual environment."""
    found = find_interpreter()
    standard = next(folder for folder in found.folders if Path(folder, "wsgiref").is_dir())
    packages = f"{standard}/wsgiref"
    monkeypatch.setattr(bubblewrap, "find_interpreter", lambda: replace(found, hidden=(packages,)))
    result = play(f"import os; print(os.listdir({packages!r})); open({packages!r} + '/new', 'w')")
    assert result.stdout == "[]\n"
    assert "Read-only file system" in result.reason


@needs_bwrap
def test_libraries_that_lie_elsewhere(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's module system puts an interpreter's libraries where only LD_LIBRARY_PATH finds them."""
    ask = "import ctypes; print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libffi' in l or 'libcrypto' in l})"
    python = getattr(sys, "_base_executable", sys.executable)
    command = [python, "-c", f"import ssl, hashlib, ctypes; {ask}"]
    libraries = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    folder = tempfile.mkdtemp(prefix="pgs-libraries-", dir="/var/tmp")
    try:
        os.chmod(folder, 0o755)
        for library in map(Path, libraries):
            for name in library.parent.glob(f"{library.name.split('.so')[0]}.so*"):
                shutil.copy(name, folder)
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}:/nonexistent")
        result = play(f"import os, ssl, ctypes; print(os.environ['LD_LIBRARY_PATH']); {ask}")
        path, used = result.stdout.split("\n", 1)
        assert path == folder
        assert folder in used
    finally:
        shutil.rmtree(folder)


def test_an_interpreter_where_programs_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bubblewrap, "SCRATCH", "/usr")
    monkeypatch.setattr(sys, "_base_executable", SYSTEM_PYTHON)
    with pytest.raises(SandboxError, match="scratch files"):
        find_interpreter()


def test_a_home_folder_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", find_interpreter().folders[0])
    with pytest.raises(SandboxError, match="home folder"):
        find_interpreter()


# --------------------------------------------------------------------------------------------------------------- standing

FULL = "CapEff:\t000001ffffffffff\n"
CONTAINER = "CapEff:\t00000000a80425fb\n"  # docker's default


@pytest.mark.parametrize(
    ("uid", "ids", "rights", "expected"),
    [
        (1000, "0 0 4294967295", "CapEff:\t0\n", Standing(False)),
        (0, "         0          0 4294967295", FULL, Standing(True)),
        (0, "0 0 4294967295", CONTAINER, Standing(False, NOBODY_WORDS)),
        (0, "0 1000 1\n1 100000 65536", FULL, Standing(True)),  # a rootless container
        (0, "0 1000 1", FULL, Standing(False)),  # an ordinary user who is root by name
    ],
)
def test_standing(monkeypatch: pytest.MonkeyPatch, uid: int, ids: str, rights: str, expected: Standing) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(bubblewrap, "_proc", {"uid_map": ids, "status": rights}.__getitem__)
    assert find_standing() == expected


def test_a_root_that_can_be_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bubblewrap, "_proc", {"uid_map": "0 0 1", "status": FULL}.__getitem__)
    with pytest.raises(SandboxError, match="the machine's root"):
        find_standing()


# --------------------------------------------------------------------------------------------------------- control groups


def folders_of_this_machine() -> FolderGroups:
    found = find_groups(Bounds(64, 8))
    if not isinstance(found, FolderGroups):
        pytest.skip(f"no control group can be made here: {found.name}")
    return found


def made_by(pid: int, groups: FolderGroups) -> list[Path]:
    return [path for hierarchy in groups.hierarchies for path in hierarchy.folder.glob(f"palingenesis-{pid}-*")]


@needs_bwrap
def test_a_room_has_a_group_and_leaves_none() -> None:
    groups = folders_of_this_machine()
    sandbox: Any = open_sandbox(SandboxConfig(backend="bubblewrap", workers=2))
    sandbox.start()
    assert len(made_by(os.getpid(), groups)) == 2 * len(groups.hierarchies)
    burn = """
        import os, time
        end = time.monotonic() + 1
        for _ in range(3):
            if os.fork() == 0:
                while time.monotonic() < end:
                    pass
                os._exit(0)
        for _ in range(3):
            os.wait()
        print(os.times().children_user + os.times().children_system)
    """
    (result,) = asyncio.run(sandbox.run([Program(textwrap.dedent(burn))]))
    assert float(result.stdout) < 1.3, "seconds of CPU in one second, of a room that may use one CPU"
    sandbox.close()
    assert made_by(os.getpid(), groups) == []


def test_groups_of_trainers_that_ended_are_removed() -> None:
    groups = folders_of_this_machine()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for hierarchy in groups.hierarchies:
        (hierarchy.folder / f"palingenesis-{ended.pid}-0").mkdir()
        (hierarchy.folder / f"palingenesis-{os.getpid()}-x").mkdir()
    find_groups(Bounds(64, 8))
    assert made_by(ended.pid, groups) == []
    assert len(made_by(os.getpid(), groups)) == len(groups.hierarchies)
    for folder in made_by(os.getpid(), groups):
        folder.rmdir()


def test_a_group_counts_what_the_kernel_killed() -> None:
    group = folders_of_this_machine().make(Bounds(1, 8))
    assert group.kills() == 0
    greedy = [sys.executable, "-c", "print(len(bytearray(500 << 20)))"]
    done = subprocess.run([*group.words, *greedy], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")
    assert group.kills() >= 1
    deadline = time.monotonic() + 5
    while not group.remove() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group.remove()


@dataclass
class SomeGroup:
    count: int | None
    words: tuple[str, ...] = ()

    def kills(self) -> int | None:
        return self.count

    def remove(self) -> bool:
        return True


@pytest.mark.parametrize(("before", "after", "broke"), [(0, 1, True), (1, 1, False), (None, None, True)])
def test_who_is_blamed_for_a_worker_that_was_killed(before: int | None, after: int | None, broke: bool) -> None:
    """The program, when the kernel killed for memory since it began, or may have."""

    async def blame() -> bool:
        process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1, stderr=-1)
        room = BubblewrapRoom("room", process)
        room.group = group = SomeGroup(before)  # type: ignore[assignment]
        room._kills_before = room.group.kills()
        group.count = after
        cause = await room.cause(137)
        await room.close()
        return cause.broke

    assert asyncio.run(blame()) is broke


MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime master:9 - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:2 master:3 - cgroup2 cgroup2 rw,nsdelegate
"""


def test_where_groups_are() -> None:
    memory, cpu, unified = cgroups._cgroup_mounts(MOUNTS.splitlines())
    assert memory.place_of("/docker/abc/inner") == Path("/sys/fs/cgroup/memory/inner")
    assert memory.place_of("/docker/abc") == Path("/sys/fs/cgroup/memory")
    assert memory.place_of("/system.slice") is None
    assert (cpu.kind, "cpu" in cpu.options) == ("cgroup", True)
    assert unified.place_of("/user.slice/a.scope") == Path("/sys/fs/cgroup/unified/user.slice/a.scope")
    assert unified.place_of("/../other") is None  # outside of the namespace
    assert unified.place_of("") is None


def test_a_folder_that_takes_no_groups(tmp_path: Path) -> None:
    groups = FolderGroups("plain folders", (Hierarchy(tmp_path / "missing", ("memory.max",)),))
    with pytest.raises(OSError, match="missing"):
        groups.make(Bounds(1, 1))


# ------------------------------------------------------------------------------------------------------ no room can start


def test_bwrap_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match=r"sandbox\.backend: bubblewrap needs .*apt install bubblewrap"):
        BubblewrapBackend(SandboxConfig(backend="bubblewrap"))


# What bwrap said where it was tried: a machine with that sysctl, docker, Ubuntu 24.04, bubblewrap of Debian 10.
NO_RIGHTS = "bwrap: No permissions to create new namespace, likely because the kernel does not allow ..."
NO_SPACE = "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)"
NO_PROC = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
NO_LOOPBACK = "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted"
SETUID = "bwrap: --cap-add in setuid mode can be used only by root"


@pytest.mark.parametrize(
    ("words", "sysctls", "container", "cause", "cure"),
    [
        (NO_SPACE, {"user/max_user_namespaces": "0"}, False, "max_user_namespaces is 0", "sysctl user.max"),
        (NO_RIGHTS, {"kernel/unprivileged_userns_clone": "0"}, False, "userns_clone is 0", "userns_clone=1"),
        (NO_LOOPBACK, {"kernel/apparmor_restrict_unprivileged_userns": "1"}, False, "AppArmor", "profile"),
        (NO_RIGHTS, {}, True, "container", "--security-opt seccomp=unconfined"),
        (NO_PROC, {}, True, "container", "systempaths=unconfined"),
        (SETUID, {}, False, "setuid", "not setuid"),
        ("bwrap: Unknown option --as-pid-1", {}, False, "too old", "0.4"),
        ("bwrap: Creating new namespace failed: Invalid argument", {}, False, "kernel lacks", "4.18"),
        ("bwrap: something new", {}, False, "something new", "docker"),
    ],
)
def test_why_no_room_starts(
    monkeypatch: pytest.MonkeyPatch, words: str, sysctls: dict[str, str], container: bool, cause: str, cure: str
) -> None:
    monkeypatch.setattr(bubblewrap, "_sysctl", lambda name: sysctls.get(name, ""))
    monkeypatch.setattr(bubblewrap, "_in_container", lambda: container)
    message = bubblewrap._why_not(words)
    assert message.startswith("sandbox.backend: bubblewrap cannot start a room: ")
    assert cause in message
    assert cure in message
    assert words in message


@needs_bwrap
def test_a_room_that_does_not_start_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: no room today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = open_sandbox(SandboxConfig(backend="bubblewrap", workers=1))
    with pytest.raises(SandboxError, match="no room today"):
        sandbox.start()
