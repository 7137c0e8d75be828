"""Sandboxes of replicas, made by bubblewrap.

bubblewrap creates the namespaces and the file tree of a sandbox, and keeps one idle process in it. A replica is forked
from the warm parent, outside, and then enters the sandbox: so it shares the warm parent's memory, and starts as soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from region_agent.gateway.embedded.replicas.seccomp import filter_program

__all__ = ["HOME", "Sandbox", "SandboxView"]

HOME = "/home/function"
"""Home and working directory of a function in its sandbox."""
_LOOPBACK = {"localhost": "127.0.0.1", "ip6-localhost": "::1"}
_START_SECONDS = 10.0
"""Timeout of a sandbox's start, which takes about 10 ms."""


@dataclass(frozen=True)
class SandboxView:
    """What a function sees in its sandbox, besides empty folders for temporary files and shared memory."""

    system: Sequence[str]
    """Arguments of bubblewrap for the parts that are the same for all functions."""
    home: str
    """The replica's own directory; its folder ``tmp`` is ``/tmp`` in the sandbox."""
    read: Sequence[str] = ()
    """Files and folders that can be read."""
    write: Sequence[str] = ()
    """Files and folders that can be written to."""
    hidden: Sequence[str] = ()
    """Folders that are covered where something above them is visible."""
    egress: Sequence[tuple[str, int]] = ()
    """Hosts and ports to which the function may connect."""
    hosts: Mapping[str, str] | None = None
    """Names of hosts with their addresses in the sandbox; None: the network of this machine."""
    memory_bytes: int | None = None
    """Size of the shared memory; None: half of the machine's."""


def _arguments(view: SandboxView) -> list[str]:
    """Return bubblewrap's arguments. Later ones lie over earlier ones."""
    exposed = [path for path in view.read if not _is_below(path, view.hidden)]
    within = [path for path in view.read if _is_below(path, view.hidden)]
    covered = [path for path in view.hidden if _is_below(path, exposed) or _is_below(path, _sources(view.system))]
    size = ["--size", str(view.memory_bytes)] if view.memory_bytes else []
    found = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    found += ["--unshare-net"] if view.hosts is not None else []
    found += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "function"]
    # First, since what is visible may be in the machine's own folders of these names.
    found += ["--bind", f"{view.home}/tmp", "/tmp", "--bind", view.home, HOME, *size, "--tmpfs", "/dev/shm"]
    found += view.system
    for option, paths in (("--ro-bind", exposed), ("--tmpfs", covered), ("--ro-bind", within), ("--bind", view.write)):
        for path in paths:
            found += [option, path] if option == "--tmpfs" else [option, path, path]
    return [*found, "--remount-ro", "/", "--chdir", "/"]


def _sources(arguments: Sequence[str]) -> list[str]:
    return [source for option, source in itertools.pairwise(arguments) if option.startswith("--ro-bind")]


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


class Sandbox:
    """A sandbox that exists."""

    def __init__(self, process: asyncio.subprocess.Process, first: int) -> None:
        """``first``: the process in it that ends last."""
        self._process, self._first = process, first
        self.fd = os.pidfd_open(first)
        """pidfd of a process in the sandbox, for `isolation.enter`."""

    @property
    def pid(self) -> int:
        """Process ID of bubblewrap, of which orphans in the sandbox are descendants."""
        return self._process.pid

    @classmethod
    async def start(cls, view: SandboxView) -> Sandbox:
        """Create a sandbox. Raises ``OSError`` with the reason where that is impossible."""
        program = shutil.which("bwrap")
        if program is None:
            raise OSError(errno.ENOENT, "bubblewrap is not installed")
        read_info, write_info = os.pipe2(os.O_CLOEXEC)
        files = [("--seccomp", filter_program(), ""), *_accounts(view)]
        files.append(("--args", b"\0".join(map(os.fsencode, _arguments(view))), ""))
        with _as_descriptors(files) as (given, descriptors), os.fdopen(read_info, "rb") as info:
            try:
                # `cat` answers once the sandbox is complete, and ends when this process does.
                process = await asyncio.create_subprocess_exec(
                    program, "--info-fd", str(write_info), *given, "cat",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                    env={}, cwd="/", pass_fds=[write_info, *descriptors],
                )  # fmt: skip
            finally:
                os.close(write_info)
            await _complete(process)
            return cls(process, int(json.load(info)["child-pid"]))

    async def close(self) -> None:
        """End the sandbox with all processes in it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
        os.close(self.fd)
        # bubblewrap ends with the sandbox. If it was killed before, this process has inherited what it has left.
        await self._process.wait()
        with contextlib.suppress(ChildProcessError):
            await asyncio.to_thread(os.waitpid, self._first, 0)


async def _complete(process: asyncio.subprocess.Process) -> None:
    """Wait until the first process in a sandbox runs."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            with contextlib.suppress(ConnectionError):
                process.stdin.write(b"\n")
                await process.stdin.drain()
            if await process.stdout.readline():
                return
            reason = (await process.stderr.read()).decode("utf-8", "replace").strip()
    except TimeoutError:
        reason = f"bubblewrap has not made a sandbox within {_START_SECONDS:g} s"
    except asyncio.CancelledError:
        await _end(process)
        raise
    await _end(process)
    raise OSError(errno.EPERM, reason or "bubblewrap has ended without a reason")


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _accounts(view: SandboxView) -> list[tuple[str, bytes, str]]:
    """Return files with the names of users and hosts: only those that the function needs."""
    user, group = os.getuid(), os.getgid()
    files = {
        "/etc/passwd": f"function:x:{user}:{group}::{HOME}:/bin/sh\n",
        "/etc/group": f"function:x:{group}:\n",
        "/etc/hosts": "".join(f"{address} {name}\n" for name, address in (_LOOPBACK | dict(view.hosts or {})).items()),
    }
    if view.hosts is None:
        files["/etc/hosts"] = Path("/etc/hosts").read_text()
        files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
    return [("--ro-bind-data", content.encode(), path) for path, content in files.items()]


@contextlib.contextmanager
def _as_descriptors(files: Sequence[tuple[str, bytes, str]]) -> Iterator[tuple[list[str], list[int]]]:
    """Provide contents as descriptors; yields the options that name them, and the descriptors."""
    descriptors: list[int] = []
    given: list[str] = []
    try:
        for option, content, path in files:
            descriptors.append(os.memfd_create(option))
            os.write(descriptors[-1], content)
            os.lseek(descriptors[-1], 0, os.SEEK_SET)
            given += [option, str(descriptors[-1]), *([path] if path else [])]
        yield given, descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
