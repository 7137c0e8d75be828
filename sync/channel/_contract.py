"""What every channel does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sync.channel._meter import Usage

__all__ = ["Buffer", "Channel", "Limits"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Limits:
    """What a channel can hold."""

    value_bytes: int
    """The largest value."""
    total_bytes: int | None
    """All values together; None where the store sets no bound, or none that it tells."""


class Channel(Protocol):
    """Values under keys, written once and whole: a reader sees all of a value or none of it.

    Keys are paths of letters, digits, `.`, `_` and `-`; no part begins with `.`, and no key lies under another.
    Putting a value again under the same key replaces it whole. A key that is not there is not an error. Safe for many
    processes, each with a channel that it opened itself, and for many threads of one. Where the store can, it forgets
    a value some hours after it was put, so that a job that died leaves nothing for ever.

    Raises ``GeofedError``: ``FRAME_INVALID`` for what is no key, ``LIMIT_EXCEEDED`` for a value above
    ``limits.value_bytes``, ``DISK_FULL`` where a value finds no room, ``CHANNEL_TIMEOUT`` from ``wait``,
    ``CHANNEL_UNAVAILABLE`` where the store does not answer for longer than the channel tries,
    ``UNAUTHENTICATED`` and ``FORBIDDEN`` where it lets nobody in.
    """

    @property
    def usage(self) -> Usage:
        """What was asked of the store through this object so far."""

    @property
    def limits(self) -> Limits:
        """What the store can hold; asks it where only the store knows."""

    @property
    def in_memory(self) -> bool:
        """Whether values lie in this machine's memory: a request then takes no longer than the copy of its bytes."""

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        """Store the pieces, one after the other, as one value."""

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        """Store several values, side by side where that is faster. Each is whole; all together are not atomic."""

    def get(self, key: str) -> memoryview | None:
        """The value, or None where there is none (any more)."""

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        """Each key with its value, once, in the order in which the values come.

        The time counts from the call, and what is there when it ends is still given. Raises ``CHANNEL_TIMEOUT``, which
        names what is missing.
        """

    def has(self, key: str) -> bool:
        """Whether the value is there now."""

    def delete(self, key: str) -> None:
        """Forget a value, if it is there."""

    def delete_many(self, keys: Collection[str]) -> None:
        """Forget several values, in as few requests as the store lets it be."""

    def delete_tree(self, prefix: str) -> None:
        """Forget every value whose key begins with ``prefix/``. May have to list; ``delete_many`` does not."""

    def close(self) -> None:
        """Let go of connections and threads. The values stay."""
