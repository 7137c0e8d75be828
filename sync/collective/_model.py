"""Closed-form model of the time and cost of a collective. Has no imports from this package, so that planners can use
it.

The formulas follow FasDL (10.1109/TC.2024.3485202, §1.2 and §1.3 of the notes in its code) for sequential requests;
where requests are concurrent, sums are replaced by the slower of latency and bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

__all__ = [
    "PATTERNS",
    "ChannelCosts",
    "Choice",
    "Estimate",
    "Merge",
    "best_chunks",
    "best_groups",
    "choose",
    "estimate",
    "least_seconds",
    "unequal_batches",
]

_LATE_FRACTION = 0.1
"""Workers request a value later than it is likely to exist, by this fraction of the time; with groups, for two more
values in sequence."""
_MIN_GROUP_GAIN = 0.1
"""Fraction of time that groups must save: they round means once more, and cause more requests that come too early."""
PATTERNS = ("all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce")


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
class Merge:
    """One merge of the vectors of W workers."""

    pattern: str
    """One of `PATTERNS`, ``isp``, or ``server-reduce``: every worker puts its vector, the region's parameter server
    gets and adds them all and puts the mean, which every worker gets."""
    workers: int
    size_bytes: float
    """S: encoded size of one vector; for ``isp``: of one worker's list."""
    chunks: int | None = None
    """K; None: 1 for all-reduce, otherwise one chunk per worker. ``isp``: None if every worker reads every list."""
    faithful: bool = False
    """Whether requests are sequential, and values are found by listing."""
    groups: int = 1
    """As in `Settings`."""
    merged_bytes: float | None = None
    """Encoded size of the merged vector, if it differs from ``size_bytes``. ``isp``: of the union of all lists."""

    @property
    def in_groups(self) -> int:
        """Number of groups, within its limits."""
        return max(1, min(self.groups, self.workers // self.owners))

    @property
    def owners(self) -> int:
        """K, within its limits."""
        if self.pattern == "all-reduce":
            return 1
        return max(1, min(self.workers, self.chunks or self.workers))


@dataclass(frozen=True)
class Estimate:
    """The estimate of one merge. Requests are those of all workers."""

    seconds: float
    """Time until the last worker has the merged vector, if all begin together."""
    puts: int
    gets: int
    polls: float
    """Requests that find nothing; for ``faithful`` patterns all lists."""
    up_bytes: float
    """Bytes of the worker that transfers most; a parameter server does not count."""
    down_bytes: float
    requests_usd: float

    def usd(self, workers: int, usd_per_worker_second: float) -> float:
        """Return the cost of the requests, and of the workers' time while they merge."""
        return self.requests_usd + workers * usd_per_worker_second * self.seconds


@dataclass(frozen=True)
class Choice:
    """The result of `choose`."""

    merge: Merge
    estimate: Estimate
    usd: float


def estimate(merge: Merge, costs: ChannelCosts, *, late: float = _LATE_FRACTION) -> Estimate:
    """Estimate time, requests and bytes of one merge; zeros for a single worker.

    ``late``: workers request a value later than it is likely to exist, by this fraction of the time.
    """
    workers = merge.workers
    if workers < 2:
        return Estimate(0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    if merge.pattern == "isp" and merge.chunks is None:
        return _all_to_all(merge, costs)
    if merge.pattern == "server-reduce":
        return _at_server(merge, costs)
    chunks, groups = merge.owners, merge.in_groups
    group = -(-workers // groups)
    """Workers of the largest group."""
    part, merged = merge.size_bytes / chunks, (merge.merged_bytes or merge.size_bytes) / chunks
    uploads = chunks if chunks * groups < workers else chunks - 1
    """Uploads of the slowest worker: one that merges no chunk, if there is any."""
    others = chunks if chunks < workers else chunks - 1
    """Merged chunks that the slowest worker reads."""
    read = chunks * (workers - 1)
    # As published, requests are sequential, and their variations average out.
    even = replace(costs, jitter=0.0) if merge.faithful else costs
    giving, reading = _at_work(even, workers, uploads * workers), _at_work(even, chunks, read)
    storing, pulling = _at_work(even, chunks, chunks), _at_work(even, workers, read)
    look = costs.list_seconds + costs.poll_seconds / 2 if merge.faithful else costs.poll_seconds / 2
    up_one = storing.put_seconds + merged / storing.up_bytes_per_second
    if merge.faithful:
        given = uploads * (giving.put_seconds + part / giving.up_bytes_per_second)
        collected = given + look + (group - 1) * (reading.get_seconds + part / reading.down_bytes_per_second)
        pulled = max(1, chunks - 1) * (pulling.get_seconds + merged / pulling.down_bytes_per_second)
    else:
        given = _puts(uploads, part, giving)
        all_parts = _gets(group - 1, part, reading)
        if merge.pattern == "scatter-reduce" or costs.cores:
            collected = given + look + all_parts
        else:
            first = giving.put_seconds + part / costs.up_bytes_per_second
            last = reading.get_seconds + part / costs.down_bytes_per_second
            collected = look + max(given + last, first + all_parts)
        # The only merged chunk is the vector, which is not copied if it is in memory.
        pulled = pulling.get_seconds if costs.cores and chunks == 1 else _gets(max(1, others), merged, pulling)
    collected += _adding(group, part, reading)
    if groups > 1:
        joint = storing.put_seconds + part / storing.up_bytes_per_second + look + _gets(groups - 1, part, reading)
        collected += joint + _adding(groups, part, reading) + late * (joint + up_one)
    seconds = collected + up_one + look + pulled
    puts, gets = chunks * workers, 2 * chunks * (workers - 1)
    waited = (workers - chunks) * (collected + up_one - given) + chunks * (look + up_one)
    pause = costs.list_seconds + costs.poll_seconds
    # As published, a worker lists at least twice in a merge, however soon it finds a value.
    least = 2 * chunks + (workers - chunks) if merge.faithful else 0
    every = pause if merge.faithful else costs.poll_seconds
    polls = least + (waited / every if every > 0 else 0.0)
    if not merge.faithful:
        # Workers request a value when it is likely to exist: about once too early in each of their waits.
        polls = min(polls, workers * (2.0 if groups == 1 else 3.0))
    usd = puts * costs.put_usd + gets * costs.get_usd + polls * (costs.list_usd if merge.faithful else costs.get_usd)
    down = (group - 1 + groups - 1) * part + (chunks - 1) * merged
    return Estimate(seconds, puts, gets, polls, (chunks - 1) * part + merged, max(down, chunks * merged), usd)


def _all_to_all(merge: Merge, costs: ChannelCosts) -> Estimate:
    workers, size = merge.workers, merge.size_bytes
    given = costs.put_seconds + size / costs.up_bytes_per_second
    if merge.faithful:
        pulled = (workers - 1) * (costs.get_seconds + size / costs.down_bytes_per_second)
    else:
        pulled = _gets(workers - 1, size, costs)
    gets = workers * (workers - 1)
    usd = workers * costs.put_usd + gets * costs.get_usd
    down = (workers - 1) * size
    return Estimate(given + costs.poll_seconds / 2 + pulled, workers, gets, 0.0, size, down, usd)


def _at_server(merge: Merge, costs: ChannelCosts) -> Estimate:
    """Estimate ``server-reduce``, as if the server used the channel like a worker."""
    workers, size = merge.workers, merge.size_bytes
    merged = merge.merged_bytes or size
    all_, reading, storing = _at_work(costs, workers, workers), _at_work(costs, 1, workers), _at_work(costs, 1, 1)
    given = _puts(1, size, all_)
    collected = given + costs.poll_seconds / 2 + _gets(workers, size, reading) + _adding(workers, size, reading)
    stored = storing.put_seconds + merged / storing.up_bytes_per_second
    pulled = all_.get_seconds if costs.cores else _gets(1, merged, all_)
    puts, gets = workers + 1, 2 * workers
    polls = workers * (collected + stored - given) / costs.poll_seconds if costs.poll_seconds else 0.0
    usd = puts * costs.put_usd + (gets + polls) * costs.get_usd
    return Estimate(collected + stored + costs.poll_seconds / 2 + pulled, puts, gets, polls, size, merged, usd)


def _at_work(costs: ChannelCosts, active: int, requests: int) -> ChannelCosts:
    """Return the constants while so many workers are active, with the latency of the slowest of so many requests."""
    slower = max(1.0, active / costs.cores) if costs.cores else 1.0
    if requests < 1:
        return costs
    # Blom's approximation of the largest of n normal values.
    late = math.exp(costs.jitter * NormalDist().inv_cdf((requests - 0.375) / (requests + 0.25)))
    if slower == late == 1.0:
        return costs
    return replace(
        costs,
        put_seconds=costs.put_seconds * slower * late,
        get_seconds=costs.get_seconds * slower * late,
        up_bytes_per_second=costs.up_bytes_per_second / slower,
        down_bytes_per_second=costs.down_bytes_per_second / slower,
        merge_seconds_per_byte=costs.merge_seconds_per_byte * slower,
        request_cpu_seconds=costs.request_cpu_seconds * slower,
    )


def _adding(workers: int, part_bytes: float, costs: ChannelCosts) -> float:
    """Return the seconds of an owner's additions that nothing hides: parts are added while others are being received,
    except for the last."""
    return costs.merge_seconds_per_byte * part_bytes * (workers if costs.cores else 2)


def _puts(requests: int, size_bytes: float, costs: ChannelCosts) -> float:
    return _lane(requests, costs.put_seconds, size_bytes, costs.up_bytes_per_second, costs)


def _gets(requests: int, size_bytes: float, costs: ChannelCosts) -> float:
    return _lane(requests, costs.get_seconds, size_bytes, costs.down_bytes_per_second, costs)


def _lane(requests: int, latency: float, size_bytes: float, bytes_per_second: float, costs: ChannelCosts) -> float:
    """Return the seconds of so many concurrent requests of one size over one link."""
    if requests < 1:
        return 0.0
    one = size_bytes / bytes_per_second
    if costs.cores:
        return requests * (latency + one)
    turns = math.ceil(requests / max(1, costs.parallel))
    # The first arrives after its latency; the others follow as fast as link and core allow.
    return max(latency + requests * max(one, costs.request_cpu_seconds), turns * (latency + one))


def least_seconds(workers: int, size_bytes: float, costs: ChannelCosts) -> float:
    """Return the lower bound: through a store that does not compute, each of W workers must download 2 S (W - 1) / W,
    or upload S."""
    if workers < 2:
        return 0.0
    down = 2 * size_bytes * (workers - 1) / workers / costs.down_bytes_per_second
    return max(down, size_bytes / costs.up_bytes_per_second)


def best_chunks(
    workers: int, size_bytes: float, costs: ChannelCosts, *, usd_per_worker_second: float | None = None
) -> int:
    """Return the best K of K-REDUCE for sequential requests: T(K) = const + K P + Q / K, so K = sqrt(Q / P).

    With a price of time it is the cheapest K: every chunk costs W puts and 2 (W - 1) gets. It is the better of the two
    integers around the optimum, compared with K = 1 and 2, as K = 1 reads one merged chunk where the formula has none,
    and with K = W, where every worker keeps its part of its own chunk.
    """
    latency = costs.put_seconds + costs.get_seconds
    bytes_term = size_bytes * (1 / costs.up_bytes_per_second + (workers - 2) / costs.down_bytes_per_second)
    if usd_per_worker_second is not None:
        rate = workers * usd_per_worker_second
        latency = latency * rate + workers * costs.put_usd + 2 * (workers - 1) * costs.get_usd
        bytes_term *= rate
    around = math.sqrt(max(0.0, bytes_term) / latency) if latency > 0 else float(workers)
    candidates = {max(1, min(workers, k)) for k in (1, 2, math.floor(around), math.ceil(around), workers)}

    def worth(chunks: int) -> float:
        # Polls are ignored: they depend on who waits for whom, hardly on K.
        costs_without_polls = ChannelCosts(
            costs.put_seconds, costs.get_seconds, costs.up_bytes_per_second, costs.down_bytes_per_second,
            put_usd=costs.put_usd, get_usd=costs.get_usd,
        )  # fmt: skip
        one = estimate(Merge("k-reduce", workers, size_bytes, chunks, faithful=True), costs_without_polls)
        return one.seconds if usd_per_worker_second is None else one.usd(workers, usd_per_worker_second)

    return min(sorted(candidates), key=worth)


def choose(
    workers: int,
    size_bytes: float,
    costs: ChannelCosts,
    *,
    usd_per_worker_second: float = 0.0,
    minimise: Literal["time", "cost"] = "time",
    slack: float = 0.0,
    patterns: Sequence[str] = PATTERNS,
) -> Choice:
    """Return the pattern and K that take the least time, or cost least; of two equal ones, the one that is better
    otherwise.

    ``patterns``: the patterns to choose from; may include ``server-reduce``. ``slack``: choices that are worse by at
    most this fraction (0.05: 5 %) count as equal, and the other measure decides.
    """
    evaluated: list[Choice] = []
    for pattern in patterns:
        for chunks in range(1, workers + 1) if pattern == "k-reduce" else (None,):
            merge = Merge(pattern, workers, size_bytes, chunks)
            if pattern == "k-reduce":
                merge = replace(merge, groups=best_groups(merge, costs))
            cost = estimate(merge, costs)
            evaluated.append(Choice(merge, cost, cost.usd(workers, usd_per_worker_second)))
    first, then = (_seconds, _usd) if minimise == "time" else (_usd, _seconds)
    limit = min(first(choice) for choice in evaluated) * (1 + slack)
    return min(
        (choice for choice in evaluated if first(choice) <= limit), key=lambda choice: (then(choice), first(choice))
    )


def best_groups(merge: Merge, costs: ChannelCosts) -> int:
    """Return the number of groups for a K-REDUCE with this K, if groups are sufficiently faster; the requests are the
    same.

    An owner reads W / G parts and then G - 1: least for G = sqrt(W). With more than W / K groups it would wait for its
    own uploads of K chunks instead.
    """
    workers, owners = merge.workers, merge.owners
    if costs.cores or 2 * owners > workers:
        return 1
    groups = min(workers // owners, round(workers / max(owners, math.sqrt(workers))))
    alone, grouped = (estimate(replace(merge, groups=count), costs).seconds for count in (1, groups))
    return groups if grouped < (1 - _MIN_GROUP_GAIN) * alone else 1


def _seconds(choice: Choice) -> float:
    return choice.estimate.seconds


def _usd(choice: Choice) -> float:
    return choice.usd


def unequal_batches(
    batch: int, chunks: int, workers: int, *, aggregation_seconds: float, seconds_per_sample: float, most: int
) -> int:
    """Return the batch of a worker that owns no chunk, such that it computes as long as an owner computes and
    aggregates.

    FasDL's A = min(round((T_agg + T_train(B)) (M + m) / a - b), floor((most - B K) / (W - K))), whose first term is B +
    T_agg / (seconds per sample). ``batch``: B, an owner's; ``most``: the largest global batch. At least B if the global
    batch allows it, and at least 1; B if every worker owns a chunk.
    """
    if chunks >= workers:
        return batch
    equal = round(batch + aggregation_seconds / seconds_per_sample)
    return max(1, min(equal, (most - batch * chunks) // (workers - chunks)))
