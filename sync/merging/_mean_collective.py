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
from sync.collective import Merged, Model, Settings, Settled, State
from sync.layout import Vector
from sync.merging._arithmetic import MeanOf, Values
from sync.merging._driver import Driver, Events, InPlace, Patience, RequestFailed, SequentialRequests, Threads
from sync.merging._exchange import Event, Given
from sync.merging._members import Member
from sync.merging._parted import PartedVector
from sync.merging._reduce_exchange import Pull, ReduceExchange
from sync.merging._reduction_plan import Call, ReductionPlan, in_parts, plan_of

__all__ = ["Buckets", "MeanCollective", "driver_of", "with_weight"]


def driver_of(
    channel: Channel, settings: Settings, patience: Patience | None, plan: ReductionPlan | None = None
) -> Driver:
    """Return the driver for a channel and a plan."""
    patience = patience or (lambda: settings.timeout_seconds)
    if settings.faithful:
        return SequentialRequests(channel, patience, settings.poll_seconds)
    if channel.in_memory:
        return InPlace(channel, patience)
    looks = 1 if settings.asked is None else settings.asked.parallel
    if plan is None:
        return Threads(channel, patience, looks)
    # Chunks that are sent separately are also awaited separately.
    return Threads(channel, patience, looks, plan.uploads_at_once, waits=2 + len(plan.bounds))


class Buckets:
    """One exchange whose vector is passed part by part, while the rest is still being computed.

    A chunk is sent as soon as it is complete. Parts may be passed in any order; a backward pass computes the last
    layers first.
    """

    def __init__(
        self, plan: ReductionPlan, vector: Vector | None, events: Events, merged: Future[tuple[Merged, ...]]
    ) -> None:
        """``vector``: what the parts are copied to; None: the mean is written into them."""
        self._plan, self._vector, self._events, self._merged = plan, vector, events, merged
        self._parts: dict[int, Vector] = {}
        """The parts passed so far, by their first element, if they are not copied."""
        self._left = [chunk.stop - chunk.start for chunk in plan.bounds]
        self._stops = np.array([chunk.stop for chunk in plan.bounds])

    def give(self, start: int, values: Vector) -> None:
        """Pass the elements from ``start`` on, each element of the vector exactly once. Without a copy they must not be
        read or written before there is a result."""
        stop = start + values.size
        if not 0 <= start <= stop <= self._plan.size:
            raise GeofedError("FRAME_INVALID", f"elements {start} to {stop} of a vector of {self._plan.size}")
        if self._vector is None:
            self._parts.update({start: values} if values.size else {})
        else:
            self._vector[start:stop] = values
        chunk = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            part = min(stop, self._plan.bounds[chunk].stop) - start
            self._left[chunk] -= part
            if self._left[chunk] < 0:
                raise GeofedError("FRAME_INVALID", f"elements of chunk {chunk} were passed twice")
            if self._left[chunk] == 0:
                self._events.put(Given(chunk, self._values(chunk)))
            start, chunk = start + part, chunk + 1

    def _values(self, chunk: int) -> PartedVector | None:
        if self._vector is not None:
            return None
        bounds = self._plan.bounds[chunk]
        return PartedVector(
            [
                part[max(0, bounds.start - start) : max(0, bounds.stop - start)]
                for start, part in sorted(self._parts.items(), key=lambda one: one[0])
            ]
        )

    def result(self) -> tuple[Merged, ...]:
        """Return the result, as `Collective.merge` does, without a vector if the parts were not copied. Raises the same
        errors, and ``FRAME_INVALID`` if elements are missing."""
        if any(self._left):
            raise GeofedError("FRAME_INVALID", f"{sum(self._left)} elements are missing")
        return self._merged.result()


