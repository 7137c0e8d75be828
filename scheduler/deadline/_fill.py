"""The least device time that meets a deadline, given what others hold: minimum satisfactory shares.

Progressive filling (ElasticFlow, ASPLOS'23, §4.1) without slots: capacity is a step function over real instants, and a
job fills it between two neighbouring levels of its curve's lower hull, the smaller one first, so that what is free soon
stays free for those who come. Everything that a change of shares takes is charged inside the fill.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._curve import Curve
from scheduler.deadline._model import Capacity, Job, Reservation, Rules

_EXACT_UP_TO = 4096
"""Points of a book's grid up to which a constrained fill may add its own; beyond, it is rounded up to the next."""


_AS_CHEAP = 1.2
"""A running job keeps its share where that takes at most so many times the least device time: changes disturb."""
_ORDERS = 4
"""Orders in which a region is filled at most, until everybody fits."""
_PAUSES_AHEAD = 2
"""A planned rise comes earlier by so many pauses: others may change just before it."""
_SOON, _SOON_S = 0.02, 5.0
"""A rise within this part of the window, or this time, comes at once: a plan that is drawn up anew at every event would
otherwise put it off for ever, by less and less."""


@dataclass(slots=True)
class Holding:
    """What a book holds for one job: `first` devices, then `second` from `switch_s` to `end_s`, or as in `shares`."""

    first: int
    second: int
    switch_s: float
    end_s: float
    times: NDArray[np.float64] | None = None
    """Where the capacity did not leave two plain levels: instants, one more than shares."""
    shares: NDArray[np.int64] | None = None
    late: bool = False
    """True where even all that was free does not meet the deadline."""

    def share(self) -> int:
        """Devices now."""
        return self.first if self.shares is None else int(self.shares[0])

    def most(self) -> int:
        """The most devices that it ever holds."""
        return max(self.first, self.second)

    def share_at(self, at: float) -> int:
        """Devices at an instant that is not before the first."""
        if at >= self.end_s:
            return 0
        if self.shares is not None and self.times is not None:
            return int(self.shares[min(int(self.times.searchsorted(at, side="right")) - 1, len(self.shares) - 1)])
        return self.first if at < self.switch_s else self.second

    def rises_s(self, share: int) -> float:
        """The first instant, later than the first, at which it holds more than `share`; infinite: never."""
        if self.shares is not None and self.times is not None:
            above = np.flatnonzero(self.shares > share)
            return float(self.times[above[0]]) if len(above) else math.inf
        return self.switch_s if self.second > share else math.inf

    def device_seconds(self, now: float) -> float:
        if self.shares is not None and self.times is not None:
            return float(np.dot(np.diff(self.times), self.shares))
        return self.first * (self.switch_s - now) + self.second * (self.end_s - self.switch_s)

    def reservation(self, job: Job, region: str, now: float) -> Reservation:
        total = self.device_seconds(now)
        if self.shares is not None and self.times is not None:
            keep = np.flatnonzero(np.diff(self.shares, prepend=-1))
            times, shares = tuple(self.times[keep].tolist()), tuple(self.shares[keep].tolist())
            return Reservation(job.name, region, times, shares, self.end_s, total)
        if self.first == self.second or self.switch_s <= now:
            return Reservation(job.name, region, (now,), (self.second,), self.end_s, total)
        return Reservation(job.name, region, (now, self.switch_s), (self.first, self.second), self.end_s, total)


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

    def copy(self) -> Book:
        """A book to try something in."""
        other = Book.__new__(Book)
        other.now, other.times, other.free = self.now, self.times, self.free.copy()
        other.holdings, other.uneasy = dict(self.holdings), set(self.uneasy)
        return other

    def displace(self, name: str, wish: Wish) -> None:
        """Hold a wish's two levels whether they are free or not: ``free`` may fall below zero."""
        self.point(wish.switch_s)
        self.point(wish.deadline_s)
        self._hold(name, Holding(wish.first, wish.second, wish.switch_s, wish.deadline_s))

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
            end = self.point(wish.stay_s)
            if self.free[:end].min() >= wish.share:
                return self._hold(name, Holding(wish.share, wish.share, self.now, wish.stay_s))
        if wish.index == len(wish.curve.ladder[0]):
            return None
        switch, end = self.point(wish.switch_s), self.point(wish.deadline_s)
        switch = min(switch, end)
        free = self.free
        if (switch == end or free[switch:end].min() >= wish.second) and (
            not switch or free[:switch].min() >= wish.first
        ):
            return self._hold(name, Holding(wish.first, wish.second, wish.switch_s, wish.deadline_s))
        return self._squeeze(name, wish, end)

    def _hold(self, name: str, holding: Holding) -> Holding:
        """Take a plain holding; its instants are points of the grid."""
        switch, end = self.times.searchsorted(holding.switch_s), self.times.searchsorted(holding.end_s)
        self.free[:switch] -= holding.first
        self.free[switch:end] -= holding.second
        self.holdings[name] = holding
        return holding

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
        holding = Holding(int(shares[0]), int(shares.max()), self.now, end_s, times, shares, late=True)
        self.holdings[name] = holding
        return holding

    def _squeeze(self, name: str, wish: Wish, end: int) -> Holding | None:
        """The general fill: on each step the largest level up to the wished one that is free there."""
        curve = wish.curve
        levels, rates = curve.ladder
        spans = self.times[1 : end + 1] - self.times[:end]
        fitting = curve.rate_by_free[np.clip(self.free[:end], 0, curve.levels[-1])]
        index = wish.index
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
        early = wish.share > 0
        goal = wish.need - float(spans @ lower) if early else full - wish.need
        at = min(int(gain.searchsorted(goal, side="left" if early else "right")), end - 1)
        inside = (goal - (float(gain[at - 1]) if at else 0.0)) / max(float(upper[at] - lower[at]), 1e-12)
        switch_s = float(self.times[at]) + inside
        cut = at + 1 if early else at
        if self.times[at] < switch_s < self.times[at + 1] and len(self.times) < _EXACT_UP_TO:
            cut = self.point(switch_s)
            end += 1
        first, second = (levels[index], levels[index - 1]) if early else (levels[index - 1], levels[index])
        free = np.clip(self.free[:end], 0, curve.levels[-1])
        shares = curve.level_by_free[np.minimum(free, second)]
        shares[:cut] = curve.level_by_free[np.minimum(free[:cut], first)]
        self.free[:end] -= shares
        holding = Holding(first, second, switch_s, wish.deadline_s, self.times[: end + 1].copy(), shares)
        self.holdings[name] = holding
        return holding

    def give_back(self, name: str) -> None:
        """Free what a job holds."""
        held = self.holdings.pop(name)
        if held.shares is not None and held.times is not None:
            end = self.point(float(held.times[-1]))
            step = held.times.searchsorted(self.times[:end], side="right") - 1
            self.free[:end] += held.shares[np.minimum(step, len(held.shares) - 1)]
            return
        switch, end = self.point(held.switch_s), self.point(held.end_s)
        self.free[:switch] += held.first
        self.free[switch:end] += held.second


