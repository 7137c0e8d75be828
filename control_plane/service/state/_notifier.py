"""Wait for new rows without polling."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes waiters when something was added. A waiter passes the count that it has seen, so that it misses nothing."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake all waiters."""
        self.count += 1
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, seen: int) -> None:
        """Return once `count` exceeds `seen`."""
        while self.count <= seen:
            await self._rung.wait()
