"""Whether a running job should continue with other numbers of workers: more, fewer, or in other regions.

The plan used what was known; regions then turn out faster or slower, are throttled, or lend their workers to others.
The possible workers for the rest of the job are evaluated with measured speeds. Workers change
only where that saves more than the change costs, or keeps a promise that would break, since a job pays for every
change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler._cost_model import MERGE_SECONDS

__all__ = [
    "EvaluatedOption",
    "Option",
    "RunningRegion",
    "WorkerChange",
    "WorkerLimits",
    "options",
    "pace",
    "paces",
    "taken",
    "worker_change",
]

CHANGE_SECONDS = 3.0
"""Seconds for which a region's workers stand still when their number changes: old ones store their state, new ones
begin. 0.5 to 2 s were measured on one machine with warm replicas; this leaves a margin."""
WORTH = 0.1
"""Share of the rest of the job that a change must save beyond its own cost."""
MARGIN = 1.1
"""Factor by which the rest of the job may take longer than expected."""
MOST_PACES = 48
"""Number of paces above which they are thinned out evenly; the fastest and the slowest are kept."""
MUCH_THE_SAME = 0.05
"""Relative difference in what is minimised below which the option that is better in the other measure is chosen.
Predictions are not more accurate than that."""


@dataclass(frozen=True)
class RunningRegion:
    """One region of a running job."""

    region: str
    workers: int
    """Present number of workers."""
    free: int
    """Workers that it may have, its own included."""
    batch: int
    """Samples of the region in one step."""
    steps_per_round: int
    samples_per_second: float
    """Speed of one worker, as measured lately."""
    worker_usd_per_second: float
    usd_per_second: float
    """Cost that does not depend on the workers: the parameter server."""
    merge_seconds: float = MERGE_SECONDS
    """Seconds of merging one step, where there are several workers."""

    def round_seconds(self, workers: int) -> float:
        """Return the seconds of one round's compute and merges."""
        merging = self.merge_seconds if workers > 1 else 0.0
        return self.steps_per_round * (math.ceil(self.batch / workers) / self.samples_per_second + merging)


@dataclass(frozen=True)
class WorkerChange:
    """A change of the numbers of workers."""

    workers: Mapping[str, int]
    """Workers by region; regions that stay as they are are omitted."""
    reason: str
    """Text for users."""


def pace(
    regions: Sequence[RunningRegion], exchange_seconds: float, background: bool, workers: Sequence[int] | None = None
) -> float:
    """Return rounds per second with a number of workers in each region; None: with the present ones, which must be
    above 0."""
    counts = [region.workers for region in regions] if workers is None else workers
    compute = max(region.round_seconds(count) for region, count in zip(regions, counts, strict=True))
    return 1.0 / (max(compute, exchange_seconds) if background else compute + exchange_seconds)


def paces(
    regions: Sequence[RunningRegion], exchange_seconds: float, background: bool
) -> tuple[tuple[Mapping[str, int], float], ...]:
    """Return the possible workers of a job, each faster than the one before with no fewer workers anywhere: workers by
    region, and rounds a second.

    The present one is among them; those that cannot be ordered with it are omitted.
    """

    def rate(workers: Sequence[int]) -> float:
        return pace(regions, exchange_seconds, background, workers)

    now = tuple(region.workers for region in regions)
    found = {option.workers: rate(option.workers) for option in options([_bounds(region) for region in regions])}
    if all(now):
        present, total = rate(now), sum(now)
        found = {now: present} | {
            workers: speed
            for workers, speed in found.items()
            if _in_line(workers, now) and (speed > present) == (sum(workers) > total)
        }
    chain: list[tuple[tuple[int, ...], float]] = []
    for workers, speed in sorted(found.items(), key=lambda way: (sum(way[0]), way[1])):
        if not chain or (speed > chain[-1][1] and _in_line(chain[-1][0], workers)):
            chain.append((workers, speed))
        elif workers == now:
            # What is there stays in line, and a little above what is as fast with fewer workers.
            chain = [way for way in chain if way[1] <= speed and _in_line(way[0], now)]
            chain.append((now, max(speed, chain[-1][1] * (1 + 1e-6)) if chain else speed))
    return tuple((dict(zip((r.region for r in regions), ways, strict=True)), speed) for ways, speed in chain)


def _in_line(one: Sequence[int], other: Sequence[int]) -> bool:
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return all(d >= 0 for d in differences) or all(d <= 0 for d in differences)


def _bounds(region: RunningRegion) -> WorkerLimits:
    load_seconds = region.steps_per_round * region.batch / region.samples_per_second
    return WorkerLimits(load_seconds, max(1, min(region.free, region.batch)))


