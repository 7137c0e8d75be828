"""A slow ledger and simulation of promises, which share no calculation: the referee of the fast ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline import Gang, Reservation, Rules, _admission, _schedule_simulation
from scheduler.deadline._ledger import _AS_CHEAP, _SOON_S, _WORTH_SLOWING, WorkerLedger, _Switch


class SlowLedger(WorkerLedger):
    """All paces of all gangs are compared with what is free on all steps, whenever a gang asks."""

    def point(self, at: float) -> int:
        """As the ledger's."""
        at = max(at, self.now)
        index = int(self.times.searchsorted(at))
        if index == len(self.times) or self.times[index] != at:
            self.times = np.concatenate((self.times[:index], (at,), self.times[index:]))
            self.free = np.concatenate((self.free[:, :index], self.free[:, index - 1 : index], self.free[:, index:]), 1)
        return index

    def fitting(self, gang: Gang) -> NDArray[np.int64]:
        """Return how many of a gang's paces, from the slowest on, fit on each step; shape (steps,)."""
        if any(row not in self.rows for row in gang.paces[0].needs):
            return np.zeros(len(self.times), dtype=np.int64)
        need = self._table(gang)[1:]
        rows = need.any(axis=0)
        fits: NDArray[np.int64] = (need[:, rows, None] <= self.free[None, rows, :]).all(axis=1).sum(axis=0)
        return fits

    def least(
        self, gang: Gang, deadline_s: float, rules: Rules, margin: float, *, lean: bool = False
    ) -> Reservation | None:
        """As the ledger's."""
        window = deadline_s - self.now
        window -= margin * max(0.0, window - rules.grace_s)
        if window <= 0:
            return None
        if gang.fixed:
            return self.stretch(gang, rules, self.now + window)
        stay_s = 0.0 if lean else self._staying(gang, self.now + window)
        end = self.point(self.now + window)
        switch = _switch_in_time(gang, self.times[: end + 1], self.fitting(gang)[:end], rules)
        if switch is None:
            return self._stay(gang, stay_s) if stay_s else None
        steps = len(self.times)
        cut = self.point(switch.at_s)
        end += len(self.times) - steps
        fit = self.fitting(gang)[:end]
        chosen = np.minimum(fit, switch.second)
        chosen[:cut] = np.minimum(fit[:cut], switch.first)
        if stay_s:
            per_second = sum(gang.needs(gang.held).values())
            needed = np.diff(self.times[: end + 1]) @ self._table(gang).sum(axis=1)[chosen]
            if per_second * (stay_s - self.now) <= _AS_CHEAP * needed:
                return self._stay(gang, stay_s)
        return self._hold_each(gang, chosen, self.now + window)

    def stretch(self, gang: Gang, rules: Rules, until_s: float = math.inf) -> Reservation | None:
        """Hold the earliest stretch in which a gang can run to its end without a change; None: there is none."""
        takes_s = rules.overhead.seconds(sum(gang.workers(0).values())) + gang.work / gang.paces[0].rate
        fits = self.fitting(gang) > 0
        edges = np.flatnonzero(np.diff(fits, prepend=False, append=False))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            begin_s = float(self.times[begin])
            room_s = float(self.times[end]) if end < len(self.times) else math.inf
            if begin_s + takes_s <= min(room_s, until_s):
                last = self.point(begin_s + takes_s)
                chosen = np.zeros(last, dtype=np.int64)
                chosen[begin:] = 1
                return self._hold_each(gang, chosen, begin_s + takes_s, late=begin_s + takes_s > gang.deadline_s)
        return None

    def _staying(self, gang: Gang, until_s: float) -> float:
        """Return when a running gang is done at its present pace; 0 if that is too late or does not fit."""
        if gang.held < 0:
            return 0.0
        end_s = self.now + gang.work / gang.paces[gang.held].rate
        if end_s > until_s or self.fitting(gang)[: self.point(end_s)].min(initial=gang.held + 1) <= gang.held:
            return 0.0
        return end_s

    def _stay(self, gang: Gang, end_s: float) -> Reservation:
        return self._hold_each(gang, np.full(self.point(end_s), gang.held + 1), end_s, late=end_s > gang.deadline_s)

    def _table(self, gang: Gang) -> NDArray[np.int64]:
        """Needs by pace, a row of zeros first, and row of the ledger; shape (paces + 1, rows)."""
        need = np.zeros((len(gang.paces) + 1, len(self.rows)), dtype=np.int64)
        for index, pace in enumerate(gang.paces, 1):
            for row, count in pace.needs.items():
                if row in self.rows:
                    need[index, self.rows[row]] = count
        return need

    def _hold_each(self, gang: Gang, chosen: NDArray[np.int64], end_s: float, *, late: bool = False) -> Reservation:
        """Hold the chosen paces of each step up to ``end_s``; steps added meanwhile repeat the one before."""
        end = self.point(end_s)
        if len(chosen) != end:
            raise ValueError("a choice for each step is needed")
        self.free[:, :end] -= self._table(gang)[chosen].T
        kept = [0, *(np.flatnonzero(chosen[1:] != chosen[:-1]) + 1)] if end else []
        times = (*(float(self.times[index]) for index in kept), end_s)
        return Reservation(times, tuple(int(chosen[index]) - 1 for index in kept), late)

    def _hold(self, gang: Gang, begins: Any, chosen: Any, end_s: float, *, late: bool = False) -> Reservation:
        lengths = np.diff([*begins, self.point(end_s)])
        return self._hold_each(gang, np.repeat(np.array(chosen, dtype=np.int64), lengths), end_s, late=late)


