"""Admission in one region: promises job by job in the order of deadlines, and as many as possible within a burst.

Jobs that train in several regions at once, which a control plane admits live: `scheduler.deadline.offer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.deadline._book import Book, Wish
from scheduler.deadline._fill import fill, wish_of
from scheduler.deadline._model import DeadlineJob, DeadlineRefusal, DeviceCapacity, Reservation, Rules
from scheduler.deadline._spread import still_until

_FEW = 200
"""Number of promises up to which a region is filled again for a job that fits in no other way; beyond, that takes too
long."""
_PUSHED_MOST = 12
"""Number of jobs that one new job may displace at most."""
_STEEPNESS = 6.0
"""An empty region promises jobs exp(6), about 400, times the usual size; a full one only those of the usual size."""


@dataclass(frozen=True)
class Admission:
    """The answer to a burst of requests."""

    promised: tuple[DeadlineJob, ...]
    """The new jobs that have a promise: with their region, and the deadline that was promised."""
    refused: tuple[DeadlineRefusal, ...]
    books: Mapping[str, Book]
    """By region: what every job with a promise holds."""

    def reservation(self, job: DeadlineJob) -> Reservation:
        """Return what a promised job holds. Raises ``KeyError`` where it has no promise."""
        book = self.books[job.region]
        return book.holdings[job.name].reservation(job, job.region, book.now)


def admit(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    promised: Sequence[DeadlineJob],
    new: Sequence[DeadlineJob] = (),
    rules: Rules | None = None,
    books: Mapping[str, Book] | None = None,
    explained: bool = True,
) -> Admission:
    """Decide on a burst of new jobs; promises already given stay valid.

    Each job is first tried in what the others leave free, which changes nobody's reservation, and then with everything
    filled again by deadline (ElasticFlow, ASPLOS'23, §4.1). If it still does not fit, it takes the place of the new job
    of the burst that holds the most device time for its value, if that one holds more than it would (after Moore and
    Hodgson, 1968): promised jobs are never dropped. A soft deadline is tried at each of its steps.

    `books` are those of an earlier answer at the same instant; they are reused and changed. Without them every region
    is filled from scratch. To find out what would make refused jobs possible takes most of the time; it is omitted
    unless `explained`. Deadlines and curves name regions of `capacities`.
    """
    rules = rules or Rules()
    still_s = still_until(now, [(job, job.curves[job.region]) for job in promised], rules)
    if still_s > now:
        new = [replace(job, ready_s=max(job.ready_s, still_s)) for job in new]
        rules = replace(rules, change_pause_s=0.0)
    desk = _Desk(now, capacities, promised, rules, books)
    refused = []
    for members in _groups(new):
        for job in desk.decide(members):
            if explained:
                refused.append(desk.refusal(job))
    taken = tuple(job for jobs in desk.new.values() for job in jobs)
    return Admission(taken, tuple(refused), desk.books)


def _groups(jobs: Iterable[DeadlineJob]) -> list[list[DeadlineJob]]:
    """Return groups of jobs that are promised together or not at all, by their earliest deadline."""
    groups: dict[str, list[DeadlineJob]] = {}
    for job in jobs:
        groups.setdefault(f"group {job.group}" if job.group else f"job {job.name}", []).append(job)
    return sorted(groups.values(), key=lambda members: min(job.deadline_s for job in members))


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

    def decide(self, members: list[DeadlineJob]) -> list[DeadlineJob]:
        """Promise all of a group, or none; returns those without a promise, dropped ones included."""
        if len(members) == 1:
            return self._one(members[0])
        before = {region: list(jobs) for region, jobs in self.new.items()}
        if all(self._place(job) for job in members):
            return []
        self.new = before
        for region in {region for job in members for region in job.curves if region in self.books}:
            self.books[region] = self._filled(region, self.new[region]) or self.books[region]
        return members

    def _one(self, job: DeadlineJob) -> list[DeadlineJob]:
        for deadline_s, value in ((job.deadline_s, job.value), *job.later):
            if self._place(replace(job, deadline_s=deadline_s, value=value)):
                return []
        dropped = self._exchange(job)
        return [job] if dropped is None else [dropped]

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
                if self._within_quota(region, placed, [*self.new[region], placed]):
                    self.new[region].append(placed)
                    return True
                self.books[region].give_back(job.name)
                continue
            book = self._repaired(region, placed, wish)
            if book is None and len(self.old[region]) + len(self.new[region]) <= _FEW:
                book = self._filled(region, [*self.new[region], placed])
            if book is not None:
                before, self.books[region] = self.books[region], book
                if self._within_quota(region, placed, [*self.new[region], placed]):
                    self.new[region].append(placed)
                    return True
                self.books[region] = before
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

    def _exchange(self, job: DeadlineJob) -> DeadlineJob | None:
        """Let a job take the place of the most expensive one of the burst; returns that one, or None where nothing is
        gained."""
        for region, curve in job.curves.items():
            rivals = [rival for rival in self.new.get(region, ()) if not rival.group]
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
            if after is None:
                continue
            before, self.books[region] = self.books[region], after
            if self._within_quota(region, placed, [*kept, placed]):
                self.new[region] = [*kept, placed]
                return dearest
            self.books[region] = before
        return None

    def _within_quota(self, region: str, job: DeadlineJob, new: list[DeadlineJob]) -> bool:
        """Whether all promises of the job's user together, in all regions, stay within the quota at every instant."""
        limit = self.rules.quotas.get(job.user)
        if limit is None:
            return True
        steps: list[tuple[float, int]] = []
        for place, book in self.books.items():
            for mine in [*self.old[place], *(new if place == region else self.new[place])]:
                if mine.user == job.user and mine.name in book.holdings:
                    held = book.holdings[mine.name].reservation(mine, place, self.now)
                    for begin, end, share in zip(held.times, (*held.times[1:], held.end_s), held.shares, strict=True):
                        steps += [(begin, share), (end, -share)]
        total = most = 0
        for _, change in sorted(steps):
            total += change
            most = max(most, total)
        return most <= limit

    def refusal(self, job: DeadlineJob) -> DeadlineRefusal:
        """Return what would make the job possible as things are, in the region that comes nearest."""
        options = [self._refusal(job, region) for region in job.curves if region in self.books]
        if not options:
            return DeadlineRefusal(job.name, "", "none of its regions has capacity", math.inf, math.inf, 0.0)
        return min(options, key=lambda refusal: refusal.earliest_s)

    def _proven(self, job: DeadlineJob, region: str, extra: int, most: int) -> float:
        """Return the first number of devices from `extra` on, by doubling, with which all jobs fit; infinite: not
        shown."""
        if len(self.old[region]) + len(self.new[region]) > _FEW:
            return extra
        jobs = sorted([*self.old[region], *self.new[region], job], key=lambda each: each.deadline_s)
        names = {job.name, *(new.name for new in self.new[region])}
        capacity = self.capacities[region]
        while extra <= most:
            larger = DeviceCapacity(
                capacity.devices + extra, tuple((at, devices + extra) for at, devices in capacity.changes)
            )
            if fill(self.now, larger, region, jobs, self.rules, names, self.uneasy[region])[1] is None:
                return extra
            extra *= 2
        return math.inf

    def _refusal(self, job: DeadlineJob, region: str) -> DeadlineRefusal:
        book, curve, margin = self.books[region], job.curves[region], self.rules.margin
        wish = wish_of(job, curve, self.now, self.rules, margin, self.rules.reserve_s)
        most = curve.levels[-1]
        rates = curve.rate_by_free[np.clip(book.free, 0, most)]
        ends = np.append(book.times[1:], math.inf)
        need = job.work + 2 * curve.rates[-1] * max(self.rules.overhead.seconds(most), self.rules.change_pause_s)
        spans = np.minimum(ends, wish.deadline_s) - np.minimum(book.times, wish.deadline_s)
        possible = max(0.0, float(spans @ rates) - (need - job.work))
        with np.errstate(invalid="ignore"):
            done = np.cumsum(np.where(rates > 0, (ends - book.times) * rates, 0.0))
        last = int(done.searchsorted(need))
        earliest_s = math.inf
        if last < len(done) and rates[last] > 0:
            before = float(done[last - 1]) if last else 0.0
            end_s = float(book.times[last]) + (need - before) / float(rates[last])
            earliest_s = max(job.deadline_s, self.now + (end_s - self.now + self.rules.reserve_s) / (1.0 - margin))
        if wish.index >= len(curve.ladder[0]):
            reason = "too little time: even alone, at its fastest measured level, it would end after its deadline"
            return DeadlineRefusal(job.name, region, reason, earliest_s, math.inf, min(possible, job.work))
        within = book.times < wish.deadline_s
        free = np.maximum(book.free[within], 0)
        few, many = 0, most
        while many - few > 1:
            middle = (few + many) // 2
            enough = float(spans[within] @ curve.rate_by_free[np.minimum(free + middle, most)]) >= wish.need
            few, many = (few, middle) if enough else (middle, many)
        short = self._proven(job, region, many, 2 * most)
        reason = f"too few devices are free before its deadline in {region}"
        if job.user in self.rules.quotas:
            reason += f", or the quota of {job.user} is used up"
        return DeadlineRefusal(job.name, region, reason, earliest_s, short, min(possible, job.work))
