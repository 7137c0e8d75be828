"""Merging of the gradients of one stage's replicas, during the backward pass."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.collective import Collective, Merged, Settings, State, collective_named
from sync.flat import FlatModel
from sync.layout import Vector
from sync.merging import Buckets, Member, open_collective
from sync.merging.gradients import GradientMerge

__all__ = ["GroupMerge"]


_MIN_CHUNK_ELEMENTS = 1024
"""Smallest chunk of an owner: for a smaller one, a request takes longer than it can save."""


class _JoinedBuckets:
    """The `Buckets` of several consecutive vectors, used as those of one."""

    def __init__(self, starts: Sequence[int], buckets: Sequence[Buckets]) -> None:
        self._each, self._stops = list(zip(starts, buckets, strict=True)), [*starts[1:], None]

    def give(self, start: int, values: Vector) -> None:
        for (begin, buckets), stop in zip(self._each, self._stops, strict=True):
            part = values[max(0, begin - start) : None if stop is None else max(0, stop - start)]
            if part.size:
                buckets.give(max(start, begin) - begin, part)

    def result(self) -> tuple[Merged, ...]:
        """Return the result of each vector, in order."""
        return tuple(one for _, buckets in self._each for one in buckets.result())


class _SplitMeans:
    """Several collectives of means, each for its own coordinates, used as one. `settle` is not supported."""

    def __init__(self, starts: Sequence[int], collectives: Sequence[Any]) -> None:
        self._starts, self._collectives = starts, collectives

    def begin(self, step: int, weight: float) -> _JoinedBuckets:
        return _JoinedBuckets(self._starts, [one.begin(step, weight) for one in self._collectives])

    def merge(self, step: int, vector: Vector, weight: float) -> tuple[Merged, ...]:
        handed = self.begin(step, weight)
        handed.give(0, vector)
        return handed.result()

    def state(self) -> State:
        states = [(f"{at}/", one.state()) for at, one in zip(self._starts, self._collectives, strict=True)]
        return State(
            {at + name: value for at, state in states for name, value in state.tensors.items()},
            {at + name: value for at, state in states for name, value in state.facts.items()},
        )

    def restore(self, state: State) -> None:
        for start, collective in zip(self._starts, self._collectives, strict=True):
            at = f"{start}/"
            tensors = {name.removeprefix(at): one for name, one in state.tensors.items() if name.startswith(at)}
            facts = {name.removeprefix(at): one for name, one in state.facts.items() if name.startswith(at)}
            collective.restore(State(tensors, facts))

    def close(self) -> None:
        for one in self._collectives:
            one.close()


class GroupMerge:
    """One replica's side of the merge. The mean is weighted by the replicas' samples; each group has its own key
    prefix.

    With ``overlap``, gradients are sent as the last backward pass of a step computes them (`GradientMerge`). Without,
    all are sent after the pass, as in FuncPipe.

    The gradients of the first layers are computed at the end of the pass. If they were only one or two chunks of all,
    the owners of these would read them from all other replicas while the other links are idle. So they are a separate
    vector, of which every replica owns an equal part, except on channels whose requests are billed.
    """

    def __init__(
        self, flat: FlatModel, settings: Settings, member: Member, channel: Channel, place: str, *, overlap: bool = True
    ) -> None:
        if collective_named(settings.pattern).shares != "mean" or settings.staleness:
            text = f"the replicas of a stage merge gradients of one step; {settings.pattern} with staleness does not"
            raise GeofedError("CONFIG_INVALID", text)
        self._flat = flat
        self._collective: Collective | None = None
        self._merge: GradientMerge | None = None
        if member.workers > 1:
            last = _comes_last(flat, member.workers) if overlap and _leaves_apart(settings, member.workers) else 0
            whole = flat.layout.gradient_size
            ends = sorted({0, last, whole}) if last else [0, whole]
            each = [
                open_collective(_clipped(settings, start, stop), member, channel, f"{place}/{start}", stop - start)
                for start, stop in itertools.pairwise(ends)
            ]
            collective: Any = each[0] if len(each) == 1 else _SplitMeans(ends[:-1], each)
            self._collective = collective
            self._merge = GradientMerge(flat, collective, overlap=overlap)
        self._weight, self._step = 0.0, 0
        self.exposed_seconds = 0.0
        """Total time spent waiting in `finish`."""

    def arm(self, step: int, weight: float) -> None:
        """Announce that the next backward pass is the last of the step, after all its forward passes. ``weight``:
        samples."""
        self._step, self._weight = step, weight
        if self._merge is not None:
            self._merge.arm(step, weight)

    def finish(self) -> None:
        """Wait for the mean, and write it into the gradients."""
        if self._merge is None:
            return
        begun = time.monotonic()
        for _ in self._merge.merged(self._step, self._weight):
            pass
        self.exposed_seconds += time.monotonic() - begun

    def state(self) -> State:
        """Return the state of the merge between steps, for a checkpoint; empty where nothing is merged."""
        return State() if self._collective is None else self._collective.state()

    def restore(self, state: State) -> None:
        """Continue from the state of a checkpoint."""
        if self._collective is not None:
            self._collective.restore(state)

    def close(self) -> None:
        """Close the collective; no further step can be merged."""
        if self._collective is not None:
            self._collective.close()


def _leaves_apart(settings: Settings, workers: int) -> bool:
    method = collective_named(settings.pattern)
    equal_parts = method.overlapped and not method.takes_k and method.owners(workers, None) == workers
    return equal_parts and settings.asked is None and not settings.faithful


def _clipped(settings: Settings, start: int, stop: int) -> Settings:
    """Return the settings for a range of the coordinates."""
    return replace(settings, trained=None if settings.trained is None else max(0, min(settings.trained, stop) - start))


def _comes_last(flat: FlatModel, degree: int) -> int:
    """Return the number of leading coordinates that the backward pass computes last: those of the first layer, and
    enough further parameters to make a chunk of the whole; 0: too few, or all."""
    trained = [one.numel() for one in flat.module.parameters() if one.requires_grad]
    first = next(iter(flat.module.children()), flat.module)
    least = max(sum(one.numel() for one in first.parameters() if one.requires_grad), flat.layout.size / degree)
    last = next((total for total in itertools.accumulate(trained) if total >= least), 0)
    return last if min(last, flat.layout.size - last) >= degree * _MIN_CHUNK_ELEMENTS else 0
