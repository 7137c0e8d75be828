"""The assignment of lasting and preemptible workers. A job leaves preemptible ones at the last safe instant.

Promises are kept with lasting workers alone. A gang on preemptible workers counts there as one that waits without
workers: those that it is promised are reserved from the last instant at which it must begin. Until then, the loss of
all preemptible workers at once breaks no promise; at that instant the gang leaves them. So the rule of ``latest_exit``,
which is for one job alone, holds for many that need the same workers later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.deadline._admission import LIVE, _fits, _grow, _more, _take, allot
from scheduler.deadline._curve import SpeedCurve
from scheduler.deadline._model import DeviceCapacity, Overhead, Rules
from scheduler.deadline._reservations import Gang, Reservation


@dataclass(frozen=True)
class LatestExit:
    """How a job reaches its deadline on capacity that is not taken away."""

    leave_s: float
    """The last instant at which it can leave preemptible capacity; now or before: it must leave at once."""
    share: int
    """Devices that it then needs; 0: no level meets the deadline any more."""


def latest_exit(
    work: float,
    deadline_s: float,
    curve: SpeedCurve,
    now: float,
    overhead: Overhead,
    margin: float = 0.03,
    lost_s: float = 0.0,
) -> LatestExit:
    """Return when a job with so many steps left must leave preemptible capacity at the latest, and for which share.

    Of the levels that still meet the deadline it is the one with the least device time, all changes included, and of
    two about equal ones the one that lets it stay longer. `lost_s`: run time that a preemption can cost at most; it is
    reserved, since the job may be preempted at its last instant there.
    """
    window = (deadline_s - now) * (1.0 - margin)
    best, least = LatestExit(-math.inf, 0), math.inf
    for level, rate in zip(curve.levels, curve.rates, strict=True):
        takes_s = work / rate + overhead.seconds(level) + lost_s
        if takes_s <= window and level * takes_s < 0.95 * least:
            best, least = LatestExit(now + window - takes_s, level), level * takes_s
    if not best.share:
        fastest = curve.levels[-1]
        takes_s = work / curve.rates[-1] + overhead.seconds(fastest)
        if now + takes_s <= deadline_s:
            return LatestExit(now, fastest)
    return best


def preemptible_share(work: float, deadline_s: float, curve: SpeedCurve, now: float, margin: float = 0.03) -> int:
    """Devices on preemptible capacity: the leanest level that would do the work in half of the time left, if one does.

    The other half is slack for preemptions; with less than that at the fastest level it takes the fastest.
    """
    window = max(1e-9, (deadline_s - now) * (1.0 - margin))
    return next(
        (level for level, rate in zip(curve.levels, curve.rates, strict=True) if work / rate <= window / 2),
        curve.levels[-1],
    )


__all__ = ["KindAllotment", "allot_kinds"]

_WORTH_CHANGES = 10.0
"""A gang moves to preemptible workers only for at least this factor of the pause that a change takes."""


@dataclass(frozen=True)
class KindAllotment:
    """The workers of all gangs from now on, by kind."""

    paces: Mapping[str, int]
    """By gang: index of its pace on lasting workers; -1: none of them."""
    preemptible: Mapping[str, int]
    """Index of its paces on preemptible workers; gangs that are not here have none."""
    held: Mapping[str, Reservation]
    """What gangs with a promise are sure to get of lasting workers, late ones included."""

    @property
    def late(self) -> frozenset[str]:
        """Gangs whose deadline cannot be kept if the preemptible workers were taken away now."""
        return frozenset(name for name, held in self.held.items() if held.late)

    def pace(self, gang: str) -> int:
        """Index of a gang's pace, on workers of whichever kind; -1: none."""
        return self.preemptible.get(gang, self.paces[gang])