def worker_change(
    regions: Sequence[RunningRegion],
    *,
    rounds_left: int,
    exchange_seconds: float,
    background: bool,
    minimise: str,
    deadline_seconds: float | None = None,
    budget_usd: float | None = None,
) -> WorkerChange | None:
    """Return the change that is worth it; None: continue unchanged. ``deadline_seconds`` and ``budget_usd`` are what is
    left of them.

    ``exchange_seconds`` is of one round; in the background it counts only where it is longer than the compute.
    """
    if not regions or rounds_left < 1 or any(region.workers < 1 for region in regions):
        return None

    def evaluated(option: Option) -> EvaluatedOption:
        compute = max(r.round_seconds(n) for r, n in zip(regions, option.workers, strict=True))
        seconds = rounds_left * (max(compute, exchange_seconds) if background else compute + exchange_seconds)
        changes = any(r.workers != n for r, n in zip(regions, option.workers, strict=True))
        seconds += CHANGE_SECONDS * changes
        rates = (n * r.worker_usd_per_second + r.usd_per_second for r, n in zip(regions, option.workers, strict=True))
        usd = seconds * sum(rates)
        return EvaluatedOption(option, seconds, usd, seconds * MARGIN, usd * MARGIN)

    bounds = [_bounds(region) for region in regions]
    now = evaluated(Option("now", tuple(region.workers for region in regions)))
    best = taken(
        [evaluated(option) for option in options(bounds)],
        minimise=minimise,
        deadline_seconds=deadline_seconds,
        budget_usd=budget_usd,
    )
    reason = _reason(now, best, minimise, deadline_seconds, budget_usd)
    if best.option.workers == now.option.workers or reason is None:
        return None
    changed = {r.region: n for r, n in zip(regions, best.option.workers, strict=True) if r.workers != n}
    return WorkerChange(changed, reason)


def _reason(
    now: EvaluatedOption, best: EvaluatedOption, minimise: str, deadline: float | None, budget: float | None
) -> str | None:
    """Return why a change is worth it; None: it is not."""
    if deadline is not None and now.most_seconds > deadline:
        if best.seconds < now.seconds * (1 - WORTH):
            return (
                f"the deadline is {deadline:.0f} s away: {best.seconds:.0f} s instead of {now.seconds:.0f} s are left"
            )
        return None
    if budget is not None and now.most_usd > budget:
        return (
            f"the budget has ${budget:.4f} left: ${best.usd:.4f} instead of ${now.usd:.4f}"
            if (best.usd < now.usd * (1 - WORTH))
            else None
        )
    if minimise == "time":
        saved = 1 - best.seconds / now.seconds if now.seconds else 0.0
        return f"saves {saved:.0%} of the time that is left" if saved > WORTH else None
    saved = 1 - best.usd / now.usd if now.usd else 0.0
    return f"saves {saved:.0%} of what is left to pay" if saved > WORTH else None


# Numbers of workers by pace


@dataclass(frozen=True)
class WorkerLimits:
    """The limits of a region's number of workers."""

    load_seconds: float
    """Seconds that one worker takes for one pass over the region's data."""
    free: int
    """Workers that it has, and that its data suffice for; at least 1."""
    least: int = 1
    """Fewest workers; not more than are free."""


@dataclass(frozen=True)
class Option:
    """One assignment of workers to all regions."""

    name: str
    """Text for users: "matched" is load-power matching, "greedy" uses everything that is free."""
    workers: tuple[int, ...]
    """Workers by region, in the order of the regions."""


def options(regions: Sequence[WorkerLimits]) -> tuple[Option, ...]:
    """Return the assignment for every pace, fastest first, and last the one that uses everything free; no duplicates.

    A pace is the time of a pass over the data; a region keeps it with the fewest workers that are fast enough.
    """
    slowest = max(region.load_seconds / region.free for region in regions)
    paces = sorted(
        {r.load_seconds / n for r in regions for n in range(r.least, r.free + 1) if r.load_seconds / n > slowest}
    )
    kept = [slowest, *_thinned(paces)]
    found = dict.fromkeys(tuple(_keeping(region, pace) for region in regions) for pace in kept)
    named = [Option("matched" if n == 0 else _paced(workers), workers) for n, workers in enumerate(found)]
    greedy = tuple(region.free for region in regions)
    return (*named, *([] if greedy in found else [Option("greedy", greedy)]))


def _keeping(region: WorkerLimits, pace: float) -> int:
    # A hair less, so that a pace which comes from the region itself is kept.
    return max(region.least, min(region.free, math.ceil(region.load_seconds / pace - 1e-9)))


def _thinned(paces: Sequence[float]) -> list[float]:
    if len(paces) <= MOST_PACES:
        return list(paces)
    step = (len(paces) - 1) / (MOST_PACES - 1)
    return [paces[round(n * step)] for n in range(MOST_PACES)]


def _paced(workers: tuple[int, ...]) -> str:
    return "one worker in each region" if set(workers) == {1} else f"{sum(workers)} workers"


@dataclass(frozen=True)
class EvaluatedOption:
    """An option with its expected and largest time and cost."""

    option: Option
    seconds: float
    usd: float
    most_seconds: float
    most_usd: float


def taken(
    evaluated: Iterable[EvaluatedOption], *, minimise: str, deadline_seconds: float | None, budget_usd: float | None
) -> EvaluatedOption:
    """Return the cheapest (or fastest) option that can be promised; if none can, the one that comes closest.

    An option can be promised if it keeps deadline and budget even in the upper estimate of time and cost.
    """
    held = list(evaluated)
    in_time = [w for w in held if deadline_seconds is None or w.most_seconds <= deadline_seconds]
    both = [w for w in in_time if budget_usd is None or w.most_usd <= budget_usd]
    if not in_time:
        return min(held, key=lambda w: (w.seconds, w.usd))
    if not both:
        return min(in_time, key=lambda w: (w.usd, w.seconds))
    if minimise == "time":
        fastest = min(w.seconds for w in both)
        return min((w for w in both if w.seconds <= fastest * (1 + MUCH_THE_SAME)), key=lambda w: (w.usd, w.seconds))
    cheapest = min(w.usd for w in both)
    return min((w for w in both if w.usd <= cheapest * (1 + MUCH_THE_SAME)), key=lambda w: (w.seconds, w.usd))
