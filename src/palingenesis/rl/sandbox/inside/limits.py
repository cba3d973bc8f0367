"""What the worker asks of the kernel: who may look at a process, which calls it may make, how much it may use.

Linux only. The filter and `no_new_privs` are set once, in PID 1, and inherited by everything it forks; rlimits and the
rest are set in the program's process alone.

The filter refuses what could pass data from one job to the next (System V IPC, message queues, keyrings), what could bend
the room for later jobs (limits, priorities and affinities of *other* processes, which all run as the same user), what
looks into other processes, files of memory alone, which nothing counts where no control group does, and what widens the
attack surface (mounts, namespaces, bpf, io_uring, userfaultfd).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
NOBODY = 65534  # the user that programs become
THREAD_STACK_MB = 512  # of address space: what programs that recurse deeply ask for with threading.stack_size
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20
_SET_FLAGS = 0x40086602  # FS_IOC_SETFLAGS: what chattr sets

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: Any, third: Any = 0) -> None:
    if _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


def hide() -> None:
    """Nobody but root may read this process's memory, descriptors or environment; nor may its children's be read."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show() -> None:
    """This process owns its files in /proc again: /dev/stdin and the like work."""
    _prctl(_PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Descendants whose parent died become this process's children, as they are PID 1's anyway."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Be killed when `parent`, the caller's parent, ends. A change of user undoes it."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- the system call filter

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit's architecture, column in the tables

# name: (x86_64, aarch64)
_REFUSED = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "ioprio_set": (251, 30),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "unshare": (272, 97), "setns": (308, 268),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip

# Allowed on the caller alone: the argument that names the process must be 0.
_SELF_ONLY = {
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
}  # fmt: skip
_SETPRIORITY = (141, 140)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*

_LOAD, EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of the classic BPF machine
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's record of a call, little-endian

ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
LOAD_NUMBER = (_LOAD, 0, 0, _NUMBER)
LOAD_ARCHITECTURE = (_LOAD, 0, 0, _ARCHITECTURE)


def fail(error: int) -> Instruction:
    """Let the call fail with `errno`."""
    return (_RETURN, 0, 0, 0x00050000 | error)


def argument(n: int) -> Instruction:
    """Load the low half of the call's argument `n`."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * n)


def when(number: int, *test: Instruction) -> list[Instruction]:
    """For one call: `test` ends in a return; what it lets pass falls through to the next, with the number loaded."""
    return [(EQUAL, 0, len(test), number), *test]


def machine() -> tuple[int, int]:
    """The architecture as the kernel's record of a call names it, and the column of the tables of calls.

    Raises:
        OSError: this machine's calls are not known here.
    """
    name = platform.machine()
    if name not in _MACHINES:
        raise OSError(f"no table of system calls for {name}; there is one for {' and '.join(_MACHINES)}")
    return _MACHINES[name]


def install(code: Sequence[Instruction]) -> None:
    """Install `no_new_privs` and a filter, for this process and all it will ever start.

    Raises:
        OSError: the kernel has no filters.
    """
    program = b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def refuse_calls() -> None:
    """Install the filter of all rooms. Raises OSError: the kernel has no filters, or this machine's calls are not known."""
    install(_filter(*machine()))


def _filter(architecture: int, column: int) -> list[Instruction]:
    refuse, unknown = fail(errno.EPERM), fail(errno.ENOSYS)
    code = [
        LOAD_ARCHITECTURE,
        (EQUAL, 1, 0, architecture),
        unknown,
        LOAD_NUMBER,
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 calls, under other numbers
        unknown,
    ]
    for numbers in _REFUSED.values():
        code += when(numbers[column], refuse)
    for numbers in _SELF_ONLY.values():
        code += when(numbers[column], argument(0), (EQUAL, 1, 0, 0), refuse, ALLOW)
    code += when(_SETPRIORITY[column], argument(0), (EQUAL, 0, 2, 0), argument(1), (EQUAL, 1, 0, 0), refuse, ALLOW)
    code += when(_CLONE[column], argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse, ALLOW)
    code += when(_CLONE3[column], unknown)  # its flags cannot be seen; the C library uses clone then
    return [*code, ALLOW]


# ---------------------------------------------------------------------------------------------------------- one program


def confine(settings: Mapping[str, Any], parent: int) -> None:
    """In the program's process: what it may use, who it is. After this it is nobody and can only get less.

    Args:
        settings: the room's, see `room.WorkerSettings`.
        parent: the supervisor's process id.
    """
    os.setsid()
    files = settings["file_mb"] * _MIB
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    if settings["watch"]:
        limits.append((resource.RLIMIT_AS, (settings["memory_mb"] + THREAD_STACK_MB) * _MIB))
    if settings["user_processes"]:
        limits.append((resource.RLIMIT_NPROC, settings["user_processes"]))
    for what, most in limits:
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    show()
    die_with(parent)
    adjustment = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(adjustment, b"1000")
    os.close(adjustment)


def nameless_file(data: bytes, folder: str) -> int:
    """A descriptor that reads `data`, from the start. The file has no name any more; its descriptor can be reopened."""
    path = f"{folder}/.stdin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.unlink(path)
    os.fchmod(fd, 0o666)  # whoever the program becomes
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


# ------------------------------------------------------------------------------------------------ a room's processes


def processes(root: int, *spared: int) -> list[int]:
    """Process ids of a room but for `root` and the `spared`: everything where `root` is PID 1, else its descendants."""
    if root == 1:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        found = _children(root)
        for pid in found:  # grows while it is walked
            found += _children(pid)
    return [pid for pid in found if pid != root and pid not in spared]


def _children(pid: int) -> list[int]:
    """Of all threads of a process; empty when it has gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def usage(pids: list[int]) -> tuple[int, int]:
    """(threads, bytes of resident memory) of processes. Pages shared after a fork count for each."""
    threads = memory = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        threads += int(fields[17])
        memory += int(fields[21]) * _PAGE
    return threads, memory


def shared_usage(pids: list[int]) -> int:
    """Bytes of memory of processes, each page counted once. Slow: for when `usage` says too much."""
    memory = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                memory += sum(int(line.split()[1]) for line in file if line.startswith(("Pss:", "SwapPss:")))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            memory += usage([pid])[1]  # it hides itself: then it is charged in full
    return memory * 1024


def is_stopped(pid: int) -> bool:
    """Somebody stopped the process with a signal."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")


