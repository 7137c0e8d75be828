"""Runs parts of exchanges over a channel."""

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
from sync.channel import Channel
from sync.collective._exchange import Arrived, Event, Fetch, Part, Pieces, Put, Request, Stored

__all__ = ["Driver", "Events", "Failed", "InPlace", "OneByOne", "Patience", "Threads"]

_UPLOADS = 2
"""At once, so that a merged chunk need not wait for the parts before it."""
_DOWNLOADS = 3
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _PAUSE_FACTOR = 0.02, 0.5, 1.5
_PART_WAITED = 0.05
"""Of what has been waited: who waits long for one that is away looks less often, as every look is billed."""
_LOOK_SECONDS = 2.0
"""How long a wait continues before it looks whether anybody still needs it."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failed:
    """Something that was asked for went wrong; whoever runs the part raises it."""

    error: Exception


Events = queue.SimpleQueue[Event | Failed]
Patience = Callable[[], float]
"""Seconds that an exchange which begins now may take."""


class Driver(Protocol):
    """Runs one part at a time."""

    def run(self, part: Part[Result], events: Events | None = None) -> Result:
        """The part's result; ``events``: where events from outside come in, from any thread.

        Raises what the channel raised, and ``GeofedError("CHANNEL_TIMEOUT")``.
        """

    def drain(self) -> None:
        """Wait until no value is on its way into the channel any more; raises what went wrong with one."""

    def close(self) -> None: ...


class Threads:
    """Uploads, downloads and deletes continue beside each other. Puts that queue up are sent together."""

    def __init__(
        self,
        channel: Channel,
        patience: Patience,
        parallel: int = 1,
        uploads_at_once: int | None = None,
        waits: int = _DOWNLOADS,
    ) -> None:
        """``parallel``: looks at once, into a channel that has to be asked; ``uploads_at_once``: each put then goes by
        itself, in the order given, so many at once; ``waits``: for so many values, or lists of them, apart from each
        other at once."""
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

    def run(self, part: Part[Result], events: Events | None = None) -> Result:
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
                if isinstance(event, Failed):
                    raise event.error
                self._ask(part.handle(event), inbox, over, deadline)
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
        except Exception as error:  # at a thread's edge: whoever runs the part must hear of it
            inbox.put(Failed(error))
            raise
        inbox.put(Stored(tuple(values)))

    def _download(self, request: Fetch, inbox: Events, over: threading.Event, deadline: float) -> None:
        left = dict.fromkeys(request.keys)
        try:
            if request.asked_after_seconds is not None:
                for key, value in self._asked(request, request.asked_after_seconds, over, deadline):
                    inbox.put(Arrived(key, value))
                return
            while left and not over.is_set() and not self._closed.is_set() and time.monotonic() < deadline:
                until = min(deadline, time.monotonic() + _LOOK_SECONDS)
                for key, value in _arrivals(self._channel, tuple(left), until):
                    del left[key]
                    inbox.put(Arrived(key, value))
        except Exception as error:  # noqa: BLE001 - at a thread's edge
            inbox.put(Failed(error))

    def _asked(
        self, request: Fetch, after_seconds: float, over: threading.Event, deadline: float
    ) -> Iterator[tuple[str, memoryview]]:
        """Look for values when they are likely to be there, and again after pauses that grow."""
        first, *others = request.keys
        begun = time.monotonic()
        looked = not request.asked_at_once
        due = [(begun + (after_seconds if looked else 0.0), first)]
        pauses = dict.fromkeys(request.keys, _FIRST_PAUSE_SECONDS)
        looks: dict[Future[memoryview | None], str] = {}
        while (due or looks) and not over.is_set() and not self._closed.is_set():
            now = time.monotonic()
            if now > deadline:
                return
            while due and due[0][0] <= now:
                key = heapq.heappop(due)[1]
                looks[self._gets.submit(self._channel.get, key)] = key
            pause = min(_LOOK_SECONDS, max(0.0, due[0][0] - now)) if due else _LOOK_SECONDS
            if not looks:
                over.wait(pause)
                continue
            for look in wait(looks, pause, FIRST_COMPLETED).done:
                key, value, now = looks.pop(look), look.result(), time.monotonic()
                if value is not None:
                    yield key, value
                    if key == first:
                        # Where it was there at once, this worker is late, and so are the others there.
                        gap = request.asked_gap_seconds if looked else 0.0
                        for number, other in enumerate(others, 1):
                            heapq.heappush(due, (now + number * gap, other))
                elif key == first and not looked:
                    looked = True
                    heapq.heappush(due, (begun + after_seconds, key))
                else:
                    heapq.heappush(due, (now + pauses[key], key))
                    longest = max(_LONGEST_PAUSE_SECONDS, _PART_WAITED * (now - begun))
                    pauses[key] = min(pauses[key] * _PAUSE_FACTOR, longest)

    def _delete(self, keys: Sequence[str]) -> None:
        # What cannot be deleted now goes with the attempt's tree; nobody will read it.
        with contextlib.suppress(GeofedError, OSError):
            self._channel.delete_many(keys)


class InPlace(Threads):
    """For values in this machine's memory: the caller's own thread puts and gets.

    A request is a copy there, which no other thread makes shorter: with W workers on a few cores threads only take the
    cores from each other. Deletes continue beside. What is handed in part by part comes while others wait, and so does
    take threads.
    """

    def run(self, part: Part[Result], events: Events | None = None) -> Result:
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
            until = min(deadline, time.monotonic() + _LOOK_SECONDS)
            for key, value in _arrivals(self._channel, tuple(wanted), until):
                del wanted[key]
                requests.extend(part.handle(Arrived(key, value)))
                before = len(wanted)
                self._take(requests, wanted, part)
                if len(wanted) > before:
                    # More to wait for than this wait knows of.
                    break
        self._take(requests, wanted, part)
        return part.result

    def _take(self, requests: deque[Request], wanted: dict[str, None], part: Part[Result]) -> None:
        while requests:
            request = requests.popleft()
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._channel.put(key, pieces)
                    requests.extend(part.handle(Stored((key,))))
            elif isinstance(request, Fetch):
                wanted.update(dict.fromkeys(request.keys))
            else:
                self._beside.submit(self._delete, request.keys)


def _arrivals(channel: Channel, keys: Sequence[str], until: float) -> Iterator[tuple[str, memoryview]]:
    try:
        yield from channel.wait(keys, max(0.0, until - time.monotonic()))
    except GeofedError as error:
        if error.code != "CHANNEL_TIMEOUT":
            raise


def _next(inbox: Events, deadline: float) -> Event | Failed | None:
    """None: the time is over."""
    try:
        return inbox.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return None


def _late(awaited: Sequence[int], seconds: float) -> GeofedError:
    which = f"worker {awaited[0]}" if len(awaited) == 1 else f"workers {', '.join(str(one) for one in awaited)}"
    return GeofedError("CHANNEL_TIMEOUT", f"what {which} should merge or give has not come within {seconds:.3g} s")


class OneByOne:
    """One request after the other in one lane, as FasDL's, LambdaML's and MLLess's workers make them.

    They look for values by listing the bucket; a channel cannot list, so each missing key is looked at. Not for use:
    it is what the others are measured against.
    """

    def __init__(self, channel: Channel, patience: Patience, poll_seconds: float) -> None:
        self._channel, self._patience, self._poll_seconds = channel, patience, poll_seconds

    def run(self, part: Part[Result], events: Events | None = None) -> Result:
        deadline = time.monotonic() + self._patience()
        requests = deque(part.start())
        while requests:
            request = requests.popleft()
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._channel.put(key, pieces)
                    requests += part.handle(Stored((key,)))
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
                    raise GeofedError("CHANNEL_TIMEOUT", f"{', '.join(missing)} have not come in time")
                time.sleep(self._poll_seconds)

    def drain(self) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """Nothing runs beside."""
