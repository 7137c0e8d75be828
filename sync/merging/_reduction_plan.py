"""The plan of a reduction: who merges which chunk (chosen in `_members.py`), the keys of values, and when values are
likely to exist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sync.codec import merged_size_factor
from sync.collective import ChannelCosts, Settings, collective_named
from sync.merging._members import Member, chunk_bounds, owners

__all__ = ["Call", "ReductionPlan", "in_parts", "plan_of"]

_ALIGN = 256
"""Chunks begin at multiples of this: of a codec's block, and of a cache line."""
_MIN_CHUNKS_IN_PARTS = 3
"""Fewest chunks for which passing a vector in parts is worth it: one chunk cannot be sent before all of it is complete,
and of two, one worker would have to read most of both."""
_SAFETY_FACTOR = 1.1
"""Requests are made this much later than expected: one that is slightly too early costs a whole pause, one that is
slightly too late costs only that delay."""


@dataclass(frozen=True)
class ReductionPlan:
    """The fixed properties of a reduction."""

    member: Member
    bounds: tuple[slice, ...]
    """The ranges of the chunks."""
    groups: tuple[tuple[int, ...], ...]
    """Worker numbers by group. In each group, the first workers merge one chunk each of the group's vectors, in the
    order of the chunks. Those of the first group own their chunks: they merge the groups' results, which all workers
    read."""
    prefix: str
    """Prefix of all keys."""
    overlapped: bool = True
    """Whether an owner reads the parts of its chunk while it is still uploading its parts of other chunks."""

    asked: ChannelCosts | None = None
    """As in `Settings`."""
    element_bytes: float = 4.0
    """Encoded bytes of an element."""

    @property
    def size(self) -> int:
        return int(self.bounds[-1].stop)

    @property
    def owners(self) -> tuple[int, ...]:
        """The owner of each chunk."""
        return self.groups[0][: len(self.bounds)]

    @property
    def group(self) -> tuple[int, ...]:
        """The group of this worker."""
        return self._group_of(self.member.worker)

    def _group_of(self, worker: int) -> tuple[int, ...]:
        return next(group for group in self.groups if worker in group)

    @property
    def merges(self) -> int | None:
        """The chunk that this worker merges, for its group or for all; None: none."""
        return self._merges(self.member.worker)

    def _merges(self, worker: int) -> int | None:
        position = self._group_of(worker).index(worker)
        return position if position < len(self.bounds) else None

    @property
    def own(self) -> int | None:
        """The chunk that this worker owns, that is merges for all; None: none."""
        return self.merges if self.member.worker in self.owners else None

    def helpers(self, chunk: int) -> tuple[int, ...]:
        """Return the workers that send the owner of a chunk their groups' results."""
        return tuple(group[chunk] for group in self.groups[1:])

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which this worker uploads chunks: starting after its own chunk, so that every owner is sent its
        first part immediately (FuncPipe §4). Workers without a chunk start at different ones."""
        return tuple(sorted(range(len(self.bounds)), key=lambda chunk: self.turn(chunk, self.member.worker)))

    def turn(self, chunk: int, worker: int) -> int:
        """Return the position, from 0, of a chunk in a worker's uploads."""
        own = self._merges(worker)
        return (chunk - (worker if own is None else own + 1)) % len(self.bounds)

    def stored_after(self) -> float | None:
        """Return the seconds until a chunk that another worker begins to put now exists; None if the channel announces
        values."""
        if self.asked is None:
            return None
        return _SAFETY_FACTOR * (self.asked.put_seconds + self.chunk_bytes / self.asked.up_bytes_per_second)

    def merged_after(self) -> float | None:
        """Return the same for a merged chunk, for a worker that merges none and has put all its parts.

        By then the workers that merge have read as many parts as there are chunks, and must read the rest.
        """
        if self.asked is None:
            return None
        parts = len(self.group) - 1
        rest = max(1, parts - len(self.bounds)) if self.overlapped else parts
        return self._read_after(rest) + (self.stored_after() or 0.0) + self._joined_after()

    def _read_after(self, values: int) -> float:
        assert self.asked is not None
        return _SAFETY_FACTOR * (self.asked.get_seconds + values * self.chunk_bytes / self.asked.down_bytes_per_second)

    def _joined_after(self) -> float:
        """Return the seconds from the groups' results of a chunk to their arrival at the owner."""
        others = len(self.groups) - 1
        return (self.stored_after() or 0.0) + self._read_after(others) if others else 0.0

    def owned_after(self) -> float | None:
        """Return the seconds until a chunk is merged for all, after this worker has put its group's result."""
        if self.asked is None:
            return None
        return self._read_after(len(self.groups) - 1) + (self.stored_after() or 0.0)

    def bytes_of(self, chunk: int) -> float:
        return self.element_bytes * int(self.bounds[chunk].stop - self.bounds[chunk].start)

    def given_after(self, ahead_bytes: float) -> float | None:
        """Return the seconds until what workers begin to upload now exists, if so many bytes, including it, are still
        to be uploaded; None if the channel announces values."""
        if self.asked is None:
            return None
        return _SAFETY_FACTOR * (self.asked.put_seconds + ahead_bytes / self.asked.up_bytes_per_second)

    def owner_takes(self, chunk: int) -> float | None:
        """Return the seconds from the existence of all parts of a chunk to that of the merged chunk; None if the
        channel announces values."""
        if self.asked is None:
            return None
        parts = (max(len(group) for group in self.groups) - 1) * self.bytes_of(chunk)
        read = self.asked.get_seconds + parts / self.asked.down_bytes_per_second
        put = self.asked.put_seconds + self.bytes_of(chunk) / self.asked.up_bytes_per_second
        return _SAFETY_FACTOR * (read + put) + self._joined_after()

    @property
    def uploads_at_once(self) -> int | None:
        """Number of concurrent uploads to a channel that does not announce values: as many as keep the link busy while
        others wait for their answers.

        More uploads would overtake each other, and the order in which owners request them. None: all, in one call.
        """
        if self.asked is None or not self.overlapped:
            return None
        busy = self.asked.put_seconds * self.asked.up_bytes_per_second / max(1.0, self.chunk_bytes)
        return max(2, min(self.asked.parallel, 1 + math.ceil(min(busy, 1e6))))

    @property
    def chunk_bytes(self) -> float:
        """Average encoded bytes of a chunk."""
        return self.element_bytes * self.size / len(self.bounds)

    def part_key(self, where: str, chunk: int, worker: int) -> str:
        return f"{self.prefix}/{where}/p/{chunk}.{worker}"

    def joint_key(self, where: str, chunk: int, worker: int) -> str:
        """Return the key of a group's result, put by the worker of the group that merges the chunk."""
        return f"{self.prefix}/{where}/j/{chunk}.{worker}"

    def merged_key(self, where: str, chunk: int) -> str:
        return f"{self.prefix}/{where}/m/{chunk}"


