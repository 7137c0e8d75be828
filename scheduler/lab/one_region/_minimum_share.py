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
from scheduler.lab.one_region._capacity import CapacityLedger, DeviceRequest

_MAX_COST_FACTOR = 1.2
"""A running job keeps its share where that takes at most this factor of the least device time: changes disturb
others."""
_MAX_EXACT_JOBS = 1000
"""Number of jobs above which instants are rounded to a grid of about as many points."""
_MAX_ORDERS = 4
"""Orders in which a region is filled at most, until all jobs fit."""
_RESERVED_PAUSES = 2
"""Number of pauses by which a planned rise comes earlier: others may change just before it."""
_SOON, _SOON_S = 0.02, 5.0
"""A rise within this share of the window, or these seconds, comes at once: a plan that is computed again at every event
would otherwise postpone it for ever, by less and less."""


def _window(job: DeadlineJob, now: float, rules: Rules, margin: float, reserve_s: float) -> float:
    """Return the time until a job's deadline, less what is reserved."""
    window = job.deadline_s - now
    return window - margin * max(0.0, window - rules.grace_s) - reserve_s


def request_of(
    job: DeadlineJob,
    curve: SpeedCurve,
    now: float,
    rules: Rules,
    margin: float,
    reserve_s: float = 0.0,
    soon: bool = False,
) -> DeviceRequest:
    """Return the levels that a job would use alone in the region; the cost of changes is part of its work.

    The smaller level comes first, so that capacity of the near future stays free for new jobs. A job that runs on the
    larger one already keeps it first, and changes once instead of twice; so does a job whose promise is in danger,
    which must be done `soon`.
    """
    window = _window(job, now, rules, margin, reserve_s)
    levels, rates = curve.ladder
    pause = max(rules.change_pause_s, job.ready_s - now, 0.0)
    request = DeviceRequest(curve, now + max(window, 0.0), job.work, job.share, index=len(levels))
    if window <= 0:
        return request
    stay_s = now + pause + job.work / curve.rate(job.share) if job.share else math.inf
    index, down = 0, False
    for _ in range(3):
        index = max(index, bisect_left(rates, request.need / window, 1))
        if index == len(levels):
            break
        high, low = levels[index], levels[index - 1]
        down = high == job.share
        request.need = job.work + rates[index] * (pause if down else max(pause, rules.overhead.seconds(high)))
        if low and low != job.share:
            request.need += rates[index - 1] * rules.overhead.seconds(low)
    if index == len(levels) or rates[index] * window < request.need:
        request.stay_s = stay_s if stay_s <= now + window else 0.0
        return request
    request.index = index
    low_s = min(window, (rates[index] * window - request.need) / (rates[index] - rates[index - 1]))
    if rules.overhead.everyone:
        low_s -= _RESERVED_PAUSES * rules.overhead.base_s
    if low_s < max(_SOON_S, _SOON * window):
        request.first, request.second, request.switch_s = high, high, now
    elif down or soon:
        request.first, request.second, request.switch_s = high, low, now + max(window - low_s, 0.5 * _SOON * window)
    else:
        request.first, request.second, request.switch_s = low, high, now + low_s
    cheap = job.share * (stay_s - now) <= _MAX_COST_FACTOR * request.device_seconds(now)
    if stay_s <= now + window and (cheap or stay_s - now <= rules.grace_s):
        request.stay_s = stay_s
    return request


def least_device_seconds(job: DeadlineJob, curve: SpeedCurve, now: float) -> float:
    """Device seconds with which a job meets its deadline in an empty region; infinite: it cannot."""
    request = request_of(job, curve, now, Rules(), 0.0)
    return request.device_seconds(now) if request.possible else math.inf


def fill(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    rules: Rules,
    new: Collection[str] = (),
    without_margin: Mapping[str, bool] | None = None,
) -> tuple[CapacityLedger, str | None]:
    """Fill one region with jobs by deadline; returns the ledger, and the name of the job that stops it, if one does.

    That is a `new` job that does not fit, or a promised one that no longer fits after a new one; the ledger is complete
    only if no job stops it. ``without_margin``: promised jobs that do not fit with their margin in any case get what is
    available, without one; those that are late (true) stop nothing. Running jobs keep their shares where that costs
    about the same and all others still fit; else all jobs are filled with the least.
    """
    without_margin = without_margin or {}
    requests = _requests(now, region, jobs, rules, new)
    ledger, stopped = _fill(now, capacity, region, jobs, requests, rules, new, without_margin)
    if stopped is None and not ledger.without_margin:
        return ledger, None
    missing = {stopped} if stopped is not None else ledger.without_margin
    if not any(request.possible for job, request in zip(jobs, requests, strict=True) if job.name in missing):
        return ledger, stopped
    # Shares that stay, and the order of deadlines, are good but not always possible: first the least shares, then
    # those that did not fit before all others.
    for request in requests:
        if request.possible:
            request.stay_s = 0.0
    first: list[int] = []
    for _ in range(_MAX_ORDERS):
        tried = [*first, *(index for index in range(len(jobs)) if index not in first)]
        other, stopped_other = _fill(
            now, capacity, region, [jobs[i] for i in tried], [requests[i] for i in tried], rules, new, without_margin
        )
        if stopped_other is None and (stopped is not None or len(other.without_margin) < len(ledger.without_margin)):
            ledger, stopped = other, None
        missing = {stopped_other} if stopped_other is not None else other.without_margin
        ahead = [
            index
            for index, (job, request) in enumerate(zip(jobs, requests, strict=True))
            if job.name in missing and index not in first and request.possible
        ]
        if not ahead or (stopped is None and not ledger.without_margin):
            break
        first = [*ahead, *first]
    return ledger, stopped


