"""Entering a sandbox: namespaces, capabilities, limits; and the children of a process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address

from geofed_pb.linux import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUSER, call

__all__ = ["NAMESPACES", "children", "enter", "listen_at", "read_proc"]

_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x04000000, 0x08000000, 0x20000000
"""Flags of setns, as of `linux/sched.h`."""
NAMESPACES = {
    "user": CLONE_NEWUSER,
    "mount": CLONE_NEWNS,
    "pid": _CLONE_NEWPID,
    "ipc": _CLONE_NEWIPC,
    "uts": _CLONE_NEWUTS,
    "net": CLONE_NEWNET,
}
"""Namespaces of a sandbox, with the flags of setns."""
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
_CAPABILITY_VERSION_3 = 0x20080522
"""Version of capset's header with 64-bit sets, `_LINUX_CAPABILITY_VERSION_3` of `linux/capability.h`."""
_LAST_CAPABILITY = 63
"""Highest number of a capability in 64-bit sets; the kernel rejects those that it does not know."""
_SIOCSIFADDR = 0x8916
"""Request of ioctl, as of `linux/sockios.h`: set the address of a network interface."""
_BACKLOG = 64
"""Connections that wait until they are accepted. A choice."""


def children(pid: int | str = "self") -> list[int]:
    """Return the child processes of a process, including adopted orphans; empty if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # not by `Path`, which takes three times as long
            found += map(int, read_proc(f"{pid}/task/{task}/children").split())
    return found


def read_proc(file: str) -> bytes:
    """Read a file below /proc. Raises ``OSError``."""
    with open(f"/proc/{file}", "rb", buffering=0) as opened:
        return opened.readall()


def enter(
    sandbox_fd: int, *, own_network: bool, addresses: Sequence[tuple[str, int]], processes: int
) -> list[socket.socket]:
    """Move this process to the namespaces of a sandbox, without any capability and for good.

    ``sandbox_fd``: pidfd of a process in it. Children are in its PID namespace, this process is not. ``own_network``:
    the sandbox has a network of its own; ``addresses``: where to listen in it; returns the sockets. ``processes``:
    largest number of processes and threads, which the kernel does not enforce for root.

    Needs a single thread. Raises ``OSError``.
    """
    flags = sum(NAMESPACES.values())
    call("setns", sandbox_fd, flags if own_network else flags & ~NAMESPACES["net"])
    try:
        return [listen_at(host, port) for host, port in addresses]
    finally:
        _drop_capabilities()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at an address, which is given to the loopback interface if it is not one of loopback."""
    address = ip_address(host)
    version6 = not isinstance(address, IPv4Address)
    if not address.is_loopback:
        _add_address(address.packed, version6=version6)
    return socket.create_server((host, port), family=socket.AF_INET6 if version6 else socket.AF_INET, backlog=_BACKLOG)


def _add_address(packed: bytes, *, version6: bool) -> None:
    """Give the loopback interface of this network namespace one more address."""
    with socket.socket(socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if version6:
            # struct in6_ifreq of linux/ipv6.h: address, length of the prefix, index of the interface.
            request = struct.pack("=16sIi", packed, 128, socket.if_nametoindex("lo"))
        else:
            # struct ifreq of linux/if.h. An alias is named after its address, which is unique.
            name = f"lo:{packed.hex()}".encode()
            request = struct.pack("=16sHH4s8s8x", name, socket.AF_INET, 0, packed, b"")
        with contextlib.suppress(FileExistsError):
            fcntl.ioctl(any_socket, _SIOCSIFADDR, request)


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
