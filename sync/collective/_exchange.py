"""What one worker's part in an exchange asks for, and what it hears.

A part is a state machine without threads, clock or sockets: it is started, told of events, and answers each with
requests. `_driver` runs it over a channel; tests and benchmarks run many of them over a modelled one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Arrived", "Delete", "Event", "Fetch", "Given", "Part", "Pieces", "Put", "Request", "Stored"]

Pieces = Sequence[memoryview]


@dataclass(frozen=True)
class Put:
    """Store these, in this order if one after the other; `Stored` tells of each."""

    values: Mapping[str, Pieces]


@dataclass(frozen=True)
class Fetch:
    """Get these once they are there; `Arrived` tells of each."""

    keys: tuple[str, ...]
    asked_after_seconds: float | None = None
    """Of a channel that tells nobody: when the first, if it is not there at once, is likely to be."""
    asked_gap_seconds: float = 0.0
    """And how long after it each further one, in order."""
    asked_at_once: bool = True
    """Whether to look for the first at once, too: whoever is late finds it there. Otherwise nobody can be so late."""


@dataclass(frozen=True)
class Delete:
    """Forget these; nothing tells of it."""

    keys: tuple[str, ...]


Request = Put | Fetch | Delete


@dataclass(frozen=True)
class Stored:
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Arrived:
    key: str
    value: memoryview


@dataclass(frozen=True)
class Given:
    """The caller has handed in all of a chunk."""

    chunk: int


Event = Stored | Arrived | Given

Result = TypeVar("Result", covariant=True)


class Part(Protocol[Result]):
    """One worker's part in one exchange."""

    def start(self) -> list[Request]:
        """The first requests."""

    def handle(self, event: Event) -> list[Request]:
        """What follows from an event; raises ``GeofedError("FRAME_INVALID")`` for a value that is damaged."""

    @property
    def done(self) -> bool:
        """Whether the result is there. Puts and deletes may still be on their way."""

    @property
    def awaited(self) -> tuple[int, ...]:
        """The workers whose values it still waits for, as far as it can tell."""

    @property
    def result(self) -> Result: ...
