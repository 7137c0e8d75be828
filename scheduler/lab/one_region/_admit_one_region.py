"""Admission in one region: promises job by job in the order of deadlines, and as many as possible within a burst.

Jobs that train in several regions at once, which a control plane admits live: `scheduler.deadline.offer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Rules
from scheduler.lab.one_region._capacity import CapacityLedger, DeviceRequest
from scheduler.lab.one_region._minimum_share import fill, request_of
from scheduler.lab.one_region._spread import fixed_until

_MAX_REFILLED_PROMISES = 200
"""Number of promises up to which a region is filled again for a job that fits in no other way; beyond, that takes too
long."""
_MAX_DISPLACED_JOBS = 12
"""Number of jobs that one new job may displace at most."""
_STEEPNESS = 6.0
"""An empty region promises jobs exp(6), about 400, times the usual size; a full one only those of the usual size."""


@dataclass(frozen=True)
class AdmissionResult:
    """The answer to a burst of requests."""

    promised: tuple[DeadlineJob, ...]
    """The new jobs that have a promise: with their region, and the deadline that was promised."""
    ledgers: Mapping[str, CapacityLedger]
    """By region: what every job with a promise has reserved."""


def admit(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    promised: Sequence[DeadlineJob],
    new: Sequence[DeadlineJob] = (),
    rules: Rules | None = None,
    ledgers: Mapping[str, CapacityLedger] | None = None,
) -> AdmissionResult:
    """Decide on a burst of new jobs; promises already given stay valid.

    Each job is first tried in what the others leave free, which changes nobody's reservation, and then with everything
    filled again by deadline (ElasticFlow, ASPLOS'23, §4.1). If it still does not fit, it takes the place of the new job
    of the burst that holds the most device time for its value, if that one holds more than it would (after Moore and
    Hodgson, 1968): promised jobs are never dropped. A soft deadline is tried at each of its steps.

    `ledgers` are those of an earlier answer at the same instant; they are reused and changed. Without them every region
    is filled from scratch. Promises and curves name regions of `capacities`.
    """
    rules = rules or Rules()
    fixed_until_s = fixed_until(now, [(job, job.curves[job.region]) for job in promised], rules)
    if fixed_until_s > now:
        new = [replace(job, ready_s=max(job.ready_s, fixed_until_s)) for job in new]
        rules = replace(rules, change_pause_s=0.0)
    burst = _AdmissionBurst(now, capacities, promised, rules, ledgers)
    for job in sorted(new, key=lambda job: job.deadline_s):
        burst.decide(job)
    return AdmissionResult(tuple(job for jobs in burst.new.values() for job in jobs), burst.ledgers)


class _AdmissionBurst:
    """Decides on one burst of new jobs, with the ledgers of all regions."""

    def __init__(
        self,
        now: float,
        capacities: Mapping[str, DeviceCapacity],
        promised: Sequence[DeadlineJob],
        rules: Rules,
        ledgers: Mapping[str, CapacityLedger] | None,
    ) -> None:
        self.now, self.capacities, self.rules = now, capacities, rules
        self.old: dict[str, list[DeadlineJob]] = {region: [] for region in capacities}
        for job in sorted(promised, key=lambda job: job.deadline_s):
            self.old[job.region].append(job)
        self.new: dict[str, list[DeadlineJob]] = {region: [] for region in capacities}
        if ledgers is not None:
            self.ledgers = dict(ledgers)
        else:
            self.ledgers = {
                region: fill(now, capacity, region, self.old[region], rules)[0]
                for region, capacity in capacities.items()
            }
        self.without_margin = {
            region: {name: ledger.reservations[name].late for name in ledger.without_margin}
            for region, ledger in self.ledgers.items()
        }

    def decide(self, job: DeadlineJob) -> None:
        """Promise a job the first of its deadlines that fits, also in the place of another job of the burst."""
        for deadline_s, value in ((job.deadline_s, job.value), *job.later):
            if self._place(replace(job, deadline_s=deadline_s, value=value)):
                return
        self._exchange(job)

    def _place(self, job: DeadlineJob) -> bool:
        """Promise a job in the region where it takes the least device time, if it fits in any."""
        tries = []
        for region, curve in job.curves.items():
            if region in self.ledgers:
                request = request_of(job, curve, self.now, self.rules, self.rules.margin, self.rules.reserve_s)
                if request.possible:
                    tries.append((request.device_seconds(self.now), region, request))
        tries.sort(key=lambda entry: entry[:2])
        for seconds, region, request in tries:
            if self._too_expensive(region, seconds / max(job.value, 1e-9), seconds, request.deadline_s):
                continue
            placed = replace(job, region=region)
            if self.ledgers[region].take(job.name, request) is not None:
                self.new[region].append(placed)
                return True
            ledger = self._repaired(region, placed, request)
            if ledger is None and len(self.old[region]) + len(self.new[region]) <= _MAX_REFILLED_PROMISES:
                ledger = self._filled(region, [*self.new[region], placed])
            if ledger is not None:
                self.ledgers[region] = ledger
                self.new[region].append(placed)
                return True
        return False

    def _too_expensive(self, region: str, price: float, seconds: float, until_s: float) -> bool:
        """Whether a job takes more than is left for jobs of its size; the limit falls as the region fills.

        A posted price that grows exponentially with the use of what is sold, as in online packing (Buchbinder and
        Naor, 2009, §4).
        """
        if math.isinf(self.rules.usual_device_s):
            return False
        ledger = self.ledgers[region]
        spans = np.diff(np.minimum(np.append(ledger.times, math.inf), until_s))
        free = float(spans @ np.maximum(ledger.free, 0))
        all_of_it = max(float(self.capacities[region].devices) * (until_s - self.now), 1e-9)
        left = max(0.0, free - seconds) / all_of_it
        return price > self.rules.usual_device_s * math.exp(_STEEPNESS * left)

    def _repaired(self, region: str, job: DeadlineJob, request: DeviceRequest) -> CapacityLedger | None:
        """Return the ledger with the job as if it were alone, and the jobs with later deadlines that it displaces
        filled again; None: impossible."""
        ledger = self.ledgers[region].copy()
        ledger.displace(job.name, request)
        after = (other for other in [*self.old[region], *self.new[region]] if other.deadline_s > job.deadline_s)
        later = sorted(after, key=lambda other: other.deadline_s, reverse=True)
        displaced: list[DeadlineJob] = []
        while True:
            short = np.flatnonzero(ledger.free < 0)
            if not len(short):
                break
            at = float(ledger.times[short[0]])
            other_job = next((other for other in later if ledger.reservations[other.name].share_at(at)), None)
            if other_job is None or len(displaced) == _MAX_DISPLACED_JOBS:
                return None
            ledger.release(other_job.name)
            later.remove(other_job)
            displaced.append(other_job)
        names = {new.name for new in self.new[region]}
        for other in reversed(displaced):
            margin, reserve_s = self._margins(other.name in names)
            again = request_of(other, other.curves[region], self.now, self.rules, margin, reserve_s)
            if ledger.take(other.name, again) is None:
                return None
        return ledger

    def _margins(self, is_new: bool) -> tuple[float, float]:
        rules = self.rules
        return (rules.margin, rules.reserve_s) if is_new else (rules.kept_margin, rules.kept_reserve_s)

    def _filled(self, region: str, new: list[DeadlineJob]) -> CapacityLedger | None:
        """Fill a region with all its jobs by deadline; None where one does not fit."""
        jobs = sorted([*self.old[region], *new], key=lambda job: job.deadline_s)
        names = {job.name for job in new}
        ledger, stopped = fill(
            self.now, self.capacities[region], region, jobs, self.rules, names, self.without_margin[region]
        )
        return ledger if stopped is None else None

    def _exchange(self, job: DeadlineJob) -> None:
        """Let a job take the place of the most expensive one of the burst, where something is gained."""
        for region, curve in job.curves.items():
            rivals = self.new.get(region)
            if not rivals:
                continue
            request = request_of(job, curve, self.now, self.rules, self.rules.margin, self.rules.reserve_s)
            if request.index >= len(curve.ladder[0]):
                continue
            own = request.device_seconds(self.now)
            ledger = self.ledgers[region]
            prices = {
                rival.name: ledger.reservations[rival.name].device_seconds(self.now) / max(rival.value, 1e-9)
                for rival in rivals
            }
            most_expensive = max(rivals, key=lambda rival: prices[rival.name])
            if prices[most_expensive.name] <= own / max(job.value, 1e-9) or most_expensive.value > job.value:
                continue
            placed = replace(job, region=region)
            kept = [rival for rival in self.new[region] if rival is not most_expensive]
            after = self._filled(region, [*kept, placed])
            if after is not None:
                self.ledgers[region], self.new[region] = after, [*kept, placed]
                return
