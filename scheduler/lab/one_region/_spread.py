"""The use of devices that no promise needs now: they go to the jobs that save the most later."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeadlineJob, Rules
from scheduler.lab.one_region._capacity import CapacityLedger

_KEEP_FACTOR = 1.2
"""Factor on the gain of a level that a job has already."""
_WORTHWHILE = 2.0
"""Factor of the cost of a change that a larger share must save."""
_LEAST_RETURN = 0.1
"""Share of their time that devices must return to be used; otherwise they stay free, since the next job would only have
to take them back."""
_SHORTEST_S = 1.0
"""Least seconds between two decisions that are due only to a plan."""
_HORIZON_S = 1800.0
"""Seconds for which a gain is counted at most; by then something else will have happened."""


@dataclass(frozen=True)
class WorkerShares:
    """Shares from now on."""

    shares: Mapping[str, int]
    """Devices by job, for every job that was named."""
    wake_s: float
    """Instant of the next decision if nothing happens before; infinite: none."""


def spread(
    ledger: CapacityLedger,
    region: str,
    promised: Sequence[DeadlineJob],
    waiting: Sequence[DeadlineJob] = (),
    rules: Rules | None = None,
) -> WorkerShares:
    """Return the shares of one region: what is reserved, and what is free by marginal return.

    `promised` jobs are in `ledger`; `waiting` ones run on what is left: best effort, and jobs whose deadline was not
    promised. The return of one more level is the device time that the job saves later, for each second and device that
    it takes now (ElasticFlow, ASPLOS'23, §4.2, with the sign of its text). A running job scales only where the time
    saved exceeds the cost of the change; where a change pauses all jobs, unneeded changes are made only if all gains
    together exceed all pauses.
    """
    rules = rules or Rules()
    free = max(0, int(ledger.free[0]))
    shares = {job.name: ledger.reservations[job.name].share() for job in promised}
    shares.update((job.name, 0) for job in waiting)
    gains = _grow(ledger, region, promised, waiting, rules, free, shares)
    everyone = [*promised, *waiting]
    fixed_until_s = fixed_until(ledger.now, [(job, job.curves[region]) for job in promised], rules)
    if (
        fixed_until_s > ledger.now
        and _fits(ledger, everyone)
        and _can_wait(ledger, region, promised, fixed_until_s, rules)
    ):
        return WorkerShares({job.name: job.share for job in everyone}, fixed_until_s)
    urgent = any(job.share < ledger.reservations[job.name].share() for job in promised)
    if rules.overhead.everyone and not urgent and _fits(ledger, everyone):
        running = sum(job.share for job in everyone)
        small = sum(gains.values()) <= _WORTHWHILE * rules.overhead.base_s * running
        if small or any(_has_little_slack(job, job.curves[region], ledger.now, rules) for job in promised):
            shares = {job.name: job.share for job in everyone}
    wake_s = min((ledger.reservations[job.name].increase_s(shares[job.name]) for job in promised), default=math.inf)
    return WorkerShares(shares, max(wake_s, ledger.now + _SHORTEST_S))


def fixed_until(now: float, jobs: Sequence[tuple[DeadlineJob, SpeedCurve]], rules: Rules) -> float:
    """Return until when nothing should change, since some job will be done soon that can take no more pause; `now`: no
    need."""
    if not rules.overhead.everyone:
        return now
    fixed_until_s = now
    for job, curve in jobs:
        rate = curve.rate(job.share)
        if rate:
            end_s = max(now, job.ready_s) + job.work / rate
            slack_s = job.deadline_s - end_s
            if 0 <= slack_s < rules.overhead.base_s and end_s - now <= rules.grace_s:
                fixed_until_s = max(fixed_until_s, end_s)
    return fixed_until_s


def _has_little_slack(job: DeadlineJob, curve: SpeedCurve, now: float, rules: Rules) -> bool:
    """Whether two more pauses would make a job late, even at its fastest; one that is late anyway is not."""
    slack_s = job.deadline_s - max(now, job.ready_s) - job.work / curve.rates[-1]
    return 0 <= slack_s < 2 * rules.overhead.base_s


def _can_wait(
    ledger: CapacityLedger, region: str, promised: Sequence[DeadlineJob], until_s: float, rules: Rules
) -> bool:
    """Whether every job whose share would rise before an instant still meets its deadline if it increases then."""
    for job in promised:
        held = ledger.reservations[job.name]
        if held.increase_s(job.share) < until_s:
            curve, most = job.curves[region], held.most()
            left = max(0.0, job.work - curve.rate(job.share) * (until_s - max(ledger.now, job.ready_s)))
            pauses_s = rules.overhead.seconds(most) + 2 * rules.overhead.base_s
            if until_s + pauses_s + left / curve.rate(most) > job.deadline_s:
                return False
    return True


def _fits(ledger: CapacityLedger, jobs: Sequence[DeadlineJob]) -> bool:
    """Return whether all jobs can keep what they have: capacity may have gone."""
    held = sum(ledger.reservations[job.name].share() for job in jobs if job.name in ledger.reservations)
    return sum(job.share for job in jobs) <= int(ledger.free[0]) + held


def _grow(
    ledger: CapacityLedger,
    region: str,
    promised: Sequence[DeadlineJob],
    waiting: Sequence[DeadlineJob],
    rules: Rules,
    free: int,
    shares: dict[str, int],
) -> dict[str, float]:
    """Raise shares until nothing is free or no job gains; returns device seconds gained by the jobs that change."""
    heap: list[tuple[float, float, str, int, DeadlineJob]] = []
    gains: dict[str, float] = {}

    def offer(job: DeadlineJob) -> None:
        step = _step(ledger, region, job, shares[job.name], rules)
        if step is not None:
            gain, level = step
            heapq.heappush(heap, (-gain, _urgency(job), job.name, level, job))

    for job in (*promised, *waiting) if free > 0 else ():
        offer(job)
    while heap and free > 0:
        negative, _, name, level, job = heapq.heappop(heap)
        more = level - shares[name]
        if more > free:
            continue
        free -= more
        if level > job.share:
            lasts = min(_HORIZON_S, job.work / job.curves[region].rate(level))
            gains[name] = gains.get(name, 0.0) - negative * more * lasts
        shares[name] = level
        offer(job)
    return gains


def _urgency(job: DeadlineJob) -> float:
    """Return the order at an equal return: by deadline; best effort by what its user has had."""
    return job.deadline_s if math.isfinite(job.deadline_s) else 1e15 + job.served_s


def _step(ledger: CapacityLedger, region: str, job: DeadlineJob, share: int, rules: Rules) -> tuple[float, int] | None:
    """The return of a job's next worthwhile level, and that level.

    What the change takes is spread over the time that the level lasts: a level that the job has already saves it, any
    other costs it.
    """
    curve = job.curves[region]
    held = ledger.reservations.get(job.name)
    later = (held.most() if held is not None else 0) or curve.levels[0]
    price = later / curve.rate(later)
    have = curve.rate(share)
    best: tuple[float, int] | None = None
    for level, rate in zip(curve.levels, curve.rates, strict=True):
        if level <= share:
            continue
        gain = (rate - have) * price
        if job.share:
            change = rules.overhead.seconds(level) / max(min(_HORIZON_S, job.work / rate), 1.0) * level
            if level > job.share:
                gain -= _WORTHWHILE * change
            else:
                gain = _KEEP_FACTOR * gain + (change if level == job.share else 0.0)
        gain /= level - share
        if gain >= _LEAST_RETURN and (best is None or gain > best[0] + 1e-9):
            best = (gain, level)
    return best
