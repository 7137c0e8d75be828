"""Closed forms of a merge's time and requests, term by term, for many merges at once.

They follow FasDL (10.1109/TC.2024.3485202; §1.2 and §1.3 of the notes in its code) where requests are made one after
the other, LambdaML (arXiv 2105.07806, §4.3) for its two patterns, and replace sums by the slower of latency and
bandwidth where requests go side by side. ``sync.collective`` has the same forms of one merge; a test holds them
against each other. Here a merge is a row of terms, so that what was measured can evaluate them (`Correction`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from scheduler.tuning._model import COLLECTIVES, TERMS, ChannelProfile, Correction

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_SERVER, _ALL, _SCATTER = (COLLECTIVES.index(name) for name in ("server-reduce", "all-reduce", "scatter-reduce"))
_K_REDUCE = COLLECTIVES.index("k-reduce")
_LATENCY, _LATE, _TRANSFER, _WORK, _ADDING, _HIDDEN, _DUPLEX, _REQUESTS, _MERGE = range(len(TERMS))
_LOOKS_LATE, _LEAST_GAIN = 0.1, 0.1
"""Of time: by how much later workers look where groups are joined, and what makes groups worth it."""


@dataclass(frozen=True)
class Merges:
    """Many merges, each at one place of arrays of one length."""

    collective: npt.NDArray[np.int64]
    """Numbers of `COLLECTIVES`."""
    workers: Floats
    chunks: Floats
    """K, between 1 and the number of workers."""
    share: Floats
    """What each worker has of the channel's bandwidth, at most 1."""

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, int, float]]) -> Merges:
        """From (collective, workers, K, share of the bandwidth)."""
        collectives, workers, chunks, shares = zip(*rows, strict=True)
        numbers = np.array([COLLECTIVES.index(name) for name in collectives])
        return cls(numbers, np.array(workers, float), np.array(chunks, float), np.array(shares, float))


@dataclass(frozen=True)
class MergeTerms:
    """What merges take: a row each."""

    terms: Floats
    """By `TERMS`, (merges, terms)."""
    puts: Floats
    gets: Floats
    polls: Floats
    """Looks that find nothing; as published all lists."""

    def seconds(self, correction: Correction) -> Floats:
        """Of each merge, until its last worker has the merged vector."""
        return np.maximum(_sum(self.terms, correction), 0.0)

    def usd(self, channel: ChannelProfile, *, faithful: bool) -> Floats:
        """Of each merge's requests."""
        look = channel.list_usd if faithful else channel.get_usd
        return self.puts * channel.put_usd + self.gets * channel.get_usd + self.polls * look


def merged(
    merges: Merges, size_bytes: float, channel: ChannelProfile, *, faithful: bool = False, grouped: bool = True
) -> MergeTerms:
    """Terms and requests of merges of vectors of so many bytes; zeros for a worker alone.

    ``grouped``: workers make a K-REDUCE in groups where that is faster, as they do without staleness.
    """
    form = _Form(merges, size_bytes, channel)
    told = form.as_published() if faithful else form.grouped() if grouped else form.overlapped()
    at_server = merges.collective == _SERVER
    if at_server.any():
        told = _either(at_server, form.at_server(), told)
    alone = merges.workers < 2
    return MergeTerms(*(np.where(alone[:, None] if part.ndim > 1 else alone, 0.0, part) for part in _parts(told)))


def _parts(told: MergeTerms) -> tuple[Floats, ...]:
    return told.terms, told.puts, told.gets, told.polls


def _either(where: Flags, one: MergeTerms, other: MergeTerms) -> MergeTerms:
    pairs = zip(_parts(one), _parts(other), strict=True)
    return MergeTerms(*(np.where(where[:, None] if a.ndim > 1 else where, a, b) for a, b in pairs))


@dataclass(frozen=True)
class _Pace:
    """A channel while so many workers are at work at once."""

    put: Floats
    """Latency, and what the latest of the requests takes longer: (merges, 2)."""
    get: Floats
    up: Floats
    down: Floats
    adding: Floats
    cpu: Floats


