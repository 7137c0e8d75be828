"""The process that runs a container's handler, and its supervisor's view of it.

The supervisor answers the platform at any time and is not disturbed by what a handler does: a call that exceeds its
time limit, or whose caller has gone, ends with the process, and the next process takes its place. The two speak over a
pair of sockets, in frames of a JSON header and a body.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

from geofed_pb import linux
from region_agent.gateway.embedded.replicas.calls import CallContext, CallQueue, resolve_handler
from region_agent.gateway.embedded.replicas.replica_http import Answer, CallEvent
from region_agent.gateway.functions import EXIT_HEADER
from region_agent.gateway.quantities import format_bytes

__all__ = ["HandlerProcess", "main"]

_FRAME = struct.Struct(">IQ")
"""Sizes of a frame's header and body."""
_MOST_HEADER_BYTES = 1 << 20
"""Limit of a frame's header, which is JSON."""
_MOST_BODY_BYTES = 1 << 30
"""Limit of a frame's body: that of a request or response of a function."""
_LOOK_SECONDS = 0.1
"""Interval at which a call looks whether its caller is still there."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0
"""Pauses before a process that ended is replaced; each is twice the one before, until one is ready."""
_START_SECONDS = 60.0
"""Time for which a call waits for a process that is starting."""
_END_SECONDS = 1.0
"""Time for a process to exit after it has closed its socket."""
_OOM_FILES = ("memory.events", "memory/memory.oom_control")
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of control groups, of their second and first version."""


@dataclass
class _Pending:
    """A call that runs."""

    answer: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)


