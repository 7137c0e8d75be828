"""The requests and events of one worker's part in an exchange.

A part is a state machine without threads, clock or sockets: it is started, receives events, and answers each with
requests. `_driver` runs it over a channel; tests and benchmarks run many of them over a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sync.channel import RangedValue
from sync.merging._parted import PartedVector

__all__ = ["Arrived", "Delete", "Event", "ExchangePart", "Fetch", "Given", "Pieces", "Put", "Request", "ValuesStored"]

Pieces = Sequence[memoryview]


@dataclass(frozen=True)
class Put:
    """Store these values, in this order if sequentially; `ValuesStored` reports each."""

    values: Mapping[str, Pieces]


@dataclass(frozen=True)
class Fetch:
    """Get these values once they exist; `Arrived` reports each."""

    keys: tuple[str, ...]
    asked_after_seconds: float | None = None
    """For a channel that does not announce values: when the first, if it does not exist yet, is likely to."""
    asked_gap_seconds: float = 0.0
    """Seconds between it and each further one, in order."""
    asked_at_once: bool = True
    """Whether to request the first one immediately as well, because this worker may be late. If not, it cannot be so
    late."""
    whole: int | None = None
    """If the channel reads ranges, at most so many are received as a whole; None: all."""


@dataclass(frozen=True)
class Delete:
    """Delete these values; no event follows."""

    keys: tuple[str, ...]


Request = Put | Fetch | Delete


@dataclass(frozen=True)
class ValuesStored:
    """Values have been stored."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Arrived:
    """A value has been received, or can be read in ranges."""

    key: str
    value: memoryview | RangedValue


@dataclass(frozen=True)
class Given:
    """The caller has passed a whole chunk."""

    chunk: int
    values: PartedVector | None = None
    """Its values, if it is merged in their memory."""


Event = ValuesStored | Arrived | Given

Result = TypeVar("Result", covariant=True)


class ExchangePart(Protocol[Result]):
    """One worker's part in one exchange."""

    def start(self) -> list[Request]:
        """Return the first requests."""

    def handle(self, event: Event) -> list[Request]:
        """Return the requests that follow from an event. Raises ``GeofedError("FRAME_INVALID")`` for a damaged
        value."""

    @property
    def done(self) -> bool:
        """Whether the result is complete. Puts and deletes may still be under way."""

    @property
    def awaited(self) -> tuple[int, ...]:
        """The workers whose values it still waits for, as far as it knows."""

    @property
    def result(self) -> Result: ...
