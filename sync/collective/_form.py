"""What the closed forms of merges are made of: a channel's constants, terms of time, and how requests overlap.

The forms follow FasDL (10.1109/TC.2024.3485202; §1.2 and §1.3 of the notes in its code) where requests are made one
after the other, and LambdaML (arXiv 2105.07806, §4.3) for its two patterns. Where requests are concurrent, sums are
replaced by the slower of latency and bandwidth. A merge is a row of terms, so that measured merges can correct them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

__all__ = ["TERMS", "ChannelCosts", "ChannelLoad", "Correction", "Floats", "MergeForm", "MergeTerms", "total_seconds"]

Floats = npt.NDArray[np.float64]

TERMS = ("latency", "late", "transfer", "work", "adding", "hidden", "duplex", "requests", "merge")
"""What a merge's seconds are made of; "requests" is a number of them, "merge" is 1, the others are seconds."""
_LATENCY, _LATE, _TRANSFER, _WORK, _ADDING, _HIDDEN, _DUPLEX, _REQUESTS, _MERGE = range(len(TERMS))
_LATE_FRACTION = 0.1
"""Workers request a value later than it is likely to exist, by this fraction of the time; with groups, for two more
values in sequence."""


@dataclass(frozen=True)
class ChannelCosts:
    """Constants of one worker's use of a channel: a request takes its latency, plus its bytes over the worker's own
    bandwidth."""

    put_seconds: float
    get_seconds: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    poll_seconds: float = 0.0
    """Pause between two polls of a waiting worker; 0: the channel announces values."""
    list_seconds: float = 0.0
    """Duration of a poll that lists the channel, for the patterns as published."""
    parallel: int = 8
    """Concurrent requests of one worker, in each direction."""
    put_usd: float = 0.0
    get_usd: float = 0.0
    """Also for a request that finds nothing."""
    list_usd: float = 0.0
    merge_seconds_per_byte: float = 0.0
    """Time of adding a part to a sum, per byte of float32; 0: ignored."""
    request_cpu_seconds: float = 0.0
    """Core time of a request; concurrent requests don't share it."""
    cores: float = 0.0
    """For a channel in the memory of one machine: the cores that all workers on it share. Requests and bytes are then
    work for the cores, nothing runs concurrently, and a worker gets slower as more workers are active. 0: each worker
    has its own machine."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of the latency. A worker that waits for many requests waits for the
    slowest."""


@dataclass(frozen=True)
class Correction:
    """What measured merges have taught: the weight of each term of the closed form.

    The defaults are the closed form as it is, over constants that were probed.
    """

    latency: float = 1.0
    late: float = 1.0
    """Weight of what the slowest of many requests takes longer than one: workers that continue by themselves are not
    all late at once."""
    transfer: float = 1.0
    work: float = 1.0
    """Weight of requests that keep a core busy."""
    adding: float = 1.0
    hidden: float = 1.0
    """Fraction of what overlapping could hide that it does hide, if some workers own no chunk. Below 0 it costs more
    than it hides: requests that come too early, and requests that wait behind others."""
    duplex: float = 1.0
    """The same if all workers own a chunk: each then needs both directions of its link at once."""
    request_seconds: float = 0.0
    """Seconds of each request in the longest chain, beyond its latency."""
    merge_seconds: float = 0.0
    """Seconds of each merge, whatever its size."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights in the order of `TERMS`."""
        return (
            self.latency, self.late, self.transfer, self.work, self.adding, -self.hidden, -self.duplex,
            self.request_seconds, self.merge_seconds,
        )  # fmt: skip


@dataclass(frozen=True)
class MergeTerms:
    """Time, requests and bytes of merges, one merge a row. Requests are those of all workers, and of the server."""

    terms: Floats
    """Shape (merges, terms), by `TERMS`."""
    puts: Floats
    gets: Floats
    polls: Floats
    """Gets that find nothing."""
    lists: Floats
    """Polls that list the channel, as published."""
    up_bytes: Floats
    """Bytes of the worker that transfers most; a parameter server does not count."""
    down_bytes: Floats

    def seconds(self, correction: Correction = Correction()) -> Floats:
        """Return each merge's seconds until its last worker has the merged vector, if all begin together."""
        return np.maximum(total_seconds(self.terms, correction), 0.0)

    def usd(self, channel: ChannelCosts) -> Floats:
        """Return the price of each merge's requests."""
        found = self.puts * channel.put_usd + (self.gets + self.polls) * channel.get_usd
        return found + self.lists * channel.list_usd


@dataclass(frozen=True)
class ChannelLoad:
    """A channel's constants while a number of workers use it at the same time."""

    put: Floats
    """Latency, and what the slowest of the requests takes longer: shape (merges, 2)."""
    get: Floats
    up: Floats
    """Bytes per second."""
    down: Floats
    adding: Floats
    """Seconds per byte."""
    cpu: Floats
    """Seconds per request."""


