"""The warm parent: imports the heavy modules once, then forks a replica for each request.

It is connected to the gateway by an inherited SOCK_SEQPACKET socket, with one JSON object per packet:

    gateway -> zygote   {"op": "spawn", "id": ..., "sandbox": {...} or null} with descriptors: control socket, log pipe,
                        pidfd of the sandbox
                        {"op": "signal", "id": ..., "signal": ...}
    zygote -> gateway   {"event": "ready", "failed_preloads": [...], "threads": n, "python_path": [...]}
                        {"event": "spawned", "id": ..., "pid": ...}
                        {"event": "exited", "id": ..., "status": <waitpid status>}

It has one thread and never reads a function's specification: a replica gets it over its own control socket, so no
function's environment is left in the memory that the next one inherits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from geofed_pb import linux
from region_agent.gateway.embedded.replicas import isolation, replica

__all__ = ["main"]

_MAX_DESCRIPTOR = 1 << 16
"""Above the descriptors that the warm parent can have open."""
_PACKET_BYTES = 64 * 1024
"""Largest packet on the socket to the gateway."""


class Zygote:
    """The loop of the warm parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._pids: dict[str, int] = {}
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = False
        self._pid = os.getpid()

    def run(self, preload: list[str]) -> None:
        """Serve until the gateway closes the socket."""
        linux.become_subreaper()
        # Objects of modules stay, so collecting garbage during imports is useless; it takes a fifth of torch's import.
        gc.disable()
        failed = [name for name in preload if not _preload(name)]
        # Imports leave 9,000 objects of garbage, which keep no memory worth a collection: it would take 0.3 s.
        gc.freeze()
        gc.enable()
        threads = len(os.listdir("/proc/self/task"))
        self._tell(event="ready", failed_preloads=failed, threads=threads, python_path=sys.path[1:])
        signal.set_wakeup_fd(self._wakeup_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        while not self._stopping:
            sources: list[socket.socket | int] = [self._link, self._wakeup_read]
            readable, _, _ = select.select(sources, [], [])
            if self._wakeup_read in readable:
                self._reap()
            if self._link in readable and not self._serve():
                break
        self._end_all()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _serve(self) -> bool:
        try:
            packet, fds, _, _ = socket.recv_fds(self._link, _PACKET_BYTES, 3)
        except OSError:
            return False
        if not packet:
            return False
        request = json.loads(packet)
        if request["op"] == "spawn":
            self._spawn(request["id"], request["sandbox"], fds)
        elif request["id"] in self._pids:
            _signal_group(self._pids[request["id"]], request["signal"])
        return True

    def _spawn(self, name: str, sandbox: dict[str, Any] | None, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_replica(sandbox, fds)
        self._pids[name] = pid
        # Set in parent and child, so that the group exists before any signal is sent to it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        self._tell(event="spawned", id=name, pid=pid)

    def _become_replica(self, sandbox: dict[str, Any] | None, fds: list[int]) -> None:
        status = 70
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            linux.die_with_parent(self._pid)
            self._link.close()
            os.close(self._wakeup_read)
            os.close(self._wakeup_write)
            control, log, *of_sandbox = fds
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            if sandbox is not None:
                _enter(sandbox, of_sandbox[0], control, self._pid)
            status = replica.main(socket.socket(fileno=control))
        except SystemExit as exit_request:
            status = exit_request.code if isinstance(exit_request.code, int) else 1
        except BaseException:  # noqa: BLE001 - a forked child must never return into its parent's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_read, 4096)
        names = {pid: name for name, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            name = names.get(pid)
            if name is not None:
                _signal_group(pid, signal.SIGKILL)
                del self._pids[name]
                self._tell(event="exited", id=name, status=status)
                self._end_orphans()

    def _end_orphans(self) -> None:
        """End children of functions that left their process group and lost their parent."""
        own = set(self._pids.values())
        for pid in isolation.children():
            if pid not in own:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill every replica, then orphans that this process inherits, until it has no child."""
        for pid in self._pids.values():
            _signal_group(pid, signal.SIGKILL)
        self._pids.clear()
        with contextlib.suppress(ChildProcessError):
            while True:
                self._end_orphans()
                os.waitpid(-1, 0)

    def _tell(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            self._link.send(json.dumps(event).encode())


def _preload(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a module that cannot be imported must not take the platform down
        traceback.print_exc()
        return False
    return True


def _enter(sandbox: dict[str, Any], sandbox_fd: int, control: int, parent: int) -> None:
    """Enter a sandbox; returns in a forked child, which is in its PID namespace, too.

    This process waits for the child and ends as that does: a process cannot change its own PID namespace.
    """
    if sandbox["cgroup"]:
        Path(sandbox["cgroup"]).write_text(str(os.getpid()))
    listeners = isolation.enter(
        sandbox_fd,
        own_network=sandbox["own_network"],
        addresses=[(host, port) for host, port in sandbox["listen"]],
        processes=sandbox["processes"],
    )
    # Entering has cleared the setting.
    linux.die_with_parent(parent)
    if listeners:
        with socket.socket(fileno=os.dup(control)) as link:
            socket.send_fds(link, [b"\n"], [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()
    pid = os.fork()
    if pid == 0:
        # A session of its own: signals to its process group must not reach the process outside.
        os.setsid()
        linux.die_with_parent(0)  # the parent is not in this PID namespace
        os.closerange(3, control)
        os.closerange(control + 1, _MAX_DESCRIPTOR)
        return
    os.close(control)
    os.closerange(0, 3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)


def main(arguments: list[str] | None = None) -> None:
    """Entry point; only the gateway starts this process."""
    parser = argparse.ArgumentParser(prog="zygote")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--python-path", action="append", default=[])
    options = parser.parse_args(arguments)
    linux.die_with_parent(options.parent, signal.SIGTERM)
    sys.path.extend(options.python_path)
    Zygote(socket.socket(fileno=options.link_fd)).run(options.preload)
    sys.stderr.flush()
    # Python would take torch's modules apart one by one.
    os._exit(0)


if __name__ == "__main__":
    main()