def allot_kinds(
    now: float,
    lasting: Mapping[str, DeviceCapacity],
    preemptible: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    rules: Rules = LIVE,
    before: Mapping[str, Reservation] | None = None,
    rests: Collection[str] = (),
) -> KindAllotment:
    """Assign the workers of both kinds; only the present number of preemptible ones counts, since they may go any time.

    Gangs that ``rests`` names do not move to preemptible workers now.

    A gang has workers of one kind, in all of its regions; ``Gang.preemptible`` is the present kind. A fixed gang does
    not change kinds. Preemptible workers go to the gangs that have them, then by deadline, then to the least served
    user's, each at the leanest pace that would do its work in half of the time left (``preemptible_share``), best
    effort at its slowest; with what is left they grow as in ``allot``. All others get lasting workers by ``allot``.
    """
    barred = set(rests)
    while True:
        there = _places(now, preemptible, gangs, rules, barred)
        on_lasting = [_as_seen_there(gang, there) for gang in gangs]
        answer = allot(now, lasting, on_lasting, rules, before)
        # Who would have to leave again soon does not come; who is there already stays to the last moment.
        soon = {
            gang.name
            for gang in gangs
            if gang.name in there
            and not gang.preemptible
            and gang.name in answer.held
            and _begins_s(answer.held[gang.name]) - now <= _worth_s(gang, rules)
        }
        if not soon:
            break
        barred |= soon
    staying = {name: pace for name, pace in there.items() if answer.paces[name] < 0}
    paces = {**answer.paces, **dict.fromkeys(staying, -1)}
    free = {region: capacity.devices for region, capacity in preemptible.items()}
    mine = [gang for gang in gangs if gang.name in staying]
    for gang in mine:
        _take(_more(gang, -1, staying[gang.name]), free)
    _grow([gang if gang.preemptible else replace(gang, held=-1) for gang in mine], staying, free, {}, rules)
    return KindAllotment(paces, staying, answer.held)


def _as_seen_there(gang: Gang, there: Mapping[str, int]) -> Gang:
    """Return a gang as the assignment of lasting workers sees it: one on preemptible workers counts as one without
    any."""
    if gang.name in there:
        return replace(gang, preemptible=True)
    return replace(gang, preemptible=False, held=-1, ready_s=-math.inf) if gang.preemptible else gang


def _places(
    now: float, preemptible: Mapping[str, DeviceCapacity], gangs: Sequence[Gang], rules: Rules, barred: set[str]
) -> dict[str, int]:
    """Return the paces on preemptible workers, before any gang grows."""
    free = {region: capacity.devices for region, capacity in preemptible.items()}
    there: dict[str, int] = {}
    for gang in gangs:
        if gang.fixed and gang.preemptible and gang.held >= 0:
            # It cannot be informed of a change just now.
            there[gang.name] = gang.held
            _take(_more(gang, -1, gang.held), free)
    order = sorted(
        (gang for gang in gangs if not gang.fixed and (gang.preemptible or gang.name not in barred)),
        key=lambda gang: (not gang.preemptible, gang.deadline_s, gang.served_s, gang.since_s, gang.name),
    )
    for gang in order:
        if not (gang.preemptible or _worth_coming(gang, now, rules)):
            continue
        wanted = 0 if gang.best_effort else _lean_pace(gang, now, rules)
        fitting = [pace for pace in range(wanted + 1) if _fits(_more(gang, -1, pace), free)]
        if fitting:
            there[gang.name] = fitting[-1]
            _take(_more(gang, -1, fitting[-1]), free)
    return there


def _worth_coming(gang: Gang, now: float, rules: Rules) -> bool:
    """Return whether slack and work are much more than the cost of the change."""
    worth_s = _worth_s(gang, rules)
    if gang.held >= 0 and gang.work / gang.paces[gang.held].rate <= worth_s:
        return False
    if gang.best_effort:
        return True
    found = latest_exit(gang.work, gang.deadline_s, gang.curve, now, rules.overhead, rules.kept_margin)
    return found.share > 0 and found.leave_s - now > worth_s


def _worth_s(gang: Gang, rules: Rules) -> float:
    return _WORTH_CHANGES * rules.overhead.seconds(sum(gang.workers(0).values()))


def _lean_pace(gang: Gang, now: float, rules: Rules) -> int:
    return gang.curve.levels.index(preemptible_share(gang.work, gang.deadline_s, gang.curve, now, rules.kept_margin))


def _begins_s(held: Reservation) -> float:
    """The first instant at which workers are held; infinite: never."""
    return next((at for at, pace in zip(held.times, held.pace_indices, strict=False) if pace >= 0), math.inf)
