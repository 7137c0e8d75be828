"""Retries of failed calls: which failures are retried, and after what wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tenacity import AsyncRetrying, stop_before_delay, wait_random_exponential
from tenacity.retry import retry_base

from region_agent.gateway.functions import EXIT_HEADER, INTERNAL_HEADER

__all__ = ["RetryPolicy"]

_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""HTTP statuses of failures that may be temporary."""
_PERMANENT_EXITS = frozenset({"memory", "disk", "timeout", "gone"})
"""Reasons for which a replica was killed that a retry would repeat."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with full jitter, within a total deadline."""

    deadline: timedelta = timedelta(seconds=30)
    """Time after the first attempt at which no further one is begun."""
    first: timedelta = timedelta(milliseconds=50)
    """Upper bound of the first wait; each further bound is twice the one before."""
    longest: timedelta = timedelta(seconds=5)
    """Upper bound of every wait."""

    @property
    def waits(self) -> wait_random_exponential:
        """Waits between attempts."""
        return wait_random_exponential(multiplier=self.first.total_seconds(), max=self.longest.total_seconds())

    def retrying(self, failed: retry_base) -> AsyncRetrying:
        """Return what calls a function again while its attempts fail; it returns or raises what the last one did."""
        return AsyncRetrying(
            retry=failed,
            stop=stop_before_delay(self.deadline),
            wait=self.waits,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )


def is_retryable(status: int, headers: Mapping[str, str]) -> bool:
    """Whether an answer is a failure of the infrastructure that may be temporary.

    A replica that was killed over its memory or time limit would be killed again, so such answers are not retried.
    """
    if status < 400 or headers.get(EXIT_HEADER) in _PERMANENT_EXITS:
        return False
    return status in _RETRYABLE_STATUSES or (status >= 500 and INTERNAL_HEADER in headers)
