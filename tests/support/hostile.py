"""What job code of an attacker tries."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST_CHILDREN = 3000
_SYSCALLS = {"bpf": 321, "io_uring_setup": 425, "keyctl": 250, "perf_event_open": 298, "userfaultfd": 323}
"""Numbers of x86_64."""
_libc = ctypes.CDLL(None, use_errno=True)


def successes(targets: dict[str, Any]) -> dict[str, str]:
    """Try everything, or only what begins with certain words; what worked, with evidence."""
    found = {}
    for name, attempt in _attempts(targets):
        if targets.get("only") and name.split()[0] not in targets["only"]:
            continue
        try:
            evidence = attempt()
        except Exception as error:
            evidence = None
            print(f"attempt {name}: {type(error).__name__}: {error}", flush=True)
        if evidence:
            found[name] = str(evidence)[:200]
    return found


def _attempts(targets: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    for path in targets["secrets"]:
        yield f"read {path}", lambda path=path: Path(path).read_bytes()
    for path in targets["folders"]:
        yield f"list {path}", lambda path=path: os.listdir(path)
    for path in (*targets["read_only"], sys.executable, os.__file__, "/proc/sys/kernel/core_pattern"):
        yield f"write {path}", lambda path=path: _opened(path)
    for pid in targets["pids"]:
        yield f"see {pid}", lambda pid=pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        yield f"signal {pid}", lambda pid=pid: os.kill(pid, 0) is None
        yield f"trace {pid}", lambda pid=pid: _traced(pid)
        yield f"memory {pid}", lambda pid=pid: _opened(f"/proc/{pid}/mem")
    for host, port in targets["ports"]:
        yield f"connect to {host}:{port}", lambda place=(host, port): _connected(place)
    for path in targets["sockets"]:
        yield f"connect to {path}", lambda path=path: _connected(path)
    yield "send a datagram to a name server", lambda: _asked("1.1.1.1")
    yield (
        "other processes",
        lambda: [p for p in _processes() if "geofed" in p or "control_plane" in p or "sync.ps" in p],
    )
    yield "capabilities", lambda: [line for line in _status("CapEff", "CapPrm", "CapBnd") if int(line.split()[1], 16)]
    yield "new privileges", lambda: [line for line in _status("NoNewPrivs") if line.split()[1] != "1"]
    yield "system calls", lambda: [line for line in _status("Seccomp") if line.split()[1] != "2"]
    yield "mount", lambda: _libc.mount(b"none", tempfile.gettempdir().encode(), b"tmpfs", 0, None) == 0
    yield "new user namespace", lambda: _in_child(lambda: _libc.unshare(0x10000000) == 0)
    yield "new root", lambda: _in_child(lambda: os.chroot("/tmp") is None)
    yield "be traced", lambda: _in_child(lambda: _libc.ptrace(0, 0, None, None) == 0)
    if platform.machine() == "x86_64":
        for name, number in _SYSCALLS.items():
            yield name, lambda number=number: _libc.syscall(number, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1
    yield "socket to the hypervisor", lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).fileno()
    yield "raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).fileno()
    yield "devices", lambda: [path for path in glob.glob("/dev/*") if _is_dangerous(path)]
    yield "a link in the channel", lambda: os.symlink("/etc/passwd", f"{_first(targets['channel'])}/link") is None
    yield "a pipe in the channel", lambda: os.mkfifo(f"{_first(targets['channel'])}/pipe") is None
    yield "a socket in a shared folder", lambda: [path for path in glob.glob("/tmp/*") if "geofed-gw" in path]
    if targets["bomb"]:
        yield "a fork bomb", _bombed


def _first(pattern: str) -> str:
    """The folder that a pattern matches: the attacker finds only its own."""
    return glob.glob(pattern)[0]


def _opened(path: str) -> bool:
    with open(path, "r+b"):
        return True


def _traced(pid: int) -> bool:
    if _libc.ptrace(16, pid, None, None) < 0:
        return False
    os.waitpid(pid, 0x40000000)
    _libc.ptrace(17, pid, None, None)
    return True


def _connected(place: Any) -> bool:
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(3)
        connection.connect(place)
        return True


def _asked(server: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection, contextlib.suppress(OSError):
        return connection.sendto(b"x", (server, 53)) == 1
    return False


def _processes() -> list[str]:
    names = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            names.append(Path(path).read_bytes().replace(b"\0", b" ").decode())
    return names


def _status(*keys: str) -> list[str]:
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.split(":")[0] in keys]


def _is_dangerous(path: str) -> bool:
    name = os.path.basename(path)
    return name in ("fuse", "kmsg", "kvm", "mem", "port", "tun", "vsock") or name.startswith(
        ("vd", "sd", "nvme", "loop")
    )


def _in_child(attempt: Callable[[], bool]) -> bool:
    """In a process of its own, which may be changed by it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if attempt() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _bombed() -> str:
    """Start processes until that fails."""
    pids: list[int] = []
    try:
        while len(pids) < MOST_CHILDREN:
            pid = os.fork()
            if pid == 0:
                try:
                    signal.pause()
                finally:
                    os._exit(0)
            pids.append(pid)
    except OSError:
        pass
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return f"{len(pids)} processes" if len(pids) == MOST_CHILDREN else ""