def _switch_in_time(gang: Gang, times: NDArray[np.float64], fit: NDArray[np.int64], rules: Rules) -> _Switch | None:
    """The slowest two neighbours on the hull with which a gang is done by the end, and the time of each; None: no two.

    ``times``: instants from now to the end, one more than ``fit``, which counts the paces that fit on each step.
    """
    spans = np.diff(times)
    rates = np.array([0.0, *(pace.rate for pace in gang.paces)])
    hull = (0, *(level + 1 for level in gang.curve.lean))
    for index in range(1, len(hull)):
        top = hull[index]
        upper = rates[np.minimum(fit, top)]
        pause = rules.overhead.seconds(sum(gang.workers(top - 1).values())) * rates[top]
        surplus = float(spans @ upper) - (gang.work + _changes(gang, np.minimum(fit, top)) * pause)
        if surplus >= 0:
            break
    else:
        return None
    low = hull[index - 1]
    lower = rates[np.minimum(fit, low)]
    early = gang.held + 1 >= top
    # Slowing down costs one more pause; without time for it, the gang keeps the faster pace.
    surplus = max(0.0, surplus - pause * early)
    gain = np.cumsum(spans * (upper - lower))
    goal = float(gain[-1]) - surplus if early else surplus
    at = min(int(gain.searchsorted(goal)), len(fit) - 1)
    before = float(gain[at - 1]) if at else 0.0
    inside = (goal - before) / max(float(upper[at] - lower[at]), 1e-12)
    cut_s = float(min(times[at] + max(inside, 0.0), times[at + 1]))
    now, last_s = float(times[0]), float(times[-1])
    if not early:
        return _Switch(low, top, now if cut_s - now < _SOON_S else cut_s)
    short = last_s - cut_s < _SOON_S + _WORTH_SLOWING * pause / float(rates[top])
    return _Switch(top, low, last_s if short else cut_s)


def _changes(gang: Gang, chosen: NDArray[np.int64]) -> int:
    """Return how often a gang pauses that goes from its present pace to the fastest one chosen, via the one below it.

    Paces that it has already are not counted again: a promise that could be kept can still be after its first change.
    """
    top = int(chosen.max(initial=1))
    below = top - gang.held - 1
    to_come = min(2, below) if below >= 0 else 1
    return int(np.count_nonzero(np.diff(chosen))) + to_come


def _unshared(now: float, capacities: Any, gangs: Any, new: Any, rules: Rules) -> Any:
    """As if no attempt had anything in common with another."""
    return {}, _admission._asking(now, capacities, gangs)[0]


def _above(simulation: Any) -> None:
    """Look at all jobs whether they are above their plan now."""
    for number, job in enumerate(simulation.jobs):
        steps = [level for at, level in job.plan if at <= simulation.now + _schedule_simulation._SAME_S]
        simulation.planned[number] = steps[-1] if steps else 0
    simulation.above = {number for number in range(len(simulation.jobs)) if math.isinf(simulation.done[number])}


@contextmanager
def calculated_slowly() -> Iterator[None]:
    """Answers of `offer` and `allot` within the block are those of the referee."""
    simulation = _schedule_simulation._ScheduleSimulation
    with (
        mock.patch.object(_admission, "WorkerLedger", SlowLedger),
        mock.patch.object(_admission, "_attempts_before", _unshared),
        mock.patch.object(simulation, "_follow_plans", _above),
    ):
        yield
