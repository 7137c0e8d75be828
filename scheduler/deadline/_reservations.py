"""The free capacity of several regions over time, and the holdings of jobs that run in several regions at one pace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeviceCapacity, Rules

__all__ = ["AssignmentPace", "Gang", "Reservation", "WorkerLedger", "devices_of"]

_AS_CHEAP = 1.1
"""A running job keeps its pace to its end where that takes at most this factor of the least device time."""

_SOON_S = 5.0
"""Seconds within which a need counts as immediate, since decisions are not more frequent."""
_WORTH_SLOWING = 4.0
"""A gang slows down at its end only if that saves at least this factor of the pause that it costs."""


@dataclass(frozen=True)
class AssignmentPace:
    """One assignment of workers to all regions of a job, and its speed."""

    workers: Mapping[str, int]
    """Workers by region."""
    rate: float
    """Rounds a second that promises may rely on."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Devices of these workers, by region; of regions that count them."""

    @cached_property
    def needs(self) -> Mapping[str, int]:
        """What has to be free: workers by region, and devices by `devices_of` the region."""
        return {**self.workers, **{devices_of(region): count for region, count in self.devices.items()}}


def devices_of(region: str) -> str:
    """Return the name by which capacities and needs count the devices of a region, beside its workers."""
    return f"{region}/devices"


@dataclass(frozen=True)
class Gang:
    """A job that has workers in several regions: a round ends with the slowest, so that all have one pace.

    Raises ``ValueError`` where the paces do not ascend.
    """

    name: str
    paces: tuple[AssignmentPace, ...]
    """Ascending in rate, and in no region descending in workers."""
    work: float
    """Rounds left."""
    deadline_s: float = math.inf
    """Instant that was promised or is asked for; infinite: best effort."""
    later: tuple[float, ...] = ()
    """A soft deadline's further instants, ascending, tried in turn."""
    held: int = -1
    """Index of the pace that it has now; -1: no workers."""
    wish: int = 0
    """Index of the pace to run at while the workers are free: the fastest that is worth its cost."""
    fixed: bool = False
    """Whether it has one pace, which it keeps from its begin to its end."""
    since_s: float = 0.0
    """Instant at which it was submitted."""
    user: str = ""
    served_s: float = 0.0
    """Worker seconds that its user's best-effort jobs have had."""
    ready_s: float = -math.inf
    """Instant until which it is paused by an earlier change."""
    value: float = 1.0
    """Value of its deadline; where promises break, those of least value break first."""
    insists: bool = False
    """Whether ``wish`` was decided elsewhere: the gang grows to it even if the time saved is less than the pause."""

    preemptible: bool = False
    """Whether its present workers are preemptible. Among on-demand workers it counts as having none, and gets some only
    once its deadline needs them."""

    def __post_init__(self) -> None:
        if not self.paces:
            raise ValueError(f"{self.name} has no pace")
        for slow, fast in zip(self.paces, self.paces[1:], strict=False):
            fewer = any(fast.workers.get(region, 0) < count for region, count in slow.workers.items())
            if fast.rate <= slow.rate or fewer:
                raise ValueError(f"the paces of {self.name} do not ascend")

    @property
    def best_effort(self) -> bool:
        """Whether the job has no deadline."""
        return math.isinf(self.deadline_s)

    @cached_property
    def curve(self) -> SpeedCurve:
        """The rate by workers in all regions; by number of the pace where two paces have equally many."""
        rates = tuple(pace.rate for pace in self.paces)
        totals = tuple(sum(pace.workers.values()) for pace in self.paces)
        ascends = all(a < b for a, b in zip((0, *totals), totals, strict=False))
        return SpeedCurve(totals if ascends else tuple(range(1, len(rates) + 1)), rates)

    def waiting(self, now: float) -> Gang:
        """Return the gang with the rounds of its pause added to its work, for calculations without pauses."""
        if self.held < 0 or self.ready_s <= now:
            return self
        return replace(self, work=self.work + (self.ready_s - now) * self.paces[self.held].rate, ready_s=-math.inf)

    def lasting(self) -> Gang:
        """Return the gang as it counts among lasting workers."""
        return replace(self, held=-1, ready_s=-math.inf) if self.preemptible else self

    def workers(self, pace: int) -> Mapping[str, int]:
        """Return the workers by region; none for pace -1."""
        return self.paces[pace].workers if pace >= 0 else {}

    def needs(self, pace: int) -> Mapping[str, int]:
        """Return what has to be free for them; nothing for pace -1."""
        return self.paces[pace].needs if pace >= 0 else {}


