"""A replica: one forked process that serves one function over HTTP on a unix socket.

The handler contract is that of the OpenFaaS ``python3-http`` template: ``handle(event, context)`` with
``event.body, headers, method, query, path`` and ``context.hostname``; it returns None, str, bytes or a dict of
``statusCode``, ``body``, ``headers``. Calls run in the main thread; with ``max_inflight`` above one, in further
threads besides it.
"""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from region_agent.gateway.embedded.replicas import seccomp
from region_agent.gateway.embedded.replicas.calls import CallContext, CallQueue, resolve_handler
from region_agent.gateway.embedded.replicas.replica_http import ReplicaServer

__all__ = ["READY", "ReplicaSpec", "main"]

READY = b"ready\n"
"""What a replica sends over its control socket when it is ready."""
SOCKET_NAME = "s"
"""Name of the listening socket in a replica's directory; short, since socket paths are limited to 107 bytes."""


@dataclass(frozen=True)
class ReplicaSpec:
    """Specification that the gateway sends a replica over its control socket."""

    name: str
    """Replica."""
    handler: str
    """``module:function``."""
    directory: str
    """Its own directory, which becomes home, temporary and working directory."""
    env: Mapping[str, str]
    """The whole environment."""
    python_path: list[str] = field(default_factory=list)
    """Folders to append to ``sys.path``."""
    filter: str = ""
    """Filter of system calls, as a BPF program in base64; empty: none."""
    threads: int = 1
    """Threads for torch's operators."""
    max_inflight: int = 1
    """Calls at the same time."""
    cold_start_s: float = 0.0
    """Emulated cold start."""


def main(control: socket.socket) -> int:
    """Become the replica that the control socket describes; returns the exit status.

    Without a handler it only reports that it is ready.
    """
    spec = ReplicaSpec(**json.loads(_read_all(control)))
    os.environ.clear()
    os.environ.update(spec.env)
    # The cached folder for temporary files is the warm parent's.
    tempfile.tempdir = None
    os.chdir(spec.directory)
    listener = _listen()
    if spec.filter:
        seccomp.restrict(base64.b64decode(spec.filter))
    if not spec.handler:
        control.sendall(READY)
        return 0
    if spec.cold_start_s:
        time.sleep(spec.cold_start_s)
    _settle_libraries(spec.threads)
    sys.path.extend(path for path in spec.python_path if path not in sys.path)
    calls = CallQueue(resolve_handler(spec.handler), CallContext(spec.name))
    server = ReplicaServer(listener, calls.call, spec.max_inflight)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    control.sendall(READY)
    control.close()
    calls.work(spec.max_inflight)
    return 0


def _read_all(control: socket.socket) -> bytes:
    received = bytearray()
    while chunk := control.recv(65536):
        received += chunk
    return bytes(received)


def _listen() -> socket.socket:
    """Listen on a socket in the working directory; its relative path is shorter than AF_UNIX's 108 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(SOCKET_NAME)
    listener.listen(128)
    return listener


def _settle_libraries(threads: int) -> None:
    """Give each replica its own random state and thread count; both are inherited from the warm parent."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
