"""Preemptible capacity: cheap while there is slack, left at the last safe moment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeadlineJob, Overhead


@dataclass(frozen=True)
class Refuge:
    """How a job reaches its deadline on capacity that is not taken away."""

    leave_s: float
    """The last instant at which it can leave preemptible capacity; now or before: it must leave at once."""
    share: int
    """Devices that it then needs; 0: no level meets the deadline any more."""


def refuge(
    job: DeadlineJob, curve: SpeedCurve, now: float, overhead: Overhead, margin: float = 0.03, lost_s: float = 0.0
) -> Refuge:
    """Return when a job must leave preemptible capacity at the latest, and for which share.

    Of the levels that still meet the deadline it is the one with the least device time, all changes included, and of
    two about equal ones the one that lets it stay longer. `lost_s`: run time that a preemption can cost at most; it is
    reserved, since the job may be preempted at its last instant there.
    """
    window = (job.deadline_s - now) * (1.0 - margin)
    best, least = Refuge(-math.inf, 0), math.inf
    for level, rate in zip(curve.levels, curve.rates, strict=True):
        takes_s = job.work / rate + overhead.seconds(level) + lost_s
        if takes_s <= window and level * takes_s < 0.95 * least:
            best, least = Refuge(now + window - takes_s, level), level * takes_s
    if not best.share:
        fastest = curve.levels[-1]
        takes_s = job.work / curve.rates[-1] + overhead.seconds(fastest)
        if now + takes_s <= job.deadline_s:
            return Refuge(now, fastest)
    return best


def spot_share(job: DeadlineJob, curve: SpeedCurve, now: float, margin: float = 0.03) -> int:
    """Devices on preemptible capacity: the leanest level that would do the work in half of the time left, if one does.

    The other half is slack for preemptions; with less than that at the fastest level it takes the fastest.
    """
    window = max(1e-9, (job.deadline_s - now) * (1.0 - margin))
    return next(
        (level for level, rate in zip(curve.levels, curve.rates, strict=True) if job.work / rate <= window / 2),
        curve.levels[-1],
    )
