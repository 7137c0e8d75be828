"""``python -m region_agent.gateway.container``: serves a function in a container for OpenFaaS, without a watchdog.

It serves the handler on TCP with the watchdog's contract: ``/_/health`` and ``/_/ready``, 429 beyond ``max_inflight``
calls at the same time, and after SIGTERM no further call, while those that run are answered. Settings come from the
environment under the watchdog's names: ``port``, ``max_inflight``, ``write_timeout``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from types import FrameType

from geofed_pb.errors import Exit, GeofedError
from region_agent.gateway.embedded.replicas.calls import CallContext, CallQueue, resolve_handler
from region_agent.gateway.embedded.replicas.replica_http import ReplicaServer
from region_agent.gateway.quantities import parse_duration

__all__ = ["main"]

_HANDLER = "region_agent.worker.handler:handle"
"""Default handler: the worker function."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m region_agent.gateway.container", description=__doc__)
    parser.add_argument("--handler", default=_HANDLER, metavar="MODULE:FUNCTION")
    parser.add_argument("--host", default="0.0.0.0", help="a container's gateway reaches it from outside")
    options = parser.parse_args(arguments)
    try:
        return _serve(options.host, options.handler)
    except GeofedError as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit)


def _serve(host: str, handler: str) -> int:
    port, inflight = _number("port", 8080), max(1, _number("max_inflight", 1))
    try:
        drain_s = parse_duration(_setting("write_timeout", "60s")).total_seconds()
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", f"write_timeout: {error}", hint="write it like 10m") from None
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {host}:{port}: {error.strerror}") from None
    # The handler, and with it torch, is loaded before the first request is read: a healthy container is warm.
    calls = CallQueue(resolve_handler(handler), CallContext(os.environ.get("HOSTNAME", "container")))
    server = ReplicaServer(listener, calls.call, inflight)

    # Python runs signal handlers in the main thread between two bytecode instructions, which is too late while that
    # thread sleeps or computes. The wake-up descriptor is written to immediately.
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    threading.Thread(target=_drain_on_signal, args=(signals, server, calls, drain_s), name="drain", daemon=True).start()
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    print(f"serving {handler} on port {listener.getsockname()[1]}", file=sys.stderr, flush=True)
    calls.work(inflight)
    return int(Exit.OK)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the thread that reads the wake-up descriptor handles the signal."""


def _drain_on_signal(signals: socket.socket, server: ReplicaServer, calls: CallQueue, timeout_s: float) -> None:
    """Wait for SIGTERM or SIGINT, then for the calls that run, with a timeout in seconds, and end the process."""
    ending = {bytes([signal.SIGTERM]), bytes([signal.SIGINT])}
    while signals.recv(1) not in ending:
        pass
    if not server.drain(timeout_s):
        os._exit(int(Exit.UNAVAILABLE))  # ends calls that have exceeded every time limit
    calls.stop()


def _setting(name: str, default: str) -> str:
    return os.environ.get(name, default)


def _number(name: str, default: int) -> int:
    text = _setting(name, str(default))
    if not text.isdigit():
        raise GeofedError("CONFIG_INVALID", f"{name} is {text!r}, not a number", hint="correct the environment")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
