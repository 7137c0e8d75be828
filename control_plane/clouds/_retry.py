"""Retry requests that a cloud throttles, for SDKs that do not retry correctly.

boto3 retries itself. libcloud retries only by a switch for the whole process. The retryer of Tencent's SDK 3.1 raises
the error of a failed attempt even if a later one succeeded.
"""

from __future__ import annotations

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from geofed_pb.errors import GeofedError


def retries(attempts: int = 5, first_seconds: float = 0.5) -> Retrying:
    """Return what calls an idempotent request until it succeeds; it raises the error of the last attempt.

    Before the second attempt it waits up to ``first_seconds``, at random, and before each further one up to twice as
    long.
    """
    return Retrying(
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=first_seconds),
        retry=retry_if_exception(lambda error: isinstance(error, GeofedError) and error.retryable),
        reraise=True,
    )