@dataclass(slots=True)
class Wish:
    """What one job would take in an empty region: two neighbouring levels, and the instant between them."""

    curve: Curve
    deadline_s: float
    """The margin is taken off."""
    need: float
    """Steps, the overheads in them."""
    share: int
    """What the job has now."""
    stay_s: float = 0.0
    """When it would be done if it went on with that, where that is about as cheap or the only way; else 0."""
    index: int = 0
    """Of the upper level in the curve's ladder; its length where no level is fast enough."""
    first: int = 0
    second: int = 0
    switch_s: float = 0.0

    def device_seconds(self, now: float) -> float:
        return self.first * (self.switch_s - now) + self.second * (self.deadline_s - self.switch_s)


def wish_of(
    job: Job, curve: Curve, now: float, rules: Rules, margin: float, reserve_s: float = 0.0, soon: bool = False
) -> Wish:
    """Levels that a job would take with nobody else there; what changes take is in its work.

    The smaller level comes first, so that what is free soon stays free for those who come, but a job that runs on the
    larger one already keeps it first, and changes once instead of twice; as does one whose promise is in danger: it
    shall be done `soon`.
    """
    window = job.deadline_s - now
    window -= margin * max(0.0, window - rules.grace_s) + reserve_s
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


def least_device_seconds(job: Job, curve: Curve, now: float) -> float:
    """Device seconds with which a job meets its deadline in an empty region; infinite: it cannot."""
    wish = wish_of(job, curve, now, Rules(), 0.0)
    return wish.device_seconds(now) if wish.index < len(curve.ladder[0]) else math.inf


