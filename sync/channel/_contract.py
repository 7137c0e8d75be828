"""What every channel does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Channel", "Usage"]

Buffer = bytes | bytearray | memoryview


@dataclass
class Usage:
    """What a channel was used for, metered where it arises."""

    puts: int = 0
    gets: int = 0
    misses: int = 0
    deletes: int = 0
    bytes_in: int = 0
    """Put."""
    bytes_out: int = 0
    """Got."""


class Channel(Protocol):
    """Values under keys, written once and whole: a reader sees all of a value or none of it.

    Keys are paths of letters, digits, `.`, `_` and `-`; no part begins with `.`, and no key lies under another.
    Putting a value again under the same key replaces it whole. Safe for many processes and threads, except that the
    meter is one thread's; a key that is not there is not an error.

    Raises ``GeofedError``: ``FRAME_INVALID`` for what is no key, ``DISK_FULL`` where a value finds no room.
    """

    usage: Usage

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        """Store the pieces, one after the other, as one value."""

    def get(self, key: str) -> memoryview | None:
        """The value, or None where there is none (any more)."""

    def has(self, key: str) -> bool:
        """Whether the value is there now."""

    def delete(self, key: str) -> None:
        """Forget a value, if it is there."""

    def delete_tree(self, prefix: str) -> None:
        """Forget every value whose key begins with ``prefix/``."""