@dataclass(frozen=True)
class MergeForm:
    """Merges by one collective over one channel, with what their closed form is put together from.

    Arrays have shape (merges,). A span of time is an array of shape (merges, terms); spans are added up.
    """

    channel: ChannelCosts
    size_bytes: float
    """S: encoded size of one vector; for a collective of changes: of one worker's list."""
    merged_bytes: float
    """Encoded size of the merged vector."""
    workers: Floats
    """W, at least 2."""
    chunks: Floats
    """K, as the collective's ``owners`` says."""
    share: Floats
    """Fraction of the channel's bandwidth that each worker has, at most 1."""
    groups: Floats | None
    """Number of groups that merge first; None: as many as pay off."""
    overlapped: bool = True
    """As in `CollectiveMethod`."""
    faithful: bool = False
    """Whether requests are sequential, and values are found by listing."""
    chained: bool = True
    """Whether other iterations come before and after."""
    late: float = _LATE_FRACTION
    """Workers request a value later than it is likely to exist, by this fraction of the time."""

    def load(self, active: Floats, requests: Floats | None = None) -> ChannelLoad:
        """Return the constants while so many workers are active, with the latency of the slowest of so many requests;
        None: each request is waited for in turn."""
        channel = self.channel
        slower = np.maximum(1.0, active / channel.cores) if channel.cores else np.ones_like(active)
        late = np.ones_like(slower) if requests is None else _slowest(requests, channel.jitter)
        latency = np.column_stack([slower, slower * (late - 1)])
        share = self.share / slower
        return ChannelLoad(
            channel.put_seconds * latency,
            channel.get_seconds * latency,
            channel.up_bytes_per_second * share,
            channel.down_bytes_per_second * share,
            channel.merge_seconds_per_byte * slower,
            channel.request_cpu_seconds * slower,
        )

    def waiting(self, seconds: float) -> Floats:
        """Return the span of a wait that moves nothing."""
        return self._span(_LATENCY, seconds)

    def request(self, latency: Floats, transfer: Floats | float) -> Floats:
        """Return the span of one request; ``transfer``: seconds of its bytes."""
        spans = self._span(_LATENCY, latency[:, 0])
        spans[:, _LATE], spans[:, _TRANSFER] = latency[:, 1], transfer
        return spans

    def concurrent(self, requests: Floats, latency: Floats, one: Floats, cpu: Floats) -> Floats:
        """Return the span of so many concurrent requests of one size over one link; ``one``: seconds of one's bytes."""
        channel = self.channel
        if channel.cores:
            return requests[:, None] * self.request(latency, one)
        turns = np.ceil(requests / max(1, channel.parallel))
        # The first arrives after its latency; the others follow as fast as link and core allow.
        streamed = self.request(latency, np.zeros_like(one))
        busy = one < cpu
        streamed[:, _TRANSFER] = np.where(busy, 0.0, requests * one)
        streamed[:, _WORK] = np.where(busy, requests * cpu, 0.0)
        by_turns = turns[:, None] * self.request(latency, one)
        longer = np.where((total_seconds(streamed) >= total_seconds(by_turns))[:, None], streamed, by_turns)
        return np.where((requests < 1)[:, None], 0.0, longer)

    def adding(self, workers: Floats, load: ChannelLoad, size_bytes: Floats | float) -> Floats:
        """Return the span of additions that nothing hides: parts are added while others are being received, except
        for the last."""
        return self._span(_ADDING, load.adding * size_bytes * (workers if self.channel.cores else 2.0))

    def hide(self, spans: Floats, seconds: Floats, *, duplex: npt.NDArray[np.bool_]) -> None:
        """Take seconds that overlapping hides from spans; ``duplex``: whether both directions of a link are needed."""
        spans[:, _HIDDEN] += np.where(duplex, 0.0, seconds)
        spans[:, _DUPLEX] += np.where(duplex, seconds, 0.0)

    def whole(self, spans: Floats, requests: Floats) -> Floats:
        """Return spans as those of whole merges, with the number of requests in their longest chain."""
        spans[:, _REQUESTS], spans[:, _MERGE] = requests, 1.0
        return spans

    def _span(self, term: int, seconds: Floats | float) -> Floats:
        spans = np.zeros((len(self.workers), len(TERMS)))
        spans[:, term] = seconds
        return spans


def total_seconds(spans: Floats, correction: Correction = Correction()) -> Floats:
    """Return the sum of each row's terms, shape (merges,).

    Term after term: a product of matrices rounds differently for one row than for many.
    """
    found = np.zeros(len(spans))
    for term, weight in enumerate(correction.weights):
        if weight == 1.0:
            found += spans[:, term]
        elif weight == -1.0:
            found -= spans[:, term]
        elif weight:
            found += weight * spans[:, term]
    return found


def _slowest(requests: Floats, jitter: float) -> Floats:
    """Return by what factor the slowest of so many requests is slower than one."""
    if not jitter:
        return np.ones_like(requests)
    found, where = np.unique(requests, return_inverse=True)
    return np.array([math.exp(jitter * _largest_normal(int(count))) for count in found])[where]


@lru_cache(maxsize=4096)
def _largest_normal(count: int) -> float:
    """Return Blom's approximation of the largest of so many standard normal values."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 0 else 0.0
