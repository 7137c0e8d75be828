"""Executes parts of exchanges over a channel."""

from __future__ import annotations

import contextlib
import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from geofed_pb.errors import GeofedError
from sync.channel import Channel, RangedValue
from sync.merging._exchange import Arrived, Event, ExchangePart, Fetch, Pieces, Put, Request, ValuesStored

__all__ = ["Driver", "Events", "InPlace", "Patience", "RequestFailed", "SequentialRequests", "Threads"]

_UPLOADS = 2
"""Concurrent uploads; more than one, so that a merged chunk needn't wait for the parts before it."""
_DOWNLOADS = 3
"""Concurrent waits for values."""
_MIN_PAUSE_SECONDS = 0.02
"""Pause before a missing value is requested again."""
_MAX_PAUSE_SECONDS = 0.5
"""Longest such pause, unless the wait is long; see below."""
_PAUSE_FACTOR = 1.5
"""Growth of the pause with each request."""
_PAUSE_FRACTION = 0.05
"""The longest pause is at least this fraction of the time waited so far, because every request is billed."""
_CHECK_SECONDS = 2.0
"""Interval at which a wait checks whether it is still needed."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class RequestFailed:
    """A request has failed; the thread that runs the part raises the error."""

    error: Exception


Events = queue.SimpleQueue[Event | RequestFailed]
Patience = Callable[[], float]
"""Returns the timeout in seconds of an exchange that begins now."""


class Driver(Protocol):
    """Executes one part at a time."""

    def run(self, part: ExchangePart[Result], events: Events | None = None) -> Result:
        """Execute a part and return its result. ``events``: a queue for events from outside, put by any thread.

        Raises the channel's errors, and ``GeofedError("CHANNEL_TIMEOUT")``.
        """

    def drain(self) -> None:
        """Wait until all puts have ended; raise the error of one that failed."""

    def close(self) -> None: ...


class Threads:
    """Uploads, downloads and deletes run concurrently. Puts that queue up are sent together."""

    def __init__(
        self,
        channel: Channel,
        patience: Patience,
        parallel: int = 1,
        uploads_at_once: int | None = None,
        waits: int = _DOWNLOADS,
    ) -> None:
        """``parallel``: concurrent requests to a channel that does not announce values. ``uploads_at_once``: values are
        put one by one, in the given order, so many concurrently. ``waits``: concurrent waits for values."""
        self._channel, self._patience = channel, patience
        self._gets = ThreadPoolExecutor(max(1, parallel), thread_name_prefix="look")
        self._each = uploads_at_once is not None
        self._up = ThreadPoolExecutor(uploads_at_once or _UPLOADS, thread_name_prefix="upload")
        self._down = ThreadPoolExecutor(waits, thread_name_prefix="download")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="delete")
        self._lock = threading.Lock()
        self._queued: dict[str, Pieces] = {}
        self._uploads: list[Future[None]] = []
        self._closed = threading.Event()

    def run(self, part: ExchangePart[Result], events: Events | None = None) -> Result:
        self.drain()
        inbox: Events = queue.SimpleQueue() if events is None else events
        over, patience = threading.Event(), self._patience()
        deadline = time.monotonic() + patience
        try:
            self._ask(part.start(), inbox, over, deadline)
            while not part.done:
                event = _next(inbox, deadline)
                if event is None:
                    raise _late(part.awaited, patience)
                if isinstance(event, RequestFailed):
                    raise event.error
                self._ask(part.handle(event), inbox, over, deadline)
                # Its value is freed before the next one arrives.
                event = None
        finally:
            over.set()
        return part.result

    def drain(self) -> None:
        uploads, self._uploads = self._uploads, []
        for upload in uploads:
            upload.result()

    def close(self) -> None:
        self._closed.set()
        for pool in (self._up, self._down, self._gets, self._beside):
            pool.shutdown(wait=True)

    def _ask(self, requests: Sequence[Request], inbox: Events, over: threading.Event, deadline: float) -> None:
        for request in requests:
            if isinstance(request, Put):
                with self._lock:
                    self._queued.update(request.values)
                for _ in range(len(request.values) if self._each else 1):
                    self._uploads.append(self._up.submit(self._upload, inbox))
            elif isinstance(request, Fetch):
                self._down.submit(self._download, request, inbox, over, deadline)
            else:
                self._beside.submit(self._delete, request.keys)

    def _upload(self, inbox: Events) -> None:
        with self._lock:
            if not self._queued:
                return
            if self._each:
                key = next(iter(self._queued))
                values = {key: self._queued.pop(key)}
            else:
                values, self._queued = self._queued, {}
        try:
            self._channel.put_many(values)
        except Exception as error:  # outermost frame of the thread: the part's thread must be notified
            inbox.put(RequestFailed(error))
            raise
        inbox.put(ValuesStored(tuple(values)))

    def _download(self, request: Fetch, inbox: Events, over: threading.Event, deadline: float) -> None:
        left, whole = dict.fromkeys(request.keys), request.whole
        try:
            if request.asked_after_seconds is not None:
                for arrived in self._asked(request, request.asked_after_seconds, over, deadline):
                    inbox.put(Arrived(*arrived))
                return
            while left and not over.is_set() and not self._closed.is_set() and time.monotonic() < deadline:
                until = min(deadline, time.monotonic() + _CHECK_SECONDS)
                for key, value in _arrivals(self._channel, tuple(left), until, whole):
                    del left[key]
                    whole = whole if whole is None or not isinstance(value, memoryview) else max(0, whole - 1)
                    inbox.put(Arrived(key, value))
                    del value  # so that it can be freed while the next one is awaited
        except Exception as error:  # noqa: BLE001 - outermost frame of the thread
            inbox.put(RequestFailed(error))

    def _asked(
        self, request: Fetch, after_seconds: float, over: threading.Event, deadline: float
    ) -> Iterator[tuple[str, memoryview]]:
        """Request values when they are likely to exist, and again after growing pauses."""
        first, *others = request.keys
        begun = time.monotonic()
        looked = not request.asked_at_once
        due = [(begun + (after_seconds if looked else 0.0), first)]
        pauses = dict.fromkeys(request.keys, _MIN_PAUSE_SECONDS)
        looks: dict[Future[memoryview | None], str] = {}
        while (due or looks) and not over.is_set() and not self._closed.is_set():
            now = time.monotonic()
            if now > deadline:
                return
            while due and due[0][0] <= now:
                key = heapq.heappop(due)[1]
                looks[self._gets.submit(self._channel.get, key)] = key
            pause = min(_CHECK_SECONDS, max(0.0, due[0][0] - now)) if due else _CHECK_SECONDS
            if not looks:
                over.wait(pause)
                continue
            for look in wait(looks, pause, FIRST_COMPLETED).done:
                key, value, now = looks.pop(look), look.result(), time.monotonic()
                if value is not None:
                    yield key, value
                    if key == first:
                        # If the first existed immediately, this worker is late, and the others exist too.
                        gap = request.asked_gap_seconds if looked else 0.0
                        for number, other in enumerate(others, 1):
                            heapq.heappush(due, (now + number * gap, other))
                elif key == first and not looked:
                    looked = True
                    heapq.heappush(due, (begun + after_seconds, key))
                else:
                    heapq.heappush(due, (now + pauses[key], key))
                    longest = max(_MAX_PAUSE_SECONDS, _PAUSE_FRACTION * (now - begun))
                    pauses[key] = min(pauses[key] * _PAUSE_FACTOR, longest)

    def _delete(self, keys: Sequence[str]) -> None:
        # What cannot be deleted now is deleted with the attempt's tree; no worker will read it.
        with contextlib.suppress(GeofedError, OSError):
            self._channel.delete_many(keys)


class InPlace(Threads):
    """For values in this machine's memory: the caller's own thread puts and gets.

    A request is a copy there, which other threads cannot speed up: with W workers on a few cores, threads only compete
    for the cores. Deletes still run concurrently. If the vector is passed in parts, these arrive while other values are
    awaited, so then threads are used.
    """

    def run(self, part: ExchangePart[Result], events: Events | None = None) -> Result:
        if events is not None:
            return super().run(part, events)
        self.drain()
        patience = self._patience()
        deadline = time.monotonic() + patience
        requests, wanted = deque(part.start()), dict[str, None]()
        while not part.done:
            self._take(requests, wanted, part)
            if part.done:
                break
            if self._closed.is_set() or time.monotonic() >= deadline:
                raise _late(part.awaited, patience)
            until = min(deadline, time.monotonic() + _CHECK_SECONDS)
            for key, value in _arrivals(self._channel, tuple(wanted), until):
                del wanted[key]
                requests.extend(part.handle(Arrived(key, value)))
                before = len(wanted)
                self._take(requests, wanted, part)
                if len(wanted) > before:
                    # There are more keys to wait for than this wait knows.
                    break
        self._take(requests, wanted, part)
        return part.result

    def _take(self, requests: deque[Request], wanted: dict[str, None], part: ExchangePart[Result]) -> None:
        while requests:
            request = requests.popleft()
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._channel.put(key, pieces)
                    requests.extend(part.handle(ValuesStored((key,))))
            elif isinstance(request, Fetch):
                wanted.update(dict.fromkeys(request.keys))
            else:
                self._beside.submit(self._delete, request.keys)


def _arrivals(
    channel: Channel, keys: Sequence[str], until: float, whole: int | None = None
) -> Iterator[tuple[str, memoryview | RangedValue]]:
    seconds = max(0.0, until - time.monotonic())
    try:
        yield from channel.wait(keys, seconds) if whole is None else channel.wait_ranged(keys, seconds, whole)
    except GeofedError as error:
        if error.code != "CHANNEL_TIMEOUT":
            raise


def _next(inbox: Events, deadline: float) -> Event | RequestFailed | None:
    """Return the next event, or None after the deadline."""
    try:
        return inbox.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return None


def _late(awaited: Sequence[int], seconds: float) -> GeofedError:
    which = f"worker {awaited[0]}" if len(awaited) == 1 else f"workers {', '.join(str(one) for one in awaited)}"
    return GeofedError("CHANNEL_TIMEOUT", f"timed out after {seconds:.3g} s waiting for values from {which}")


class SequentialRequests:
    """Makes one request after the other, as the workers of FasDL, LambdaML and MLLess do.

    They find values by listing the bucket; a channel cannot list, so each missing key is checked. For comparison only.
    """

    def __init__(self, channel: Channel, patience: Patience, poll_seconds: float) -> None:
        self._channel, self._patience, self._poll_seconds = channel, patience, poll_seconds

    def run(self, part: ExchangePart[Result], events: Events | None = None) -> Result:
        deadline = time.monotonic() + self._patience()
        requests = deque(part.start())
        while requests:
            request = requests.popleft()
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._channel.put(key, pieces)
                    requests += part.handle(ValuesStored((key,)))
            elif isinstance(request, Fetch):
                for key, value in self._polled(request.keys, deadline):
                    requests += part.handle(Arrived(key, value))
            else:
                for key in request.keys:
                    self._channel.delete(key)
        return part.result

    def _polled(self, keys: Sequence[str], deadline: float) -> Iterator[tuple[str, memoryview]]:
        missing = list(keys)
        while missing:
            there = [key for key in missing if self._channel.has(key)]
            for key in there:
                value = self._channel.get(key)
                if value is not None:
                    missing.remove(key)
                    yield key, value
            if missing and not there:
                if time.monotonic() > deadline:
                    raise GeofedError("CHANNEL_TIMEOUT", f"timed out waiting for {', '.join(missing)}")
                time.sleep(self._poll_seconds)

    def drain(self) -> None:
        """Nothing to wait for: puts are synchronous."""

    def close(self) -> None:
        """Nothing to close: there are no threads."""
