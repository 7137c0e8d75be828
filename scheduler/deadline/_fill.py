"""The least device time that meets a deadline, given what others hold: minimum satisfactory shares.

Progressive filling (ElasticFlow, ASPLOS'23, §4.1) without slots: capacity is a step function over real instants, and a
job fills it between two neighbouring levels of its curve's lower hull, the smaller one first, so that what is free soon
stays free for those who come. Everything that a change of shares takes is charged inside the fill.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._curve import Curve
from scheduler.deadline._model import Capacity, Job, Reservation, Rules

_EXACT_UP_TO = 4096
"""Points of a book's grid up to which a constrained fill may add its own; beyond, it is rounded up to the next."""


_AS_CHEAP = 1.2
"""A running job keeps its share where that takes at most so many times the least device time: changes disturb."""
_SOON, _SOON_S = 0.02, 5.0
"""A rise within this part of the window, or this time, comes at once: a plan that is drawn up anew at every event would
otherwise put it off for ever, by less and less."""


@dataclass(slots=True)
class Holding:
    """What a book holds for one job: `low` devices, then `high` from `split_s` until `end_s`, or as in `shares`."""

    low: int
    high: int
    split_s: float
    end_s: float
    work: float
    """Steps that the holding covers, the overheads in it included."""
    times: NDArray[np.float64] | None = None
    """Where the capacity did not leave two plain levels: instants, one more than shares."""
    shares: NDArray[np.int64] | None = None
    late: bool = False
    """True where even all that was free does not meet the deadline."""

    def share(self) -> int:
        """Devices now."""
        return self.low if self.shares is None else int(self.shares[0])

    def rises_s(self, share: int) -> float:
        """The first instant at which it holds more than `share`; infinite: never."""
        if self.shares is not None and self.times is not None:
            above = np.flatnonzero(self.shares > share)
            return float(self.times[above[0]]) if len(above) else math.inf
        return self.split_s if self.high > share else math.inf

    def device_seconds(self, now: float) -> float:
        if self.shares is not None and self.times is not None:
            return float(np.dot(np.diff(self.times), self.shares))
        return self.low * (self.split_s - now) + self.high * (self.end_s - self.split_s)

    def reservation(self, job: Job, region: str, now: float) -> Reservation:
        total = self.device_seconds(now)
        if self.shares is None or self.times is None:
            if self.split_s <= now:
                return Reservation(job.name, region, (now,), (self.high,), self.end_s, total)
            return Reservation(job.name, region, (now, self.split_s), (self.low, self.high), self.end_s, total)
        keep = np.flatnonzero(np.diff(self.shares, prepend=-1))
        times, shares = tuple(self.times[keep].tolist()), tuple(self.shares[keep].tolist())
        return Reservation(job.name, region, times, shares, self.end_s, total)