class _Form:
    """The closed forms of some merges over one channel. A span of time is an array (merges, terms)."""

    def __init__(self, merges: Merges, size_bytes: float, channel: ChannelProfile) -> None:
        self._merges, self._channel, self._size = merges, channel, size_bytes
        self._workers, self._chunks = merges.workers, merges.chunks
        self._part = size_bytes / merges.chunks
        self._uploads = np.where(self._chunks < self._workers, self._chunks, self._chunks - 1)
        """Of the slowest worker: one that owns no chunk, where there are such."""

    def grouped(self) -> MergeTerms:
        """In as many groups as `sync.collective.best_groups` says."""
        workers, chunks = self._workers, self._chunks
        groups = np.minimum(workers // chunks, np.round(workers / np.maximum(chunks, np.sqrt(workers))))
        may = (self._merges.collective == _K_REDUCE) & (groups > 1) & (not self._channel.cores)
        told = self.overlapped()
        if not may.any():
            return told
        apart = self.overlapped(np.where(may, groups, 1.0))
        faster = _total(apart.terms) < (1 - _LEAST_GAIN) * _total(self.overlapped(chained=False).terms)
        return _either(may & faster, apart, told)

    def overlapped(self, groups: Floats | None = None, *, chained: bool = True) -> MergeTerms:
        """Requests side by side; an owner reads others' parts of its chunk while it uploads its parts of theirs.

        ``groups``: in how many workers merge first; None: one. ``chained``: other iterations come before and after.
        """
        channel, workers, chunks = self._channel, self._workers, self._chunks
        groups = np.ones_like(workers) if groups is None else groups
        group, uploads = np.ceil(workers / groups), chunks - (chunks * groups >= workers)
        giving, reading = self._pace(workers, uploads * workers), self._pace(chunks, chunks * (workers - 1))
        storing, pulling = self._pace(chunks, chunks), self._pace(workers, chunks * (workers - 1))
        look = self._span(_LATENCY, channel.poll_seconds / 2)
        given = self._lane(uploads, giving.put, self._part / giving.up, giving.cpu)
        parts = self._lane(group - 1, reading.get, self._part / reading.down, reading.cpu)
        apart = given + parts
        last = given + self._request(reading.get, self._part / reading.down)
        first = self._request(giving.put, self._part / giving.up) + parts
        overlaps = (self._merges.collective != _SCATTER) & (not channel.cores)
        # In a chain of iterations an owner is ahead of the others: it has a merged chunk less to get. Meanwhile it has
        # read another owner's part, so that it need not do so while the others wait for it.
        before = (chunks > 1) & (chunks < workers) & (groups == 1) & chained
        longest = np.maximum(_total(last), _total(first) - np.where(before, self._part / reading.down, 0.0))
        hidden = np.where(overlaps, np.maximum(0.0, _total(apart) - longest), 0.0)
        collected = apart + look + self._adding(group, reading)
        all_own = chunks == workers
        collected[:, _HIDDEN] += np.where(all_own, 0.0, hidden)
        collected[:, _DUPLEX] += np.where(all_own, hidden, 0.0)
        up_one = self._request(storing.put, self._part / storing.up)
        joint = up_one + look + self._lane(groups - 1, reading.get, self._part / reading.down, reading.cpu)
        joint += self._adding(groups, reading) + _LOOKS_LATE * (joint + up_one)
        collected += np.where(groups > 1, 1.0, 0.0)[:, None] * joint
        pulled = self._lane(np.maximum(1, self._uploads), pulling.get, self._part / pulling.down, pulling.cpu)
        if channel.cores:
            # The only merged chunk is the vector: where it lies in memory it is not copied.
            pulled = np.where((chunks == 1)[:, None], self._request(pulling.get, 0.0), pulled)
        spans = collected + up_one + look + pulled
        spans[:, _REQUESTS] = uploads + (group - 1) + 1 + np.maximum(1, self._uploads) + (groups > 1) * groups
        spans[:, _MERGE] = 1.0
        return MergeTerms(
            spans, chunks * workers, 2 * chunks * (workers - 1), self._polls(given, collected, up_one, groups)
        )

    def _polls(self, given: Floats, collected: Floats, up_one: Floats, groups: Floats) -> Floats:
        """Workers look when a value is likely to be there: about once too early in each of their waits, at most."""
        channel, workers, chunks = self._channel, self._workers, self._chunks
        if not channel.poll_seconds:
            return np.zeros_like(workers)
        waited = (workers - chunks) * _total(collected + up_one - given)
        waited += chunks * (_total(up_one) + channel.poll_seconds / 2)
        return np.minimum(waited / channel.poll_seconds, workers * np.where(groups > 1, 3.0, 2.0))

    def as_published(self) -> MergeTerms:
        """One request after the other, whose latenesses even out, and values that are found by listing."""
        channel, workers, chunks = self._channel, self._workers, self._chunks
        giving, reading = self._pace(workers), self._pace(chunks)
        storing, pulling = self._pace(chunks), self._pace(workers)
        look = self._span(_LATENCY, channel.list_seconds + channel.poll_seconds / 2)
        given = self._uploads[:, None] * self._request(giving.put, self._part / giving.up)
        read = (workers - 1)[:, None] * self._request(reading.get, self._part / reading.down)
        collected = given + look + read + self._adding(workers, reading)
        up_one = self._request(storing.put, self._part / storing.up)
        pulls = np.maximum(1, chunks - 1)
        spans = collected + up_one + look + pulls[:, None] * self._request(pulling.get, self._part / pulling.down)
        spans[:, _REQUESTS] = self._uploads + (workers - 1) + 1 + pulls
        spans[:, _MERGE] = 1.0
        waited = (workers - chunks) * _total(collected + up_one - given) + chunks * _total(look + up_one)
        pause = channel.list_seconds + channel.poll_seconds
        # A worker lists at least twice in a merge, however soon it finds what it looks for.
        polls = 2 * chunks + (workers - chunks) + (waited / pause if pause else 0.0)
        return MergeTerms(spans, chunks * workers, 2 * chunks * (workers - 1), polls)

    def at_server(self) -> MergeTerms:
        """The region's parameter server gets all vectors, adds them and puts the mean. It sees the channel as a
        worker does."""
        channel, workers = self._channel, self._workers
        one = np.ones_like(workers)
        all_, reading, storing = self._pace(workers, workers), self._pace(one, workers), self._pace(one, one)
        whole, look = self._size, self._span(_LATENCY, channel.poll_seconds / 2)
        given = self._lane(one, all_.put, whole / all_.up, all_.cpu)
        read = self._lane(workers, reading.get, whole / reading.down, reading.cpu)
        collected = given + look + read + self._adding(workers, reading, whole)
        stored = self._request(storing.put, whole / storing.up)
        pulled = self._lane(one, all_.get, whole / all_.down, all_.cpu)
        if channel.cores:
            pulled = self._request(all_.get, 0.0)
        spans = collected + stored + look + pulled
        spans[:, _REQUESTS], spans[:, _MERGE] = workers + 3, 1.0
        waited = _total(collected + stored - given)
        polls = workers * waited / channel.poll_seconds if channel.poll_seconds else np.zeros_like(workers)
        return MergeTerms(spans, workers + 1, 2 * workers, polls)

    def _pace(self, active: Floats, requests: Floats | None = None) -> _Pace:
        """``requests``: of which the latest is waited for; None: of each in its turn."""
        channel = self._channel
        slower = np.maximum(1.0, active / channel.cores) if channel.cores else np.ones_like(active)
        late = np.ones_like(slower) if requests is None else _lateness(requests, channel.jitter)
        waits = np.column_stack([slower, slower * (late - 1)])
        share = self._merges.share / slower
        return _Pace(
            channel.put_seconds * waits,
            channel.get_seconds * waits,
            channel.up_bytes_per_second * share,
            channel.down_bytes_per_second * share,
            channel.merge_seconds_per_byte * slower,
            channel.request_cpu_seconds * slower,
        )

    def _lane(self, requests: Floats, latency: Floats, one: Floats, cpu: Floats) -> Floats:
        """So many requests of one size side by side over one link; ``one``: seconds of one's bytes."""
        channel = self._channel
        if channel.cores:
            return requests[:, None] * self._request(latency, one)
        turns = np.ceil(requests / max(1, channel.parallel))
        # The first comes after its latency; from then on they come as fast as link and core let them.
        streamed = self._request(latency, np.zeros_like(one))
        busy = one < cpu
        streamed[:, _TRANSFER] = np.where(busy, 0.0, requests * one)
        streamed[:, _WORK] = np.where(busy, requests * cpu, 0.0)
        by_turns = turns[:, None] * self._request(latency, one)
        longer = np.where((_total(streamed) >= _total(by_turns))[:, None], streamed, by_turns)
        return np.where((requests < 1)[:, None], 0.0, longer)

    def _adding(self, workers: Floats, pace: _Pace, part: Floats | float | None = None) -> Floats:
        """What no transfer hides: parts are added while others are on their way, the last is not."""
        size = self._part if part is None else part
        return self._span(_ADDING, pace.adding * size * (workers if self._channel.cores else 2.0))

    def _request(self, latency: Floats, transfer: Floats | float) -> Floats:
        spans = self._span(_LATENCY, latency[:, 0])
        spans[:, _LATE], spans[:, _TRANSFER] = latency[:, 1], transfer
        return spans

    def _span(self, term: int, seconds: Floats | float) -> Floats:
        spans = np.zeros((len(self._workers), len(TERMS)))
        spans[:, term] = seconds
        return spans


def _total(spans: Floats) -> Floats:
    """Seconds of the closed form as it is."""
    return _sum(spans, Correction())


def _sum(spans: Floats, correction: Correction) -> Floats:
    """Term after term: a product of matrices rounds otherwise for one row than for many."""
    told = np.zeros(len(spans))
    for term, weight in enumerate(correction.weights):
        if weight == 1.0:
            told += spans[:, term]
        elif weight == -1.0:
            told -= spans[:, term]
        elif weight:
            told += weight * spans[:, term]
    return told


def _lateness(requests: Floats, jitter: float) -> Floats:
    if not jitter:
        return np.ones_like(requests)
    found, where = np.unique(requests, return_inverse=True)
    return np.array([math.exp(jitter * _latest(int(count))) for count in found])[where]


@lru_cache(maxsize=4096)
def _latest(count: int) -> float:
    """Blom's approximation of the largest of so many standard normal ones."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 0 else 0.0
