"""Counts what is asked of a store, where it arises."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

__all__ = ["Meter", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Requests that a store got, each under one kind, and the bytes of values that were moved.

    The sum of the kinds is what a count at the store shows. A value may take several requests, and one request may
    bring several values.
    """

    puts: int = 0
    """Requests that stored a value or a part of one."""
    gets: int = 0
    """Requests that were answered with a value or a part of one."""
    misses: int = 0
    """Requests for a value that was not there."""
    looks: int = 0
    """Requests that asked about a value, or about the store, and not for a value."""
    deletes: int = 0
    """Requests that deleted, one key or many."""
    lists: int = 0
    """Requests that listed keys."""
    waits: int = 0
    """Requests that the store was to answer when something came."""
    failures: int = 0
    """Requests of any kind that were refused or broke off. Those that broke off may have been carried out."""
    bytes_in: int = 0
    """Put."""
    bytes_out: int = 0
    """Got."""

    def __add__(self, other: Usage) -> Usage:
        # Not by `dataclasses.astuple`, which copies deeply, for every request.
        return Usage(**{kind: count + getattr(other, kind) for kind, count in vars(self).items()})

    @property
    def requests(self) -> int:
        """All requests, of whatever kind."""
        counts = dataclasses.asdict(self)
        return sum(counts[kind] for kind in counts if not kind.startswith("bytes_"))


class Meter:
    """A running count that several threads add to."""

    def __init__(self) -> None:
        self._usage, self._lock = Usage(), threading.Lock()

    def count(self, **more: int) -> None:
        """Add to the fields of ``Usage`` that are named."""
        added = Usage(**more)
        with self._lock:
            self._usage += added

    @property
    def usage(self) -> Usage:
        with self._lock:
            return self._usage