def fill(
    now: float,
    capacity: Capacity,
    region: str,
    jobs: Sequence[Job],
    rules: Rules,
    new: Collection[str] = (),
    uneasy: Mapping[str, bool] | None = None,
) -> tuple[Book, str | None]:
    """Fill one region with jobs by deadline. Returns the book, and the name of the job that stops it, if one does.

    What stops it is a `new` job that does not fit, or a promised one that no longer fits once a new one is there; the
    book is complete only where nothing does. Promised jobs that are `uneasy` do not fit with their margin in any case:
    they get what there is, without one; those that are late (true) even so stop nothing. Running jobs keep their shares where that is about as cheap
    and leaves room for all others; else everybody is filled with the least.
    """
    uneasy = uneasy or {}
    wishes = _wishes(now, region, jobs, rules, new)
    book, stopped = _fill(now, capacity, region, jobs, wishes, rules, new, uneasy)
    if stopped is None and not book.uneasy:
        return book, None
    missing = {stopped} if stopped is not None else book.uneasy
    if all(
        wish.index == len(wish.curve.ladder[0]) for job, wish in zip(jobs, wishes, strict=True) if job.name in missing
    ):
        return book, stopped
    # Shares that stay, and the order of deadlines, are good but not always possible: first the least shares, then
    # those that did not fit before all others.
    for wish in wishes:
        if wish.index < len(wish.curve.ladder[0]):
            wish.stay_s = 0.0
    order = list(range(len(jobs)))
    first: list[int] = []
    for _ in range(_ORDERS):
        tried = [*first, *(index for index in order if index not in first)]
        other, stopped_other = _fill(
            now, capacity, region, [jobs[i] for i in tried], [wishes[i] for i in tried], rules, new, uneasy
        )
        if stopped_other is None and (stopped is not None or len(other.uneasy) < len(book.uneasy)):
            book, stopped = other, None
        missing = {stopped_other} if stopped_other is not None else other.uneasy
        ahead = [
            index
            for index in order
            if jobs[index].name in missing
            and index not in first
            and wishes[index].index < len(wishes[index].curve.ladder[0])
        ]
        if not ahead or (stopped is None and not book.uneasy):
            break
        first = [*ahead, *first]
    return book, stopped


def _wishes(now: float, region: str, jobs: Sequence[Job], rules: Rules, new: Collection[str]) -> list[Wish]:
    """What all would take; where any change pauses everybody, the pauses of the rises that are planned kept free."""
    cares = [
        (rules.margin, rules.reserve_s) if job.name in new else (rules.kept_margin, rules.kept_reserve_s)
        for job in jobs
    ]
    wishes = [wish_of(job, job.curves[region], now, rules, *care) for job, care in zip(jobs, cares, strict=True)]
    if not rules.overhead.everyone:
        return wishes
    rises = sorted(wish.switch_s for wish in wishes if wish.switch_s > now and not wish.stay_s)
    for index, (job, (margin, reserve_s)) in enumerate(zip(jobs, cares, strict=True)):
        pauses_s = rules.overhead.base_s * bisect_left(rises, wishes[index].deadline_s)
        if pauses_s:
            wishes[index] = wish_of(job, job.curves[region], now, rules, margin, reserve_s + pauses_s)
    return wishes


def _fill(
    now: float,
    capacity: Capacity,
    region: str,
    jobs: Sequence[Job],
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
            bare.stay_s = end_s if end_s - now <= rules.grace_s and bare.index == len(bare.curve.ladder[0]) else 0.0
        if book.take(job.name, bare) is None:
            if new and not uneasy.get(job.name, False):
                return book, job.name
            book.take_what_there_is(job.name, bare)
        book.uneasy.add(job.name)
    return book, None
