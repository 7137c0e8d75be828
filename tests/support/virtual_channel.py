"""Runs the parts of a collective over a modelled channel, in virtual time and one thread.

Every worker has an uplink and a downlink of its own, each carrying one value after the other; a request costs its
latency before its bytes, and so many requests of a worker may be on their way at once in each direction. Deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sync.collective import ChannelCosts
from sync.merging._exchange import Arrived, Event, ExchangePart, Fetch, Put, Request, ValuesStored

__all__ = ["Program", "Virtual", "Worker"]

Program = Generator["float | ExchangePart[Any]", Any, None]
"""What a worker does: yields seconds of compute, or a part, whose result it is sent."""


@dataclass
class Meter:
    """What one worker asked of the channel."""

    puts: int = 0
    gets: int = 0
    polls: int = 0
    """Looks that found nothing, and lists."""
    deletes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class Lane:
    """One direction of a link: requests on their way, and those that wait for a turn."""

    slots: int
    free: float = 0.0
    """When its last value is through."""
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass
class Worker:
    """One worker's lanes and program."""

    number: int
    program: Program
    serial: bool = False
    part: ExchangePart[Any] | None = None
    meter: Meter = field(default_factory=Meter)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When each part began and was done."""
    ended: bool = False
    up: Lane = field(default_factory=lambda: Lane(1))
    down: Lane = field(default_factory=lambda: Lane(1))
    uploads: int = 0
    """On their way."""
    waits: bool = False
    """For its uploads, before it begins the next part."""
    lane: deque[Any] = field(default_factory=deque)
    """Requests of a serial worker that wait for their turn."""
    busy: bool = False
    run: int = 0


class Virtual:
    """A channel and the workers around it; `run` returns the time at which the last program ended."""

    def __init__(
        self,
        costs: ChannelCosts,
        *,
        store_bytes_per_second: float = math.inf,
        delay: Callable[[int, str], float] = lambda worker, key: 0.0,
        dies: Callable[[int, int], bool] = lambda worker, request: False,
        pauses: tuple[float, float, float] | None = None,
    ) -> None:
        """``store_bytes_per_second``: what the store's own network carries, each way, for all workers together.
        ``pauses``: the channel has to be asked, after a first pause that grows by a factor up to a longest; None: one
        look for all values in every ``poll_seconds``, or none where that is 0. ``delay``: further seconds of one
        worker's request for one key. ``dies``: whether a worker is lost when it makes its request of this number."""
        self.costs, self._delay, self._dies, self._pauses = costs, delay, dies, pauses
        self._store_rate = store_bytes_per_second
        self._store_in, self._store_out = Lane(0), Lane(0)
        self.values: dict[str, bytes] = {}
        self.workers: list[Worker] = []
        self.now = 0.0
        self.dead: set[int] = set()
        self.reads: Counter[str] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._watchers: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self._requests: Counter[int] = Counter()

    def add(self, program: Program, *, serial: bool = False, uploads: int | None = None) -> Worker:
        """``uploads``: at once; None: as many as other requests."""
        slots = max(1, self.costs.parallel)
        worker = Worker(len(self.workers), program, serial, up=Lane(uploads or slots), down=Lane(slots))
        self.workers.append(worker)
        self.at(0.0, lambda: self._resume(worker, None))
        return worker

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._count), what))

    def run(self) -> float:
        while self._due:
            self.now, _, what = heapq.heappop(self._due)
            what()
        return self.now

    # Programs

    def _resume(self, worker: Worker, result: object) -> None:
        if worker.number in self.dead:
            return
        try:
            item = worker.program.send(result)
        except StopIteration:
            worker.ended = True
            return
        if isinstance(item, (int, float)):
            self.at(self.now + item, lambda: self._resume(worker, None))
            return
        worker.part = item
        worker.spans.append((self.now, math.nan))
        worker.run += 1
        if worker.uploads:
            worker.waits = True
        else:
            self._ask(worker, item.start())
            self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        if worker.part is not None and worker.part.done and not worker.lane and not worker.busy:
            result, worker.part = worker.part.result, None
            worker.spans[-1] = (worker.spans[-1][0], self.now)
            worker.run += 1
            self._resume(worker, result)

    def tell(self, worker: Worker, event: Event) -> None:
        """An event for the worker's part of now."""
        if worker.part is None or worker.number in self.dead:
            return
        if worker.waits:
            self.at(self.now + 1e-3, lambda: self.tell(worker, event))
            return
        self._ask(worker, worker.part.handle(event))
        self._finish(worker)

    def _ask(self, worker: Worker, requests: Sequence[Request]) -> None:
        if worker.serial:
            worker.lane.extend(requests)
            self._next_in_lane(worker)
            return
        for request in requests:
            if isinstance(request, Put):
                for key, pieces in request.values.items():
                    self._upload(worker, key, b"".join(pieces))
            elif isinstance(request, Fetch):
                self._fetch(worker, request)
            else:
                self._delete(worker, request.keys)

    def _lost(self, worker: Worker) -> bool:
        self._requests[worker.number] += 1
        if worker.number not in self.dead and self._dies(worker.number, self._requests[worker.number]):
            self.dead.add(worker.number)
        return worker.number in self.dead

    # Requests, beside each other

    def _upload(self, worker: Worker, key: str, value: bytes) -> None:
        if self._lost(worker):
            return
        worker.uploads += 1
        run = worker.run

        def stored() -> None:
            self._store(worker, key, value)
            worker.uploads -= 1
            if worker.waits and not worker.uploads and worker.part is not None:
                worker.waits = False
                self._ask(worker, worker.part.start())
                self._finish(worker)
            elif worker.run == run:
                self.tell(worker, ValuesStored((key,)))

        latency = self.costs.put_seconds + self._delay(worker.number, key)
        rate = self.costs.up_bytes_per_second
        self._carry(worker.up, self._store_in, latency, len(value), rate, stored)

    def _carry(self, link: Lane, store: Lane, latency: float, size: int, rate: float, then: Callable[[], None]) -> None:
        """A request: a turn in its lane, its latency, then its bytes after those that were ready before."""

        def ready() -> None:
            link.free = max(self.now, link.free) + size / rate
            store.free = max(self.now, store.free) + size / self._store_rate
            self.at(max(link.free, store.free), over)

        def over() -> None:
            link.slots += 1
            if link.waiting:
                link.slots -= 1
                link.waiting.popleft()()
            then()

        def begin() -> None:
            self.at(self.now + latency, ready)

        if link.slots:
            link.slots -= 1
            begin()
        else:
            link.waiting.append(begin)

    def _store(self, worker: Worker, key: str, value: bytes) -> None:
        worker.meter.puts += 1
        worker.meter.bytes_in += len(value)
        self.values[key] = value
        for found in self._watchers.pop(key, []):
            found()

    def _fetch(self, worker: Worker, request: Fetch) -> None:
        keys, after, gap = request.keys, request.asked_after_seconds, request.asked_gap_seconds
        issued, run, left = self.now, worker.run, set(keys)

        def found(key: str) -> None:
            poll = self.costs.poll_seconds
            ticks = math.ceil((self.now - issued) / poll) if poll and self.now > issued else 0
            left.discard(key)
            if not left:
                # One of the missing keys is looked at in every interval, until none is missing.
                worker.meter.polls += ticks
            self.at(max(self.now, issued + ticks * poll), lambda: self._download(worker, key, run))

        def seen(key: str, since: float, first: float, others: Sequence[str]) -> None:
            looks, at = self._looks(since, first)
            worker.meter.polls += looks
            self.at(at, lambda: self._download(worker, key, run))
            apart = gap if looks or not request.asked_at_once else 0.0
            for number, other in enumerate(others, 1):
                turn = at + number * apart
                self.at(at, lambda o=other, t=turn: self._when_there(o, lambda: seen(o, t, 0.0, ())))

        if self._pauses is not None:
            if after is None:
                for key in keys:
                    self._when_there(key, lambda key=key: seen(key, issued, 0.0, ()))
            elif request.asked_at_once:
                self._when_there(keys[0], lambda: seen(keys[0], issued, after, keys[1:]))
            else:
                self._when_there(keys[0], lambda: seen(keys[0], issued + after, 0.0, keys[1:]))
            return
        for key in keys:
            self._when_there(key, lambda key=key: found(key))

    def _when_there(self, key: str, what: Callable[[], None]) -> None:
        if key in self.values:
            what()
        else:
            self._watchers[key].append(what)

    def _looks(self, issued: float, after: float) -> tuple[int, float]:
        """How often a wait that began then has looked in vain, and when it looks and finds what is there now."""
        assert self._pauses is not None
        pause, factor, longest = self._pauses
        looks, at = 0, issued
        if at < self.now and after:
            looks, at = 1, at + max(self.costs.get_seconds, after)
        while at < self.now:
            looks, at, pause = looks + 1, at + self.costs.get_seconds + pause, min(pause * factor, longest)
        return looks, at

    def _download(self, worker: Worker, key: str, run: int) -> None:
        if self._lost(worker):
            return
        value = self.values[key]

        def arrived() -> None:
            self._read(worker, key, value)
            if worker.run == run:
                self.tell(worker, Arrived(key, memoryview(value)))

        latency = self.costs.get_seconds + self._delay(worker.number, key)
        rate = self.costs.down_bytes_per_second
        self._carry(worker.down, self._store_out, latency, len(value), rate, arrived)

    def _read(self, worker: Worker, key: str, value: bytes) -> None:
        worker.meter.gets += 1
        worker.meter.bytes_out += len(value)
        self.reads[key] += 1

    def _delete(self, worker: Worker, keys: Sequence[str]) -> None:
        worker.meter.deletes += len(keys)
        for key in keys:
            self.values.pop(key, None)

    # Requests, one after the other

    def _next_in_lane(self, worker: Worker) -> None:
        if worker.busy or worker.number in self.dead:
            return
        if not worker.lane:
            self._finish(worker)
            return
        request = worker.lane.popleft()
        if isinstance(request, Put):
            # One at a time: the rest go back to the head of the lane.
            (key, pieces), *rest = request.values.items()
            if rest:
                worker.lane.appendleft(Put(dict(rest)))
            value = b"".join(pieces)
            if self._lost(worker):
                return
            took = self.costs.put_seconds + self._delay(worker.number, key)
            self._busy(
                worker, took + len(value) / self.costs.up_bytes_per_second, lambda: self._put(worker, key, value)
            )
        elif isinstance(request, Fetch):
            self._busy(worker, self.costs.list_seconds, lambda: self._listed(worker, list(request.keys)))
        else:
            self._delete(worker, request.keys)
            self._next_in_lane(worker)

    def _busy(self, worker: Worker, seconds: float, then: Callable[[], None]) -> None:
        worker.busy = True

        def over() -> None:
            worker.busy = False
            then()

        self.at(self.now + seconds, over)

    def _put(self, worker: Worker, key: str, value: bytes) -> None:
        self._store(worker, key, value)
        self._serially(worker, ValuesStored((key,)))

    def _listed(self, worker: Worker, missing: list[str]) -> None:
        worker.meter.polls += 1
        there = [key for key in missing if key in self.values]
        left = [key for key in missing if key not in self.values]
        if left:
            pause = self.costs.poll_seconds if not there else 0.0
            worker.lane.appendleft(Fetch(tuple(left)))
            if not there:
                self._busy(worker, pause, lambda: self._next_in_lane(worker))
                return
        self._get_all(worker, there)

    def _get_all(self, worker: Worker, keys: list[str]) -> None:
        if not keys:
            self._next_in_lane(worker)
            return
        key, rest = keys[0], keys[1:]
        if self._lost(worker):
            return
        value = self.values[key]

        def got() -> None:
            self._read(worker, key, value)
            assert worker.part is not None
            worker.lane.extend(worker.part.handle(Arrived(key, memoryview(value))))
            self._get_all(worker, rest)

        took = self.costs.get_seconds + self._delay(worker.number, key)
        self._busy(worker, took + len(value) / self.costs.down_bytes_per_second, got)

    def _serially(self, worker: Worker, event: Event) -> None:
        assert worker.part is not None
        worker.lane.extend(worker.part.handle(event))
        self._next_in_lane(worker)
