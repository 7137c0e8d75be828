"""Collectives of means: all-reduce, scatter-reduce, pipelined scatter-reduce and K-REDUCE."""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import numpy as np

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective._arithmetic import MeanOf
from sync.collective._contract import Merged, Settings, Settled, State
from sync.collective._driver import Driver, Events, Failed, InPlace, OneByOne, Patience, Threads
from sync.collective._exchange import Event, Given
from sync.collective._members import Member, chunk_bounds, owners
from sync.collective._plan import Call, Plan
from sync.collective._reduce import Pull, Reduce
from sync.layout import Vector

__all__ = ["Buckets", "Reducing", "driver_of", "plan_of", "with_weight"]

_ALIGN = 256
"""Chunks begin on multiples of a codec's block, and of a cache line."""
_LEAST_PARTS = 3
"""Of one chunk nothing leaves before all is there; of two, one worker would have to read most of both."""
_ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.004, "fp8": 1.0, "int4": 0.516}
"""Of a vector without zeros."""


def plan_of(member: Member, size: int, settings: Settings, place: str) -> Plan:
    """Chunks and owners of a vector of ``size`` elements; the same for all members."""
    present = member.present
    chunks = 1 if settings.pattern == "all-reduce" else min(settings.chunks or len(present), len(present))
    half_first = settings.in_parts and chunks >= _LEAST_PARTS
    # Small vectors are cut finer than the alignment, so that there is a chunk for each.
    least = _ALIGN * (2 * chunks - 1 if half_first else chunks)
    bounds = chunk_bounds(size, chunks, _ALIGN if size >= least else 1, half_first=half_first)
    groups = _groups(present, len(bounds), settings, str(member.attempt))
    without = "-".join(str(worker) for worker in member.lost)
    place = f"{place}/{member.attempt}" + (f"-without-{without}" if without else "")
    overlapped = settings.pattern != "scatter-reduce" and not settings.faithful
    asked = None if settings.faithful else settings.asked
    return Plan(member, bounds, groups, place, overlapped, asked, _ELEMENT_BYTES[settings.codec])