@dataclass(frozen=True)
class Reservation:
    """Reservation of a gang: one of its paces, or none, in each interval of time."""

    times: tuple[float, ...]
    """Boundaries of the intervals, one more than intervals; the last is the end."""
    pace_indices: tuple[int, ...]
    """Index of the gang's pace in each interval; -1: it has no workers."""
    late: bool = False
    """Whether the deadline cannot be met even with all free capacity."""
    schedule: tuple[tuple[float, int], ...] = ()
    """(instant, pace from then on): forecast with spare workers included. The forecasts of all gangs were simulated
    together to the end, with all pauses, and no gang was late."""
    ladder: tuple[AssignmentPace, ...] = ()
    """Paces that `pace_indices` and `schedule` refer to: the gang's at the time of the answer. They may have changed
    since."""

    def on(self, gang: Gang) -> Reservation | None:
        """Return the holding in terms of a gang's present paces; None where that is impossible.

        Each pace becomes the fastest with no more workers anywhere, so that it fits wherever the old one did.
        """
        if self.ladder == gang.paces:
            return self
        steps = {-1: -1}
        for index in {*self.pace_indices, *(pace for _, pace in self.schedule)} - {-1}:
            if index >= len(self.ladder):
                return None
            had = self.ladder[index].workers
            within = (all(count <= had.get(region, 0) for region, count in pace.workers.items()) for pace in gang.paces)
            # Workers never decrease from one pace to the next, so the paces that fit come first.
            steps[index] = sum(within) - 1
            if steps[index] < 0:
                return None
        indices = tuple(steps[pace] for pace in self.pace_indices)
        schedule = tuple((at, steps[pace]) for at, pace in self.schedule)
        return replace(self, pace_indices=indices, schedule=schedule, ladder=gang.paces)

    @property
    def now(self) -> int:
        """Index of the pace held in the first interval; -1: the gang stands still."""
        return self.pace_indices[0] if self.pace_indices else -1

    @property
    def end_s(self) -> float:
        """Instant at which the last interval ends."""
        return self.times[-1]


@dataclass(frozen=True)
class _Switch:
    """Two paces, counted from 1, and the instant at which the second takes the place of the first."""

    first: int
    second: int
    at_s: float


