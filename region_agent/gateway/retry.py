"""When a failed call is tried again, and after what wait."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from region_agent.gateway.functions import EXIT_HEADER, INTERNAL_HEADER

__all__ = ["RetryPolicy"]

_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
_POINTLESS_EXITS = frozenset({"memory", "timeout"})


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter, within a total deadline."""

    deadline: timedelta = timedelta(seconds=30)
    """Time after the first attempt at which no further one is begun."""
    first: timedelta = timedelta(milliseconds=50)
    """Upper bound of the first wait; each further bound is twice the one before."""
    longest: timedelta = timedelta(seconds=5)
    """Upper bound of every wait."""

    def wait(self, attempt: int, draw: float | None = None) -> timedelta:
        """The wait after failed attempt number ``attempt`` (from 0); ``draw`` in [0, 1) replaces the dice."""
        bound = min(self.longest, self.first * 2 ** min(attempt, 30))
        return timedelta(seconds=bound.total_seconds() * (random.random() if draw is None else draw))


def is_retryable(status: int, headers: Mapping[str, str]) -> bool:
    """True for a failure of the infrastructure that may pass.

    A replica that was killed over its memory or time limit would be killed again, so such answers are not.
    """
    if status < 400 or headers.get(EXIT_HEADER) in _POINTLESS_EXITS:
        return False
    return status in _RETRYABLE_STATUSES or (status >= 500 and INTERNAL_HEADER in headers)
