"""Admission in one region: promises job by job in the order of deadlines, and as many as possible within a burst.

Jobs that train in several regions at once, which a control plane admits live: `scheduler.deadline.offer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Rules
from scheduler.lab.one_region._capacity import Book, Wish
from scheduler.lab.one_region._minimum_share import fill, wish_of
from scheduler.lab.one_region._spread import still_until

_MAX_REFILLED_PROMISES = 200
"""Number of promises up to which a region is filled again for a job that fits in no other way; beyond, that takes too
long."""
_PUSHED_MOST = 12
"""Number of jobs that one new job may displace at most."""
_STEEPNESS = 6.0
"""An empty region promises jobs exp(6), about 400, times the usual size; a full one only those of the usual size."""


@dataclass(frozen=True)
class AdmissionResult:
    """The answer to a burst of requests."""

    promised: tuple[DeadlineJob, ...]
    """The new jobs that have a promise: with their region, and the deadline that was promised."""
    books: Mapping[str, Book]
    """By region: what every job with a promise holds."""


def admit(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    promised: Sequence[DeadlineJob],
    new: Sequence[DeadlineJob] = (),
    rules: Rules | None = None,
    books: Mapping[str, Book] | None = None,
) -> AdmissionResult:
    """Decide on a burst of new jobs; promises already given stay valid.

    Each job is first tried in what the others leave free, which changes nobody's reservation, and then with everything
    filled again by deadline (ElasticFlow, ASPLOS'23, §4.1). If it still does not fit, it takes the place of the new job
    of the burst that holds the most device time for its value, if that one holds more than it would (after Moore and
    Hodgson, 1968): promised jobs are never dropped. A soft deadline is tried at each of its steps.

    `books` are those of an earlier answer at the same instant; they are reused and changed. Without them every region
    is filled from scratch. Promises and curves name regions of `capacities`.
    """
    rules = rules or Rules()
    still_s = still_until(now, [(job, job.curves[job.region]) for job in promised], rules)
    if still_s > now:
        new = [replace(job, ready_s=max(job.ready_s, still_s)) for job in new]
        rules = replace(rules, change_pause_s=0.0)
    desk = _Desk(now, capacities, promised, rules, books)
    for job in sorted(new, key=lambda job: job.deadline_s):
        desk.decide(job)
    return AdmissionResult(tuple(job for jobs in desk.new.values() for job in jobs), desk.books)


class _Desk:
    """The books of all regions while a burst is decided."""

    def __init__(
        self,
        now: float,
        capacities: Mapping[str, DeviceCapacity],
        promised: Sequence[DeadlineJob],
        rules: Rules,
        books: Mapping[str, Book] | None,
    ) -> None:
        self.now, self.capacities, self.rules = now, capacities, rules
        self.old: dict[str, list[DeadlineJob]] = {region: [] for region in capacities}
        for job in sorted(promised, key=lambda job: job.deadline_s):
            self.old[job.region].append(job)
        self.new: dict[str, list[DeadlineJob]] = {region: [] for region in capacities}
        if books is not None:
            self.books = dict(books)
        else:
            self.books = {
                region: fill(now, capacity, region, self.old[region], rules)[0]
                for region, capacity in capacities.items()
            }
        self.uneasy = {
            region: {name: book.holdings[name].late for name in book.uneasy} for region, book in self.books.items()
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
            if region in self.books:
                wish = wish_of(job, curve, self.now, self.rules, self.rules.margin, self.rules.reserve_s)
                if wish.possible:
                    tries.append((wish.device_seconds(self.now), region, wish))
        tries.sort(key=lambda entry: entry[:2])
        for seconds, region, wish in tries:
            if self._too_dear(region, seconds / max(job.value, 1e-9), seconds, wish.deadline_s):
                continue
            placed = replace(job, region=region)
            if self.books[region].take(job.name, wish) is not None:
                self.new[region].append(placed)
                return True
            book = self._repaired(region, placed, wish)
            if book is None and len(self.old[region]) + len(self.new[region]) <= _MAX_REFILLED_PROMISES:
                book = self._filled(region, [*self.new[region], placed])
            if book is not None:
                self.books[region] = book
                self.new[region].append(placed)
                return True
        return False

    def _too_dear(self, region: str, price: float, seconds: float, until_s: float) -> bool:
        """Whether a job takes more than is left for jobs of its size; the limit falls as the region fills.

        A posted price that grows exponentially with the use of what is sold, as in online packing (Buchbinder and
        Naor, 2009, §4).
        """
        if math.isinf(self.rules.usual_device_s):
            return False
        book = self.books[region]
        spans = np.diff(np.minimum(np.append(book.times, math.inf), until_s))
        free = float(spans @ np.maximum(book.free, 0))
        all_of_it = max(float(self.capacities[region].devices) * (until_s - self.now), 1e-9)
        left = max(0.0, free - seconds) / all_of_it
        return price > self.rules.usual_device_s * math.exp(_STEEPNESS * left)

    def _repaired(self, region: str, job: DeadlineJob, wish: Wish) -> Book | None:
        """Return the holdings with the job as if alone, and the later deadlines that it displaces filled again; None:
        impossible."""
        book = self.books[region].copy()
        book.displace(job.name, wish)
        after = (other for other in [*self.old[region], *self.new[region]] if other.deadline_s > job.deadline_s)
        later = sorted(after, key=lambda other: other.deadline_s, reverse=True)
        pushed: list[DeadlineJob] = []
        while True:
            short = np.flatnonzero(book.free < 0)
            if not len(short):
                break
            at = float(book.times[short[0]])
            victim = next((other for other in later if book.holdings[other.name].share_at(at)), None)
            if victim is None or len(pushed) == _PUSHED_MOST:
                return None
            book.give_back(victim.name)
            later.remove(victim)
            pushed.append(victim)
        names = {new.name for new in self.new[region]}
        for other in reversed(pushed):
            margin, reserve_s = self._care(other.name in names)
            again = wish_of(other, other.curves[region], self.now, self.rules, margin, reserve_s)
            if book.take(other.name, again) is None:
                return None
        return book

    def _care(self, is_new: bool) -> tuple[float, float]:
        rules = self.rules
        return (rules.margin, rules.reserve_s) if is_new else (rules.kept_margin, rules.kept_reserve_s)

    def _filled(self, region: str, new: list[DeadlineJob]) -> Book | None:
        """Fill a region with all its jobs by deadline; None where one does not fit."""
        jobs = sorted([*self.old[region], *new], key=lambda job: job.deadline_s)
        names = {job.name for job in new}
        book, stopped = fill(self.now, self.capacities[region], region, jobs, self.rules, names, self.uneasy[region])
        return book if stopped is None else None

    def _exchange(self, job: DeadlineJob) -> None:
        """Let a job take the place of the most expensive one of the burst, where something is gained."""
        for region, curve in job.curves.items():
            rivals = self.new.get(region)
            if not rivals:
                continue
            wish = wish_of(job, curve, self.now, self.rules, self.rules.margin, self.rules.reserve_s)
            if wish.index >= len(curve.ladder[0]):
                continue
            own = wish.device_seconds(self.now)
            book = self.books[region]
            prices = {
                rival.name: book.holdings[rival.name].device_seconds(self.now) / max(rival.value, 1e-9)
                for rival in rivals
            }
            dearest = max(rivals, key=lambda rival: prices[rival.name])
            if prices[dearest.name] <= own / max(job.value, 1e-9) or dearest.value > job.value:
                continue
            placed = replace(job, region=region)
            kept = [rival for rival in self.new[region] if rival is not dearest]
            after = self._filled(region, [*kept, placed])
            if after is not None:
                self.books[region], self.new[region] = after, [*kept, placed]
                return
