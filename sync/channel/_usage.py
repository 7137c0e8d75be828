"""The requests to a store, by kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["Usage"]


@dataclass(frozen=True)
class Usage:
    """Requests that a store received, each counted under one kind, and the bytes of values that were transferred.

    The sum of all kinds equals a count at the store. A value may take several requests, and one request may return
    several values.
    """

    puts: int = 0
    """Requests that stored a value or a part of one."""
    gets: int = 0
    """Requests that returned a value or a part of one."""
    misses: int = 0
    """Requests for a value that did not exist."""
    looks: int = 0
    """Requests that asked about a value or about the store, not for a value."""
    deletes: int = 0
    """Requests that deleted, one key or many."""
    lists: int = 0
    """Requests that listed keys."""
    waits: int = 0
    """Requests that the store answers when something arrives."""
    failures: int = 0
    """Requests of any kind that were refused or interrupted. Those that were interrupted may have been executed."""
    bytes_in: int = 0
    """Bytes put."""
    bytes_out: int = 0
    """Bytes got."""

    def __add__(self, other: Usage) -> Usage:
        # `dataclasses.astuple` would make a deep copy for every request.
        return Usage(**{kind: count + getattr(other, kind) for kind, count in vars(self).items()})

    @property
    def requests(self) -> int:
        """Number of all requests, of any kind."""
        counts = dataclasses.asdict(self)
        return sum(counts[kind] for kind in counts if not kind.startswith("bytes_"))
