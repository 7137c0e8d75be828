"""How much one peer may ask of a receiver at the same time, and how often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from geofed_pb.errors import GeofedError

__all__ = ["CallQuotas"]

_MAX_CALLS = 64
"""Calls of one peer that are handled at the same time. A sender of ours makes at most 8, on each of two connections
while one replaces the other."""
_BURST_CALLS = 2000
"""Calls in a row that are answered at once: after a restart a sender offers again all updates that it keeps."""
_CALLS_PER_SECOND = 200.0
"""Calls that a peer may go on with after a burst; then its answers are delayed. One takes about a millisecond of the
receiver's only event loop."""


@dataclass
class _Caller:
    left: float = _BURST_CALLS
    at: float = 0.0
    calls: int = 0


class CallQuotas:
    """Limits the calls of each peer. Answers are delayed, not refused, so that a peer with much to send only slows
    down."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers: dict[str, _Caller] = {}

    def delay_seconds(self, caller: str) -> float:
        """Count a call, and return how long it must be delayed."""
        now, one = self._clock(), self._callers.setdefault(caller, _Caller(at=self._clock()))
        one.left = min(_BURST_CALLS, one.left + (now - one.at) * _CALLS_PER_SECOND) - 1
        one.at = now
        return max(0.0, -one.left / _CALLS_PER_SECOND)

    @asynccontextmanager
    async def call(self, caller: str) -> AsyncIterator[None]:
        """Handle a call. The caller must have been admitted. Raises ``GeofedError("LIMIT_EXCEEDED")`` if the peer has
        too many under way."""
        one = self._callers.setdefault(caller, _Caller(at=self._clock()))
        if one.calls >= _MAX_CALLS:
            raise GeofedError("LIMIT_EXCEEDED", f"{caller} has {one.calls} calls under way at the same time")
        one.calls += 1
        try:
            if (delay := self.delay_seconds(caller)) > 0:
                await asyncio.sleep(delay)
            yield
        finally:
            one.calls -= 1
