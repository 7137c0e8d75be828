"""Whether this control plane leads, and queries of the store with a time limit.

Two control planes on one PostgreSQL database share a row that names the leader. The leader gives a sign of life every
second, and every transaction checks the row, so that a leader that was replaced cannot write. It also stops answering
from memory once its last sign of life is too old, since another one may have taken over.

A thread gives the signs of life: when 1,000 agents connect at once, the event loop needs seconds for one turn, and a
leader that stepped down then would have all of them connect again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import structlog

from control_plane.store import Leadership, OutcomeUnknown, Store
from geofed_pb.errors import GeofedError

_T = TypeVar("_T")
_log = structlog.get_logger("geofed.leading")
BEAT_SECONDS = 1.0
"""Time between two signs of life."""
LEADING_SECONDS = 4.5
"""How long a leader serves after its last sign of life. A restart of the database within this time is not noticed."""
SILENT_SECONDS = 5.5
"""Time without a sign of life after which another control plane takes over. Longer than `LEADING_SECONDS`, for clocks
whose rates differ by up to a sixth, and since the other one sees a sign of life only after the leader has begun to give
it."""
_TURN_SECONDS = 30.0
"""Time without a turn of the event loop after which it counts as hung: the leader then gives no signs of life, so that
another one takes over. Measured with 1,000 agents that connected at once, on two busy cores: 9 s."""
QUERY_SECONDS = 8.0
"""Time limit of a query; the database's own limits are shorter, and only a database that hangs exceeds this."""
_FURTHER_SECONDS = 1.0
"""Time until the connections are broken again, for a query that was just connecting."""


def boot_clock() -> float:
    """Return seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoreThreads:
    """Runs queries of a store in threads. One that exceeds its time limit fails with UNAVAILABLE."""

    def __init__(self, store: Store, threads: int) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(threads, "geofed-store")

    async def run(self, query: Callable[[Store], _T]) -> _T:
        """Return what the query returns."""
        done = asyncio.get_running_loop().run_in_executor(self._threads, query, self._store)
        limit = QUERY_SECONDS
        while not (await asyncio.wait({done}, timeout=limit))[0]:
            self._store.interrupt()
            limit = _FURTHER_SECONDS
        return done.result()

    def start(self, work: Callable[[Store], _T]) -> asyncio.Future[_T]:
        """Run in a thread what lasts, without a time limit; it must end before `close` does."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, self._store)

    async def close(self) -> None:
        """Wait until the running queries have ended."""
        ended = asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        limit = QUERY_SECONDS
        while not (await asyncio.wait({ended}, timeout=limit))[0]:
            self._store.interrupt()
            limit = _FURTHER_SECONDS


class LeaderState:
    """Knows whether this control plane leads."""

    def __init__(self, store: Store, clock: Callable[[], float] = boot_clock) -> None:
        self.lost = asyncio.Event()
        """Set once this control plane does not lead any more; it must stop serving, and load the state again before it
        leads again."""
        self._clock = clock
        self._store = store
        self._until = clock() + LEADING_SECONDS if store.shared else math.inf
        self._turned_at = -math.inf
        """When the event loop last had a turn for the signs of life."""
        self._why = ""

    def check(self) -> None:
        """Raise ``GeofedError("STANDBY")`` if another control plane may lead."""
        if not self.lost.is_set() and self._clock() >= self._until:
            self.step_down(f"no sign of life could be stored for {LEADING_SECONDS:g} s")
        if self.lost.is_set():
            raise GeofedError("STANDBY", f"this control plane does not lead any more: {self._why}")

    def step_down(self, why: str) -> None:
        """Stop leading, since the state in memory may differ from the store."""
        if not self.lost.is_set():
            _log.error("this control plane does not lead any more", why=why)
            self._why = why
            self.lost.set()

    async def keep(self) -> None:
        """Give signs of life until the leadership is lost."""
        if not self._store.shared:
            await self.lost.wait()
            return
        threads, stop = StoreThreads(self._store, 1), threading.Event()
        self._turned_at = self._clock()
        beats = threads.start(partial(self._beat, stop))
        try:
            while not self.lost.is_set():
                self._turned_at = self._clock()
                with suppress(GeofedError):
                    self.check()
                if (await asyncio.wait({beats}, timeout=BEAT_SECONDS))[0]:
                    self.step_down(beats.result())
        finally:
            stop.set()
            await threads.close()

    def _beat(self, stop: threading.Event, store: Store) -> str:
        """Give signs of life in a thread until told to stop; return why this control plane does not lead any more."""
        while not stop.is_set():
            begun = self._clock()
            if begun - self._turned_at < _TURN_SECONDS:
                try:
                    store.beat()
                    self._until = begun + LEADING_SECONDS
                except GeofedError as error:
                    if error.code == "STANDBY":
                        return error.message
                except OutcomeUnknown:
                    # The next check or sign of life decides.
                    pass
            stop.wait(BEAT_SECONDS)
        return "it was told to stop"


class LeaderSilence:
    """Watches the leadership's row for signs of life."""

    def __init__(self, clock: Callable[[], float] = boot_clock) -> None:
        self._clock = clock
        self._last: Leadership | None = None
        self._since = 0.0

    def may_take(self, seen: Leadership) -> bool:
        """Whether nobody leads, or the leader has given no sign of life for too long."""
        if seen != self._last:
            self._last, self._since = seen, self._clock()
        return not seen.holder or self._clock() - self._since >= SILENT_SECONDS
