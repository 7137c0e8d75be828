"""Which stored items are removed when: decided from what was measured, without a clock and without files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Keep", "Stored", "Total", "due", "due_at", "totals"]

Keep = Mapping[str, float | None]
"""By kind of items: for how many seconds they are kept; None: until a user deletes their job."""


@dataclass(frozen=True)
class Stored:
    """Files or rows that are kept, and removed, together."""

    kind: str
    name: str
    """Identifies them among their kind: a path, a digest, a job's ID."""
    bytes: int
    since: float
    """Unix time from which their retention counts: the end of their job, or their last change."""
    jobs: tuple[str, ...] = ()
    """IDs of the jobs that they belong to."""
    in_use: bool = False
    """Whether they are kept however old they are."""
    count: int = 1
    """Number of files or rows."""


@dataclass(frozen=True)
class Total:
    """All items of one kind."""

    kind: str
    count: int
    bytes: int
    due_count: int
    """Number of files or rows that the next sweep removes."""
    due_bytes: int
    next_at: float | None
    """Unix time at which further ones are due; None: never, as things are."""
    keep_seconds: float | None


def due_at(item: Stored, keep: Keep) -> float:
    """Return the Unix time from which an item may be removed; infinity: never, as things are."""
    seconds = keep.get(item.kind)
    return math.inf if item.in_use or seconds is None else item.since + seconds


def due(items: Iterable[Stored], keep: Keep, now: float) -> list[Stored]:
    """Return the items that may be removed, the oldest first."""
    return sorted((item for item in items if due_at(item, keep) <= now), key=lambda item: due_at(item, keep))


def totals(items: Iterable[Stored], keep: Keep, now: float) -> list[Total]:
    """Return the sums for each kind that has a rule or an item, sorted by name."""
    by_kind: dict[str, list[Stored]] = {kind: [] for kind in keep}
    for item in items:
        by_kind.setdefault(item.kind, []).append(item)
    found = []
    for kind, held in sorted(by_kind.items()):
        gone = due(held, keep, now)
        later = [at for item in held if now < (at := due_at(item, keep)) < math.inf]
        found.append(
            Total(
                kind,
                sum(item.count for item in held),
                sum(item.bytes for item in held),
                sum(item.count for item in gone),
                sum(item.bytes for item in gone),
                min(later, default=None),
                keep.get(kind),
            )
        )
    return found