def _requests(
    now: float, region: str, jobs: Sequence[DeadlineJob], rules: Rules, new: Collection[str]
) -> list[DeviceRequest]:
    """Return what all jobs would use; where any change pauses all jobs, time is reserved for the pauses of planned
    increases."""
    margins = [
        (rules.margin, rules.reserve_s) if job.name in new else (rules.kept_margin, rules.kept_reserve_s)
        for job in jobs
    ]
    if len(jobs) > _MAX_EXACT_JOBS:
        requests = _on_a_grid(now, region, jobs, rules, margins)
    else:
        requests = [
            request_of(job, job.curves[region], now, rules, *own_margins)
            for job, own_margins in zip(jobs, margins, strict=True)
        ]
    if not rules.overhead.everyone:
        return requests
    increases = sorted(request.switch_s for request in requests if request.switch_s > now and not request.stay_s)
    for index, (job, (margin, reserve_s)) in enumerate(zip(jobs, margins, strict=True)):
        pauses_s = rules.overhead.base_s * bisect_left(increases, requests[index].deadline_s)
        if pauses_s:
            requests[index] = request_of(job, job.curves[region], now, rules, margin, reserve_s + pauses_s)
    return requests


def _on_a_grid(
    now: float, region: str, jobs: Sequence[DeadlineJob], rules: Rules, margins: Sequence[tuple[float, float]]
) -> list[DeviceRequest]:
    """Return requests whose instants are rounded to a common grid, on the safe side: the time to fill depends on the
    number of instants.

    The grid is as fine as the deadlines are close to each other; a job holds a little more than it needs.
    """
    ends = [
        now + max(0.0, _window(job, now, rules, *own_margins)) for job, own_margins in zip(jobs, margins, strict=True)
    ]
    instants = np.unique(ends)
    grid = np.append(instants[:: max(1, len(instants) // _MAX_EXACT_JOBS)], instants[-1])
    before = grid[grid.searchsorted(ends, side="right") - 1].tolist()
    points = grid.tolist()
    requests = []
    for job, (margin, reserve_s), end_s, grid_s in zip(jobs, margins, ends, before, strict=True):
        request = request_of(job, job.curves[region], now, rules, margin, reserve_s + end_s - grid_s)
        request.deadline_s = grid_s
        if request.switch_s > now:
            if request.second > request.first:
                at = bisect_right(points, request.switch_s) - 1
                request.switch_s = points[at] if at >= 0 else now
                request.first = request.first if request.switch_s > now else request.second
            else:
                request.switch_s = min(grid_s, points[bisect_left(points, request.switch_s)])
        if request.stay_s:
            request.stay_s = min(grid_s, points[min(bisect_left(points, request.stay_s), len(points) - 1)])
        requests.append(request)
    return requests


def _fill(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    requests: Sequence[DeviceRequest],
    rules: Rules,
    new: Collection[str],
    without_margin: Mapping[str, bool],
) -> tuple[CapacityLedger, str | None]:
    ledger = CapacityLedger(
        now, capacity, [request.deadline_s for request in requests] + [request.switch_s for request in requests]
    )
    for job, request in zip(jobs, requests, strict=True):
        if ledger.take(job.name, request) is not None:
            continue
        if job.name in new or (new and job.name not in without_margin):
            return ledger, job.name
        bare = request_of(job, job.curves[region], now, rules, 0.0, soon=True)
        if not bare.stay_s and job.share:
            # It will be late whatever happens: where it is nearly done, a change would only make it later.
            end_s = max(now, job.ready_s) + job.work / job.curves[region].rate(job.share)
            bare.stay_s = end_s if end_s - now <= rules.grace_s and not bare.possible else 0.0
        if ledger.take(job.name, bare) is None:
            if new and not without_margin.get(job.name, False):
                return ledger, job.name
            ledger.take_all_free(job.name, bare)
        ledger.without_margin.add(job.name)
    return ledger, None
