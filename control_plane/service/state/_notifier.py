"""Waiting for something new without polling."""

from __future__ import annotations

import asyncio


class Notifier:
    """Rings when something was added; who listens says which ring it has heard, so none is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake all that wait."""
        self.count += 1
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, heard: int) -> None:
        """Return once the notifier has rung more than `heard` times."""
        while self.count <= heard:
            await self._rung.wait()
