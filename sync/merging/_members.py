"""The members of a collective and their tasks, which every member derives by itself: chunks, their owners, and the
successors of lost owners."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from geofed_pb.errors import GeofedError

__all__ = ["Member", "chunk_bounds", "owners"]


@dataclass(frozen=True)
class Member:
    """One of the workers that merge."""

    worker: int
    """From 0."""
    workers: int
    """Number of workers."""
    attempt: int
    """Attempt of the workers; it is part of all keys, so that attempts are separate."""
    lost: tuple[int, ...] = ()
    """Workers that the partition continues without. All members must know the same ones: they are part of the keys, so
    that nothing from before the loss is merged with anything after it."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers or self.worker in self.lost:
            raise GeofedError(
                "CONFIG_INVALID", f"worker {self.worker} is not one of {self.workers} (lost: {self.lost})"
            )

    @property
    def present(self) -> tuple[int, ...]:
        """The workers that merge, by number."""
        return tuple(worker for worker in range(self.workers) if worker not in self.lost)


def chunk_bounds(size: int, chunks: int, align: int = 1, *, half_first: bool = False) -> tuple[slice, ...]:
    """Divide ``size`` elements into ``chunks`` of nearly equal length; ``half_first``: the first one has half of it.

    Boundaries are multiples of ``align``, empty chunks are left out, and there is at least one chunk.
    """
    if size < 0 or chunks < 1 or align < 1:
        raise GeofedError("CONFIG_INVALID", f"cannot cut {size} elements into {chunks} chunks of multiples of {align}")
    rows, less = -(-size // align), int(half_first)
    cuts = [
        min(size, align * (rows * max(0, 2 * number - less) // (2 * chunks - less))) for number in range(chunks + 1)
    ]
    return tuple(slice(a, b) for a, b in itertools.pairwise(cuts) if b > a) or (slice(0, size),)


def owners(chunks: int, present: Sequence[int], salt: str) -> tuple[int, ...]:
    """Return the owner of each chunk, which merges it: the first members in rendezvous order (Thaler, Ravishankar
    1998).

    All members derive the same owners from the members and the salt (the attempt). If a member that is not an owner is
    lost, the owners stay the same. Raises ``GeofedError("CONFIG_INVALID")`` for more chunks than members.
    """
    if not 1 <= chunks <= len(present):
        raise GeofedError("CONFIG_INVALID", f"{chunks} chunks for {len(present)} members")
    return tuple(_ranked(present, f"{salt}/owner")[:chunks])


def _ranked(workers: Collection[int], salt: str) -> list[int]:
    return sorted(workers, key=lambda worker: (hashlib.blake2b(f"{salt}/{worker}".encode()).digest(), worker))