class MeanCollective:
    """Computes the mean; each chunk is merged by its owner.

    With staleness, a worker without a chunk applies the mean of some merges before, and the remaining ones when it
    settles. All workers apply the means in the same order, so that with a deterministic optimiser all have the same
    bits in the end. In its first steps such a worker applies nothing.
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
        """``place`` and ``patience``: as in `open_collective`."""
        self._settings, self._member, self._size, self._place = settings, member, size, place
        self.plan = plan_of(member, size, settings, place)
        """Chunks and owners."""
        self._arithmetic = MeanOf(settings.codec, self.plan.bounds, settings.trained)
        self._driver = driver_of(channel, settings, patience, self.plan)
        self._lag = settings.staleness if self.plan.own is None else 0
        self._pending: deque[int] = deque()
        """Steps that this worker has contributed to, but whose mean it has not applied."""
        self._published: deque[int] = deque()
        """Steps whose merged chunks of this owner are in the channel."""
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="buckets")
        self._open: Events | None = None
        """Queue of events for the current exchange, if its vector is passed in parts."""
        self._copy: Vector | None = None
        """Copy of the vector of the current exchange, if the caller may change it or passes it in parts."""

    @property
    def in_parts(self) -> bool:
        """Whether `begin` is useful: chunks are sent, and received merged, before the last one is complete."""
        return in_parts(self._settings, len(self.plan.bounds))

    def merge(self, step: int, vector: Vector, weight: float, model: Model | None = None) -> tuple[Merged, ...]:
        if vector.shape != (self._size,) or vector.dtype != np.float32:
            raise GeofedError("FRAME_INVALID", f"{vector.dtype} of shape {vector.shape} for {self._size} elements")
        if self._lag:
            # The upload continues while the caller computes the next vector.
            self._driver.drain()
            buffer = self._buffer()
            buffer[:] = vector
            vector = buffer
        return self._run(step, vector, weight, None)

    @property
    def in_place(self) -> bool:
        """Whether vectors may be merged in their memory: each merge returns the mean of its own step."""
        return not (self._settings.staleness or self._settings.faithful) and len(self._member.present) > 1

    def merge_parts(self, step: int, parts: Sequence[Vector], weight: float) -> None:
        """Merge one step's vector, which is given in consecutive arrays, and write the mean into them.

        Only `in_place`. They must not be read or written before this returns; after an error their values are
        undefined.
        """
        vector = PartedVector(parts)
        if vector.size != self._size or any(part.dtype != np.float32 for part in vector.parts):
            raise GeofedError("FRAME_INVALID", f"{vector.size} elements for {self._size}, or not of float32")
        self._run(step, vector, weight, None)

    def begin(self, step: int, weight: float, *, in_place: bool = False) -> Buckets:
        """Begin a merge whose vector is passed in parts. No other method may be called before the result is complete.

        ``in_place``: as the property; the mean is written into the parts, which are not copied.
        """
        self._driver.drain()
        vector, events = None if in_place else self._buffer(), queue.SimpleQueue[Event | RequestFailed]()
        if self._size == 0:
            events.put(Given(0, PartedVector([]) if in_place else None))
        self._open = events
        return Buckets(self.plan, vector, events, self._beside.submit(self._run, step, vector, weight, events))

    def _buffer(self) -> Vector:
        if self._copy is None:
            self._copy = np.empty(self._size, np.float32)
        return self._copy

    def settle(self, step: int, model: Vector | None) -> Settled:
        return Settled(with_weight(self._driver.run(self.settling(step))), None)

    def settling(self, step: int) -> Pull:
        """Return the part that `settle` executes."""
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
        """Continue without lost workers, from the merge that failed, which must be repeated.

        All remaining workers must be notified of the same loss. They are then all in the same merge: if one of them has
        finished it, all can, since its merged chunks are in the channel. Values of the failed merge have other keys, so
        nothing counts twice. Raises ``GeofedError("CONFIG_INVALID")`` with staleness, where a worker is several merges
        behind.
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
        # They have the old keys, and are deleted with the attempt's tree.
        self._published.clear()

    def close(self) -> None:
        if self._open is not None:
            self._open.put(RequestFailed(GeofedError("INTERNAL", "the collective was closed during a merge")))
        self._beside.shutdown(wait=True)
        self._driver.close()

    def _run(self, step: int, vector: Values | None, weight: float, events: Events | None) -> tuple[Merged, ...]:
        if not (math.isfinite(weight) and weight >= 0):
            raise GeofedError("FRAME_INVALID", f"a weight of {weight}")
        alone = len(self._member.present) == 1
        if events is not None and (alone or self._settings.faithful):
            _await_all(events, len(self.plan.bounds))
            events = None
        if alone:
            assert isinstance(vector, np.ndarray)
            own = vector.copy()
            own.flags.writeable = False
            return with_weight((Merged(step, own, weight),))
        return with_weight(self._driver.run(self.part(step, vector, weight, whole=events is None), events))

    def part(self, step: int, vector: Values | None, weight: float, *, whole: bool = True) -> ReduceExchange:
        """Return the part that `merge` executes, for callers with their own driver; there must be several workers."""
        self._arithmetic.begin()
        self._pending.append(step)
        wanted = [self._pending.popleft() for _ in range(len(self._pending) - self._lag)]
        expired: list[int] = []
        if self.plan.own is not None:
            self._published.append(step)
            # A worker that delivers its part of this step has applied the mean of `staleness` + 1 merges before. One
            # more is kept for a worker that repeats its last step after an interrupted invocation.
            expired = [self._published.popleft() for _ in range(len(self._published) - 2 - self._settings.staleness)]
        call = Call("g", step, weight, tuple(wanted), tuple(expired))
        own = self._arithmetic
        return ReduceExchange(self.plan, call, own, vector, whole=whole, joint=own.joint, verbatim=own.verbatim)


def _await_all(events: Events, chunks: int) -> None:
    for _ in range(chunks):
        event = events.get()
        if isinstance(event, RequestFailed):
            raise event.error


def with_weight(merged: tuple[Merged, ...]) -> tuple[Merged, ...]:
    """Return what was merged. Raises ``GeofedError("FRAME_INVALID")`` if no worker has a weight above 0."""
    if any(one.weight <= 0 for one in merged):
        raise GeofedError("FRAME_INVALID", f"no worker has a weight above 0 in step {merged[0].step}")
    return merged
