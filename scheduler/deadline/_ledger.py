"""The free capacity of several regions over time, and what jobs with a deadline hold of it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._model import DeviceCapacity, Rules
from scheduler.deadline._reservations import Gang, Reservation, RowNeeds

__all__ = ["WorkerLedger"]

_AS_CHEAP = 1.1
"""A running job keeps its pace to its end where that takes at most this factor of the least device time."""

_SOON_S = 5.0
"""Seconds within which a need counts as immediate, since decisions are not more frequent."""
_WORTH_SLOWING = 4.0
"""A gang slows down at its end only if that saves at least this factor of the pause that it costs."""
_ROOM = 64
"""Steps for which a ledger has room at first, besides as many as it has."""
_ROUNDING = 1.0 + 1e-9
"""Factor within which sums over the steps agree, however they are rounded."""


@dataclass(frozen=True)
class _Switch:
    """Two paces, counted from 1, and the instant at which the second takes the place of the first."""

    first: int
    second: int
    at_s: float


class WorkerLedger:
    """What is free, workers by region and devices by `devices_of` a region (rows), over one grid of instants (columns);
    the last step has no end."""

    def __init__(self, now: float, capacities: Mapping[str, DeviceCapacity]) -> None:
        changes = [at for capacity in capacities.values() for at, _ in capacity.changes]
        grid = np.unique(np.array([now, *changes], dtype=float))
        self.now = now
        self.times: NDArray[np.float64] = grid[grid >= now]
        self.rows = {region: row for row, region in enumerate(capacities)}
        self.free: NDArray[np.int64] = np.zeros((len(capacities), len(self.times)), dtype=np.int64)
        for region, capacity in capacities.items():
            steps = self.free[self.rows[region]]
            steps[:] = capacity.devices
            for at, devices in capacity.changes:
                steps[self.times.searchsorted(at) :] = devices
        self._reserve()

    def _reserve(self) -> None:
        """Make room for as many steps again, so that a step is inserted in place."""
        count = len(self.times)
        times, free = np.empty(2 * count + _ROOM), np.empty((len(self.rows), 2 * count + _ROOM), dtype=np.int64)
        times[:count], free[:, :count] = self.times, self.free
        self._all_times, self._all_free = times, free
        self.times, self.free = times[:count], free[:, :count]

    def copy(self) -> WorkerLedger:
        """Return a copy for trials."""
        other = WorkerLedger.__new__(WorkerLedger)
        other.now, other.rows, other.times, other.free = self.now, self.rows, self.times, self.free
        other._reserve()
        return other

    def become(self, other: WorkerLedger) -> None:
        """Take over what is free in a copy, which must not be used any more."""
        self.times, self.free = other.times, other.free
        self._all_times, self._all_free = other._all_times, other._all_free

    def point(self, at: float) -> int:
        """Return the index of the step that begins at `at`, which is finite; the step is created if needed."""
        at = max(at, self.now)
        index, count = int(self.times.searchsorted(at)), len(self.times)
        if index == count or self.times[index] != at:
            if count == len(self._all_times):
                self._reserve()
            times, free = self._all_times, self._all_free
            times[index + 1 : count + 1] = times[index:count]
            free[:, index + 1 : count + 1] = free[:, index:count]
            times[index], free[:, index] = at, free[:, index - 1]
            self.times, self.free = times[: count + 1], free[:, : count + 1]
        return index

    def _split(self, points: Iterable[float]) -> None:
        """Begin a step at each of many points, which are finite and not before now."""
        grid = np.union1d(self.times, np.fromiter(points, dtype=float))
        self.free = self.free[:, self.times.searchsorted(grid, side="right") - 1]
        self.times = grid
        self._reserve()

    def fitting(self, gang: Gang) -> NDArray[np.int64]:
        """Return how many of a gang's paces, from the slowest on, fit on each step; shape (steps,)."""
        return _fitting(*gang.needed.of(self.rows), self.free)

    def least(
        self, gang: Gang, deadline_s: float, rules: Rules, margin: float, *, lean: bool = False
    ) -> Reservation | None:
        """Hold the least worker time that is done by the deadline, less a margin; None if nothing is enough.

        Progressive filling (ElasticFlow, ASPLOS'23, section 4.1) with two neighbouring paces of the lower hull
        (`SpeedCurve.lean`): the slower one up to some instant, the faster one after it, or in reverse order if the gang
        runs at the faster one already. In each interval the gang has what fits, up to that pace. A running gang keeps
        its pace if that costs about the same, unless ``lean``. A fixed gang gets the earliest interval where it fits.
        """
        window = deadline_s - self.now
        window -= margin * max(0.0, window - rules.grace_s)
        if window <= 0:
            return None
        until_s = self.now + window
        if gang.fixed:
            return self.stretch(gang, rules, until_s)
        needs, row = gang.needed.of(self.rows)
        stay_s = 0.0 if lean else self._staying(gang, until_s, needs, row)
        end = self.point(until_s)
        steps = _Steps(self.times[: end + 1], self.free[:, :end], needs, row)
        switch = _switch_in_time(gang, steps, rules)
        if switch is None:
            return self._stay(gang, stay_s) if stay_s else None
        count = len(self.times)
        cut = self.point(switch.at_s)
        end += len(self.times) - count
        if stay_s:
            per_second = sum(gang.needs(gang.held).values())
            needed = _spans(self.times[: end + 1]) @ needs.totals[steps.chosen(switch, cut, end)]
            if per_second * (stay_s - self.now) <= _AS_CHEAP * needed:
                return self._stay(gang, stay_s)
        if max(switch.first, switch.second) <= steps.always and 0 < cut < end:
            return self._hold(gang, [0, cut], [switch.first, switch.second], until_s)
        return self._hold(gang, *_runs(steps.chosen(switch, cut, end)), until_s)

    def again(self, gang: Gang, before: Reservation, rules: Rules) -> Reservation | None:
        """Hold from now on what was held before, if that is free and still does the work; else None."""
        if before.late or not self.now < before.end_s < math.inf:
            return None
        inside = [at for at in before.times if at > self.now]
        end = [self.point(at) for at in inside][-1]
        steps = np.searchsorted(np.array(before.times[:-1]), self.times[:end], side="right") - 1
        chosen = np.array(before.pace_indices, dtype=np.int64)[np.maximum(steps, 0)] + 1
        if chosen.max(initial=0) > len(gang.paces) or (self.fitting(gang)[:end] < chosen).any():
            return None
        rates = gang.rates
        changed = np.flatnonzero(np.diff(chosen, prepend=gang.held + 1))
        pauses = [rules.overhead.seconds(sum(gang.workers(int(chosen[at]) - 1).values())) for at in changed]
        lost = sum(pause * float(rates[chosen[at]]) for at, pause in zip(changed, pauses, strict=True))
        if float(np.diff(self.times[: end + 1]) @ rates[chosen]) - lost < gang.work * (1 - 1e-9):
            return None
        return self._hold(gang, *_runs(chosen), before.end_s)

    def all_there_is(self, gang: Gang, rules: Rules) -> Reservation:
        """Hold everything that fits until the work is done, however late that is."""
        if gang.fixed:
            found = self.stretch(gang, rules)
            return found if found is not None else Reservation((self.now, math.inf), (-1,), late=True)
        held = self.soonest(gang, rules)
        if not math.isfinite(held.end_s):
            return held
        end = self.point(held.end_s)
        chosen = np.minimum(self.fitting(gang)[:end], len(gang.paces))
        return self._hold(gang, *_runs(chosen), held.end_s, late=True)

    def stretch(self, gang: Gang, rules: Rules, until_s: float = math.inf) -> Reservation | None:
        """Hold the earliest stretch in which a gang can run to its end without a change; None: there is none."""
        takes_s = rules.overhead.seconds(sum(gang.workers(0).values())) + gang.work / gang.paces[0].rate
        fits = np.zeros(len(self.times) + 2, dtype=bool)
        fits[1:-1] = self.fitting(gang) > 0
        edges = (fits[1:] != fits[:-1]).nonzero()[0]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            begin_s = float(self.times[begin])
            room_s = float(self.times[end]) if end < len(self.times) else math.inf
            if begin_s + takes_s <= min(room_s, until_s):
                begins, chosen = ([0, int(begin)], [0, 1]) if begin else ([0], [1])
                return self._hold(gang, begins, chosen, begin_s + takes_s, late=begin_s + takes_s > gang.deadline_s)
        return None

    def soonest(self, gang: Gang, rules: Rules) -> Reservation:
        """Return when the work would be done with everything that fits; holds nothing. Infinite: never."""
        if gang.fixed:
            found = self.copy().stretch(gang, rules)
            return found if found is not None else Reservation((self.now, math.inf), (-1,), late=True)
        rates, fit = gang.rates, self.fitting(gang)
        speeds = rates[fit]
        spans = np.diff(self.times, append=math.inf)
        pause = rules.overhead.seconds(sum(gang.workers(len(gang.paces) - 1).values())) * rates[-1]
        need = gang.work + (_changes(fit) + _changes_to(gang, int(fit.max(initial=0)))) * pause
        with np.errstate(invalid="ignore"):
            done = np.cumsum(np.where(speeds > 0, spans * speeds, 0.0))
        last = int(done.searchsorted(need))
        if last == len(done):
            return Reservation((self.now, math.inf), (int(fit[0]) - 1,), late=True)
        before = float(done[last - 1]) if last else 0.0
        end_s = float(self.times[last]) + (need - before) / float(speeds[last])
        return Reservation((self.now, end_s), (int(fit[0]) - 1,), late=end_s > gang.deadline_s)

    def keep(self, gangs: Iterable[Gang]) -> dict[str, Reservation]:
        """Hold the workers that each gang has until its work is done, free or not, since it has them already."""
        ends = [(gang, max(self.now, self.now + gang.work / gang.paces[gang.held].rate)) for gang in gangs]
        self._split(end_s for _, end_s in ends)
        for gang, end_s in ends:
            end = int(self.times.searchsorted(end_s))
            for name, count in gang.needs(gang.held).items():
                if (row := self.rows.get(name)) is not None:
                    self.free[row, :end] -= count
        return {
            gang.name: Reservation((self.now, end_s), (gang.held,), late=end_s > gang.deadline_s)
            for gang, end_s in ends
        }  # fmt: skip

    def free_now(self) -> dict[str, int]:
        """Return what is free now, by row; never below zero."""
        return {region: max(0, int(self.free[row, 0])) for region, row in self.rows.items()}

    def _staying(self, gang: Gang, until_s: float, needs: RowNeeds, row: int | NDArray[np.int64] | None) -> float:
        """Return when a running gang is done at its present pace; 0 if that is too late or does not fit."""
        if gang.held < 0:
            return 0.0
        end_s = self.now + gang.work / gang.paces[gang.held].rate
        if end_s > until_s:
            return 0.0
        end = self.point(end_s)
        return end_s if _fitting_always(needs, row, self.free[:, :end]) > gang.held else 0.0

    def _stay(self, gang: Gang, end_s: float) -> Reservation:
        return self._hold(gang, [0], [gang.held + 1], end_s, late=end_s > gang.deadline_s)

    def _hold(
        self, gang: Gang, begins: Sequence[int], chosen: Sequence[int], end_s: float, *, late: bool = False
    ) -> Reservation:
        """Hold paces, counted from 1, up to ``end_s``, each from the step on with which it begins; 0: none."""
        (needs, row), end = gang.needed.of(self.rows), self.point(end_s)
        for begin, until, pace in zip(begins, (*begins[1:], end), chosen, strict=True):
            if pace and row is not None:
                self.free[row, begin:until] -= needs.levels[pace] if needs.only else needs.counts[pace][:, None]
        times = (*self.times[begins].tolist(), end_s)
        return Reservation(times, tuple(pace - 1 for pace in chosen), late)