def kill_others(root: int, me: int) -> None:
    """Kill everything of the room but `root` and the caller: at one blow where `root` is PID 1, else those that are seen."""
    if root == 1:
        _kill(-1)  # which spares PID 1 and the caller
    else:
        for pid in processes(root, me):
            _kill(pid)


def kill_all(root: int, patience: float) -> bool:
    """Kill and reap everything of the room but its `root`, the caller. False when something still lives after a while."""
    deadline = time.monotonic() + patience
    while True:
        kill_others(root, root)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------- the scratch


def empty_folder(path: str) -> None:
    """Remove everything in a folder. Its names, modes, depth and links are hostile; nothing else writes to it now.

    A folder's entries move up into `path` before it is removed, so no path grows long, nothing recurses, and each entry
    is touched a few times only.
    """
    mine = os.getuid() in (0, os.stat(path).st_uid)  # else a job cannot change the folder itself, and nor can we
    if mine:
        os.chmod(path, 0o700)  # a job may have changed it
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while names := os.listdir(root):
            for name in names:
                if not _remove(name, root):
                    _lift(name, root)
        if mine:
            _forget(root)
    finally:
        os.close(root)


def _lift(name: str, root: int) -> None:
    """Move what is in a folder up beside it, and remove the folder."""
    _unlock(name, root)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    try:
        for child in os.listdir(inner):
            if not _remove(child, inner):
                _unlock(child, inner)
                os.rename(child, f".{os.urandom(16).hex()}", src_dir_fd=inner, dst_dir_fd=root)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)


def _forget(folder: int) -> None:
    """Reset what a folder itself can carry: attributes and access lists, flags, times."""
    with contextlib.suppress(OSError):  # not every file system has attributes, and the system's own cannot be removed
        for name in os.listxattr(folder):
            if not name.startswith("security."):
                os.removexattr(folder, name)
    with contextlib.suppress(OSError):  # nor flags
        fcntl.ioctl(folder, _SET_FLAGS, struct.pack("l", 0))
    os.utime(folder, ns=(0, 0))


def _remove(name: str, folder: int) -> bool:
    """Remove a file, link or empty folder; false for a folder that is not empty or cannot be entered."""
    try:
        os.unlink(name, dir_fd=folder)
        return True
    except OSError:
        pass
    try:
        os.rmdir(name, dir_fd=folder)
        return True
    except OSError:
        return False


def _unlock(name: str, folder: int) -> None:
    """A folder, never a link: those `_remove` has removed."""
    os.chmod(name, 0o700, dir_fd=folder)
