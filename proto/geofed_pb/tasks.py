"""Tasks of an event loop whose failure cannot go unnoticed. All tasks are started here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from geofed_pb.errors import GeofedError

__all__ = ["awaited", "background", "cancel_all", "end_process", "log_only"]

_T = TypeVar("_T")
_log = logging.getLogger("geofed.tasks")
_running: set[asyncio.Task[Any]] = set()
"""Tasks that nobody awaits: the event loop itself keeps only weak references."""


def background(
    work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], object], *, name: str | None = None
) -> asyncio.Task[None]:
    """Start a task that nobody awaits. An error that ends it is logged, and passed to ``failed``, which fails the
    task's owner."""
    task = asyncio.create_task(work, name=name)

    def ended(_: asyncio.Task[None]) -> None:
        _running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s failed", name or getattr(work, "__qualname__", "a task"), exc_info=error)
        if not isinstance(error, GeofedError):
            error = GeofedError("INTERNAL", f"{type(error).__name__}: {error}")
        failed(error)

    _running.add(task)
    task.add_done_callback(ended)
    return task


def awaited(work: Awaitable[_T], *, name: str | None = None) -> asyncio.Task[_T]:
    """Start a task whose result its owner awaits, so that an error reaches the owner."""

    async def whole() -> _T:
        return await work

    return asyncio.create_task(work if asyncio.iscoroutine(work) else whole(), name=name)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    ending = list(tasks)  # a task's own callback may take it out of the collection
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def log_only(error: GeofedError) -> None:
    """Do nothing more than `background` does: for a task without which its owner works as well."""


def end_process(error: GeofedError) -> None:
    """End this process at once, which is then started again: for a task without which it does not work."""
    _log.critical("this process ends: %s", error)
    os._exit(int(error.exit))
