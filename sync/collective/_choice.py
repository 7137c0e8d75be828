"""The choice of a collective, its K and its groups by the model of merges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sync.collective._by_owners import groups_that_pay
from sync.collective._estimate import Estimate, Merge, estimates
from sync.collective._form import ChannelCosts, MergeForm
from sync.collective._registry import collective_named, collectives

__all__ = ["Choice", "best_groups", "choose", "owners_of_lists"]

_LIST_SHARES = tuple(4.0**-power for power in range(7))
"""Lengths of a list of changes for which collectives are compared, as fractions of the whole vector: at a 4,096th,
10 kB of a model of 40 MB, requests take longer than bytes over every channel."""
_LEAST_SECONDS = 1e-12
"""Merges that take less take no time: only where neither requests nor bytes do."""


@dataclass(frozen=True)
class Choice:
    """The result of `choose`."""

    merge: Merge
    estimate: Estimate
    usd: float


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


def owners_of_lists(pattern: str, workers: int, size_bytes: float, costs: ChannelCosts, *, slack: float = 0.0) -> int:
    """Return K for a collective of changes; 0: every worker reads every other worker's list.

    How long the lists are is known only when they are sent, so no K is the fastest for certain. Chosen is the one whose
    time is the smallest multiple of the fastest one's where that is largest, over all lengths up to ``size_bytes``, the
    vector's. The lists' union counts as long as all of them together, at most as the vector. ``slack``: as in `choose`.
    """
    method = collective_named(pattern)
    options = range(0 if method.to_all else 1, workers + 1)
    slower, usd = np.zeros(len(options)), np.zeros(len(options))
    for share in _LIST_SHARES:
        size, union = share * size_bytes, min(1.0, share * workers) * size_bytes
        found = estimates([Merge(pattern, workers, size, k, merged_bytes=union) for k in options], costs)
        seconds = np.array([one.seconds for one in found])
        slower = np.maximum(slower, seconds / max(seconds.min(), _LEAST_SECONDS))
        usd = np.array([one.requests_usd for one in found])
    as_good = np.flatnonzero(slower <= slower.min() * (1 + slack))
    return options[int(min(as_good, key=lambda at: (usd[at], slower[at])))]


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
