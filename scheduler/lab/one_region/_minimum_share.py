"""The least device time that meets a deadline, given what others hold: minimum satisfactory shares.

Progressive filling (ElasticFlow, ASPLOS'23, §4.1) without slots: capacity is a step function over real instants, and a
job fills it between two neighbouring levels of its curve's lower hull, the smaller one first, so that capacity of the
near future stays free for new jobs. All costs of a change of shares are charged inside the fill.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Rules
from scheduler.lab.one_region._capacity import Book, Wish

_AS_CHEAP = 1.2
"""A running job keeps its share where that takes at most this factor of the least device time: changes disturb
others."""
_MANY = 1000
"""Number of jobs above which instants are rounded to a grid of about as many points."""
_ORDERS = 4
"""Orders in which a region is filled at most, until all jobs fit."""
_PAUSES_AHEAD = 2
"""Number of pauses by which a planned rise comes earlier: others may change just before it."""
_SOON, _SOON_S = 0.02, 5.0
"""A rise within this share of the window, or these seconds, comes at once: a plan that is computed again at every event
would otherwise postpone it for ever, by less and less."""


def _window(job: DeadlineJob, now: float, rules: Rules, margin: float, reserve_s: float) -> float:
    """Return the time until a job's deadline, less what is reserved."""
    window = job.deadline_s - now
    return window - margin * max(0.0, window - rules.grace_s) - reserve_s


def wish_of(
    job: DeadlineJob,
    curve: SpeedCurve,
    now: float,
    rules: Rules,
    margin: float,
    reserve_s: float = 0.0,
    soon: bool = False,
) -> Wish:
    """Return the levels that a job would use alone in the region; the cost of changes is part of its work.

    The smaller level comes first, so that capacity of the near future stays free for new jobs. A job that runs on the
    larger one already keeps it first, and changes once instead of twice; so does a job whose promise is in danger,
    which must be done `soon`.
    """
    window = _window(job, now, rules, margin, reserve_s)
    levels, rates = curve.ladder
    pause = max(rules.change_pause_s, job.ready_s - now, 0.0)
    wish = Wish(curve, now + max(window, 0.0), job.work, job.share, index=len(levels))
    if window <= 0:
        return wish
    stay_s = now + pause + job.work / curve.rate(job.share) if job.share else math.inf
    index, down = 0, False
    for _ in range(3):
        index = max(index, bisect_left(rates, wish.need / window, 1))
        if index == len(levels):
            break
        high, low = levels[index], levels[index - 1]
        down = high == job.share
        wish.need = job.work + rates[index] * (pause if down else max(pause, rules.overhead.seconds(high)))
        if low and low != job.share:
            wish.need += rates[index - 1] * rules.overhead.seconds(low)
    if index == len(levels) or rates[index] * window < wish.need:
        wish.stay_s = stay_s if stay_s <= now + window else 0.0
        return wish
    wish.index = index
    low_s = min(window, (rates[index] * window - wish.need) / (rates[index] - rates[index - 1]))
    if rules.overhead.everyone:
        low_s -= _PAUSES_AHEAD * rules.overhead.base_s
    if low_s < max(_SOON_S, _SOON * window):
        wish.first, wish.second, wish.switch_s = high, high, now
    elif down or soon:
        wish.first, wish.second, wish.switch_s = high, low, now + max(window - low_s, 0.5 * _SOON * window)
    else:
        wish.first, wish.second, wish.switch_s = low, high, now + low_s
    cheap = job.share * (stay_s - now) <= _AS_CHEAP * wish.device_seconds(now)
    if stay_s <= now + window and (cheap or stay_s - now <= rules.grace_s):
        wish.stay_s = stay_s
    return wish


def least_device_seconds(job: DeadlineJob, curve: SpeedCurve, now: float) -> float:
    """Device seconds with which a job meets its deadline in an empty region; infinite: it cannot."""
    wish = wish_of(job, curve, now, Rules(), 0.0)
    return wish.device_seconds(now) if wish.possible else math.inf


