"""What the provider asks of a cloud's function service; one module for each cloud carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from geofed_pb.errors import GeofedError

__all__ = ["EVENT_SECONDS", "GATEWAY_TAG", "RUN_TAG", "CloudFunctions", "Hosted", "NoFunction"]

EVENT_SECONDS = 60
"""Longest time for which a service keeps an event that it cannot run; the least that Lambda takes."""
GATEWAY_TAG, RUN_TAG = "geofed.gateway", "geofed.run"
"""Tags of every function: whose it is, and which run of its gateway has made it."""


class NoFunction(GeofedError):
    """The service has no such function, or does not know yet of one that it has just made."""


@dataclass(frozen=True)
class Hosted:
    """A function to be made."""

    name: str
    image: str
    memory_mb: int
    tags: Mapping[str, str]


class CloudFunctions(Protocol):
    """All methods block, and raise ``GeofedError``: ``UNAUTHENTICATED``, ``FORBIDDEN``, ``QUOTA_EXCEEDED``,
    ``IMAGE_UNAVAILABLE``, ``FUNCTION_UNSCHEDULABLE``, ``CONFIG_INVALID``, ``LIMIT_EXCEEDED``,
    ``GATEWAY_UNAVAILABLE``. What a service refuses for a moment is asked again, a few times."""

    def create(self, function: Hosted) -> None:
        """Make a function."""

    def is_ready(self, name: str) -> bool:
        """Whether a function that was made can be started, and is set up; raises ``GeofedError`` if it never will."""

    def start(self, name: str, event: bytes) -> None:
        """Start an invocation, which the service does not repeat; raises ``NoFunction``, too."""

    def delete(self, name: str) -> None:
        """Delete a function, if it is there; running invocations continue."""

    def names(self, mark: str) -> list[str]:
        """Return the names of a gateway's functions, by their tag."""

    def examine(self, function: Hosted, workers: int, wait: Callable[[], None]) -> str:
        """Make a function, have the service check an invocation, and delete it; returns what was found.

        ``workers``: the region's capacity. ``wait`` is called between looks, and raises when it takes too long.
        """
