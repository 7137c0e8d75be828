"""The interface of a channel, and what a planner must know about its store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sync.channel._usage import Usage

__all__ = ["Buffer", "Channel", "ChannelKind", "ChannelLimits", "RangedValue"]

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ChannelLimits:
    """What a channel can hold."""

    value_bytes: int
    """Size of the largest value."""
    total_bytes: int | None
    """Size of all values together; None: the store has no limit, or does not report it."""


class RangedValue(Protocol):
    """A value that is read in ranges when it is needed. If it is replaced meanwhile, ranges may be of either value."""

    def pieces(self, start: int, stop: int, size: int) -> Iterator[memoryview]:
        """Yield the bytes from ``start`` to ``stop`` in pieces of ``size``, of which the last one may be smaller.

        Raises ``GeofedError("FENCED")`` if the value no longer exists, or is shorter.
        """


class Channel(Protocol):
    """A store of values under keys. A reader sees a whole value or none.

    Keys are paths of letters, digits, `.`, `_` and `-`; no component begins with `.`, and no key is a prefix path of
    another. Putting a value under an existing key replaces it atomically. Reading a missing key is not an error. Many
    processes may use the same store, each with a channel that it opened itself, and many threads may use one channel.
    If the store supports it, values expire some hours after they were put, so that a job that died leaves nothing
    permanently.

    Raises ``GeofedError``: ``FRAME_INVALID`` for an invalid key, ``LIMIT_EXCEEDED`` for a value above
    ``limits.value_bytes``, ``DISK_FULL`` if the store is full, ``CHANNEL_TIMEOUT`` from ``wait``,
    ``CHANNEL_UNAVAILABLE`` if the store does not answer within the channel's timeout, ``UNAUTHENTICATED`` and
    ``FORBIDDEN`` if it denies access.
    """

    @property
    def usage(self) -> Usage:
        """The requests made through this object so far."""

    @property
    def limits(self) -> ChannelLimits:
        """The limits of the store; may ask the store for them."""

    @property
    def in_memory(self) -> bool:
        """Whether values are in this machine's memory, so that a request takes no longer than copying its bytes."""

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        """Store the concatenated pieces as one value."""

    def put_made(self, key: str, make: Callable[[], tuple[int, Iterator[memoryview]]]) -> None:
        """Store a value whose pieces are made one after the other, without holding all of them where the channel can.

        ``make``: returns the size of the value in bytes and its pieces, each valid until the next one; may be called
        again.
        """

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        """Store several values, concurrently if that is faster. Each value is stored atomically, but not all
        together."""

    def get(self, key: str) -> memoryview | None:
        """Return the value, or None if there is none."""

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        """Yield each key with its value, once, in the order in which the values arrive.

        The timeout counts from the call; values that exist when it ends are still yielded. Raises ``CHANNEL_TIMEOUT``,
        which names the missing keys.
        """

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        """As `wait`, but at most ``whole`` of the values take memory. The others, if they are large, are returned as
        `RangedValue`. A channel that pays for each request returns all as a whole."""

    def has(self, key: str) -> bool:
        """Return whether the value exists now."""

    def delete(self, key: str) -> None:
        """Delete a value, if it exists."""

    def delete_many(self, keys: Collection[str]) -> None:
        """Delete several values, in as few requests as possible."""

    def delete_tree(self, prefix: str) -> None:
        """Delete every value whose key begins with ``prefix/``. May have to list keys; ``delete_many`` does not."""

    def close(self) -> None:
        """Close connections and threads. The values stay."""


@dataclass(frozen=True)
class ChannelKind:
    """A kind of store as job and region files name it."""

    name: str
    opens: str
    """"module:name" of what opens a `Channel` by its address; it is imported with the first channel."""
    client: str = ""
    """Package that it needs, which geofed's extra of the channel's name installs; empty: none."""
    in_memory: bool = False
    """Whether it lies in the memory of one machine: there the parameter server merges unless the job file says
    otherwise, and nothing is paid."""
    announces: bool = True
    """Whether a waiting worker is notified of new values. If not, it polls for them at estimated times, and pays for
    each request."""
