"""The choice of a collective, its K and its groups by the model of merges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sync.collective._by_owners import groups_that_pay
from sync.collective._estimate import Estimate, Merge, estimate, estimates
from sync.collective._form import ChannelCosts, MergeForm
from sync.collective._registry import collective_named, collectives

__all__ = ["Choice", "best_chunks", "best_groups", "choose", "least_seconds", "unequal_batches"]


@dataclass(frozen=True)
class Choice:
    """The result of `choose`."""

    merge: Merge
    estimate: Estimate
    usd: float


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

    # Polls are ignored: they depend on who waits for whom, hardly on K.
    costs_without_polls = ChannelCosts(
        costs.put_seconds, costs.get_seconds, costs.up_bytes_per_second, costs.down_bytes_per_second,
        put_usd=costs.put_usd, get_usd=costs.get_usd,
    )  # fmt: skip

    def worth(chunks: int) -> float:
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
    patterns: Sequence[str] | None = None,
) -> Choice:
    """Return the collective and K that take the least time, or cost least; of two equal ones, the one that is better
    otherwise.

    ``patterns``: the collectives to choose from; may include ``server-reduce``; None: those of workers that ``auto``
    may choose. ``slack``: choices that are worse by at most this fraction (0.05: 5 %) count as equal, and the other
    measure decides.
    """
    if patterns is None:
        patterns = collectives(lambda method: method.automatic and method.worker)
    merges: list[Merge] = []
    for pattern in patterns:
        method = collective_named(pattern)
        merges += [
            Merge(pattern, workers, size_bytes, chunks)
            for chunks in (range(1, workers + 1) if method.takes_k else (None,))
        ]
    groups = _groups_that_pay(merges, costs)
    merges = [
        replace(merge, groups=count) if collective_named(merge.pattern).takes_groups else merge
        for merge, count in zip(merges, groups, strict=True)
    ]
    evaluated = [
        Choice(merge, cost, cost.usd(workers, usd_per_worker_second))
        for merge, cost in zip(merges, estimates(merges, costs), strict=True)
    ]
    first, then = (_seconds, _usd) if minimise == "time" else (_usd, _seconds)
    limit = min(first(choice) for choice in evaluated) * (1 + slack)
    return min(
        (choice for choice in evaluated if first(choice) <= limit), key=lambda choice: (then(choice), first(choice))
    )


def best_groups(merge: Merge, costs: ChannelCosts) -> int:
    """Return the number of groups for a K-REDUCE with this K, as `groups_that_pay` finds it."""
    return _groups_that_pay([merge], costs)[0]


def _groups_that_pay(merges: Sequence[Merge], costs: ChannelCosts) -> list[int]:
    """Return the numbers of groups of merges that differ only in collective and K."""
    first, one = merges[0], np.ones(len(merges))
    chunks = np.array([max(1.0, merge.owners) for merge in merges])
    merged_bytes = first.merged_bytes or first.size_bytes
    form = MergeForm(
        costs, first.size_bytes, merged_bytes, first.workers * one, chunks, one, groups=None, faithful=first.faithful
    )
    return [int(count) for count in groups_that_pay(form)]


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
