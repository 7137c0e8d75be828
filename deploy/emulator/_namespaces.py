"""Network namespaces without names: open files of one process hold them, until it and the processes in them end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from geofed_pb.linux import CLONE_NEWNET, CLONE_NEWUSER, call

_PR_SET_TIMERSLACK = 29
"""prctl option, as of `linux/prctl.h`: nanoseconds by which the thread's timers may be late."""

MARK = "GEOFED_EMULATOR_ID"
"""Environment variable with the id of the emulator, set for every process that is started in a site."""


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces. Raises OSError."""
    call("unshare", flags)


def enter(netns: int) -> None:
    """Move the calling thread into the network namespace of an open file. Raises OSError."""
    call("setns", netns, CLONE_NEWNET)


def use_exact_timers() -> None:
    """Make timers of the calling thread fire exactly when they are due, not up to 50 microseconds later."""
    with suppress(OSError):
        call("prctl", _PR_SET_TIMERSLACK, 1, 0, 0, 0)


def become_root_of_user_namespace() -> None:
    """Map the caller's user to root of a new user namespace. Raises OSError if the machine forbids it."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def new_netns() -> int:
    """Create a network namespace with lo up and return an open file that keeps it.

    The calling thread is inside it afterwards.
    """
    unshare(CLONE_NEWNET)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(netns: int) -> Iterator[None]:
    """Run a block in a namespace; the calling thread returns to where it was."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(netns)
        yield
    finally:
        enter(before)
        os.close(before)


def unsupported() -> str | None:
    """Return the reason why this user cannot create network namespaces; None: it can. Tried in a child process."""
    for tool in ("ip", "tc", "nsenter"):
        if not any(os.access(f"{folder}/{tool}", os.X_OK) for folder in _search_path()):
            return f"`{tool}` is not installed (packages iproute2 and util-linux)"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() != 0 or not _may_unshare():
                become_root_of_user_namespace()
            unshare(CLONE_NEWNET)
            code = 0
        except OSError:
            code = 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return None
    return "neither root nor a user namespace may create network namespaces on this machine"


def _search_path() -> list[str]:
    return [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin"]


def _may_unshare() -> bool:
    """Whether this process has CAP_SYS_ADMIN (bit 21), which root in a container may lack."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 21 & 1)
    return False


def needs_user_namespace() -> bool:
    """Whether network namespaces need a user namespace first."""
    return os.geteuid() != 0 or not _may_unshare()


def processes_inside(inodes: Collection[int], *, mark: str | None = None) -> list[int]:
    """Ids of the processes whose network namespace is one of ``inodes``.

    With ``mark``, only those with this emulator id in their environment. That is needed after the emulator's process
    has ended, since the kernel may have given the inode to another namespace.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if os.stat(f"/proc/{entry}/ns/net").st_ino not in inodes:
                continue
            if mark is None or f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def end_processes(inodes: Collection[int], *, mark: str | None = None, grace_s: float = 1.0) -> int:
    """Terminate the processes in the namespaces, and kill those that do not end; returns their number."""
    first = processes_inside(inodes, mark=mark)
    _signal(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    left = first
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = processes_inside(inodes, mark=mark)
    for _ in range(50):
        if not left:
            break
        _signal(left, signal.SIGKILL)
        time.sleep(0.01)
        left = processes_inside(inodes, mark=mark)
    return len(first)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
