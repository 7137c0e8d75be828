"""What a message from one stage to another takes besides its bytes, measured over the lanes that stages use."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from sync.channel import Channel
from sync.pipeline._carried import decoded, encoded
from sync.pipeline._lanes import Lanes

__all__ = ["MessageMeasure", "measure_messages"]

_MESSAGES, _NOT_COUNTED = 24, 4
"""The first ones make connections and folders."""
_FORGOTTEN_BYTES = 64 << 20
"""Written before each message, as before each layer that is measured: in a pipeline layers have computed since the last
one, so that it finds nothing of its own in the processor's caches."""
_LONGEST_SECONDS = 5.0
"""After which no other one is sent: a distant store answers slowly."""
_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class MessageMeasure:
    """One short message, from the thread that computes in one stage to that of another."""

    seconds: float
    """Until the other stage can begin: framing, the put, the notice, the get, and the changes of thread. Median."""
    core_seconds: float
    """What both sides together keep cores busy, deleting it included. Mean."""


def measure_messages(channel: Channel, place: str) -> MessageMeasure:
    """Send messages under ``place``, one after the other, and leave nothing there; both sides are in this process.

    Raises what the channel raises, and ``GeofedError("CHANNEL_TIMEOUT")`` for a message that does not come.
    """
    sender, receiver = Lanes(channel, _TIMEOUT_SECONDS), Lanes(channel, _TIMEOUT_SECONDS)
    keys = [f"{place}/{number}" for number in range(_MESSAGES)]
    value, device = torch.zeros(8), torch.device("cpu")
    # NumPy fills with this thread alone, whatever torch's number of threads.
    other = np.zeros(_FORGOTTEN_BYTES, np.uint8)
    took, busy, ends = list[float](), 0.0, time.monotonic() + _LONGEST_SECONDS
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
            # Who receives does not hear of what fails in sending.
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
