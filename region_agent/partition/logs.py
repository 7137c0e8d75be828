"""What a partition's function writes, on its way to the job's log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from geofed_pb.errors import GeofedError
from region_agent.gateway import GatewayClient

__all__ = ["FunctionLogs"]

_AGAIN_SECONDS = 1.0
_LONGEST_CATCH_UP_SECONDS = 10.0


class FunctionLogs:
    """Reads the log of a function from the gateway, over broken connections."""

    def __init__(self, gateway: GatewayClient, function: str, take: Callable[[str, str], None]) -> None:
        """``take`` gets the source of each line, and its text."""
        self._gateway, self._function, self._take = gateway, function, take
        self._followed = False
        self._read = datetime.min.replace(tzinfo=UTC)
        """When the last line was written that was taken."""
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Take lines until the function is gone."""
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
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self._followed = False
            self._news.set()

    async def catch_up(self) -> None:
        """Wait until what was written before now is taken, for some seconds at most.

        What becomes of a call is told after what it has written.
        """
        if not self._followed:
            return
        with contextlib.suppress(GeofedError, TimeoutError):
            async with asyncio.timeout(_LONGEST_CATCH_UP_SECONDS):
                async for newest in self._gateway.logs(self._function, tail=1):
                    while self._followed and self._read < newest.timestamp:
                        self._news.clear()
                        await self._news.wait()
