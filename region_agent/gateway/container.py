"""``python -m region_agent.gateway.container``: serves a function in a container for OpenFaaS, without a watchdog.

It serves the handler on TCP with the watchdog's contract: ``/_/health`` as soon as it listens, ``/_/ready`` once the
handler is loaded, 429 beyond ``max_inflight`` calls at the same time, 504 after ``exec_timeout`` or a shorter
``X-Timeout``, and after SIGTERM no further call, while those that run are answered. Settings come from the environment
under the watchdog's names: ``port``, ``max_inflight``, ``write_timeout``, ``exec_timeout``. With ``GEOFED_CALL_TOKEN``
it refuses calls whose header ``X-Geofed-Token`` differs, with 403. With ``GEOFED_DIAL`` it listens on the loopback
interface only, connects to its gateway, and serves what comes over these connections (`dial_out`).

The handler runs in a process of its own (`handler_process`), so that this one, the container's first, handles signals
from its beginning, and can end a call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from datetime import timedelta
from email.message import Message
from types import FrameType

from geofed_pb.errors import Exit, GeofedError
from region_agent.gateway.call_token import CallToken
from region_agent.gateway.dial_out import DialOut, connections_for, is_open
from region_agent.gateway.embedded.replicas.replica_http import Answer, CallEvent, ReplicaServer
from region_agent.gateway.handler_process import HandlerProcess
from region_agent.gateway.quantities import parse_duration

__all__ = ["HANDLER", "FunctionServer", "main"]

HANDLER = "region_agent.worker.handler:handle"
"""Default handler: the worker function."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m region_agent.gateway.container", description=__doc__)
    parser.add_argument("--handler", default=HANDLER, metavar="MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="a container's gateway reaches it from outside")
    options = parser.parse_args(arguments)
    try:
        return _serve(options.host, options.handler)
    except GeofedError as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit)


class FunctionServer(ReplicaServer):
    """Passes calls to the handler's process."""

    def __init__(
        self, listener: socket.socket, process: HandlerProcess, max_inflight: int, limit: timedelta, token: CallToken
    ) -> None:
        super().__init__(listener, _unused, max_inflight)
        self._process, self._limit, self._token = process, limit, token

    @property
    def ready(self) -> bool:
        return self._process.ready

    def allows(self, headers: Message[str, str]) -> bool:
        return self._token.allows(headers)

    def run(self, event: CallEvent, connection: socket.socket) -> Answer:
        limit = self._limit
        if asked := event.headers.get("X-Timeout"):
            try:
                limit = min(filter(None, (limit, parse_duration(asked))))
            except ValueError as error:
                return Answer(400, {"Content-Type": "text/plain"}, f"X-Timeout: {error}".encode())
        return self._process.call(event, lambda: is_open(connection), limit.total_seconds() or None)


def _unused(event: CallEvent) -> Answer:
    raise NotImplementedError


def _serve(host: str, handler: str) -> int:
    # Python runs signal handlers in the main thread between two bytecode instructions. The wake-up descriptor is
    # written to immediately, and signals that arrive while the rest is set up wait in it.
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    port, inflight = _number("port", 8080), max(1, _number("max_inflight", 1))
    dial = DialOut.taken()
    if dial is not None:
        host, port = "127.0.0.1", 0
    drain, limit = _duration("write_timeout", "60s"), _duration("exec_timeout", "30s")
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {host}:{port}: {error.strerror}") from None
    token = CallToken.taken()
    process = HandlerProcess(handler, inflight, _end)
    server = FunctionServer(listener, process, inflight, limit, token)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    process.start()
    if dial is not None:
        dial.serve(server, connections_for(inflight), lambda: _end(int(Exit.UNAVAILABLE)))
    where = f"for {dial.address}" if dial is not None else f"on port {listener.getsockname()[1]}"
    print(f"serving {handler} {where}", file=sys.stderr, flush=True)
    ending = {bytes([signal.SIGTERM]), bytes([signal.SIGINT])}
    while signals.recv(1) not in ending:
        pass
    drained = server.drain(drain.total_seconds())
    process.stop()
    return int(Exit.OK if drained else Exit.UNAVAILABLE)


def _end(status: int) -> None:
    """End with the status of a process that could not load the handler: the platform shows that, and starts again."""
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status if status > 0 else int(Exit.UNAVAILABLE))


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor is read."""


def _duration(name: str, default: str) -> timedelta:
    try:
        return parse_duration(_setting(name, default))
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", f"{name}: {error}", hint="write it like 10m") from None


def _setting(name: str, default: str) -> str:
    return os.environ.get(name, default)


def _number(name: str, default: int) -> int:
    text = _setting(name, str(default))
    if not text.isdigit():
        raise GeofedError("CONFIG_INVALID", f"{name} is {text!r}, not a number", hint="correct the environment")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
