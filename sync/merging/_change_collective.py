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
from sync.collective import Merged, Model, Settings, Settled, State
from sync.framing import Arrays
from sync.layout import Vector
from sync.merging._arithmetic import Values
from sync.merging._driver import Patience
from sync.merging._exchange import Arrived, Delete, Event, Fetch, Put, Request
from sync.merging._isp_filter import SignificanceFilter, blocks, send_chosen, significant
from sync.merging._mean_collective import driver_of
from sync.merging._members import Member
from sync.merging._merge_order import Numbers, OrderedSum
from sync.merging._parted import PartedVector
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
        self.model: Values = np.zeros(0, np.float32)
        self.step = 0
        self.unpublished = np.zeros(plan.size)
        """This worker's changes that owners have received and not published, shape (n,)."""
        self.withheld = np.zeros(0 if plan.own is None else plan.bounds[plan.own].stop - plan.bounds[plan.own].start)
        """Sums of changes in the own range that were received and not published."""

    def part(self, chunk: int, values: PartedVector) -> Arrays:
        return self._send(chunk, values)[0]

    def own(self, chunk: int, values: PartedVector) -> Numbers:
        return self._send(chunk, values)[1]

    def _send(self, chunk: int, values: PartedVector) -> tuple[Arrays, Vector]:
        """Return the entries of a change that are sent to the owner, encoded, and as the owner reads them."""
        part, sent = self._plan.bounds[chunk], np.empty(values.size, np.float32)
        (change,) = values.parts
        tensors = self._held.send(part, change, self.model[part], self.step, self._codec, out=sent)
        unpublished = self.unpublished[part]
        for block in blocks(sent.size):
            (here,) = np.nonzero(sent[block] != 0)
            unpublished[block][here] += sent[block][here]
        return tensors, sent

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        return self._codec.decode(tensors, size)

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum:
        return OrderedSum(size, contributors, weighted=False)

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Arrays, Values, float]:
        start, size = self._plan.bounds[chunk].start, self.withheld.size
        chosen, values, count = np.empty(size, np.bool_), np.empty(size, np.float32), 0
        for block, sums in fold.block_sums():
            withheld, model = self.withheld[block], self.model[start + block.start : start + block.stop]
            withheld += sums
            whole = withheld.astype(np.float32)
            chosen[block] = significant(whole, model, self._significance, self.step)
            if self._significance == 0:
                # What the encoding rounds away would always be significant, so it waits until a worker sends a change
                # of the coordinate.
                chosen[block] &= sums != 0
            some = whole[chosen[block]]
            values[count : count + some.size] = some
            count += some.size
        assert fold.into is not None
        (published,) = fold.into.parts
        tensors = send_chosen(self.withheld, chosen, values, count, self._codec, published)
        return tensors, fold.into, fold.weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._codec.decode(tensors, size)

    def leave_others(self, published: Vector) -> None:
        """Leave of a published sum, shape (n,), what is not this worker's own changes: it has applied these already."""
        for block in blocks(published.size):
            sums, own = published[block], self.unpublished[block]
            (here,) = np.nonzero(sums != 0)
            others = sums[here] - own[here]
            sums[...] = 0.0
            sums[here] = others
            own[here] = 0.0

    def settle(self) -> npt.NDArray[np.float64] | None:
        """Return the changes that owners received and that the own range of this worker's model lacks; they count as
        applied then."""
        lacking = None
        if self._plan.own is not None:
            lacking, self.withheld = self.withheld, np.zeros(self.withheld.size)
            lacking -= self.unpublished[self._plan.bounds[self._plan.own]]
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

    def part(self, chunk: int, values: PartedVector) -> Arrays:
        part, head = self._plan.bounds[chunk], self._head(chunk)
        tensors = self._held.flush(slice(part.start, part.start + head), self._lists)
        return {**tensors, "state": values[head : values.size]}

    def own(self, chunk: int, values: PartedVector) -> Numbers:
        part, head = self._plan.bounds[chunk], self._head(chunk)
        self._held.drop(slice(part.start, part.start + head))
        if self._extra is None:
            return values
        self._extra += values[:]
        return self._extra

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        head = self._head(chunk)
        state = self._dense.decode({"delta": tensors["state"]} if "state" in tensors else {}, size - head)
        rest = {name: array for name, array in tensors.items() if name != "state"}
        values = self._lists.decode(rest, head)
        return np.concatenate([values, state]) if state.size else values

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum:
        return OrderedSum(size, contributors, weighted=False)

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Arrays, Values, float]:
        head, values = self._head(chunk), fold.into
        assert values is not None
        for block, sums in fold.block_sums():
            sums[max(0, head - block.start) :] /= len(self._plan.member.present)
            values[block] = sums
        return {"delta": values.parts}, values, fold.weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._dense.decode(tensors, size)

    def _head(self, chunk: int) -> int:
        """Return the number of the chunk's elements that gradients train."""
        part = self._plan.bounds[chunk]
        return min(max(0, self._trained - int(part.start)), int(part.stop - part.start))


