"""Reduction through a channel: chunks are sent to their owners, each owner merges its chunk once, and all workers read
the same merged bytes.

One scheme covers four published ones. With one chunk it is LambdaML's AllReduce, with one chunk per worker its
ScatterReduce (arXiv 2105.07806 §4.3). If the upload of further chunks overlaps the download of others' parts of the own
chunk, it is FuncPipe's pipelined scatter-reduce (10.1145/3570607 §4). With K chunks for W workers it is FasDL's
K-REDUCE (10.1109/TC.2024.3485202). geofed's is K-REDUCE in groups: in each of G groups, workers merge the chunks of the
group, and owners merge the groups' results. It makes the same requests, and an owner reads less: (2 K + G - 3) / K of a
vector, instead of (W + K - 2) / K, similar to the recursive halving of Rabenseifner (2004).

An owner deletes the parts it has merged once the merged chunk is stored, and its own merged chunks of steps that all
workers have finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync import framing
from sync.channel import RangedValue
from sync.collective import Merged
from sync.framing import Arrays
from sync.layout import Vector
from sync.merging._arithmetic import Arithmetic, Values
from sync.merging._exchange import Arrived, Delete, Event, Fetch, Given, Put, Request, ValuesStored
from sync.merging._merge_order import Numbers, OrderedSum
from sync.merging._parted import PartedVector, RangedVector
from sync.merging._reduction_plan import Call, ReductionPlan

__all__ = ["Pull", "ReduceExchange"]


class Pull:
    """Reads the merged chunks of some steps."""

    def __init__(
        self,
        plan: ReductionPlan,
        call: Call,
        arithmetic: Arithmetic,
        into: dict[int, PartedVector] | None = None,
        merged: Vector | None = None,
    ) -> None:
        """``into``: where each merged chunk of the only step is written; may be filled later, but before the chunk can
        arrive. ``merged``: the vector of these chunks, for the result. None: a new vector for each step."""
        self._into, self._merged = into, np.empty(0, np.float32) if merged is None else merged
        self._arithmetic, self._bounds, self._owners = arithmetic, plan.bounds, plan.owners
        self._after = plan.merged_after() if plan.merges is None else plan.stored_after()
        if plan.merges is not None and plan.own is None:
            self._after = (plan.stored_after() or 0.0) + (plan.owned_after() or 0.0)
        # The chunks appear together, but not faster than the link carries them.
        self._gap = 0.0 if plan.asked is None else plan.chunk_bytes / plan.asked.down_bytes_per_second
        self._vectors: dict[int, Vector] = {}
        self._size = plan.size
        self._weights: dict[int, list[float]] = {step: [] for step in call.wanted}
        self._missing: dict[str, tuple[int, int]] = {}
        for step in call.wanted:
            for chunk in plan.order:
                self._missing[plan.merged_key(call.where(step), chunk)] = (step, chunk)

    def start(self) -> list[Request]:
        return [Fetch(tuple(self._missing), self._after, self._gap)] if self._missing else []

    def all_but(self, key: str) -> list[Request]:
        """Request all but one as they arrive, from a channel that announces values."""
        keys = tuple(missing for missing in self._missing if missing != key)
        return [Fetch(keys)] if keys else []

    def one(self, key: str, after_seconds: float | None) -> list[Request]:
        """Request one of them, which will not exist before that."""
        return [Fetch((key,), after_seconds, asked_at_once=False)] if key in self._missing else []

    def handle(self, event: Event) -> list[Request]:
        if isinstance(event, Arrived) and event.key in self._missing:
            chunk = self._missing[event.key][1]
            assert isinstance(event.value, memoryview)
            frame = framing.decode(event.value)
            size = self._bounds[chunk].stop - self._bounds[chunk].start
            self.place(event.key, self._arithmetic.read_merged(chunk, frame.tensors, size), weight_of(frame))
        return []

    def place(self, key: str, values: Values, weight: float) -> None:
        """Store a merged chunk in the result."""
        step, chunk = self._missing.pop(key)
        if isinstance(values, PartedVector):
            # It was merged in place.
            assert self._into is not None
        elif self._into is not None:
            self._into[chunk][:] = values
        elif len(self._bounds) == 1:
            # The chunk is the whole vector; a view avoids a copy.
            self._vectors[step] = values[:]
        else:
            # Allocated when the first chunk arrives: each page is then touched once, when it is written.
            if step not in self._vectors:
                self._vectors[step] = np.empty(self._size, np.float32)
            self._vectors[step][self._bounds[chunk]] = values
        self._weights[step].append(weight)

    @property
    def done(self) -> bool:
        return not self._missing

    @property
    def awaited(self) -> tuple[int, ...]:
        return tuple(sorted({self._owners[chunk] for _, chunk in self._missing.values()}))

    @property
    def result(self) -> tuple[Merged, ...]:
        merged = []
        for step in self._weights:
            vector = self._vectors[step] if self._into is None else self._merged.view()
            vector.flags.writeable = False
            merged.append(Merged(step, vector, min(self._weights[step])))
        return tuple(merged)


class ReduceExchange:
    """One worker's part in one exchange."""

    def __init__(
        self,
        plan: ReductionPlan,
        call: Call,
        arithmetic: Arithmetic,
        vector: Values | None,
        *,
        whole: bool = True,
        joint: Callable[[int, OrderedSum], tuple[Arrays, float]] | None = None,
        verbatim: bool = False,
    ) -> None:
        """``vector``: None, or a `PartedVector`: merged in place, and the exchange must be of one step; None: `Given`
        has the values of each chunk. ``whole``: all of it is available; otherwise `Given` reports each chunk. ``joint``
        encodes a group's result of a chunk, and returns the sum of its weights; needed if there are several groups.
        ``verbatim``: parts are float32 as they are, so that some may be read in ranges."""
        self._joint_of = joint
        self._plan, self._call, self._arithmetic, self._vector = plan, call, arithmetic, vector
        self._whole, self._verbatim = whole, verbatim
        self._awaited = 0 if whole else len(plan.bounds)
        """Number of chunks that the caller has not passed yet."""
        self._where = call.where(call.step)
        into: dict[int, PartedVector] | None = None if isinstance(vector, np.ndarray) else {}
        merged: Vector | None = None
        if isinstance(vector, PartedVector):
            into = {chunk: vector.range(part) for chunk, part in enumerate(plan.bounds)}
            merged = vector.parts[0] if len(vector.parts) == 1 else None
        self._in_place = into
        self._pull = Pull(plan, call, arithmetic, into, merged)
        self._own, self._owns = plan.merges, plan.own is not None
        me, group = plan.member.worker, plan.group
        self._uploads = {plan.part_key(self._where, chunk, me): chunk for chunk in plan.order if chunk != self._own}
        self._unstored = set(self._uploads)
        self._sources = {} if into is None else {plan.merged_key(self._where, c): k for k, c in self._uploads.items()}
        """Keys of the parts whose memory a merged chunk is written to, by the merged chunk's key."""
        self._early: list[Arrived] = []
        """Merged chunks that arrived before this worker knew that its part is stored, which is read until then."""
        self._ahead_bytes = 0.0
        """Bytes of chunks that were passed one by one and are not stored yet."""
        self._parts: dict[str, int] = {}
        self._joint: dict[str, int] = {}
        """Keys of the other groups' results of the chunk that this worker owns."""
        if self._own is not None:
            helpers = plan.helpers(self._own) if self._owns else ()
            self._fold = arithmetic.fold(self._own, self._length(self._own), (*group, *helpers))
            # Begin with the workers that upload this chunk first.
            givers = sorted((plan.turn(self._own, worker), worker) for worker in group if worker != me)
            self._parts = {plan.part_key(self._where, self._own, worker): worker for _, worker in givers}
            self._joint = {plan.joint_key(self._where, self._own, worker): worker for worker in helpers}
        self._merged_key = plan.merged_key(self._where, self._own or 0)
        if self._own is not None and not self._owns:
            self._merged_key = plan.joint_key(self._where, self._own, me)
        self._collecting = self._joining = self._pulling = self._merging = False
        self._merged_stored = self._own is None

    def start(self) -> list[Request]:
        stale = self._call.step not in self._call.wanted
        if not self._whole:
            return self._start_in_parts(stale)
        requests: list[Request] = []
        # One request for all, so that the channel may send them together.
        values = {key: self._part(chunk) for key, chunk in self._uploads.items()}
        if values:
            requests.append(Put(values))
        if self._own is not None:
            self._fold.add(self._plan.member.worker, self._own_values(self._own), self._call.weight)
            if self._plan.overlapped or not self._unstored:
                requests += self._fetch_parts()
            requests += self._fetch_joint()
        if stale:
            # It exists by now, or nearly.
            requests += self._fetch_merged()
        return requests + self._merge_if_complete()

    def _start_in_parts(self, stale: bool) -> list[Request]:
        """Return the first requests while this worker has no chunk yet; values of other workers are read as they
        arrive."""
        if stale:
            return self._fetch_merged()
        if not self._streams or self._plan.asked is not None:
            return []
        return [*self._fetch_parts(), *self._fetch_joint(), *self._pull.all_but(self._merged_key if self._owns else "")]

    @property
    def _streams(self) -> bool:
        """Whether each chunk is sent separately, while others are still being computed."""
        return not self._whole and self._plan.overlapped

    def handle(self, event: Event) -> list[Request]:
        if isinstance(event, Given):
            if event.values is not None:
                assert self._in_place is not None
                self._in_place[event.chunk] = event.values
            return self._given(event.chunk)
        if isinstance(event, ValuesStored):
            return self._stored(event.keys)
        if isinstance(event, Arrived) and event.key in (self._parts.keys() | self._joint.keys()):
            assert self._own is not None
            worker = self._parts[event.key] if event.key in self._parts else self._joint[event.key]
            self._fold.add(worker, *self._part_of(event.value, self._own))
            return [*self._fetch_joint(), *self._merge_if_complete()]
        if isinstance(event, Arrived) and self._sources.get(event.key) in self._unstored:
            self._early.append(event)
            return []
        return self._pull.handle(event)

    @property
    def done(self) -> bool:
        # A stale worker's uploads may continue during its next step; but no worker can read a merged chunk before it is
        # stored.
        return self._pull.done and self._merged_stored and not self._awaited

    @property
    def awaited(self) -> tuple[int, ...]:
        return self._pull.awaited if self._own is None or self._fold.complete else self._fold.missing

    @property
    def result(self) -> tuple[Merged, ...]:
        return self._pull.result

    def _length(self, chunk: int) -> int:
        return int(self._plan.bounds[chunk].stop - self._plan.bounds[chunk].start)

    def _values(self, chunk: int) -> Values:
        if self._in_place is not None:
            return self._in_place[chunk]
        assert isinstance(self._vector, np.ndarray)
        return self._vector[self._plan.bounds[chunk]]

    def _part(self, chunk: int) -> Sequence[memoryview]:
        return _framed(self._arithmetic.part(chunk, self._values(chunk)), self._call.weight)

    def _own_values(self, chunk: int) -> Numbers:
        return self._arithmetic.own(chunk, self._values(chunk))

    def _given(self, chunk: int) -> list[Request]:
        self._awaited -= 1
        if chunk != self._own:
            key = self._plan.part_key(self._where, chunk, self._plan.member.worker)
            self._ahead_bytes += self._plan.bytes_of(chunk)
            return [Put({key: self._part(chunk)})]
        self._fold.add(self._plan.member.worker, self._own_values(chunk), self._call.weight)
        requests = self._fetch_parts() if self._streams or not self._unstored else []
        return [*requests, *self._fetch_joint(), *self._merge_if_complete()]

    def _stored(self, keys: Sequence[str]) -> list[Request]:
        requests: list[Request] = []
        if self._own is not None and self._merged_key in keys:
            self._merged_stored = True
            expired = tuple(self._plan.merged_key(self._call.where(step), self._own) for step in self._call.expired)
            requests.append(Delete((*self._parts, *self._joint, *expired)))
            if not self._owns and self._streams and self._plan.asked is not None:
                own = self._plan.merged_key(self._where, self._own)
                requests += self._pull.one(own, self._plan.owned_after())
        stored = [self._uploads[key] for key in keys if key in self._unstored]
        self._unstored.difference_update(keys)
        early, self._early = self._early, []
        for event in early:
            requests += self.handle(event)
        if self._streams:
            for chunk in stored:
                self._ahead_bytes -= self._plan.bytes_of(chunk)
                if self._plan.asked is not None:
                    # Every other worker's part of it is stored too, or nearly.
                    merged = self._plan.merged_key(self._where, chunk)
                    requests += self._pull.one(merged, self._plan.owner_takes(chunk))
            return requests
        if self._unstored or not stored:
            return requests
        if self._own is not None:
            return requests if self._plan.overlapped else [*requests, *self._fetch_parts()]
        # Before its own parts are stored nothing can be merged, and requests for it would only cost money.
        return [*requests, *self._fetch_merged()]

    def _part_of(self, value: memoryview | RangedValue, chunk: int) -> tuple[Numbers, float]:
        """Return the values of a part, and its weight."""
        size = self._length(chunk)
        if not isinstance(value, memoryview):
            part = RangedVector(value, "delta", size)
            return part, weight_of(part)
        frame = framing.decode(value)
        return self._arithmetic.read_part(chunk, frame.tensors, size), weight_of(frame)

    def _fetch_parts(self) -> list[Request]:
        if not self._parts or self._collecting:
            return []
        self._collecting = True
        after, gap, asked = self._plan.stored_after(), 0.0, self._plan.asked
        if asked is not None and self._streams:
            # The other workers have passed this chunk at about the same time, and had as much to upload before it.
            assert self._own is not None
            after = self._plan.given_after(self._ahead_bytes + self._plan.bytes_of(self._own))
            return [Fetch(tuple(self._parts), after, asked_at_once=False)]
        if asked is not None and self._plan.overlapped:
            # When the last part arrives, all workers have uploaded all their chunks.
            gap = self._plan.chunk_bytes * len(self._plan.bounds) / len(self._parts) / asked.up_bytes_per_second
        elif asked is not None:
            # The other workers have put theirs while this worker did.
            after = 0.0
        return [Fetch(tuple(self._parts), after, gap, whole=self._most_whole())]

    def _most_whole(self) -> int | None:
        """Return how many parts are received as a whole, None: all. Together they take no more memory than a vector.

        On a link that is as fast in both directions, no more arrive while the other workers upload theirs. The rest is
        read in ranges once all are there, and added together: sums in float64 would take more memory than they.
        """
        assert self._own is not None
        most = self._plan.size // max(1, self._length(self._own))
        if not self._verbatim or len(self._parts) <= most:
            return None
        self._fold.at_once = math.inf
        return most

    def _fetch_joint(self) -> list[Request]:
        """Request the other groups' results, which exist at about the time when this worker has its own group's
        parts."""
        announced = self._plan.asked is None
        if not self._joint or self._joining or not (announced or set(self._fold.missing) <= set(self._joint.values())):
            return []
        self._joining = True
        return [Fetch(tuple(self._joint), self._plan.stored_after())]

    def _fetch_merged(self) -> list[Request]:
        if self._pulling:
            return []
        self._pulling = True
        return self._pull.start()

    def _merge_if_complete(self) -> list[Request]:
        if self._own is None or self._merging or not self._fold.complete:
            return []
        self._merging = True
        if self._owns:
            if self._in_place is not None:
                self._fold.into = self._in_place[self._own]
            tensors, values, weight = self._arithmetic.merged(self._own, self._fold)
            self._pull.place(self._merged_key, values, weight)
        else:
            assert self._joint_of is not None
            tensors, weight = self._joint_of(self._own, self._fold)
        pulled = [] if self._streams else self._fetch_merged()
        return [Put({self._merged_key: _framed(tensors, weight)}), *pulled]


def _framed(tensors: Arrays, weight: float) -> Sequence[memoryview]:
    return framing.encode(tensors, {"weight": weight})


def weight_of(frame: framing.Frame | RangedVector) -> float:
    if "weight" not in frame.facts:
        raise GeofedError("FRAME_INVALID", "a part has no weight")
    return frame.facts["weight"]
