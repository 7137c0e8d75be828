"""Serves a replica for the time of one invocation of a cloud's function.

It runs the handler in a process of its own, connects to the gateway, answers the calls that come over the connections,
and sends what the handler prints. It ends when the gateway does not expect it any more, when there is no gateway, or
before the platform's time limit. The handler's process sees neither the platform's variables nor its credentials in its
environment.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import ssl
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError
from region_agent.gateway.call_token import CallToken
from region_agent.gateway.container import HANDLER, FunctionServer
from region_agent.gateway.dial_out import END, OUTPUT, DialOut, ReplicaRefused, connections_for
from region_agent.gateway.embedded.replicas.memory import PrivateMemory
from region_agent.gateway.handler_process import HandlerProcess
from region_agent.gateway.quantities import parse_duration
from region_agent.gateway.serverless.order import Order

__all__ = ["serve"]

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE")
"""Variables of the image that the handler's process has, too."""
_ALONE_SECONDS = 60.0
"""Time without any connection after which the invocation ends: its agent is gone, and it costs money."""
_LEAVE_SECONDS = 6.0
"""Time before the platform's limit at which no further call is accepted."""
_LAST_SECONDS = 3.5
"""Time before the platform's limit at which calls end, whatever they do."""
_SEND_SECONDS = 1.0
"""Time for the last part of the output to be sent, and for the reason of the end."""
_LOOK_SECONDS = 0.1
"""Interval at which its memory is looked at."""
_MEMORY_SHARE = 0.97
"""Part of its memory that all its processes may use; the rest is for what grows between two looks."""
_PART_BYTES = 16384
"""Bytes that are read of a handler's output at once."""


@dataclass(frozen=True)
class _InvocationEnd:
    reason: str
    """``dismissed``, ``alone``, ``time`` or ``crash``."""
    text: str


def serve(order: Order, ends_at: float, handler: str = HANDLER) -> str:
    """Be a replica until it is over; returns the reason. ``ends_at``: the platform's limit, by the monotonic clock.

    Raises ``GeofedError("CONFIG_INVALID")`` and ``OSError``.
    """
    ends_at = min(ends_at, time.monotonic() + order.life_seconds)
    folder = Path(tempfile.mkdtemp(prefix="geofed-"))
    try:
        return _serve(order, ends_at, handler, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(order: Order, ends_at: float, handler: str, folder: Path) -> str:
    env, memory_bytes = _environment(order, folder), order.memory_mb * 2**20
    token, inflight, limit = (
        env.pop("GEOFED_CALL_TOKEN", ""),
        env.get("max_inflight", "1"),
        env.get("exec_timeout", "30s"),
    )
    if not inflight.isdigit():
        raise GeofedError("CONFIG_INVALID", f"max_inflight is {inflight!r}, not a number")
    try:
        exec_timeout = parse_duration(limit)
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", f"exec_timeout: {error}", hint="write it like 10m") from None
    over: queue.SimpleQueue[_InvocationEnd] = queue.SimpleQueue()
    dial, instance, calls = order.dial, uuid.uuid4().hex, max(1, int(inflight))

    def failed(status: int) -> None:
        over.put(_InvocationEnd("crash", f"the handler could not be loaded: its process exited with status {status}"))

    output = _Output(dial, instance)
    process = HandlerProcess(handler, calls, failed, env=env, output=output.descriptor, memory_bytes=memory_bytes)
    with socket.socket(socket.AF_UNIX) as unused:
        # Nothing listens: calls come over the connections that are opened to the gateway.
        server = FunctionServer(unused, process, calls, exec_timeout, CallToken(token))
        process.start()
        close = dial.serve(
            server, connections_for(calls), lambda: over.put(_InvocationEnd("alone", "it reached no gateway")),
            alone_seconds=_ALONE_SECONDS, refused=lambda: over.put(_InvocationEnd("dismissed", "")), instance=instance,
            left=lambda: ends_at - time.monotonic(),
        )  # fmt: skip
        ended = _wait(over, process, ends_at - _LEAVE_SECONDS, memory_bytes)
        if ended.reason == "time":
            server.drain(max(0.0, ends_at - _LAST_SECONDS - time.monotonic()))
        server.draining = True
        process.stop()
        output.end()
        if ended.reason in ("time", "crash"):
            told = threading.Thread(target=_tell, args=(dial, instance, ended), name="end", daemon=True)
            told.start()
            told.join(_SEND_SECONDS)
        close()
    return ended.reason


def _environment(order: Order, folder: Path) -> dict[str, str]:
    """Return the handler's environment, after its secrets have been written."""
    secrets, temporary = folder / "secrets", folder / "tmp"
    secrets.mkdir(mode=0o700)
    temporary.mkdir(mode=0o700)
    for name, value in order.secrets.items():
        file = secrets / name
        file.touch(mode=0o600)
        file.write_bytes(value)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own = {"HOME": str(folder), "TMPDIR": str(temporary), "HOSTNAME": order.replica, "PYTHONUNBUFFERED": "1"}
    return {**kept, **own, **order.env, "OPENFAAS_SECRETS": str(secrets)}


def _wait(
    over: queue.SimpleQueue[_InvocationEnd], process: HandlerProcess, until: float, memory_bytes: int
) -> _InvocationEnd:
    """Wait until the invocation is over, and kill a handler that exceeds its memory: the platform would end all."""
    most, memory = int(memory_bytes * _MEMORY_SHARE), PrivateMemory()
    while True:
        with contextlib.suppress(queue.Empty):
            return over.get(timeout=_LOOK_SECONDS)
        if time.monotonic() > until:
            return _InvocationEnd("time", "it has reached its platform's time limit")
        if process.pid is not None and memory.used([os.getpid()], most) > most:
            process.kill_over_memory()


def _tell(dial: DialOut, instance: str, ended: _InvocationEnd) -> None:
    with contextlib.suppress(OSError):
        dial.connect(dial.context, instance=instance, use=END, reason=ended.reason, text=ended.text).close()


class _Output:
    """Sends what is written to a pipe over a connection, which is opened again if it breaks."""

    def __init__(self, dial: DialOut, instance: str) -> None:
        self._dial, self._instance = dial, instance
        self._read, self.descriptor = os.pipe2(os.O_CLOEXEC)
        self._over = False
        self._thread = threading.Thread(target=self._send_all, name="output", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Send the rest, once every process that writes to the pipe has ended, and close the connection."""
        self._over = True
        os.close(self.descriptor)
        self._thread.join(_SEND_SECONDS)

    def _send_all(self) -> None:
        context, connection = self._dial.context, None
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            part: bytes | None = b""
            while part is not None:
                try:
                    if connection is None:
                        connection = self._dial.connect(context, instance=self._instance, use=OUTPUT)
                    if part:
                        connection.sendall(part)
                    part = pipe.read(_PART_BYTES) or None
                except (OSError, ValueError) as error:
                    _close(connection)
                    connection = None
                    if isinstance(error, ReplicaRefused | ssl.SSLCertVerificationError) or self._over:
                        break
                    time.sleep(1)
            # Nobody takes the rest, but who writes it must not wait for ever.
            while part is not None and pipe.read(_PART_BYTES):
                pass
        _close(connection)


def _close(connection: ssl.SSLSocket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.close()
