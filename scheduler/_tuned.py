"""The memory and the merging of a plan's partitions, by profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from scheduler._model import Demand, PlannedPartition, Prices, Region, Snapshot
from sync.channel import channel_kinds
from sync.collective import DEFAULT, collective_named

if TYPE_CHECKING:
    from scheduler.tuning import MergePoint, TaskProfile

__all__ = ["Tuned", "merging_of", "tuned"]


@dataclass(frozen=True)
class Tuned:
    """The best of a region's configurations with a given number of workers."""

    memory_mb: int
    merge_seconds: float
    """Seconds of merging one step; 0 for a single worker."""
    collective: str
    chunks: int


def tuned(region: Region, workers: int, snapshot: Snapshot, demand: Demand) -> Tuned | None:
    """Return the partition by the task's profile in this region; None: there is no profile for its channel, or no size
    has memory enough."""
    profile, prices = snapshot.profiles.get(region.name), region.prices
    wanted = demand.collective
    if profile is None or prices is None or profile.channel.name != region.channel:
        return None
    if wanted is not None and not collective_named(wanted).predictable:
        return None
    if wanted is None and region.channel in channel_kinds(lambda kind: kind.in_memory):
        # There the region's parameter server merges, where the plan leaves it open.
        wanted = DEFAULT
    return _tuned(
        profile, _Paid.of(prices), workers, demand.batch, demand.slice_seconds, demand.epochs, demand.steps,
        demand.minimise, demand.memory_mb, region.capacity.memory_mb, wanted, demand.merging.get("k"),
        snapshot.merges.get(region.name, ()),
    )  # fmt: skip


def merging_of(
    parts: Sequence[PlannedPartition], regions: Sequence[Region], snapshot: Snapshot, demand: Demand
) -> Tuned | None:
    """Return how all partitions with several workers merge, where their profiles choose the same for all."""
    found = [
        tuned(region, part.workers, snapshot, demand)
        for part, region in zip(parts, regions, strict=True)
        if part.workers > 1 and part.pipeline is None
    ]
    first = found[0] if found else None
    if first is None or any(one is None or _way(one) != _way(first) for one in found):
        return None
    return first


def _way(one: Tuned) -> tuple[str, int]:
    return one.collective, one.chunks if collective_named(one.collective).takes_k else 0


@dataclass(frozen=True)
class _Paid:
    """The prices of a region that matter here."""

    usd_per_gb_second: float
    usd_per_call: float
    server_usd_per_hour: float

    @classmethod
    def of(cls, prices: Prices) -> _Paid:
        return cls(prices.function_usd_per_gb_second, prices.function_usd_per_request, prices.server_usd_per_hour)


@lru_cache(maxsize=4096)
def _tuned(
    profile: TaskProfile,
    paid: _Paid,
    workers: int,
    batch: int,
    slice_seconds: float,
    epochs: float | None,
    steps: int | None,
    minimise: str,
    memory_mb: int | None,
    most_memory_mb: int,
    collective: str | None,
    chunks: float | None,
    merges: tuple[MergePoint, ...],
) -> Tuned | None:
    """Return the best configuration; cached, since jobs that wait are replanned often."""
    from scheduler.tuning import Platform, cheapest, fastest, space_of, task_of

    platform = Platform(paid.usd_per_gb_second, paid.usd_per_call, paid.server_usd_per_hour, slice_seconds)
    task = task_of(profile, platform, epochs=epochs, steps=steps, merges=merges)
    space = space_of(
        profile, most_workers=workers, most_memory_mb=most_memory_mb, batch=batch, collective=collective,
        chunks=int(chunks) if chunks is not None and collective is not None else None, workers=workers,
        memory_mb=memory_mb,
    )  # fmt: skip
    best = (fastest if minimise == "time" else cheapest)(task, space)
    if best is None:
        return None
    chosen = best.configuration
    return Tuned(chosen.memory_mb, best.merge_seconds, chosen.collective, chosen.chunks)
