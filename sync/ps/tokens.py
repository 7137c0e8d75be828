"""The workers' tokens: signed by the region's agent, bound to (job, partition, worker, attempt), short-lived.

The agent and the parameter server run on the same machine. They measure a token's lifetime by the machine's monotonic
clock, because the wall clock may be changed meanwhile.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import jwt

from geofed_pb.errors import GeofedError

__all__ = ["MAX_TOKEN_LIFETIME", "WorkerIdentity", "new_key", "sign", "verify"]

MAX_TOKEN_LIFETIME = timedelta(minutes=15)
"""Longest lifetime of a token; a token that claims more is refused."""
_AUDIENCE = "geofed-worker"


@dataclass(frozen=True)
class WorkerIdentity:
    """The worker that a token identifies."""

    job: str
    region: str
    worker: int
    attempt: int
    workers: int
    """Number of workers of the attempt."""


def new_key() -> str:
    """Return a new key for one partition's tokens."""
    return secrets.token_hex(32)


def sign(identity: WorkerIdentity, key: str, life: timedelta) -> str:
    """Return a token that is valid for ``life``, at most ``MAX_TOKEN_LIFETIME``."""
    claims = {
        "aud": _AUDIENCE,
        "job": identity.job,
        "region": identity.region,
        "worker": identity.worker,
        "attempt": identity.attempt,
        "workers": identity.workers,
        "ends": time.monotonic() + min(life, MAX_TOKEN_LIFETIME).total_seconds(),
    }
    return jwt.encode(claims, key, algorithm="HS256")


def verify(metadata: Iterable[tuple[str, str | bytes]], key: str, job: str, region: str) -> WorkerIdentity:
    """Return the worker that calls. Raises ``GeofedError("UNAUTHENTICATED")`` if the token is missing, invalid or
    expired, and ``GeofedError("FORBIDDEN")`` if it is for another partition."""
    bearer = next((str(value) for name, value in metadata if name == "authorization"), "")
    if not bearer.startswith("Bearer "):
        raise GeofedError("UNAUTHENTICATED", "a worker's call carries no token")
    try:
        claims = jwt.decode(bearer.removeprefix("Bearer "), key, algorithms=["HS256"], audience=_AUDIENCE)
        left = float(claims["ends"]) - time.monotonic()
        numbers = (int(claims[name]) for name in ("worker", "attempt", "workers"))
        identity = WorkerIdentity(claims["job"], claims["region"], *numbers)
    except (jwt.InvalidTokenError, KeyError, ValueError) as error:
        raise GeofedError("UNAUTHENTICATED", f"a worker's token is invalid: {error}") from None
    if not 0 < left <= MAX_TOKEN_LIFETIME.total_seconds():
        # A negative or too long rest means that the machine has rebooted since the token was signed.
        raise GeofedError("UNAUTHENTICATED", "a worker's token has expired")
    if (identity.job, identity.region) != (job, region):
        raise GeofedError("FORBIDDEN", f"a token of {identity.job}/{identity.region} is used for {job}/{region}")
    return identity
