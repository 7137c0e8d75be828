"""Who merges what in a reduction, under which keys, and when it can be there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sync.collective._members import Member
from sync.collective._model import ChannelCosts

__all__ = ["Call", "Plan"]

_LATER = 1.1
"""A look that comes a moment too early costs a pause, one that comes a moment late only that moment."""


@dataclass(frozen=True)
class Plan:
    """What stays the same from exchange to exchange."""

    member: Member
    bounds: tuple[slice, ...]
    """The chunks."""
    groups: tuple[tuple[int, ...], ...]
    """Workers, by number. Of each group the first ones merge a chunk each, in the order of the chunks, of what the
    group gives; those of the first group own their chunks: they merge what the groups have, and all read that."""
    place: str
    """What all keys begin with."""
    overlapped: bool = True
    """Whether an owner reads others' parts of its chunk while it still uploads its own of theirs."""

    asked: ChannelCosts | None = None
    """As in `Settings`."""
    element_bytes: float = 4.0
    """As it travels."""

    @property
    def size(self) -> int:
        return int(self.bounds[-1].stop)

    @property
    def owners(self) -> tuple[int, ...]:
        """Whose merged chunk all read, by chunk."""
        return self.groups[0][: len(self.bounds)]

    @property
    def group(self) -> tuple[int, ...]:
        """Of this worker."""
        return self._group_of(self.member.worker)

    def _group_of(self, worker: int) -> tuple[int, ...]:
        return next(group for group in self.groups if worker in group)

    @property
    def merges(self) -> int | None:
        """The chunk that this worker merges, for its group or for all."""
        return self._merges(self.member.worker)

    def _merges(self, worker: int) -> int | None:
        place = self._group_of(worker).index(worker)
        return place if place < len(self.bounds) else None

    @property
    def own(self) -> int | None:
        """The chunk that this worker merges for all."""
        return self.merges if self.member.worker in self.owners else None

    def helpers(self, chunk: int) -> tuple[int, ...]:
        """Who gives the owner of a chunk what another group has of it."""
        return tuple(group[chunk] for group in self.groups[1:])

    @property
    def order(self) -> tuple[int, ...]:
        """The chunks in the order in which this worker uploads them: from the one after its own on, so that every
        owner is sent its first part at once (FuncPipe §4). Workers without a chunk begin at different ones."""
        return tuple(sorted(range(len(self.bounds)), key=lambda chunk: self.turn(chunk, self.member.worker)))

    def turn(self, chunk: int, worker: int) -> int:
        """As which of its chunks, from 0, a worker uploads this one."""
        own = self._merges(worker)
        return (chunk - (worker if own is None else own + 1)) % len(self.bounds)

    def stored_after(self) -> float | None:
        """Seconds until a chunk that another worker begins to put now is there, of a channel that has to be asked."""
        if self.asked is None:
            return None
        return _LATER * (self.asked.put_seconds + self.chunk_bytes / self.asked.up_bytes_per_second)

    def merged_after(self) -> float | None:
        """The same of a merged chunk, by a worker that merges none and has put its parts of all.

        Those who merge have read meanwhile as many parts as there are chunks, and have the rest to read.
        """
        if self.asked is None:
            return None
        parts = len(self.group) - 1
        rest = max(1, parts - len(self.bounds)) if self.overlapped else parts
        return self._read_after(rest) + (self.stored_after() or 0.0) + self._joined_after()

    def _read_after(self, values: int) -> float:
        assert self.asked is not None
        return _LATER * (self.asked.get_seconds + values * self.chunk_bytes / self.asked.down_bytes_per_second)

    def _joined_after(self) -> float:
        """From when the groups have merged a chunk until its owner has what they have."""
        others = len(self.groups) - 1
        return (self.stored_after() or 0.0) + self._read_after(others) if others else 0.0

    def owned_after(self) -> float | None:
        """Seconds until a chunk is merged for all, of which this worker has put what its group has."""
        if self.asked is None:
            return None
        return self._read_after(len(self.groups) - 1) + (self.stored_after() or 0.0)

    def bytes_of(self, chunk: int) -> float:
        return self.element_bytes * int(self.bounds[chunk].stop - self.bounds[chunk].start)

    def given_after(self, ahead_bytes: float) -> float | None:
        """Seconds until what workers begin to upload now is there, with so many bytes, its own among them, to go; of a
        channel that has to be asked."""
        if self.asked is None:
            return None
        return _LATER * (self.asked.put_seconds + ahead_bytes / self.asked.up_bytes_per_second)

    def owner_takes(self, chunk: int) -> float | None:
        """Seconds from when all parts of a chunk are there until it is there merged; of a channel that has to be
        asked."""
        if self.asked is None:
            return None
        parts = (max(len(group) for group in self.groups) - 1) * self.bytes_of(chunk)
        read = self.asked.get_seconds + parts / self.asked.down_bytes_per_second
        put = self.asked.put_seconds + self.bytes_of(chunk) / self.asked.up_bytes_per_second
        return _LATER * (read + put) + self._joined_after()

    @property
    def uploads_at_once(self) -> int | None:
        """Of a channel that has to be asked: as many as keep the link busy while others wait for their answers.

        More would only overtake each other, and the order in which owners look for them. None: all, in one call.
        """
        if self.asked is None or not self.overlapped:
            return None
        busy = self.asked.put_seconds * self.asked.up_bytes_per_second / max(1.0, self.chunk_bytes)
        return max(2, min(self.asked.parallel, 1 + math.ceil(min(busy, 1e6))))

    @property
    def chunk_bytes(self) -> float:
        """On average."""
        return self.element_bytes * self.size / len(self.bounds)

    def part_key(self, where: str, chunk: int, worker: int) -> str:
        return f"{self.place}/{where}/p/{chunk}.{worker}"

    def joint_key(self, where: str, chunk: int, worker: int) -> str:
        """Of what a group has, by the one of it who merges the chunk."""
        return f"{self.place}/{where}/j/{chunk}.{worker}"

    def merged_key(self, where: str, chunk: int) -> str:
        return f"{self.place}/{where}/m/{chunk}"


@dataclass(frozen=True)
class Call:
    """One exchange."""

    kind: str
    """Keeps kinds of exchange in one step apart: a letter."""
    step: int
    weight: float
    wanted: tuple[int, ...]
    """The steps whose merged vectors this worker takes up now; of an owner its own step is among them."""
    expired: tuple[int, ...] = ()
    """Steps whose merged chunks this owner may delete once all have given their part of this one."""

    def where(self, step: int) -> str:
        return f"{self.kind}{step}"