class Book:
    """Free capacity of one region over time, and what is held of it. Times ascend; the last step has no end."""

    def __init__(self, now: float, capacity: Capacity, points: Sequence[float] = ()) -> None:
        changes = [(at, devices) for at, devices in capacity.changes if at > now]
        past = [devices for at, devices in capacity.changes if at <= now]
        self.now = now
        self.times: NDArray[np.float64] = np.unique(np.array([now, *(at for at, _ in changes), *points]))
        self.times = self.times[self.times >= now]
        self.free: NDArray[np.int64] = np.full(len(self.times), past[-1] if past else capacity.devices, dtype=np.int64)
        for at, devices in changes:
            self.free[self.times.searchsorted(at) :] = devices
        self.holdings: dict[str, Holding] = {}
        self.uneasy: set[str] = set()
        """Promised jobs that do not fit with their margin."""

    def point(self, at: float) -> int:
        """Index of the grid's step that begins at `at`, made where it is not there."""
        index = int(self.times.searchsorted(at))
        if index < len(self.times) and self.times[index] == at:
            return index
        self.times = np.concatenate((self.times[:index], (at,), self.times[index:]))
        self.free = np.concatenate((self.free[:index], self.free[index - 1 : index], self.free[index:]))
        return index

    def take(self, name: str, wish: Wish) -> Holding | None:
        """Hold the least that gives `wish` its work; None where that cannot be, then nothing changes."""
        if wish.deadline_s <= self.now:
            return None
        if wish.stay_s:
            end = self.point(min(wish.stay_s, wish.deadline_s))
            if self.free[:end].min() >= wish.share:
                self.free[:end] -= wish.share
                holding = Holding(wish.share, wish.share, self.now, min(wish.stay_s, wish.deadline_s), wish.need)
                self.holdings[name] = holding
                return holding
        plain = wish.index < len(wish.curve.ladder[0])
        split = self.point(wish.split_s) if plain else 0
        end = self.point(wish.deadline_s)
        if plain:
            low, high, free = wish.low, wish.high, self.free
            if (split >= end or free[split:end].min() >= high) and (not low or not split or free[:split].min() >= low):
                free[split:end] -= high
                if low:
                    free[:split] -= low
                holding = Holding(low, high, wish.split_s, wish.deadline_s, wish.need)
                self.holdings[name] = holding
                return holding
        return self._squeeze(name, wish, end)

    def take_what_there_is(self, name: str, wish: Wish) -> Holding:
        """Hold as much as fits until the deadline, and past it as long as the work takes: for a promise in danger."""
        curve, most = wish.curve, wish.curve.levels[-1]
        spans = np.diff(self.times, append=math.inf)
        rates = curve.rate_by_free[np.clip(self.free, 0, most)]
        with np.errstate(invalid="ignore"):
            done = np.cumsum(np.where(rates > 0, spans * rates, 0.0))
        last = int(done.searchsorted(wish.need))
        if last >= len(done):
            last = len(done) - 1
        before = float(done[last - 1]) if last else 0.0
        end_s = float(self.times[last]) + (wish.need - before) / float(rates[last]) if rates[last] > 0 else math.inf
        if math.isfinite(end_s) and end_s > self.times[last]:
            last = self.point(end_s) - 1
        shares = curve.level_by_free[np.clip(self.free[: last + 1], 0, most)]
        self.free[: last + 1] -= shares
        times = np.append(self.times[: last + 1], min(end_s, float(self.times[last]) + 1e9))
        holding = Holding(int(shares[0]), int(shares.max()), self.now, end_s, wish.need, times, shares, late=True)
        self.holdings[name] = holding
        return holding

    def _squeeze(self, name: str, wish: Wish, end: int) -> Holding | None:
        """The general fill: on each step the largest level up to the wished one that is free there."""
        curve = wish.curve
        levels, rates = curve.ladder
        spans = self.times[1 : end + 1] - self.times[:end]
        free = np.minimum(self.free[:end], curve.levels[-1])
        fitting = curve.rate_by_free[np.maximum(free, 0)]
        index = min(wish.index, len(levels) - 1)
        while True:
            upper = np.minimum(fitting, rates[index])
            full = float(spans @ upper)
            if full >= wish.need:
                break
            index += 1
            if index == len(levels):
                return None
        lower = np.minimum(fitting, rates[index - 1])
        gain = np.cumsum(spans * (upper - lower))
        slack = full - wish.need
        at = int(gain.searchsorted(slack, side="right"))
        if at >= end:
            at = end - 1
        inside = (slack - (float(gain[at - 1]) if at else 0.0)) / max(float(upper[at] - lower[at]), 1e-12)
        split_s = float(self.times[at]) + inside
        if self.times[at] < split_s < self.times[at + 1] and len(self.times) < _EXACT_UP_TO:
            at = self.point(split_s)
            end += 1
            free = np.minimum(self.free[:end], curve.levels[-1])
        shares = curve.level_by_free[np.minimum(np.maximum(free, 0), levels[index])]
        shares[:at] = curve.level_by_free[np.minimum(np.maximum(free[:at], 0), levels[index - 1])]
        self.free[:end] -= shares
        times = self.times[: end + 1].copy()
        holding = Holding(levels[index - 1], levels[index], split_s, wish.deadline_s, wish.need, times, shares)
        self.holdings[name] = holding
        return holding

    def give_back(self, name: str) -> None:
        """Free what a job holds."""
        held = self.holdings.pop(name)
        if held.shares is not None and held.times is not None:
            for begin, end, share in zip(held.times[:-1], held.times[1:], held.shares, strict=True):
                self.free[self.point(float(begin)) : self.point(float(end))] += share
            return
        split, end = self.point(held.split_s), self.point(held.end_s)
        self.free[:split] += held.low
        self.free[split:end] += held.high


