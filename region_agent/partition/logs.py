"""Copies the log of a partition's function to the job's log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from geofed_pb.errors import GeofedError
from region_agent.gateway import GatewayClient

__all__ = ["FunctionLogs"]

_RECONNECT_SECONDS = 1.0
"""Pause before a lost log stream is opened again."""
_CATCH_UP_SECONDS = 10.0
"""Timeout of `FunctionLogs.catch_up`."""


class FunctionLogs:
    """Reads the log of a function from the gateway and reconnects after lost connections."""

    def __init__(self, gateway: GatewayClient, function: str, take: Callable[[str, str], None]) -> None:
        """``take`` is called with the source and the text of each line."""
        self._gateway, self._function, self._take = gateway, function, take
        self._followed = False
        self._read = datetime.min.replace(tzinfo=UTC)
        """Time at which the last line that was read had been written."""
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Read lines until the function is deleted."""
        self._followed, since = True, None
        try:
            while True:
                try:
                    async for line in self._gateway.logs(self._function, since=since, follow=True):
                        self._take(f"worker {line.instance}", line.text)
                        self._read = line.timestamp
                        since = line.timestamp + timedelta(microseconds=1)
                        self._news.set()
                    return
                except GeofedError as error:
                    if not error.retryable:
                        return
                await asyncio.sleep(_RECONNECT_SECONDS)
        finally:
            self._followed = False
            self._news.set()

    async def catch_up(self) -> None:
        """Wait until all lines written before now are read, with a timeout.

        Called before the outcome of a call is reported, so that its log lines come first.
        """
        if not self._followed:
            return
        with contextlib.suppress(GeofedError, TimeoutError):
            async with asyncio.timeout(_CATCH_UP_SECONDS):
                async for newest in self._gateway.logs(self._function, tail=1):
                    while self._followed and self._read < newest.timestamp:
                        self._news.clear()
                        await self._news.wait()