def fill(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    rules: Rules,
    new: Collection[str] = (),
    uneasy: Mapping[str, bool] | None = None,
) -> tuple[Book, str | None]:
    """Fill one region with jobs by deadline; returns the book, and the name of the job that stops it, if one does.

    That is a `new` job that does not fit, or a promised one that no longer fits after a new one; the book is complete
    only if no job stops it. Promised jobs that are `uneasy` do not fit with their margin in any case: they get what is
    available, without one; those that are late (true) stop nothing. Running jobs keep their shares where that is about
    as cheap and leaves room for all others; else all jobs are filled with the least.
    """
    uneasy = uneasy or {}
    wishes = _wishes(now, region, jobs, rules, new)
    book, stopped = _fill(now, capacity, region, jobs, wishes, rules, new, uneasy)
    if stopped is None and not book.uneasy:
        return book, None
    missing = {stopped} if stopped is not None else book.uneasy
    if not any(wish.possible for job, wish in zip(jobs, wishes, strict=True) if job.name in missing):
        return book, stopped
    # Shares that stay, and the order of deadlines, are good but not always possible: first the least shares, then
    # those that did not fit before all others.
    for wish in wishes:
        if wish.possible:
            wish.stay_s = 0.0
    first: list[int] = []
    for _ in range(_ORDERS):
        tried = [*first, *(index for index in range(len(jobs)) if index not in first)]
        other, stopped_other = _fill(
            now, capacity, region, [jobs[i] for i in tried], [wishes[i] for i in tried], rules, new, uneasy
        )
        if stopped_other is None and (stopped is not None or len(other.uneasy) < len(book.uneasy)):
            book, stopped = other, None
        missing = {stopped_other} if stopped_other is not None else other.uneasy
        ahead = [
            index
            for index, (job, wish) in enumerate(zip(jobs, wishes, strict=True))
            if job.name in missing and index not in first and wish.possible
        ]
        if not ahead or (stopped is None and not book.uneasy):
            break
        first = [*ahead, *first]
    return book, stopped


def _wishes(now: float, region: str, jobs: Sequence[DeadlineJob], rules: Rules, new: Collection[str]) -> list[Wish]:
    """Return what all jobs would use; where any change pauses all jobs, time is reserved for the pauses of planned
    rises."""
    cares = [
        (rules.margin, rules.reserve_s) if job.name in new else (rules.kept_margin, rules.kept_reserve_s)
        for job in jobs
    ]
    if len(jobs) > _MANY:
        wishes = _on_a_grid(now, region, jobs, rules, cares)
    else:
        wishes = [wish_of(job, job.curves[region], now, rules, *care) for job, care in zip(jobs, cares, strict=True)]
    if not rules.overhead.everyone:
        return wishes
    rises = sorted(wish.switch_s for wish in wishes if wish.switch_s > now and not wish.stay_s)
    for index, (job, (margin, reserve_s)) in enumerate(zip(jobs, cares, strict=True)):
        pauses_s = rules.overhead.base_s * bisect_left(rises, wishes[index].deadline_s)
        if pauses_s:
            wishes[index] = wish_of(job, job.curves[region], now, rules, margin, reserve_s + pauses_s)
    return wishes


def _on_a_grid(
    now: float, region: str, jobs: Sequence[DeadlineJob], rules: Rules, cares: Sequence[tuple[float, float]]
) -> list[Wish]:
    """Return wishes whose instants are rounded to a common grid, on the safe side: the time to fill depends on the
    number of instants.

    The grid is as fine as the deadlines are close to each other; a job holds a little more than it needs.
    """
    ends = [now + max(0.0, _window(job, now, rules, *care)) for job, care in zip(jobs, cares, strict=True)]
    instants = np.unique(ends)
    grid = np.append(instants[:: max(1, len(instants) // _MANY)], instants[-1])
    before = grid[grid.searchsorted(ends, side="right") - 1].tolist()
    points = grid.tolist()
    wishes = []
    for job, (margin, reserve_s), end_s, grid_s in zip(jobs, cares, ends, before, strict=True):
        wish = wish_of(job, job.curves[region], now, rules, margin, reserve_s + end_s - grid_s)
        wish.deadline_s = grid_s
        if wish.switch_s > now:
            if wish.second > wish.first:
                at = bisect_right(points, wish.switch_s) - 1
                wish.switch_s = points[at] if at >= 0 else now
                wish.first = wish.first if wish.switch_s > now else wish.second
            else:
                wish.switch_s = min(grid_s, points[bisect_left(points, wish.switch_s)])
        if wish.stay_s:
            wish.stay_s = min(grid_s, points[min(bisect_left(points, wish.stay_s), len(points) - 1)])
        wishes.append(wish)
    return wishes


def _fill(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    wishes: Sequence[Wish],
    rules: Rules,
    new: Collection[str],
    uneasy: Mapping[str, bool],
) -> tuple[Book, str | None]:
    book = Book(now, capacity, [wish.deadline_s for wish in wishes] + [wish.switch_s for wish in wishes])
    for job, wish in zip(jobs, wishes, strict=True):
        if book.take(job.name, wish) is not None:
            continue
        if job.name in new or (new and job.name not in uneasy):
            return book, job.name
        bare = wish_of(job, job.curves[region], now, rules, 0.0, soon=True)
        if not bare.stay_s and job.share:
            # It will be late whatever happens: where it is nearly done, a change would only make it later.
            end_s = max(now, job.ready_s) + job.work / job.curves[region].rate(job.share)
            bare.stay_s = end_s if end_s - now <= rules.grace_s and not bare.possible else 0.0
        if book.take(job.name, bare) is None:
            if new and not uneasy.get(job.name, False):
                return book, job.name
            book.take_what_there_is(job.name, bare)
        book.uneasy.add(job.name)
    return book, None
