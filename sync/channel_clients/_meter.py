"""Counts the requests to a store where they are made."""

from __future__ import annotations

import threading

from sync.channel import Usage

__all__ = ["Meter"]


class Meter:
    """A running count to which several threads add."""

    def __init__(self) -> None:
        self._usage, self._lock = Usage(), threading.Lock()

    def count(self, **more: int) -> None:
        """Add to the named fields of ``Usage``."""
        added = Usage(**more)
        with self._lock:
            self._usage += added

    @property
    def usage(self) -> Usage:
        with self._lock:
            return self._usage
