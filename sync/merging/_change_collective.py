"""ISP, a collective of changes: each worker applies its own change immediately, and shares the significant part of it.

As published (MLLess, 10.1145/3464298.3494884 §3) every worker reads every other's list: W - 1 lists per step. With
chunks, coordinate ranges have owners as in K-REDUCE: an owner adds up the lists of its range once, and all workers read
the union, which has at most as many entries as the vector, however many workers there are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync import framing
from sync.channel import Channel
from sync.codec import Codec, Float32, Tensors
from sync.collective import Merged, Settings, Settled, State
from sync.layout import Vector
from sync.merging._driver import Patience
from sync.merging._exchange import Arrived, Delete, Event, Fetch, Put, Request
from sync.merging._isp_filter import SignificanceFilter, significant
from sync.merging._mean_collective import driver_of
from sync.merging._members import Member
from sync.merging._merge_order import Numbers, OrderedSum
from sync.merging._reduce_exchange import ReduceExchange, weight_of
from sync.merging._reduction_plan import Call, ReductionPlan, plan_of
from sync.merging.lists import AsPublished, ListCodec, Lists

__all__ = ["ChangeCollective"]


class _Ranges:
    """Merges changes by ranges: sums of lists.

    All workers read the union of the lists, so it is filtered as well, by the published rule: an owner holds back sums
    that are not significant relative to its own model. Workers send what is significant at v / P: it is sent to one
    owner only, and what P workers hold back then adds up to no more than what one owner holds back. A worker continues
    with its own change until the owner publishes a sum that contains it.
    """

    def __init__(self, plan: ReductionPlan, held: SignificanceFilter, codec: ListCodec, significance: float) -> None:
        self._plan, self._held, self._codec, self._significance = plan, held, codec, significance
        self.model: Vector = np.zeros(plan.size, np.float32)
        self.step = 0
        self.sent: Vector = np.zeros(plan.size, np.float32)
        """The changes that this worker sends to the owners in this step, shape (n,)."""
        self.unpublished = np.zeros(plan.size)
        """This worker's changes that owners have received and not published, shape (n,)."""
        self.withheld = np.zeros(0 if plan.own is None else plan.bounds[plan.own].stop - plan.bounds[plan.own].start)
        """Sums of changes in the own range that were received and not published."""

    def part(self, chunk: int, values: Vector) -> Tensors:
        part = self._plan.bounds[chunk]
        tensors, self.sent[part] = self._held.send(part, values, self.model[part], self.step, self._codec)
        return tensors

    def own(self, chunk: int, values: Vector) -> Numbers:
        self.part(chunk, values)
        return self.sent[self._plan.bounds[chunk]]

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        return self._codec.decode(tensors, size)

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum:
        return OrderedSum(size, contributors, weighted=False)

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Tensors, Vector, float]:
        sums, weight = fold.sum()
        self.withheld += sums
        whole = self.withheld.astype(np.float32)
        chosen = significant(whole, self.model[self._plan.bounds[chunk]], self._significance, self.step)
        if self._significance == 0:
            # What the encoding rounds away would always be significant, so it waits until a worker sends a change of
            # the coordinate.
            chosen &= sums != 0
        (places,) = np.nonzero(chosen)
        tensors, read = self._codec.encode_entries(whole.size, places, whole[places])
        self.withheld[places] -= read
        values = np.zeros(whole.size, np.float32)
        values[places] = read
        return tensors, values, weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._codec.decode(tensors, size)

    def others(self, published: Vector) -> Vector:
        """Return a published sum without this worker's own changes, which it has applied already; shape (n,)."""
        (own,) = np.nonzero(self.sent != 0)
        self.unpublished[own] += self.sent[own]
        (places,) = np.nonzero(published != 0)
        change = np.zeros(published.size, np.float32)
        change[places] = published[places] - self.unpublished[places]
        self.unpublished[places] = 0.0
        return change

    def settle(self) -> npt.NDArray[np.float64] | None:
        """Return the changes that owners received and that the own range of this worker's model lacks; they count as
        applied then."""
        lacking = None
        if self._plan.own is not None:
            lacking = self.withheld - self.unpublished[self._plan.bounds[self._plan.own]]
        self.withheld[:] = 0.0
        self.unpublished[:] = 0.0
        return lacking