@dataclass(frozen=True)
class Call:
    """One exchange."""

    kind: str
    """A letter that distinguishes the kinds of exchange of a step, in the keys."""
    step: int
    weight: float
    wanted: tuple[int, ...]
    """The steps whose merged vectors this worker applies now; for an owner its own step is one of them."""
    expired: tuple[int, ...] = ()
    """Steps whose merged chunks this owner may delete once all workers have delivered their part of this step."""

    def where(self, step: int) -> str:
        return f"{self.kind}{step}"


def in_parts(settings: Settings, chunks: int) -> bool:
    """Return whether vectors are passed part by part: chunks are sent, and received merged, before the last one is
    complete."""
    return settings.in_parts and chunks >= _MIN_CHUNKS_IN_PARTS


def plan_of(member: Member, size: int, settings: Settings, place: str) -> ReductionPlan:
    """Return the plan for a vector of ``size`` elements; the same for all members. ``place``: prefix of all keys."""
    present = member.present
    method = collective_named(settings.pattern)
    chunks = min(method.owners(len(present), settings.chunks) or len(present), len(present))
    half_first = in_parts(settings, chunks)
    # Small vectors are divided more finely than the alignment, so that there are enough chunks.
    least = _ALIGN * (2 * chunks - 1 if half_first else chunks)
    bounds = chunk_bounds(size, chunks, _ALIGN if size >= least else 1, half_first=half_first)
    groups = _groups(present, len(bounds), settings, str(member.attempt))
    without = "-".join(str(worker) for worker in member.lost)
    place = f"{place}/{member.attempt}" + (f"-without-{without}" if without else "")
    overlapped = method.overlapped and not settings.faithful
    asked = None if settings.faithful else settings.asked
    return ReductionPlan(member, bounds, groups, place, overlapped, asked, 4.0 * merged_size_factor(settings.codec))


def _groups(present: Sequence[int], chunks: int, settings: Settings, salt: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups; in each, the workers that merge a chunk come first, in the order of the chunks."""
    count = max(1, min(settings.groups, len(present) // chunks))
    merging = tuple(present[:chunks]) if settings.faithful else owners(chunks * count, present, salt)
    rest = [worker for worker in present if worker not in merging]
    return tuple((*merging[g * chunks : (g + 1) * chunks], *rest[g::count]) for g in range(count))