class WorkerLedger:
    """What is free, workers by region and devices by `devices_of` a region (rows), over one grid of instants (columns);
    the last step has no end."""

    def __init__(self, now: float, capacities: Mapping[str, DeviceCapacity], points: Sequence[float] = ()) -> None:
        changes = [at for capacity in capacities.values() for at, _ in capacity.changes]
        grid = np.unique(np.array([now, *changes, *(at for at in points if math.isfinite(at))], dtype=float))
        self.now = now
        self.times: NDArray[np.float64] = grid[grid >= now]
        self.rows = {region: row for row, region in enumerate(capacities)}
        self.free: NDArray[np.int64] = np.zeros((len(capacities), len(self.times)), dtype=np.int64)
        for region, capacity in capacities.items():
            steps = self.free[self.rows[region]]
            steps[:] = capacity.devices
            for at, devices in capacity.changes:
                steps[self.times.searchsorted(at) :] = devices

    def copy(self) -> WorkerLedger:
        """Return a copy for trials."""
        other = WorkerLedger.__new__(WorkerLedger)
        other.now, other.times, other.rows, other.free = self.now, self.times, self.rows, self.free.copy()
        return other

    def point(self, at: float) -> int:
        """Return the index of the step that begins at `at`, which is finite; the step is created if needed."""
        at = max(at, self.now)
        index = int(self.times.searchsorted(at))
        if index == len(self.times) or self.times[index] != at:
            self.times = np.concatenate((self.times[:index], (at,), self.times[index:]))
            self.free = np.concatenate((self.free[:, :index], self.free[:, index - 1 : index], self.free[:, index:]), 1)
        return index

    def _split(self, points: Iterable[float]) -> None:
        """Begin a step at each of many points, which are finite and not before now."""
        grid = np.union1d(self.times, np.fromiter(points, dtype=float))
        self.free = self.free[:, self.times.searchsorted(grid, side="right") - 1]
        self.times = grid

    def fitting(self, gang: Gang) -> NDArray[np.int64]:
        """Return how many of a gang's paces, from the slowest on, fit on each step; shape (steps,)."""
        if any(row not in self.rows for row in gang.paces[0].needs):
            return np.zeros(len(self.times), dtype=np.int64)
        need = self._needs(gang)[1:]
        rows = need.any(axis=0)
        fits: NDArray[np.int64] = (need[:, rows, None] <= self.free[None, rows, :]).all(axis=1).sum(axis=0)
        return fits

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
            needed = np.diff(self.times[: end + 1]) @ self._needs(gang).sum(axis=1)[chosen]
            if per_second * (stay_s - self.now) <= _AS_CHEAP * needed:
                return self._stay(gang, stay_s)
        return self._hold(gang, chosen, self.now + window)

    def again(self, gang: Gang, before: Reservation, rules: Rules) -> Reservation | None:
        """Hold from now on what was held before, if that is free and still does the work; else None."""
        if before.late or before.end_s <= self.now:
            return None
        inside = [at for at in before.times if at > self.now]
        end = [self.point(at) for at in inside][-1]
        steps = np.searchsorted(np.array(before.times[:-1]), self.times[:end], side="right") - 1
        chosen = np.array(before.pace_indices, dtype=np.int64)[np.maximum(steps, 0)] + 1
        if chosen.max(initial=0) > len(gang.paces) or (self.fitting(gang)[:end] < chosen).any():
            return None
        rates = np.array([0.0, *(pace.rate for pace in gang.paces)])
        changed = np.flatnonzero(np.diff(chosen, prepend=gang.held + 1))
        pauses = [rules.overhead.seconds(sum(gang.workers(int(chosen[at]) - 1).values())) for at in changed]
        lost = sum(pause * float(rates[chosen[at]]) for at, pause in zip(changed, pauses, strict=True))
        if float(np.diff(self.times[: end + 1]) @ rates[chosen]) - lost < gang.work * (1 - 1e-9):
            return None
        return self._hold(gang, chosen, before.end_s)

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
        return self._hold(gang, chosen, held.end_s, late=True)

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
                return self._hold(gang, chosen, begin_s + takes_s, late=begin_s + takes_s > gang.deadline_s)
        return None

    def soonest(self, gang: Gang, rules: Rules) -> Reservation:
        """Return when the work would be done with everything that fits; holds nothing. Infinite: never."""
        if gang.fixed:
            found = self.copy().stretch(gang, rules)
            return found if found is not None else Reservation((self.now, math.inf), (-1,), late=True)
        rates = np.array([0.0, *(pace.rate for pace in gang.paces)])
        fit = self.fitting(gang)
        speeds = rates[fit]
        spans = np.diff(self.times, append=math.inf)
        pause = rules.overhead.seconds(sum(gang.workers(len(gang.paces) - 1).values())) * rates[-1]
        need = gang.work + _changes(gang, fit) * pause
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

    def _staying(self, gang: Gang, until_s: float) -> float:
        """Return when a running gang is done at its present pace; 0 if that is too late or does not fit."""
        if gang.held < 0:
            return 0.0
        end_s = self.now + gang.work / gang.paces[gang.held].rate
        if end_s > until_s or self.fitting(gang)[: self.point(end_s)].min(initial=gang.held + 1) <= gang.held:
            return 0.0
        return end_s

    def _stay(self, gang: Gang, end_s: float) -> Reservation:
        return self._hold(gang, np.full(self.point(end_s), gang.held + 1), end_s, late=end_s > gang.deadline_s)

    def _needs(self, gang: Gang) -> NDArray[np.int64]:
        """Needs by pace, a row of zeros first, and row of the ledger; shape (paces + 1, rows)."""
        need = np.zeros((len(gang.paces) + 1, len(self.rows)), dtype=np.int64)
        for index, pace in enumerate(gang.paces, 1):
            for row, count in pace.needs.items():
                if row in self.rows:
                    need[index, self.rows[row]] = count
        return need

    def _hold(self, gang: Gang, chosen: NDArray[np.int64], end_s: float, *, late: bool = False) -> Reservation:
        """Hold the chosen paces of each step up to ``end_s``; steps added meanwhile repeat the one before."""
        end = self.point(end_s)
        if len(chosen) != end:
            raise ValueError("a choice for each step is needed")
        self.free[:, :end] -= self._needs(gang)[chosen].T
        kept = [0, *(np.flatnonzero(chosen[1:] != chosen[:-1]) + 1)] if end else []
        times = (*(float(self.times[index]) for index in kept), end_s)
        return Reservation(times, tuple(int(chosen[index]) - 1 for index in kept), late)


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