class _Models:
    """Merges models that differ by what each worker has held back.

    An owner adds to its range of its own model what the others have held back; state that gradients do not train is
    averaged.
    """

    def __init__(
        self, plan: ReductionPlan, held: SignificanceFilter, trained: int, extra: npt.NDArray[np.float64] | None
    ) -> None:
        self._plan, self._held, self._trained, self._extra = plan, held, trained, extra
        self._lists, self._dense = Lists("fp32"), Float32()

    def part(self, chunk: int, values: Vector) -> Tensors:
        part, head = self._plan.bounds[chunk], self._head(chunk)
        tensors, _ = self._held.flush(slice(part.start, part.start + head), self._lists)
        return {**tensors, "state": values[head:]}

    def own(self, chunk: int, values: Vector) -> Numbers:
        part, head = self._plan.bounds[chunk], self._head(chunk)
        self._held.drop(slice(part.start, part.start + head))
        whole = values.astype(np.float64)
        if self._extra is not None:
            whole += self._extra
        return whole

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        head = self._head(chunk)
        state = self._dense.decode({"delta": tensors["state"]} if "state" in tensors else {}, size - head)
        rest = {name: array for name, array in tensors.items() if name != "state"}
        return np.concatenate([self._lists.decode(rest, head), state])

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum:
        return OrderedSum(size, contributors, weighted=False)

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Tensors, Vector, float]:
        sums, weight = fold.sum()
        sums[self._head(chunk) :] /= len(self._plan.member.present)
        values = sums.astype(np.float32)
        return self._dense.encode(values), values, weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._dense.decode(tensors, size)

    def _head(self, chunk: int) -> int:
        """Return the number of the chunk's elements that gradients train."""
        part = self._plan.bounds[chunk]
        return min(max(0, self._trained - int(part.start)), int(part.stop - part.start))


class AllToAll:
    """One worker's part in an exchange in which each worker reads every other's list."""

    def __init__(self, plan: ReductionPlan, call: Call, codec: Codec, tensors: Tensors) -> None:
        member = plan.member
        where = call.where(call.step)
        # A list is short, so only the latency of a put counts.
        self._after = None if plan.asked is None else 1.1 * plan.asked.put_seconds
        self._own_key = plan.part_key(where, 0, member.worker)
        self._put = Put({self._own_key: framing.encode(tensors, {"weight": call.weight})})
        others = [worker for worker in member.present if worker != member.worker]
        self._missing = {plan.part_key(where, 0, worker): worker for worker in others}
        self._expired = tuple(plan.part_key(call.where(step), 0, member.worker) for step in call.expired)
        self._fold = OrderedSum(plan.size, others, weighted=False)
        self._step, self._weight, self._codec, self._size = call.step, call.weight, codec, plan.size

    def start(self) -> list[Request]:
        return [self._put, Fetch(tuple(self._missing), self._after)]

    def handle(self, event: Event) -> list[Request]:
        if not isinstance(event, Arrived):
            return []
        frame = framing.decode(event.value)
        values = self._codec.decode(frame.tensors, self._size)
        self._fold.add(self._missing.pop(event.key), values, weight_of(frame))
        # A worker that has put its list of this step has read all those of the step before.
        return [Delete(self._expired)] if self._fold.complete and self._expired else []

    @property
    def done(self) -> bool:
        return self._fold.complete

    @property
    def awaited(self) -> tuple[int, ...]:
        return self._fold.missing

    @property
    def result(self) -> tuple[Merged, ...]:
        sums, weight = self._fold.sum()
        return (Merged(self._step, _read_only(sums.astype(np.float32)), weight + self._weight),)