class HandlerProcess:
    """The present process of a handler, and its successors."""

    def __init__(
        self,
        handler: str,
        threads: int,
        failed: Callable[[int], None],
        *,
        env: Mapping[str, str] | None = None,
        output: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """``failed`` is called with the exit status of a first process that ends before it is ready.

        ``env``: its whole environment; None: that of this process. ``output``: descriptor that it prints to; None: that
        of this process. ``memory_bytes``: its limit where no file tells whom the kernel has killed over it.
        """
        self._env, self._output, self._memory_bytes = env, output, memory_bytes
        self._handler, self._threads, self._failed = handler, threads, failed
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._ready = threading.Event()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_for = ""
        """Reason for which the present process was killed: "timeout", "gone" or "memory"."""
        self._stopping = False
        self._cgroup = Path("/sys/fs/cgroup")

    @property
    def ready(self) -> bool:
        """Whether the present process has loaded the handler."""
        return self._ready.is_set()

    def start(self) -> None:
        """Start the process, and threads that keep one running."""
        threading.Thread(target=self._kept, name="handler", daemon=True).start()

    def stop(self) -> None:
        """Kill the process for good."""
        self._stopping = True
        self._kill()

    @property
    def pid(self) -> int | None:
        """Process ID of the present process; None: there is none."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def kill_over_memory(self) -> None:
        """Kill the present process, which has exceeded its memory; another one takes its place."""
        self._kill("memory")

    def call(self, event: CallEvent, here: Callable[[], bool], limit_s: float | None) -> Answer:
        """Run a call, when the process has started.

        Kills the process when the limit, in seconds, has passed, or as soon as ``here`` is false: its caller has gone.
        """
        starting_until = time.monotonic() + _START_SECONDS
        while not self._ready.wait(_LOOK_SECONDS):
            if not here() or time.monotonic() > starting_until:
                return _ended(503, "crash", "the function is still starting")
        deadline = time.monotonic() + limit_s if limit_s is not None else float("inf")
        pending, number = _Pending(), next(self._numbers)
        request = {
            "id": number, "method": event.method, "path": event.path, "query": dict(event.query),
            "headers": list(event.headers.items()),
        }  # fmt: skip
        with self._lock:
            self._pending[number] = pending
            link = self._link
        try:
            if link is None:
                return _ended(500, "crash", "the function has just ended")
            # Of a process that ends meanwhile the cause is the answer, as of one that ends during the call.
            self._send(link, request, event.body)
            while True:
                try:
                    return pending.answer.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if time.monotonic() > deadline:
                        self._kill("timeout")
                        return _ended(504, "timeout", f"the function did not answer within {limit_s:g} s and was ended")
                    if not here():
                        self._kill("gone")
                        return _ended(499, "gone", "the caller has gone")
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def _send(self, link: socket.socket, header: dict[str, Any], body: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            _write(link, header, body)

    def _kill(self, reason: str = "") -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._ready.clear()
        self._killed_for = reason
        with contextlib.suppress(OSError):
            if os.getpid() == 1:
                os.kill(-1, signal.SIGKILL)  # all other processes of the container, so that a handler leaves none
            else:
                os.killpg(process.pid, signal.SIGKILL)

    def _kept(self) -> None:
        ended = False
        try:
            self._keep()
            ended = True
        finally:
            if not ended:
                traceback.print_exc()
                # Nothing would answer any more: the platform starts another container.
                self._failed(1)

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        first = True
        while not self._stopping:
            kills = self._out_of_memory_kills()
            was_ready, status = self._run()
            if self._stopping:
                return
            if first and not was_ready:
                self._failed(status)
                return
            first = False
            answer = self._cause(status, kills)
            print(f"the function's process ended: {answer.body.decode()}", file=sys.stderr, flush=True)
            with self._lock:
                for pending in self._pending.values():
                    pending.answer.put(answer)
            pause = _FIRST_PAUSE_SECONDS if was_ready else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            time.sleep(pause)

    def _run(self) -> tuple[bool, int]:
        """Run one process until it ends; returns whether it was ready, and its exit status."""
        own, theirs = socket.socketpair()
        arguments = ["--link-fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        arguments += ["--handler", self._handler, "--threads", str(self._threads)]
        with own:
            with theirs:
                process = _execute(arguments, theirs.fileno(), self._env, self._output)
            self._process, self._killed_for, was_ready = process, "", False
            with self._lock:
                self._link = own
            with contextlib.suppress(OSError, ValueError, EOFError):
                while True:
                    header, body = _read(own)
                    if header.get("ready"):
                        was_ready = True
                        self._ready.set()
                        continue
                    with self._lock:
                        pending = self._pending.get(header["id"])
                    if pending is not None:
                        pending.answer.put(Answer(int(header["status"]), _own_headers(header["headers"]), body))
            self._ready.clear()
            with self._lock:
                self._link = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # the process, or what it has started
            status = process.wait()
        if os.getpid() == 1:
            _reap()
        return was_ready, status

    def _cause(self, status: int, kills: int) -> Answer:
        if self._killed_for == "timeout":
            return _ended(504, "timeout", "the function was ended, since another call exceeded its time limit")
        over = self._killed_for == "memory" or (self._memory_bytes is not None and not self._killed_for)
        if status == -signal.SIGKILL and (over or self._out_of_memory_kills() > kills):
            limit = self._memory_bytes or self._number(_LIMIT_FILES)
            text = f" of {format_bytes(limit)}" if limit is not None else ""
            return _ended(500, "memory", f"the function used more memory than its limit{text} and was killed")
        if status < 0:
            text = f"the function was killed by {signal.Signals(-status).name}"
            if status == -signal.SIGKILL:
                text += ", as by the kernel if it used more memory than its limit"
            return _ended(500, "crash", text)
        return _ended(500, "crash", f"the function exited with status {status} during its work")

    def _out_of_memory_kills(self) -> int:
        """Return the kernel's number of processes that it has killed in this container over the memory limit."""
        return self._number(_OOM_FILES, "oom_kill ") or 0

    def _number(self, names: tuple[str, ...], key: str = "") -> int | None:
        for name in names:
            with contextlib.suppress(OSError, ValueError):
                lines = (self._cgroup / name).read_text().splitlines()
                return next(int(line.removeprefix(key)) for line in lines if line.startswith(key))
        return None


def _execute(
    arguments: list[str], link: int, env: Mapping[str, str] | None, output: int | None
) -> subprocess.Popen[bytes]:
    """Start the process, which inherits ``link``."""
    argv = [sys.executable, "-m", __name__, *arguments]
    return subprocess.Popen(argv, pass_fds=[link], start_new_session=True, env=env, stdout=output, stderr=output)


def _ended(status: int, reason: str, text: str) -> Answer:
    return Answer(status, {EXIT_HEADER: reason, "Content-Type": "text/plain"}, text.encode())


def _own_headers(given: Any) -> dict[str, str]:
    """Return a handler's headers, without the one in which this module states reasons."""
    return {str(key): str(value) for key, value in dict(given).items() if key.lower() != EXIT_HEADER.lower()}


def _write(link: socket.socket, header: dict[str, Any], body: bytes) -> None:
    data = json.dumps(header).encode()
    link.sendall(_FRAME.pack(len(data), len(body)) + data)
    link.sendall(body)


def _read(link: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read a frame; raises ``EOFError``, and ``ValueError`` for one that is no frame."""
    sizes = _FRAME.unpack(_exactly(link, _FRAME.size))
    if sizes[0] > _MOST_HEADER_BYTES or sizes[1] > _MOST_BODY_BYTES:
        raise ValueError("the frame is too large")
    header = json.loads(_exactly(link, sizes[0]))
    if not isinstance(header, dict):
        raise ValueError("the frame's header is not an object")
    return header, _exactly(link, sizes[1])


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        read = link.recv_into(view[got:])
        if not read:
            raise EOFError
        got += read
    return bytes(data)


def _reap() -> None:
    """Wait for processes whose parents have ended, as the first process of a container must."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(arguments: list[str] | None = None) -> None:
    """Run the handler's calls until the supervisor closes its socket; only the supervisor starts this process."""
    import argparse

    parser = argparse.ArgumentParser(prog="handler")
    for name in ("--link-fd", "--parent", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--handler", required=True)
    options = parser.parse_args(arguments)
    # Platforms send SIGTERM to all processes of a container; the supervisor then waits for the calls that run.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.die_with_parent(options.parent)
    link = socket.socket(fileno=options.link_fd)
    calls = CallQueue(resolve_handler(options.handler), CallContext(os.environ.get("HOSTNAME", "container")))
    sending = threading.Lock()

    def run(header: dict[str, Any], body: bytes) -> None:
        headers: Message[str, str] = Message()
        for key, value in header["headers"]:
            headers[key] = value
        answer = calls.call(CallEvent(body, headers, header["method"], header["query"], header["path"]))
        told = dataclasses.asdict(answer) | {"id": header["id"]}
        del told["body"]
        with sending, contextlib.suppress(OSError):
            _write(link, told, answer.body)

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, EOFError):
            while True:
                threading.Thread(target=run, args=_read(link), name="request", daemon=True).start()
        os._exit(0)

    threading.Thread(target=read, name="link", daemon=True).start()
    with sending:
        _write(link, {"ready": True}, b"")
    calls.work(options.threads)


if __name__ == "__main__":
    main()
