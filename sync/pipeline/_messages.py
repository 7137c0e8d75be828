"""Measurement of the overhead of a message between stages, over the transfers that stages use."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from sync.channel import Channel
from sync.pipeline._stage_tensors import decoded, encoded
from sync.pipeline._stage_transfers import StageTransfers

__all__ = ["MessageMeasure", "measure_messages"]

_MESSAGES = 24
"""Messages that are sent."""
_NOT_COUNTED = 4
"""The first messages are not counted: they open connections and create folders."""
_CACHE_FLUSH_BYTES = 64 << 20
"""Bytes written before each message, to empty the CPU's caches: in a pipeline, layers have computed since the last
message."""
_MAX_SECONDS = 5.0
"""No further message is sent after this time, because a distant store may answer slowly."""
_TIMEOUT_SECONDS = 30.0
"""Seconds that the measurement waits for one message.

A choice: far longer than any usable store takes, so that only a broken channel exceeds it.
"""


@dataclass(frozen=True)
class MessageMeasure:
    """The overhead of one short message between the computing threads of two stages."""

    seconds: float
    """Time until the other stage can begin: framing, put, notification, get, and thread switches. Median."""
    core_seconds: float
    """Core time of both sides together, including the deletion. Mean."""


def measure_messages(channel: Channel, place: str) -> MessageMeasure:
    """Send messages under the key prefix ``place``, one after the other, and delete them; both sides are in this
    process.

    Raises the channel's errors, and ``GeofedError("CHANNEL_TIMEOUT")`` for a message that does not arrive.
    """
    sender, receiver = StageTransfers(channel, _TIMEOUT_SECONDS), StageTransfers(channel, _TIMEOUT_SECONDS)
    keys = [f"{place}/{number}" for number in range(_MESSAGES)]
    value, device = torch.zeros(8), torch.device("cpu")
    # NumPy fills with this thread alone, whatever torch's number of threads.
    other = np.zeros(_CACHE_FLUSH_BYTES, np.uint8)
    took, busy, ends = list[float](), 0.0, time.monotonic() + _MAX_SECONDS
    try:
        receiver.expect(keys)
        for number, key in enumerate(keys):
            if number == _NOT_COUNTED:
                busy = time.process_time()
            own = time.thread_time()
            other.fill(number)
            busy += time.thread_time() - own
            begun = time.monotonic()
            sender.send(key, encoded(value, "fp32"))
            # The receiver does not notice errors of sending.
            sender.drain()
            decoded(receiver.take(key), device)
            took.append(time.monotonic() - begun)
            if begun > ends and number > _NOT_COUNTED:
                break
    finally:
        sender.close()
        receiver.close()
    counted = took[_NOT_COUNTED:]
    return MessageMeasure(statistics.median(counted), (time.process_time() - busy) / len(counted))