@dataclass(slots=True)
class Wish:
    """What one job would take in an empty region: two neighbouring levels and the instant between them."""

    curve: Curve
    deadline_s: float
    """The margin is taken off."""
    need: float
    """Steps, the overheads in them."""
    index: int
    """Of the upper level in the curve's ladder; its length where no level is fast enough."""
    low: int
    high: int
    split_s: float
    share: int = 0
    """What the job has now."""
    stay_s: float = 0.0
    """Where going on with that is about as cheap: when it would be done; else 0."""


def wish_of(job: Job, curve: Curve, now: float, rules: Rules, margin: float, reserve_s: float = 0.0) -> Wish:
    """Levels that a job would take with nobody else there; what a change takes is in its work."""
    window = (job.deadline_s - now) * (1.0 - margin) - reserve_s
    levels, rates = curve.ladder
    last = len(levels) - 1
    pause = max(rules.change_pause_s, job.ready_s - now, 0.0)
    if window <= 0:
        return Wish(curve, now, job.work, last + 1, 0, levels[last], now)
    need, index = job.work, 0
    for _ in range(2):
        index = max(index, bisect_left(rates, need / window, 1))
        if index > last:
            break
        high = levels[index]
        need = job.work + rates[index] * (pause if high == job.share else max(pause, rules.overhead.seconds(high)))
    index = max(index, bisect_left(rates, need / window, 1))
    if index > last:
        return Wish(curve, now + window, need, last + 1, levels[last - 1], levels[last], now)
    low_rate, high_rate = rates[index - 1], rates[index]
    split_s = min(now + window, now + max(0.0, (high_rate * window - need) / (high_rate - low_rate)))
    low = levels[index - 1]
    if split_s - now < max(_SOON_S, _SOON * window):
        low, split_s = levels[index], now
    wish = Wish(curve, now + window, need, index, low, levels[index], split_s)
    if job.share:
        end_s = now + pause + job.work / curve.rate(job.share)
        least = low * (split_s - now) + levels[index] * (now + window - split_s)
        if end_s <= now + window and job.share * (end_s - now) <= _AS_CHEAP * least:
            wish.share, wish.stay_s = job.share, end_s
    return wish


def fill(
    now: float,
    capacity: Capacity,
    region: str,
    jobs: Sequence[Job],
    rules: Rules,
    new: Collection[str] = (),
    uneasy: Collection[str] = (),
) -> tuple[Book, str | None]:
    """Fill one region with jobs by deadline. Returns the book, and the name of the job that stops it, if one does.

    What stops it is a `new` job that does not fit, or a promised one that no longer fits once a new one has come
    before it; the book is complete only where nothing does. Promised jobs that are `uneasy` do not fit with their
    margin in any case: they get what there is, without one, and stop nothing.
    """
    wishes = [
        wish_of(job, job.curves[region], now, rules, rules.margin, rules.reserve_s)
        if job.name in new
        else wish_of(job, job.curves[region], now, rules, rules.kept_margin, rules.kept_reserve_s)
        for job in jobs
    ]
    book = Book(now, capacity, [wish.deadline_s for wish in wishes] + [wish.split_s for wish in wishes])
    for job, wish in zip(jobs, wishes, strict=True):
        if book.take(job.name, wish) is not None:
            continue
        if job.name in new or (new and job.name not in uneasy):
            return book, job.name
        bare = wish_of(job, job.curves[region], now, rules, 0.0)
        if book.take(job.name, bare) is None:
            book.take_what_there_is(job.name, bare)
        book.uneasy.add(job.name)
    return book, None