class ChangeCollective:
    """ISP. Steps are numbered from 1. State that gradients do not train stays with each worker, and is averaged when
    they settle."""

    shares: Literal["changes"] = "changes"

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
        self._member, self._size = member, size
        self._trained = size if settings.trained is None else min(size, settings.trained)
        self._plan = plan_of(member, size, settings, place)
        self._all_to_all = settings.chunks is None
        self._codec: ListCodec = AsPublished() if settings.faithful else Lists(settings.codec)
        by_ranges = not self._all_to_all and not settings.faithful
        of_a_list = settings.significance / (len(member.present) if by_ranges else 1)
        self._held = SignificanceFilter(size, of_a_list)
        # As published, nothing is held back twice.
        self._ranges = _Ranges(self._plan, self._held, self._codec, settings.significance if by_ranges else 0.0)
        self._given: deque[int] = deque()
        """Steps whose lists or merged ranges of this worker are in the channel."""
        self._settled: deque[int] = deque()
        self._driver = driver_of(channel, settings, patience)

    def merge(self, step: int, vector: Vector, weight: float, model: Vector | None = None) -> tuple[Merged, ...]:
        if model is None or not vector.shape == model.shape == (self._size,):
            raise GeofedError(
                "FRAME_INVALID", f"a change of shape {vector.shape} and its model, of {self._size} elements"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise GeofedError("FRAME_INVALID", f"a weight of {weight}")
        if len(self._member.present) == 1:
            return ()
        return self.merged(self._driver.run(self.part(step, vector, weight, model)))

    def part(self, step: int, vector: Vector, weight: float, model: Vector) -> ReduceExchange | AllToAll:
        """Return the part that `merge` executes; `merged` converts its result."""
        change = vector
        if self._trained < self._size:
            change = vector.copy()
            change[self._trained :] = 0.0
        self._given.append(step)
        if self._all_to_all:
            expired = tuple(self._given.popleft() for _ in range(len(self._given) - 1))
            whole = slice(0, self._size)
            tensors, self._ranges.sent = self._held.send(whole, change, model, max(0, step - 1), self._codec)
            return AllToAll(self._plan, Call("g", step, weight, (step,), expired), self._codec, tensors)
        self._ranges.model, self._ranges.step = model, max(0, step - 1)
        expired = tuple(self._given.popleft() for _ in range(len(self._given) - 2))
        return ReduceExchange(self._plan, Call("g", step, weight, (step,), expired), self._ranges, change)

    def merged(self, merged: tuple[Merged, ...]) -> tuple[Merged, ...]:
        """Return the result of `part` without this worker's own changes, which it has applied already."""
        if self._all_to_all:
            return merged
        return tuple(Merged(one.step, _read_only(self._ranges.others(one.vector)), one.weight) for one in merged)

    def settle(self, step: int, model: Vector) -> Settled:
        if model.shape != (self._size,):
            raise GeofedError("FRAME_INVALID", f"a model of shape {model.shape} for {self._size} elements")
        if len(self._member.present) == 1:
            return Settled((), None)
        return Settled((), self._driver.run(self.settling(step, model))[0].vector)

    def settling(self, step: int, model: Vector) -> ReduceExchange:
        """Return the part that `settle` executes."""
        self._settled.append(step)
        expired = tuple(self._settled.popleft() for _ in range(len(self._settled) - 2))
        models = _Models(self._plan, self._held, self._trained, self._ranges.settle())
        return ReduceExchange(self._plan, Call("s", step, 1.0, (step,), expired), models, model)

    def state(self) -> State:
        self._driver.drain()
        tensors: dict[str, npt.NDArray[np.generic]] = {"held": self._held.held}
        if not self._all_to_all:
            tensors |= {"withheld": self._ranges.withheld, "unpublished": self._ranges.unpublished}
        facts = {f"given.{number}": float(step) for number, step in enumerate(self._given)}
        return State(tensors, facts | {f"settled.{n}": float(step) for n, step in enumerate(self._settled)})

    def restore(self, state: State) -> None:
        self._held.held[:] = state.tensors["held"]
        if not self._all_to_all:
            self._ranges.withheld[:] = state.tensors["withheld"]
            self._ranges.unpublished[:] = state.tensors["unpublished"]
        for kind, steps in (("given", self._given), ("settled", self._settled)):
            steps.extend(sorted(int(step) for name, step in state.facts.items() if name.startswith(f"{kind}.")))

    def close(self) -> None:
        self._driver.close()


def _read_only(vector: Vector) -> Vector:
    vector.flags.writeable = False
    return vector
