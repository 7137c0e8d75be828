"""A replica: one forked process that serves one function over HTTP on a unix socket.

The handler contract is that of the OpenFaaS ``python3-http`` template: ``handle(event, context)`` with
``event.body, headers, method, query, path`` and ``context.hostname``; it returns None, str, bytes or a dict of
``statusCode``, ``body``, ``headers``. Calls run in the main thread; with ``max_inflight`` above one, in further
threads besides it.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from region_agent.gateway.embedded import kernel
from region_agent.gateway.embedded.replica_http import Answer, Event, ReplicaServer

__all__ = ["Context", "ReplicaSpec", "main"]

SOCKET_NAME = "s"


@dataclass(frozen=True)
class Context:
    """What a handler learns about where it runs."""

    hostname: str
    """Name of the replica."""


@dataclass(frozen=True)
class ReplicaSpec:
    """What the gateway tells a replica over its control socket."""

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
    hidden: list[str] = field(default_factory=list)
    """Paths that the handler must not see."""
    kept: list[str] = field(default_factory=list)
    """Paths that stay visible within the hidden ones."""
    threads: int = 1
    """Threads for torch's operators."""
    max_inflight: int = 1
    """Calls at the same time."""
    cold_start_s: float = 0.0
    """Emulated cold start."""


Handler = Callable[[Event, Context], Any]


@dataclass
class _Call:
    event: Event
    answer: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)


def main(control: socket.socket, parent_pid: int) -> int:
    """Become the replica that the control socket describes; returns the exit status."""
    spec = ReplicaSpec(**json.loads(_read_all(control)))
    os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(spec.directory)
    listener = _listen()
    isolation = _isolate(spec, parent_pid)
    if spec.cold_start_s:
        time.sleep(spec.cold_start_s)
    _settle_libraries(spec.threads)
    sys.path.extend(path for path in spec.python_path if path not in sys.path)
    handler = _resolve(spec.handler)
    calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()

    def call(event: Event) -> Answer:
        pending = _Call(event)
        calls.put(pending)
        return pending.answer.get()

    server = ReplicaServer(listener, call, spec.max_inflight)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    context = Context(spec.name)
    for number in range(1, spec.max_inflight):
        threading.Thread(target=_work, args=(calls, handler, context), name=f"call-{number}", daemon=True).start()
    control.sendall(json.dumps({"ready": True, "isolation": isolation}).encode() + b"\n")
    control.close()
    _work(calls, handler, context)
    return 0


def _work(calls: queue.SimpleQueue[_Call], handler: Handler, context: Context) -> None:
    while True:
        call = calls.get()
        call.answer.put(_run(handler, call.event, context))


def _run(handler: Handler, event: Event, context: Context) -> Answer:
    try:
        return Answer.of(handler(event, context))
    except Exception as error:  # noqa: BLE001 - the handler is somebody else's code; its failure is an answer
        traceback.print_exc()
        return Answer(500, {"Content-Type": "text/plain"}, f"{type(error).__name__}: {error}".encode())


def _read_all(control: socket.socket) -> bytes:
    received = bytearray()
    while chunk := control.recv(65536):
        received += chunk
    return bytes(received)


def _listen() -> socket.socket:
    """A listening socket in the working directory; its relative name keeps it below AF_UNIX's 108 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(SOCKET_NAME)
    listener.listen(128)
    return listener


def _isolate(spec: ReplicaSpec, parent_pid: int) -> str:
    if not spec.hidden:
        return "none"
    try:
        kernel.hide_paths(spec.hidden, [spec.directory, *spec.kept])
    except OSError as error:
        print(f"cannot hide {', '.join(spec.hidden)} from this function: {error}", file=sys.stderr)
        return "none"
    finally:
        os.chdir(spec.directory)
        kernel.die_with_parent(parent_pid)
    return "mount-namespace"


def _settle_libraries(threads: int) -> None:
    """Give each replica its own random state and thread count; both are inherited from the warm parent."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _resolve(reference: str) -> Handler:
    module, _, function = reference.partition(":")
    handler: Handler = getattr(importlib.import_module(module), function or "handle")
    return handler
