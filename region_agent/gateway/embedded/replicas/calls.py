"""Queue of a replica's calls, and the threads that run its handler."""

from __future__ import annotations

import importlib
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from region_agent.gateway.embedded.replicas.replica_http import Answer, CallEvent

__all__ = ["CallContext", "CallQueue", "Handler", "resolve_handler"]


@dataclass(frozen=True)
class CallContext:
    """Context of a call: the replica that runs it."""

    hostname: str
    """Name of the replica."""


Handler = Callable[[CallEvent, CallContext], Any]


@dataclass
class _Call:
    event: CallEvent
    answer: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)


class CallQueue:
    """Passes calls from the threads that read requests to those that run the handler."""

    def __init__(self, handler: Handler, context: CallContext) -> None:
        self._handler, self._context = handler, context
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    def call(self, event: CallEvent) -> Answer:
        """Queue a call and wait for its answer."""
        pending = _Call(event)
        self._calls.put(pending)
        return pending.answer.get()

    def work(self, threads: int = 1) -> None:
        """Run calls in this thread, and in ``threads - 1`` further ones, until `stop`."""
        for number in range(1, threads):
            threading.Thread(target=self._work, name=f"call-{number}", daemon=True).start()
        self._work()

    def stop(self) -> None:
        """Make `work` return after all calls that are already queued are answered."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.answer.put(self._run(call.event))
        self._calls.put(None)  # for the next thread

    def _run(self, event: CallEvent) -> Answer:
        try:
            return Answer.of(self._handler(event, self._context))
        except Exception as error:  # noqa: BLE001 - a handler may raise anything; its failure is an answer
            traceback.print_exc()
            return Answer(500, {"Content-Type": "text/plain"}, f"{type(error).__name__}: {error}".encode())


def resolve_handler(reference: str) -> Handler:
    """The function behind ``module:function``; without a name it is ``handle``."""
    module, _, function = reference.partition(":")
    handler: Handler = getattr(importlib.import_module(module), function or "handle")
    return handler
