"""What a function may see and do: private mounts, and no capabilities; and the children of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from geofed_pb.linux import CLONE_NEWNS, CLONE_NEWUSER, call

__all__ = ["children", "hide_paths"]

_PR_SET_DUMPABLE = 4
"""prctl option, as of `linux/prctl.h`: whether others of this user may read the process's memory."""
_PR_CAPBSET_DROP = 24
"""prctl option, as of `linux/prctl.h`: drop a capability from the bounding set."""
_PR_SET_NO_NEW_PRIVS = 38
"""prctl option, as of `linux/prctl.h`: no program that is executed may add privileges."""
_PR_CAP_AMBIENT = 47
"""prctl option, as of `linux/prctl.h`: change the ambient capabilities."""
_PR_CAP_AMBIENT_CLEAR_ALL = 4
"""Argument of `_PR_CAP_AMBIENT`, as of `linux/prctl.h`: clear all."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_CAPABILITY_VERSION_3 = 0x20080522
"""Version of capset's header with 64-bit sets, `_LINUX_CAPABILITY_VERSION_3` of `linux/capability.h`."""
_LAST_CAPABILITY = 63
"""Highest number of a capability in 64-bit sets; the kernel rejects those that it does not know."""


def children(pid: int | str = "self") -> list[int]:
    """Return the child processes of a process, including adopted orphans; empty if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def hide_paths(hidden: Iterable[str], kept: Iterable[str], read_only: Iterable[str] = ()) -> None:
    """Cover files and directories for this process and its children; ``kept`` and ``read_only`` stay visible in them.

    Needs a single thread and a kernel with user namespaces; raises ``OSError`` if it has none or forbids the mounts.
    Afterwards the process has no capabilities, so it cannot uncover them. It is in a user namespace of its own, so it
    can neither trace processes outside nor read them through ``/proc``. The caller must change to the working directory
    again, since the present one may be covered.
    """
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    try:
        _cover_all(hidden, kept, read_only)
    finally:
        _drop_capabilities()
        call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)


def _cover_all(hidden: Iterable[str], kept: Iterable[str], read_only: Iterable[str]) -> None:
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    frozen = set(read_only)
    handles = {path: os.open(path, os.O_PATH) for path in {*kept, *frozen} if os.path.isdir(path)}
    covered = [path for path in sorted(hidden, key=len) if os.path.exists(path) and _cover(path)]
    for path, handle in handles.items():
        if any(Path(path).is_relative_to(cover) for cover in covered):
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{handle}", path, None, _MS_BIND | _MS_REC)
            if path in frozen:
                # The kernel requires a remount to keep the flags of the underlying mount.
                locked = os.statvfs(path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
                _mount("none", path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | locked)
        os.close(handle)


def _cover(path: str) -> bool:
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        return True
    _mount("/dev/null", path, None, _MS_BIND)
    return False


def _drop_capabilities() -> None:
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    with contextlib.suppress(OSError):
        for capability in range(_LAST_CAPABILITY + 1):
            call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    call("capset", header, nothing)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    try:
        call("mount", source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None)
    except OSError as error:
        error.filename = target
        raise
