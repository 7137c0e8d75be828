"""Measures the constants of a channel from where a worker stands."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from sync.channel import Channel
from sync.collective._fold import Fold
from sync.collective._model import ChannelCosts

__all__ = ["probe"]

_SMALL_BYTES = 1 << 10


def probe(
    channel: Channel, place: str, *, large_bytes: int = 4 << 20, repeats: int = 3, cores: float = 0.0
) -> ChannelCosts:
    """Latency and bandwidth each way from puts and gets of two sizes, and how late a waiting worker is told.

    Also what a request and the adding of parts take of a core. ``cores``: as in `ChannelCosts`, of a channel that is
    `in_memory`; measure while no worker is at work. Medians of ``repeats``; takes about 4 * ``repeats`` requests each
    way, and leaves nothing under ``place``. Prices are not measured: they stay 0.
    """
    values = {"small": memoryview(bytes(_SMALL_BYTES)), "large": memoryview(bytes(large_bytes))}
    puts: dict[str, float] = {}
    gets: dict[str, float] = {}
    busy: dict[str, float] = {}
    try:
        for name, value in values.items():
            keys = [f"{place}/{name}.{number}" for number in range(repeats)]
            begun = time.thread_time()
            puts[name] = statistics.median(_seconds(channel.put, key, [value]) for key in keys)
            gets[name] = statistics.median(_seconds(_read, channel, key) for key in keys)
            busy[name] = (time.thread_time() - begun) / (2 * repeats)
        late = statistics.median(_lateness(channel, f"{place}/late.{n}", gets["small"]) for n in range(repeats))
    finally:
        names = [f"{place}/{name}.{n}" for name in ("small", "large", "late") for n in range(repeats)]
        channel.delete_many(names)
    more = large_bytes - _SMALL_BYTES
    up, down = (more / max(1e-9, times["large"] - times["small"]) for times in (puts, gets))
    return ChannelCosts(
        put_seconds=max(0.0, puts["small"] - _SMALL_BYTES / up),
        get_seconds=max(0.0, gets["small"] - _SMALL_BYTES / down),
        up_bytes_per_second=up,
        down_bytes_per_second=down,
        # A value comes, on average, in the middle between two looks.
        poll_seconds=2 * late,
        parallel=1 if cores else 8,
        merge_seconds_per_byte=statistics.median(_adding(large_bytes) for _ in range(repeats)),
        request_cpu_seconds=busy["small"],
        cores=cores,
    )


def _adding(size_bytes: int) -> float:
    """Seconds for each byte of a part that is added to others."""
    vectors = [np.ones(size_bytes // 4, np.float32) for _ in range(3)]
    fold = Fold(size_bytes // 4, range(len(vectors)))
    begun = time.perf_counter()
    for number, vector in enumerate(vectors):
        fold.add(number, vector, 2.0)
    fold.mean()
    return (time.perf_counter() - begun) / (len(vectors) * size_bytes)


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    begun = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begun


def _read(channel: Channel, key: str) -> bytes:
    # Copied, as a value in shared memory is not read before that.
    return bytes(channel.get(key) or b"")


def _lateness(channel: Channel, key: str, get_seconds: float) -> float:
    """Seconds from when a value is there to when a worker that waits begins to get it."""
    told: list[float] = []

    def wait() -> None:
        for _ in channel.wait([key], 30.0):
            told.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    # Long enough for pauses between looks to have grown to what they are in a merge.
    time.sleep(0.2)
    channel.put(key, [bytes(_SMALL_BYTES)])
    there = time.perf_counter()
    waiting.join()
    return max(0.0, told[0] - there - get_seconds) if told else 0.0
