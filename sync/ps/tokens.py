"""The workers' tokens: signed by the region's agent, bound to (job, partition, worker, attempt), short-lived.

Who signs and who verifies run on one machine, and measure a token's life by its monotonic clock: the wall clock may be
set meanwhile.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import jwt

from geofed_pb.errors import GeofedError

__all__ = ["LONGEST_LIFE", "WorkerIdentity", "new_key", "sign", "verify"]

LONGEST_LIFE = timedelta(minutes=15)
_AUDIENCE = "geofed-worker"


@dataclass(frozen=True)
class WorkerIdentity:
    """Who a token speaks for."""

    job: str
    region: str
    worker: int
    attempt: int
    workers: int
    """Of the attempt."""


def new_key() -> str:
    """A key for one partition's tokens."""
    return secrets.token_hex(32)


def sign(identity: WorkerIdentity, key: str, life: timedelta) -> str:
    """A token that is good for ``life``, at most ``LONGEST_LIFE``."""
    claims = {
        "aud": _AUDIENCE,
        "job": identity.job,
        "region": identity.region,
        "worker": identity.worker,
        "attempt": identity.attempt,
        "workers": identity.workers,
        "ends": time.monotonic() + min(life, LONGEST_LIFE).total_seconds(),
    }
    return jwt.encode(claims, key, algorithm="HS256")


def verify(metadata: Iterable[tuple[str, str | bytes]], key: str, job: str, region: str) -> WorkerIdentity:
    """Who calls; raises ``GeofedError("UNAUTHENTICATED")`` unless the token is good for this partition."""
    bearer = next((str(value) for name, value in metadata if name == "authorization"), "")
    if not bearer.startswith("Bearer "):
        raise GeofedError("UNAUTHENTICATED", "a worker's call carries no token")
    try:
        claims = jwt.decode(bearer.removeprefix("Bearer "), key, algorithms=["HS256"], audience=_AUDIENCE)
        left = float(claims["ends"]) - time.monotonic()
        numbers = (int(claims[name]) for name in ("worker", "attempt", "workers"))
        identity = WorkerIdentity(claims["job"], claims["region"], *numbers)
    except (jwt.InvalidTokenError, KeyError, ValueError) as error:
        raise GeofedError("UNAUTHENTICATED", f"a worker's token is not good: {error}") from None
    if not 0 < left <= LONGEST_LIFE.total_seconds():
        # The machine may have started again since.
        raise GeofedError("UNAUTHENTICATED", "a worker's token is not good: it has expired")
    if (identity.job, identity.region) != (job, region):
        raise GeofedError("FORBIDDEN", f"a token of {identity.job}/{identity.region} is used for {job}/{region}")
    return identity
