"""The model of the time and cost of merges, for one merge and for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sync.collective._form import TERMS, ChannelCosts, Floats, MergeForm, MergeTerms
from sync.collective._registry import collective_named, collectives

__all__ = ["Estimate", "Merge", "Merges", "estimate", "estimates", "merge_terms"]


@dataclass(frozen=True)
class Merges:
    """Many merges, each at one place of arrays of one length."""

    collective: npt.NDArray[np.int64]
    """Numbers of `collectives`."""
    workers: Floats
    chunks: Floats
    """K, between 1 and the number of workers; 0: as in `CollectiveMethod.owners`."""
    share: Floats
    """Fraction of the channel's bandwidth that each worker has, at most 1."""

    @classmethod
    def of(cls, rows: Sequence[tuple[str, int, int, float]]) -> Merges:
        """Create them from (collective, workers, K, share of the bandwidth)."""
        names, workers, chunks, shares = zip(*rows, strict=True)
        known = collectives()
        numbers = np.array([known.index(name) for name in names])
        return cls(numbers, np.array(workers, float), np.array(chunks, float), np.array(shares, float))


def merge_terms(
    merges: Merges,
    size_bytes: float,
    channel: ChannelCosts,
    *,
    merged_bytes: float | None = None,
    faithful: bool = False,
    grouped: bool = True,
    groups: Floats | None = None,
    chained: bool = True,
    late: float = MergeForm.late,
) -> MergeTerms:
    """Return terms and requests of merges of vectors of so many bytes; zeros for a single worker.

    ``merged_bytes``: as in `Merge`. ``grouped``: whether workers merge in groups where that is faster, as they do
    without staleness; ``groups``: the numbers of groups instead. ``faithful``, ``chained``, ``late``: as in
    `MergeForm`. Raises ``ValueError`` for a collective without a cost.
    """
    rows = len(merges.workers)
    found = MergeTerms(np.zeros((rows, len(TERMS))), *(np.zeros(rows) for _ in range(6)))
    several = merges.workers >= 2
    for number in np.unique(merges.collective[several]):
        where = several & (merges.collective == number)
        method = collective_named(collectives()[number])
        if method.cost is None:
            raise ValueError(f"the cost of {method.name} is unknown")
        workers = merges.workers[where]
        if groups is not None:
            counts: Floats | None = groups[where]
        else:
            counts = None if grouped and method.takes_groups and not faithful else np.ones_like(workers)
        form = MergeForm(
            channel, size_bytes, merged_bytes or size_bytes, workers, merges.chunks[where], merges.share[where],
            counts, method.overlapped, faithful, chained, late,
        )  # fmt: skip
        for name, values in vars(method.cost(form)).items():
            getattr(found, name)[where] = values
    return found


@dataclass(frozen=True)
class Merge:
    """One merge of the vectors of W workers."""

    pattern: str
    """Name of the collective."""
    workers: int
    size_bytes: float
    """S: encoded size of one vector; for ``isp``: of one worker's list."""
    chunks: int | None = None
    """K; None: as `CollectiveMethod.owners` says."""
    faithful: bool = False
    """Whether requests are sequential, and values are found by listing."""
    groups: int = 1
    """As in `Settings`."""
    merged_bytes: float | None = None
    """Encoded size of the merged vector, if it differs from ``size_bytes``. ``isp``: of the union of all lists."""

    @property
    def in_groups(self) -> int:
        """Number of groups, within its limits."""
        return max(1, min(self.groups, self.workers // max(1, self.owners)))

    @property
    def owners(self) -> int:
        """K, within its limits."""
        return collective_named(self.pattern).owners(self.workers, self.chunks)


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


def estimate(merge: Merge, costs: ChannelCosts, *, late: float = MergeForm.late) -> Estimate:
    """Estimate time, requests and bytes of one merge; zeros for a single worker. ``late``: as in `MergeForm`."""
    return estimates([merge], costs, late=late)[0]


def estimates(merges: Sequence[Merge], costs: ChannelCosts, *, late: float = MergeForm.late) -> list[Estimate]:
    """Estimate merges that differ only in collective, workers, K and groups."""
    first = merges[0]
    rows = Merges.of([(one.pattern, one.workers, one.owners, 1.0) for one in merges])
    found = merge_terms(
        rows, first.size_bytes, costs, merged_bytes=first.merged_bytes, faithful=first.faithful,
        groups=np.array([one.in_groups for one in merges], float), chained=False, late=late,
    )  # fmt: skip
    columns = (
        found.seconds(), found.puts, found.gets, found.polls + found.lists, found.up_bytes, found.down_bytes,
        found.usd(costs),
    )  # fmt: skip
    return [
        Estimate(seconds, int(puts), int(gets), *rest)
        for seconds, puts, gets, *rest in np.column_stack(columns).tolist()
    ]