def _groups(present: Sequence[int], chunks: int, settings: Settings, salt: str) -> tuple[tuple[int, ...], ...]:
    """Those who merge a chunk first, in the order of the chunks; then the rest, in turn."""
    count = max(1, min(settings.groups, len(present) // chunks))
    merging = tuple(present[:chunks]) if settings.faithful else owners(chunks * count, present, salt)
    rest = [worker for worker in present if worker not in merging]
    return tuple((*merging[g * chunks : (g + 1) * chunks], *rest[g::count]) for g in range(count))


def driver_of(channel: Channel, settings: Settings, patience: Patience | None, plan: Plan | None = None) -> Driver:
    patience = patience or (lambda: settings.timeout_seconds)
    if settings.faithful:
        return OneByOne(channel, patience, settings.poll_seconds)
    if channel.in_memory:
        return InPlace(channel, patience)
    looks = 1 if settings.asked is None else settings.asked.parallel
    if plan is None:
        return Threads(channel, patience, looks)
    # Of chunks that go their ways each by itself, each is waited for by itself.
    return Threads(channel, patience, looks, plan.uploads_at_once, waits=2 + len(plan.bounds))


class Buckets:
    """One exchange whose vector is handed in part by part, while the rest is still being computed.

    A chunk leaves as soon as all of it is there. The backward pass gives the last layers first: any order will do.
    """

    def __init__(self, plan: Plan, vector: Vector, events: Events, merged: Future[tuple[Merged, ...]]) -> None:
        self._plan, self._vector, self._events, self._merged = plan, vector, events, merged
        self._left = [chunk.stop - chunk.start for chunk in plan.bounds]
        self._stops = np.array([chunk.stop for chunk in plan.bounds])

    def give(self, start: int, values: Vector) -> None:
        """Hand in the elements from ``start`` on; each element of the vector once. They are copied."""
        stop = start + values.size
        if not 0 <= start <= stop <= self._vector.size:
            raise GeofedError("FRAME_INVALID", f"elements {start} to {stop} of a vector of {self._vector.size}")
        self._vector[start:stop] = values
        chunk = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            part = min(stop, self._plan.bounds[chunk].stop) - start
            self._left[chunk] -= part
            if self._left[chunk] < 0:
                raise GeofedError("FRAME_INVALID", f"elements of chunk {chunk} were handed in twice")
            if self._left[chunk] == 0:
                self._events.put(Given(chunk))
            start, chunk = start + part, chunk + 1

    def result(self) -> tuple[Merged, ...]:
        """What `Collective.merge` returns; raises what it raises, and ``FRAME_INVALID`` where elements are missing."""
        if any(self._left):
            raise GeofedError("FRAME_INVALID", f"{sum(self._left)} elements have not been handed in")
        return self._merged.result()


class Reducing:
    """The mean, merged in chunks by their owners.

    With staleness a worker without a chunk takes up the mean of some merges before, and the rest when it settles; the
    order of means that workers take up is the same for all, so that with a deterministic optimiser all end up with the
    same bits. Its first steps take up nothing.
    """

    shares: Literal["mean"] = "mean"

    def __init__(
        self,
        settings: Settings,
        member: Member,
        channel: Channel,
        place: str,
        size: int,
        patience: Patience | None = None,
    ) -> None:
        """``patience``: as in `open_collective`."""
        self._settings, self._member, self._size, self._place = settings, member, size, place
        self.plan = plan_of(member, size, settings, place)
        """Chunks and owners."""
        self._arithmetic = MeanOf(settings.codec, self.plan.bounds, settings.trained)
        self._driver = driver_of(channel, settings, patience, self.plan)
        self._lag = settings.staleness if self.plan.own is None else 0
        self._pending: deque[int] = deque()
        """Merges that this worker has given its part of and not taken up."""
        self._published: deque[int] = deque()
        """Merged chunks of this owner that are in the channel."""
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="buckets")
        self._open: Events | None = None
        """Where the buckets of the exchange that runs come in."""
        self._copy: Vector | None = None
        """What is on its way, of a vector that is the caller's again or came in parts."""

    @property
    def in_parts(self) -> bool:
        """Whether `begin` is worth its while: chunks leave, and come back merged, before the last one is there."""
        return self._settings.in_parts and len(self.plan.bounds) >= _LEAST_PARTS

    def merge(self, step: int, vector: Vector, weight: float, model: Vector | None = None) -> tuple[Merged, ...]:
        if vector.shape != (self._size,) or vector.dtype != np.float32:
            raise GeofedError("FRAME_INVALID", f"{vector.dtype} of shape {vector.shape} for {self._size} elements")
        if self._lag:
            # Its upload continues while the caller writes the next one.
            self._driver.drain()
            room = self._room()
            room[:] = vector
            vector = room
        return self._run(step, vector, weight, None)

    def begin(self, step: int, weight: float) -> Buckets:
        """`merge` of a vector that is handed in part by part; nothing else may be called until its result is there."""
        self._driver.drain()
        vector, events = self._room(), queue.SimpleQueue[Event | Failed]()
        if self._size == 0:
            events.put(Given(0))
        self._open = events
        return Buckets(self.plan, vector, events, self._beside.submit(self._run, step, vector, weight, events))

    def _room(self) -> Vector:
        if self._copy is None:
            self._copy = np.empty(self._size, np.float32)
        return self._copy

    def settle(self, step: int, model: Vector) -> Settled:
        return Settled(with_weight(self._driver.run(self.settling(step))), None)

    def settling(self, step: int) -> Pull:
        """What `settle` runs."""
        call = Call("g", step, 0.0, tuple(self._pending))
        self._pending.clear()
        return Pull(self.plan, call, self._arithmetic)

    def state(self) -> State:
        self._driver.drain()
        facts = {f"pending.{number}": float(step) for number, step in enumerate(self._pending)}
        facts |= {f"published.{number}": float(step) for number, step in enumerate(self._published)}
        return State(self._arithmetic.residuals(), facts)

    def restore(self, state: State) -> None:
        for name, residual in state.tensors.items():
            self._arithmetic.restore(name, residual)
        for kind, steps in (("pending", self._pending), ("published", self._published)):
            steps.extend(sorted(int(step) for name, step in state.facts.items() if name.startswith(f"{kind}.")))

    def without(self, lost: Sequence[int]) -> None:
        """Continue without workers that are lost, from the merge that did not come about; make that merge again.

        Somebody must have told all that are left the same. They are then all in the same merge: one that anybody has
        finished, all can finish, since its merged chunks are in the channel. What was put for the broken one lies under
        other keys, so nothing counts twice. Raises ``GeofedError("CONFIG_INVALID")`` with staleness, where a worker is
        several merges behind.
        """
        if self._settings.staleness:
            raise GeofedError("CONFIG_INVALID", "with staleness the workers of an attempt cannot continue without one")
        self._member = replace(self._member, lost=tuple(sorted({*self._member.lost, *lost})))
        held = self._arithmetic.before
        self.plan = plan_of(self._member, self._size, self._settings, self._place)
        self._arithmetic = MeanOf(self._settings.codec, self.plan.bounds, self._settings.trained)
        if held is not None:
            self._arithmetic.hold(held)
        self._lag = 0
        self._pending.clear()
        # They lie under the old keys, and go with the attempt's tree.
        self._published.clear()

    def close(self) -> None:
        if self._open is not None:
            self._open.put(Failed(GeofedError("INTERNAL", "the collective was closed while it merged")))
        self._beside.shutdown(wait=True)
        self._driver.close()

    def _run(self, step: int, vector: Vector, weight: float, events: Events | None) -> tuple[Merged, ...]:
        if not (math.isfinite(weight) and weight >= 0):
            raise GeofedError("FRAME_INVALID", f"a weight of {weight}")
        alone = len(self._member.present) == 1
        if events is not None and (alone or self._settings.faithful):
            _await_all(events, len(self.plan.bounds))
            events = None
        if alone:
            own = vector.copy()
            own.flags.writeable = False
            return with_weight((Merged(step, own, weight),))
        return with_weight(self._driver.run(self.part(step, vector, weight, whole=events is None), events))

    def part(self, step: int, vector: Vector, weight: float, *, whole: bool = True) -> Reduce:
        """What `merge` runs, for whoever has a driver of their own; there must be several workers."""
        self._arithmetic.begin()
        self._pending.append(step)
        wanted = [self._pending.popleft() for _ in range(len(self._pending) - self._lag)]
        expired: list[int] = []
        if self.plan.own is not None:
            self._published.append(step)
            # All who give their part of this step have taken up what is `staleness` + 1 merges old. One more is kept
            # for a worker that makes its last step again after its invocation was cut short.
            expired = [self._published.popleft() for _ in range(len(self._published) - 2 - self._settings.staleness)]
        call = Call("g", step, weight, tuple(wanted), tuple(expired))
        return Reduce(self.plan, call, self._arithmetic, vector, whole=whole, joint=self._arithmetic.joint)


def _await_all(events: Events, chunks: int) -> None:
    for _ in range(chunks):
        event = events.get()
        if isinstance(event, Failed):
            raise event.error


def with_weight(merged: tuple[Merged, ...]) -> tuple[Merged, ...]:
    """What was merged; raises ``GeofedError("FRAME_INVALID")`` where nobody had a weight."""
    if any(one.weight <= 0 for one in merged):
        raise GeofedError("FRAME_INVALID", f"no worker has a weight above 0 in step {merged[0].step}")
    return merged