def _fitting(
    needs: RowNeeds, row: int | NDArray[np.int64] | None, free: NDArray[np.int64], always: int = 0
) -> NDArray[np.int64]:
    """Return how many paces fit on each step; ``free`` and the result have shapes (rows, steps) and (steps,).

    ``always``: number of paces, from the slowest on, that are known to fit on every step.
    """
    fits = np.full(free.shape[1], always)
    if row is None:
        return fits
    mine = free[row]
    for pace in range(always + 1, needs.paces + 1):
        fits += mine >= needs.levels[pace] if needs.only else (mine >= needs.counts[pace][:, None]).all(axis=0)
    return fits


def _fitting_always(needs: RowNeeds, row: int | NDArray[np.int64] | None, free: NDArray[np.int64]) -> int:
    """Return how many paces fit on every step; all of them if there is no step."""
    if not free.shape[1]:
        return needs.paces
    if row is None or not needs.ascends:
        return int(_fitting(needs, row, free).min())
    if needs.only:
        return bisect_right(needs.levels, int(np.minimum.reduce(free[row])), 1) - 1
    return int((needs.counts[1:] <= free[row].min(axis=1)).all(axis=1).sum())


def _runs(chosen: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return the steps with which another pace begins, and these paces."""
    begins = [0, *((chosen[1:] != chosen[:-1]).nonzero()[0] + 1).tolist()]
    return begins, chosen[begins].tolist()


def _spans(times: NDArray[np.float64]) -> NDArray[np.float64]:
    return times[1:] - times[:-1]


class _Steps:
    """The steps up to a deadline, for one gang."""

    def __init__(
        self, times: NDArray[np.float64], free: NDArray[np.int64], needs: RowNeeds, row: int | NDArray[np.int64] | None
    ) -> None:
        self.times, self.spans = times, _spans(times)
        """Instants from now to the end, one more than steps, and the seconds of each step."""
        self.always = _fitting_always(needs, row, free)
        """How many paces fit on every step."""
        self._free, self._needs, self._row = free, needs, row

    @cached_property
    def fit(self) -> NDArray[np.int64]:
        """How many paces fit on each step."""
        return _fitting(self._needs, self._row, self._free, self.always if self._needs.ascends else 0)

    @cached_property
    def most(self) -> int:
        """How many paces fit on some step, at least 1."""
        return int(self.fit.max(initial=1))

    def chosen(self, switch: _Switch, cut: int, end: int) -> NDArray[np.int64]:
        """Return the paces of ``end`` steps: those that fit, up to those of the switch, of which the second begins with
        the step ``cut``. There may be one step more than before, which is that one."""
        if max(switch.first, switch.second) <= self.always:
            found = np.full(end, switch.second)
            found[:cut] = switch.first
            return found
        fit = self.fit if end == len(self.fit) else np.concatenate((self.fit[:cut], self.fit[cut - 1 :]))
        found = np.minimum(fit, switch.second)
        np.minimum(fit[:cut], switch.first, out=found[:cut])
        return found


def _switch_in_time(gang: Gang, steps: _Steps, rules: Rules) -> _Switch | None:
    """The slowest two neighbours on the hull with which a gang is done by the end, and the time of each; None: no two.

    A pace that fits on every step has one rate on all of them.
    """
    times, spans = steps.times, steps.spans
    now, last_s = float(times[0]), float(times[-1])
    upper: NDArray[np.float64] | float
    low, slow = 0, 0.0
    for top, rate, workers in gang.hull:
        # Where the pace is too slow even if it fits throughout, nothing needs to be summed up.
        if rate * (last_s - now) * _ROUNDING >= gang.work:
            pause = rules.overhead.seconds(workers) * rate
            if top <= steps.always:
                upper, changes = rate, _changes_to(gang, top)
                done = float(spans @ np.full(len(spans), rate))
            else:
                upper = np.minimum(gang.rates, rate)[steps.fit]
                changes = _changes(upper) + _changes_to(gang, min(steps.most, top))
                done = float(spans @ upper)
            surplus = done - (gang.work + changes * pause)
            if surplus >= 0:
                break
        low, slow = top, rate
    else:
        return None
    early = gang.held + 1 >= top
    # Slowing down costs one more pause; without time for it, the gang keeps the faster pace.
    surplus = max(0.0, surplus - pause * early)
    more = upper - (slow if low <= steps.always else np.minimum(gang.rates, slow)[steps.fit])
    gain = (spans * more).cumsum()
    goal = float(gain[-1]) - surplus if early else surplus
    at = min(int(gain.searchsorted(goal)), len(spans) - 1)
    before = float(gain[at - 1]) if at else 0.0
    inside = (goal - before) / max(more if isinstance(more, float) else float(more[at]), 1e-12)
    cut_s = min(float(times[at]) + max(inside, 0.0), float(times[at + 1]))
    if not early:
        return _Switch(low, top, now if cut_s - now < _SOON_S else cut_s)
    short = last_s - cut_s < _SOON_S + _WORTH_SLOWING * pause / rate
    return _Switch(top, low, last_s if short else cut_s)


def _changes(chosen: NDArray[np.int64] | NDArray[np.float64]) -> int:
    """Return how often the pace, or its rate, changes from one step to the next."""
    return int(np.count_nonzero(chosen[1:] != chosen[:-1]))


def _changes_to(gang: Gang, top: int) -> int:
    """Return how often a gang pauses that goes from its present pace to another, counted from 1, via the one below it.

    Paces that it has already are not counted again: a promise that could be kept can still be after its first change.
    """
    below = max(1, top) - gang.held - 1
    return min(2, below) if below >= 0 else 1
