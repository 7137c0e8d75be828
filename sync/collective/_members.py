"""Who does what, derived by every member alone: chunks, their owners, and who follows an owner that is lost."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from geofed_pb.errors import GeofedError

__all__ = ["Member", "chunk_bounds", "owners", "succession"]


@dataclass(frozen=True)
class Member:
    """One worker among those that merge."""

    worker: int
    """From 0."""
    workers: int
    """How many there are."""
    attempt: int
    """Fences: what another attempt puts lies under other keys."""
    lost: tuple[int, ...] = ()
    """Workers that the partition continues without. All members must know of the same ones: it stands in the keys, so
    that nothing merged before the loss is merged with anything after it."""

    def __post_init__(self) -> None:
        if not 0 <= self.worker < self.workers or self.worker in self.lost:
            raise GeofedError(
                "CONFIG_INVALID", f"worker {self.worker} is not one of {self.workers} (lost: {self.lost})"
            )

    @property
    def present(self) -> tuple[int, ...]:
        """Those that merge, by number."""
        return tuple(worker for worker in range(self.workers) if worker not in self.lost)


def chunk_bounds(size: int, chunks: int, align: int = 1, *, half_first: bool = False) -> tuple[slice, ...]:
    """Where ``size`` elements are cut into ``chunks`` of nearly equal length; ``half_first``: the first of half of it.

    Cuts lie on multiples of ``align``, chunks that would be empty are left out, and there is at least one.
    """
    if size < 0 or chunks < 1 or align < 1:
        raise GeofedError("CONFIG_INVALID", f"cannot cut {size} elements into {chunks} chunks of multiples of {align}")
    rows, less = -(-size // align), int(half_first)
    cuts = [
        min(size, align * (rows * max(0, 2 * number - less) // (2 * chunks - less))) for number in range(chunks + 1)
    ]
    return tuple(slice(a, b) for a, b in itertools.pairwise(cuts) if b > a) or (slice(0, size),)


def owners(chunks: int, present: Sequence[int], salt: str) -> tuple[int, ...]:
    """Which member merges each chunk: the first in rendezvous order (Thaler, Ravishankar 1998) own one each.

    Everybody derives the same from the members and the salt (the attempt). A member that is not an owner can be lost
    without a change of owners. Raises ``GeofedError("CONFIG_INVALID")`` for more chunks than members.
    """
    if not 1 <= chunks <= len(present):
        raise GeofedError("CONFIG_INVALID", f"{chunks} chunks for {len(present)} members")
    return tuple(_ranked(present, f"{salt}/owner")[:chunks])


def succession(chunk: int, owner: int, present: Collection[int], salt: str) -> tuple[int, ...]:
    """Who merges a chunk whose owner is lost, one after the other: the owner itself first, then by rendezvous, with
    another order for every chunk, so that the chunks of several lost owners spread over the others."""
    return (owner, *_ranked([worker for worker in present if worker != owner], f"{salt}/{chunk}"))


def _ranked(workers: Collection[int], salt: str) -> list[int]:
    return sorted(workers, key=lambda worker: (hashlib.blake2b(f"{salt}/{worker}".encode()).digest(), worker))
