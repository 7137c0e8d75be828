"""Copies the logs of a partition's functions to the job's log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited
from region_agent.gateway import GatewayClient

__all__ = ["FunctionLogs"]

_RECONNECT_SECONDS = 1.0
"""Pause before a lost log stream is opened again."""
_LOOK_SECONDS = 5.0
"""Interval at which functions that were deployed since are looked for."""
_CATCH_UP_SECONDS = 10.0
"""Timeout of `FunctionLogs.catch_up`."""


class FunctionLogs:
    """Reads the logs of a partition's functions from the gateway and reconnects after lost connections."""

    def __init__(
        self, gateway: GatewayClient, names: Callable[[], Iterable[str]], take: Callable[[str, str], None]
    ) -> None:
        """``names`` returns the present functions. ``take`` is called with the source and the text of each line."""
        self._gateway, self._names, self._take = gateway, names, take
        self._following: dict[str, asyncio.Task[None]] = {}
        self._read: dict[str, datetime] = {}
        """Times at which the last lines that were read had been written."""
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Read lines until the functions are deleted."""
        try:
            while True:
                for name in self._names():
                    if name not in self._following:
                        self._following[name] = awaited(self._follow(name))
                running = [task for task in self._following.values() if not task.done()]
                if not running:
                    return
                await asyncio.wait(running, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._following.values():
                task.cancel()
            self._news.set()

    async def _follow(self, name: str) -> None:
        since = None
        try:
            while True:
                try:
                    async for line in self._gateway.logs(name, since=since, follow=True):
                        self._take(f"worker {line.instance}", line.text)
                        self._read[name] = line.timestamp
                        since = line.timestamp + timedelta(microseconds=1)
                        self._news.set()
                    return
                except GeofedError as error:
                    if not error.retryable:
                        return
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            self._news.set()

    async def catch_up(self) -> None:
        """Wait until all lines written before now are read, with a timeout.

        Called before the outcome of a call is reported, so that its log lines come first.
        """
        with contextlib.suppress(GeofedError, TimeoutError):
            async with asyncio.timeout(_CATCH_UP_SECONDS):
                for name, task in self._following.items():
                    if not task.done():
                        await self._catch_up(name, task)

    async def _catch_up(self, name: str, task: asyncio.Task[None]) -> None:
        never = datetime.min.replace(tzinfo=UTC)
        async for newest in self._gateway.logs(name, tail=1):
            while not task.done() and self._read.get(name, never) < newest.timestamp:
                self._news.clear()
                await self._news.wait()
