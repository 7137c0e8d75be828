"""Tries again where a cloud says "later", for SDKs that do not do it themselves, or not rightly.

boto3 repeats by itself. libcloud does so only by a switch for the whole process. The retryer of Tencent's SDK 3.1 keeps
the error of a failed try and raises it although a later one was answered.
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
class Patience:
    """How long to wait before each try after the first; drawn between half and all of it."""

    pauses_seconds: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """The answer to a question that may be asked twice; raises what the last try raised."""
        for pause in self.pauses_seconds:
            try:
                return question()
            except GeofedError as error:
                if not error.retryable:
                    raise
                time.sleep(pause * random.uniform(0.5, 1.0))
        return question()
