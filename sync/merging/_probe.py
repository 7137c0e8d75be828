"""Measurement of a channel's constants, from a worker's position."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sync.channel import Channel
from sync.collective import ChannelCosts
from sync.merging._merge_order import OrderedSum

__all__ = ["probe"]

_SMALL_BYTES = 1 << 10
"""Bytes of a small request: its transfer takes no time compared with the latency, and all channels store it alike."""
_SMALL = 8
"""Small requests in each direction, which measure the latency and its variation."""
_CONCURRENT = 4
"""Small requests that are made concurrently."""


def probe(
    channel: Channel, place: str, *, large_bytes: int = 4 << 20, repeats: int = 3, cores: float = 0.0
) -> ChannelCosts:
    """Measure latency and bandwidth in each direction with puts and gets of two sizes, and the delay of a waiting
    worker.

    Also measures the core time of a request and of adding parts. ``cores``: as in `ChannelCosts`, for a channel that is
    `in_memory`; measure while no worker is active. The results are medians. It takes 8 small requests in each
    direction, some of them concurrently, and 2 * ``repeats`` others, and leaves no values under ``place``. Prices are
    not measured: they stay 0.
    """
    small, large = memoryview(bytes(_SMALL_BYTES)), memoryview(bytes(large_bytes))
    keys = [f"{place}/small.{number}" for number in range(_SMALL)]
    large_keys = [f"{place}/large.{number}" for number in range(repeats)]
    late_keys = [f"{place}/late.{number}" for number in range(repeats)]
    try:
        # The first requests open the connections.
        with ThreadPoolExecutor(1 if cores else _CONCURRENT) as threads:
            list(threads.map(lambda key: channel.put(key, [small]), keys[:_CONCURRENT]))
            put_times = list(threads.map(lambda key: _timed(channel.put, key, [small]), keys))
            get_times = list(threads.map(lambda key: _timed(_read, channel, key), keys))
        put_small, get_small = (statistics.median(took for took, _ in times) for times in (put_times, get_times))
        put_large = statistics.median(_timed(channel.put, key, [large])[0] for key in large_keys)
        get_large = statistics.median(_timed(_read, channel, key)[0] for key in large_keys)
        late = statistics.median(_lateness(channel, key, get_small) for key in late_keys)
    finally:
        channel.delete_many([*keys, *large_keys, *late_keys])
    up = (large_bytes - _SMALL_BYTES) / max(1e-9, put_large - put_small)
    down = (large_bytes - _SMALL_BYTES) / max(1e-9, get_large - get_small)
    return ChannelCosts(
        put_seconds=max(0.0, put_small - _SMALL_BYTES / up),
        get_seconds=max(0.0, get_small - _SMALL_BYTES / down),
        up_bytes_per_second=up,
        down_bytes_per_second=down,
        # On average, a value appears in the middle between two polls.
        poll_seconds=2 * late,
        parallel=1 if cores else 8,
        merge_seconds_per_byte=statistics.median(_adding(large_bytes) for _ in range(repeats)),
        request_cpu_seconds=statistics.median(busy for _, busy in (*put_times, *get_times)),
        cores=cores,
        jitter=0.0 if cores else _spread([took for took, _ in put_times]),
    )


def _spread(times: Sequence[float]) -> float:
    """Return the standard deviation of the logarithm, estimated from the quartiles, so that a single outlier counts
    little."""
    first, _, third = statistics.quantiles((math.log(max(1e-9, took)) for took in times), n=4)
    return (third - first) / 1.349


def _adding(size_bytes: int) -> float:
    """Return the seconds per byte of adding a part."""
    vectors = [np.ones(size_bytes // 4, np.float32) for _ in range(3)]
    fold = OrderedSum(size_bytes // 4, range(len(vectors)))
    begun = time.perf_counter()
    for number, vector in enumerate(vectors):
        fold.add(number, vector, 2.0)
    fold.mean()
    return (time.perf_counter() - begun) / (len(vectors) * size_bytes)


def _timed(work: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return the elapsed seconds, and the core's seconds."""
    begun, busy = time.perf_counter(), time.thread_time()
    work(*arguments)
    return time.perf_counter() - begun, time.thread_time() - busy


def _read(channel: Channel, key: str) -> bytes:
    # The copy is needed because a value in shared memory is not read before.
    return bytes(channel.get(key) or b"")


def _lateness(channel: Channel, key: str, get_seconds: float) -> float:
    """Return the seconds from the existence of a value until a waiting worker begins to get it."""
    noticed: list[float] = []

    def wait() -> None:
        for _ in channel.wait([key], 30.0):
            noticed.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    # Long enough for the pauses between polls to grow as they do in a merge.
    time.sleep(0.2)
    channel.put(key, [bytes(_SMALL_BYTES)])
    stored = time.perf_counter()
    waiting.join()
    return max(0.0, noticed[0] - stored - get_seconds) if noticed else 0.0
