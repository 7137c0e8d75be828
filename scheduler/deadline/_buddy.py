"""The location of shares: aligned blocks of powers of two, moved together so that free devices are never fragmented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BuddyPlacement:
    """The answer to a request for devices."""

    begin: int
    """First device; the block is aligned to its size."""
    moved: tuple[str, ...]
    """Jobs that had to move to make room, once each."""


class Buddy:
    """Devices of one region, numbered so that neighbours are near, and the aligned blocks that jobs have.

    As long as all shares are powers of two and fit a tree of ``devices`` leaves (cut into powers of two where it is not
    one itself), any request of at most what is free can be placed after moving others: the buddy system of
    ElasticFlow (ASPLOS'23, §4.3). Deciding shares then only needs to count devices.

    Raises ``ValueError`` for sizes that are no power of two, names that have a block, and requests that exceed what is
    free or the largest aligned block.
    """

    def __init__(self, devices: int, blocks: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.devices = devices
        self.blocks: dict[str, tuple[int, int]] = dict(blocks or {})
        """Blocks by job: (first device, size)."""
        self.fixed: set[str] = set()
        """Blocks that never move, such as those of broken nodes; with them some requests may have no room."""

    @property
    def free(self) -> int:
        """Number of devices that belong to no block."""
        return self.devices - sum(size for _, size in self.blocks.values())

    def release(self, job: str) -> None:
        """Free the block of a job. Raises ``KeyError`` where it has none."""
        del self.blocks[job]

    def place(self, job: str, size: int) -> BuddyPlacement:
        """Give a job an aligned block, moving others where it must be."""
        if size < 1 or size & (size - 1) or job in self.blocks:
            raise ValueError(f"no block of {size} for {job}")
        if size > self.free or size > self.devices:
            raise ValueError(f"{size} devices are not free")
        moved: dict[str, None] = {}
        begin = self._room(size, moved, ())
        self.blocks[job] = (begin, size)
        return BuddyPlacement(begin, tuple(moved))

    def _room(self, size: int, moved: dict[str, None], barred: tuple[tuple[int, int], ...]) -> int:
        """Return the first device of an empty block of `size` outside the `barred` ranges; blocks are moved if
        needed."""
        used = [0] * -(-self.devices // size)
        tops = [False] * len(used)
        for job, (begin, length) in self.blocks.items():
            for block in range(begin // size, (begin + length - 1) // size + 1):
                used[block] += min(length, size)
                tops[block] = tops[block] or length >= size or job in self.fixed
        options = [
            (used[block], -block)
            for block in range(self.devices // size)
            if not tops[block] and all((block + 1) * size <= begin or end <= block * size for begin, end in barred)
        ]
        if not options:
            raise ValueError(f"no aligned block of {size} devices is there")
        taken, block = min(options)
        first = -block * size
        if taken:
            self._clear(first, size, moved, barred)
        return first

    def _clear(self, first: int, size: int, moved: dict[str, None], barred: tuple[tuple[int, int], ...]) -> None:
        """Move all other blocks out of a block, the largest first."""
        inside = [(length, job) for job, (begin, length) in self.blocks.items() if first <= begin < first + size]
        for _, job in inside:
            del self.blocks[job]
        shut = (*barred, (first, first + size))
        for length, job in sorted(inside, reverse=True):
            self.blocks[job] = (self._room(length, moved, shut), length)
            moved[job] = None