class AllToAll:
    """One worker's part in an exchange in which each worker reads every other's list."""

    def __init__(self, plan: ReductionPlan, call: Call, codec: Codec, tensors: Arrays, out: Vector) -> None:
        """``tensors``: the encoded list. ``out``: where the sum of the others' lists is written, shape (n,), once the
        list is stored, which may be in the same memory."""
        member = plan.member
        where = call.where(call.step)
        # A list is short, so only the latency of a put counts.
        self._after = None if plan.asked is None else 1.1 * plan.asked.put_seconds
        self._own_key = plan.part_key(where, 0, member.worker)
        self._puts: list[Request] = [Put({self._own_key: framing.encode(tensors, {"weight": call.weight})})]
        others = [worker for worker in member.present if worker != member.worker]
        self._missing = {plan.part_key(where, 0, worker): worker for worker in others}
        self._expired = tuple(plan.part_key(call.where(step), 0, member.worker) for step in call.expired)
        self._fold = OrderedSum(plan.size, others, weighted=False)
        self._step, self._weight, self._codec, self._size = call.step, call.weight, codec, plan.size
        self._out, self._stored = out, False

    def start(self) -> list[Request]:
        # Not kept: once it is stored, the list needs no memory here.
        puts, self._puts = self._puts, []
        return [*puts, Fetch(tuple(self._missing), self._after)]

    def handle(self, event: Event) -> list[Request]:
        if not isinstance(event, Arrived):
            self._stored = True
            return []
        assert isinstance(event.value, memoryview)
        frame = framing.decode(event.value)
        values = self._codec.decode(frame.tensors, self._size)
        self._fold.add(self._missing.pop(event.key), values, weight_of(frame))
        # A worker that has put its list of this step has read all those of the step before.
        return [Delete(self._expired)] if self._fold.complete and self._expired else []

    @property
    def done(self) -> bool:
        return self._fold.complete and self._stored

    @property
    def awaited(self) -> tuple[int, ...]:
        return self._fold.missing

    @property
    def result(self) -> tuple[Merged, ...]:
        weight = self._fold.rounded_sum(self._out)
        return (Merged(self._step, _read_only(self._out), weight + self._weight),)


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
        self._codec: ListCodec = AsPublished() if settings.faithful else Lists(settings.codec)
        all_to_all = settings.chunks is None
        by_ranges = not all_to_all and not settings.faithful
        of_a_list = settings.significance / (len(member.present) if by_ranges else 1)
        self._held = SignificanceFilter(size, of_a_list)
        # As published, nothing is held back twice.
        again = settings.significance if by_ranges else 0.0
        self._ranges = None if all_to_all else _Ranges(self._plan, self._held, self._codec, again)
        self._given: deque[int] = deque()
        """Steps whose lists or merged ranges of this worker are in the channel."""
        self._settled: deque[int] = deque()
        self._driver = driver_of(channel, settings, patience)

    def merge(self, step: int, vector: Vector, weight: float, model: Model | None = None) -> tuple[Merged, ...]:
        held = PartedVector([] if model is None else model if isinstance(model, list) else [model])
        if model is None or not vector.shape == held.shape == (self._size,):
            raise GeofedError(
                "FRAME_INVALID", f"a change of shape {vector.shape} and its model, of {self._size} elements"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise GeofedError("FRAME_INVALID", f"a weight of {weight}")
        if len(self._member.present) == 1:
            return ()
        return self.merged(self._driver.run(self.part(step, vector, weight, held)))

    def part(self, step: int, vector: Vector, weight: float, model: Values) -> ReduceExchange | AllToAll:
        """Return the part that `merge` executes; `merged` converts its result, which is in the memory of ``vector``."""
        vector[self._trained :] = 0.0
        self._given.append(step)
        if self._ranges is None:
            expired = tuple(self._given.popleft() for _ in range(len(self._given) - 1))
            whole = slice(0, self._size)
            tensors = self._held.send(whole, vector, model, max(0, step - 1), self._codec)
            return AllToAll(self._plan, Call("g", step, weight, (step,), expired), self._codec, tensors, vector)
        self._ranges.model, self._ranges.step = model, max(0, step - 1)
        expired = tuple(self._given.popleft() for _ in range(len(self._given) - 2))
        call = Call("g", step, weight, (step,), expired)
        return ReduceExchange(self._plan, call, self._ranges, PartedVector([vector]))

    def merged(self, merged: tuple[Merged, ...]) -> tuple[Merged, ...]:
        """Return the result of `part` without this worker's own changes, which it has applied already."""
        if self._ranges is None:
            return merged
        for one in merged:
            one.vector.flags.writeable = True
            self._ranges.leave_others(one.vector)
            one.vector.flags.writeable = False
        return merged

    def settle(self, step: int, model: Vector | None) -> Settled:
        if model is None or model.shape != (self._size,):
            raise GeofedError("FRAME_INVALID", f"no model of {self._size} elements")
        if len(self._member.present) == 1:
            return Settled((), None)
        return Settled((), self._driver.run(self.settling(step, model))[0].vector)

    def settling(self, step: int, model: Vector) -> ReduceExchange:
        """Return the part that `settle` executes; its result is in the memory of ``model``."""
        self._settled.append(step)
        expired = tuple(self._settled.popleft() for _ in range(len(self._settled) - 2))
        extra = None if self._ranges is None else self._ranges.settle()
        models = _Models(self._plan, self._held, self._trained, extra)
        return ReduceExchange(self._plan, Call("s", step, 1.0, (step,), expired), models, PartedVector([model]))

    def state(self) -> State:
        self._driver.drain()
        tensors: dict[str, npt.NDArray[np.generic]] = {"held": self._held.held}
        if self._ranges is not None:
            tensors |= {"withheld": self._ranges.withheld, "unpublished": self._ranges.unpublished}
        facts = {f"given.{number}": float(step) for number, step in enumerate(self._given)}
        return State(tensors, facts | {f"settled.{n}": float(step) for n, step in enumerate(self._settled)})

    def restore(self, state: State) -> None:
        self._held.held[:] = state.tensors["held"]
        if self._ranges is not None:
            self._ranges.withheld[:] = state.tensors["withheld"]
            self._ranges.unpublished[:] = state.tensors["unpublished"]
        for kind, steps in (("given", self._given), ("settled", self._settled)):
            steps.extend(sorted(int(step) for name, step in state.facts.items() if name.startswith(f"{kind}.")))

    def close(self) -> None:
        self._driver.close()


def _read_only(vector: Vector) -> Vector:
    view = vector.view()
    view.flags.writeable = False
    return view
