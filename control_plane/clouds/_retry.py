"""Retry requests that a cloud throttles, for SDKs that do not retry correctly.

boto3 retries itself. libcloud retries only by a switch for the whole process. The retryer of Tencent's SDK 3.1 raises
the error of a failed attempt even if a later one succeeded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from geofed_pb.errors import GeofedError

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Retries:
    """Pauses before each attempt after the first; each is random between half and all of its value."""

    pauses_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)

    def call(self, request: Callable[[], _Answer]) -> _Answer:
        """Return the result of an idempotent request; raise the error of the last attempt."""
        for pause in self.pauses_seconds:
            try:
                return request()
            except GeofedError as error:
                if not error.retryable:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.0))
        return request()
