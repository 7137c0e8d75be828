"""The number of workers of each region: elastic placement where the data are.

A round ends with its slowest region, so workers that make another region faster than that are paid for waiting.
Load-power matching (Cloudless-Training, arXiv 2303.05330, section III-B) gives every region as many as it needs to keep
the pace of the slowest with all it has. That is one point of a line: every slower pace needs fewer workers. Along it
the time only grows, while the cost has a minimum, since parameter servers are paid by the hour, and workers by what
they do and by how long they wait. All paces are evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["MUCH_THE_SAME", "EvaluatedOption", "Option", "Staffing", "options", "taken"]

MOST_PACES = 48
"""Number of paces above which they are thinned out evenly; the fastest and the slowest are kept."""
MUCH_THE_SAME = 0.05
"""Relative difference in what is minimised below which the option that is better in the other measure is chosen.
Predictions are not more accurate than that."""


@dataclass(frozen=True)
class Staffing:
    """The limits of a region's number of workers."""

    load_seconds: float
    """Seconds that one worker takes for one pass over the region's data."""
    free: int
    """Workers that it has, and that its data suffice for; at least 1."""
    least: int = 1
    """Fewest workers; not more than are free."""


@dataclass(frozen=True)
class Option:
    """One way to staff all regions."""

    name: str
    """Text for users: "matched" is load-power matching, "greedy" uses everything that is free."""
    workers: tuple[int, ...]
    """Workers by region, in the order of the regions."""


def options(regions: Sequence[Staffing]) -> tuple[Option, ...]:
    """Return the staffing for every pace, the fastest first, and last the one that uses everything free; no duplicates.

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


def _keeping(region: Staffing, pace: float) -> int:
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
