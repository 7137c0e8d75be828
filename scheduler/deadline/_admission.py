"""The present workers of each job over several regions: promises first, then the jobs that gain most from what is left.

The regions of a job must keep one pace. A promise is a holding over time, so a job may be promised workers that others
still have, and others may use what it does not need yet.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.deadline._gang_simulation import previous_schedule, reserved_levels, simulate_gangs, with_schedule
from scheduler.deadline._ledger import WorkerLedger
from scheduler.deadline._model import DeviceCapacity, Overhead, Rules
from scheduler.deadline._reservations import Gang, Reservation
from scheduler.deadline._schedule_simulation import Placement, SimulatedSchedule

__all__ = ["LIVE", "Allotment", "Offer", "allot", "offer", "promised_at_once"]

LIVE = Rules(
    Overhead(base_s=3.0, doubling_s=0.0), margin=0.1, kept_margin=0.03, reserve_s=6.0, kept_reserve_s=3.0, grace_s=30.0
)
"""Rules for jobs that train on functions: a change takes 0.5 to 2 s on warm replicas (measured on one machine)."""
_WORTH = 0.1
"""Share of its remaining time that a running job must save by a faster pace, beyond the change."""
_LEAN = 0.5
"""Share of a worker's gain at the slowest pace; at paces where a worker gains less, workers are better used
elsewhere."""
_TRIES = ((False, True), (True, True), (True, True), (True, False), (True, False))
"""Whether all jobs must be lean, and whether margins are kept, in the order of the attempts until all jobs fit. From
the second lean attempt on, jobs that did not fit before come first."""
_ROUNDS, _REPAIRED = 2, 64
"""Attempts to repair a plan in which a job is late, by giving it more time, and the number of gangs up to which that is
tried."""
_TIGHTER_S, _TIGHTER = 2.0, 0.05
"""Seconds beyond a job's lateness by which its window is tightened, and the largest share of the window for that."""
_STEEPNESS = 10.0
"""Of the price: where everything is free, jobs of up to exp(10), about 22,000, times the usual size are promised. Any
from 4 to 12 does as well on published traces."""
_USUAL_JOBS = 10
"""Promises of which the median says what size is usual; with fewer, every deadline that fits is promised."""
_MAX_REORDERED_JOBS = 200
"""Number of jobs with deadlines up to which other orders are tried; beyond, that takes too long."""


@dataclass(frozen=True)
class Allotment:
    """The workers of all jobs from now on."""

    paces: Mapping[str, int]
    """By gang: index of its pace; -1: no workers."""
    held: Mapping[str, Reservation]
    """What gangs with a promise are sure to get, late ones included."""

    @property
    def late(self) -> frozenset[str]:
        """Gangs whose deadline cannot be kept as things are."""
        return frozenset(name for name, held in self.held.items() if held.late)


@dataclass(frozen=True)
class Offer:
    """The answer to a job that asks for a deadline."""

    deadline_s: float | None
    """The instant that can be promised; None: not one of those that were asked for."""
    earliest_s: float
    """Lower bound of an instant that can be promised: the job's end with all free capacity from now on. The earliest
    possible instant can be a little later, where other jobs have just what they need. Infinite: none with the present
    capacity."""
    over_quota: bool = False
    """Whether only the user's quota prevents the promise."""
    too_large: tuple[float, float] | None = None
    """Worker seconds of the job for each unit of value, and those up to which jobs are promised now, if only that
    prevents it."""
    held: Mapping[str, Reservation] = field(default_factory=dict)
    """What all gangs with a promise then hold, this one included: the ``before`` of the next question."""


def allot(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    rules: Rules = LIVE,
    before: Mapping[str, Reservation] | None = None,
    placement: Placement | None = None,
) -> Allotment:
    """Assign the workers of all regions.

    What cannot change is held first, then every promise gets the least worker time that keeps it, in the order of
    deadlines. If a job does not fit, other orders are tried, then without margins, and at last what an earlier answer
    held (``before``), which fitted then. What is free now goes to best effort at the slowest pace, running jobs first,
    then those of the least served user; then to the jobs that use it best.

    The answer is simulated to the end, each change with its pause (``simulate_schedule``). If a job with a promise
    would be late, it is simulated again without spare workers; if that does not help, everything continues as in the
    last answer that held, which still holds with exact speeds and no failure. If none holds, the one with the fewest
    late jobs is chosen. ``before`` is the ``held`` of the answer before this, or of an offer since; the `placement` is
    for one region only.
    """
    paces, held, schedule = _shared_out(now, capacities, gangs, rules, before, placement)
    return Allotment(paces, with_schedule(held, schedule, gangs))


def _shared_out(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    rules: Rules,
    before: Mapping[str, Reservation] | None,
    placement: Placement | None,
    promised: tuple[WorkerLedger, Mapping[str, Reservation]] | None = None,
) -> tuple[dict[str, int], Mapping[str, Reservation], SimulatedSchedule]:
    """Return the present paces, what is held, and the schedule with the fewest late gangs.

    ``promised``: what ``_promises`` returns for these gangs; its ledger is changed.
    """
    gangs = [gang.lasting() for gang in gangs]
    best: tuple[dict[str, int], Mapping[str, Reservation], SimulatedSchedule] | None = None
    tight: dict[str, float] = {}
    held: Mapping[str, Reservation] = {}
    for _ in range(1 + (_ROUNDS if len(gangs) <= _REPAIRED else 0)):
        waiting = [_sooner(gang.waiting(now), tight) for gang in gangs]
        ledger, held = promised or _promises(now, capacities, waiting, rules, before)
        promised = None
        paces, free = {gang.name: held[gang.name].now if gang.name in held else -1 for gang in gangs}, ledger.free_now()
        _begin(waiting, paces, free, ledger, rules, capacities)
        plans = {name: reserved_levels(holding) for name, holding in held.items()}
        begun = dict(paces)
        _grow(waiting, paces, free, held, rules)
        for chosen in [paces, begun] if begun != paces else [paces]:
            schedule = simulate_gangs(now, capacities, gangs, chosen, plans, rules, placement)
            best = _better(best, held, schedule, gangs, now)
            if schedule.holds:
                return best
        for gang in gangs:
            if gang.name in schedule.late:
                most = max(0.0, _TIGHTER * (gang.deadline_s - now))
                tight[gang.name] = tight.get(gang.name, 0.0) + min(schedule.late[gang.name] + _TIGHTER_S, most)
    chosen, plans = previous_schedule(now, gangs, before)
    return _better(best, held, simulate_gangs(now, capacities, gangs, chosen, plans, rules, placement), gangs, now)


def _better(
    best: tuple[dict[str, int], Mapping[str, Reservation], SimulatedSchedule] | None,
    held: Mapping[str, Reservation],
    schedule: SimulatedSchedule,
    gangs: Sequence[Gang],
    now: float,
) -> tuple[dict[str, int], Mapping[str, Reservation], SimulatedSchedule]:
    """Return the schedule on which fewer jobs are late, with the paces that it begins with."""
    if best is not None and (schedule.fits, -len(schedule.late)) <= (best[2].fits, -len(best[2].late)):
        return best
    return {gang.name: schedule.level(gang.name, now) - 1 for gang in gangs}, held, schedule


def _sooner(gang: Gang, tight: Mapping[str, float]) -> Gang:
    return replace(gang, deadline_s=gang.deadline_s - tight[gang.name]) if gang.name in tight else gang


def offer(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    new: Gang,
    rules: Rules = LIVE,
    before: Mapping[str, Reservation] | None = None,
    placement: Placement | None = None,
) -> Offer:
    """Return whether a deadline can be promised to one more gang; the promises of the others stay.

    It can only if the answer of ``allot`` with the new gang makes no job late that is not late without it.
    """
    waiting = [gang.lasting().waiting(now) for gang in gangs]
    asked = [replace(new, deadline_s=deadline_s) for deadline_s in (new.deadline_s, *new.later)]
    begun, whole = _attempts_before(now, capacities, waiting, asked if new.held < 0 else [], rules)
    left, held = _promises(now, capacities, waiting, rules, before, begun=whole)
    late: frozenset[str] | None = None
    over_quota, too_large = False, None
    for one in asked:
        start = begun.get(one.deadline_s)
        after = _with(now, capacities, waiting, one, rules, left, held, start)
        if after is None or (over_quota := _over_quota([*gangs, one], after, new.user, rules)):
            continue
        promised = _promises(now, capacities, [*waiting, one.lasting().waiting(now)], rules, before, begun=start)
        _, after, schedule = _shared_out(now, capacities, [*gangs, one], rules, before, placement, promised)
        if over_quota := _over_quota([*gangs, one], after, new.user, rules):
            continue
        if not schedule.holds and late is None:
            without = _shared_out(now, capacities, gangs, rules, before, placement, (left.copy(), held))
            late = frozenset(without[2].late)
        if schedule.fits and schedule.late.keys() <= (late or frozenset()):
            size, most = _size_and_limit(now, capacities, [*gangs, one], after, one, rules)
            if size > most:
                too_large = too_large or (size, most)
                continue
            return Offer(one.deadline_s, after[new.name].end_s, held=with_schedule(after, schedule, [*gangs, one]))
    soonest = left.soonest(new, rules).end_s
    margin = rules.reserve_s + (soonest - now + _pause(new, rules)) / (1.0 - rules.margin)
    return Offer(None, now + margin if math.isfinite(soonest) else math.inf, over_quota, too_large)


def _size_and_limit(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    held: Mapping[str, Reservation],
    new: Gang,
    rules: Rules,
) -> tuple[float, float]:
    """Return what a new gang takes for each unit of its value, and what a promise may take now, in worker seconds.

    The limit is a posted price, which falls exponentially with the share of the regions that stays free up to the
    deadline (Buchbinder and Naor, 2009, section 4), from multiples of the usual size down to it: a large job must not
    take the place of many small ones. Usual is the median of what the other promises hold from now on.
    """
    promised = [(gang, held[gang.name]) for gang in gangs if not gang.best_effort and gang.name in held]
    regions = new.workers(0).keys() & capacities.keys()
    sizes = {gang.name: own.worker_seconds(gang, regions) / gang.value for gang, own in promised}
    size = sizes.pop(new.name, 0.0)
    others = sorted(other for other in sizes.values() if other > 0)
    if not rules.by_price or len(others) < _USUAL_JOBS:
        return size, math.inf
    used = sum(own.worker_seconds(gang, regions, new.deadline_s) for gang, own in promised)
    empty = WorkerLedger(now, capacities)
    spans = np.diff(np.minimum(np.append(empty.times, math.inf), new.deadline_s))
    room = sum(float(empty.free[empty.rows[region]] @ spans) for region in regions)
    left = max(0.0, 1.0 - used / max(room, 1.0))
    return size, others[len(others) // 2] * math.exp(_STEEPNESS * left)


def _with(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    new: Gang,
    rules: Rules,
    left: WorkerLedger,
    held: Mapping[str, Reservation],
    begun: _Attempt | None,
) -> Mapping[str, Reservation] | None:
    """Return what all hold with the new gang; None if it does not fit, or another would be late for it."""
    margin, reserve_s = _care(rules, is_new=True)
    found = left.copy().least(new, new.deadline_s - reserve_s, rules, margin)
    if found is not None:
        return {**held, new.name: found}
    _, after = _promises(now, capacities, [*gangs, new], rules, None, new.name, begun)
    return after if not after[new.name].late and _broken(after) <= _broken(held) else None


def _care(rules: Rules, *, is_new: bool) -> tuple[float, float]:
    """Return the share of the window, and the time before its end, that are reserved."""
    return (rules.margin, rules.reserve_s) if is_new else (rules.kept_margin, rules.kept_reserve_s)


def _broken(held: Mapping[str, Reservation]) -> frozenset[str]:
    return frozenset(name for name, holding in held.items() if holding.late)


def _over_quota(gangs: Sequence[Gang], held: Mapping[str, Reservation], user: str, rules: Rules) -> bool:
    limit = rules.quotas.get(user)
    return limit is not None and promised_at_once(gangs, held, user) > limit


def promised_at_once(gangs: Sequence[Gang], held: Mapping[str, Reservation], user: str) -> int:
    """Return the most workers, over all regions, that the promises to a user hold at any instant; quotas limit them.

    A promise holds the least that keeps it. What a job has besides, because it is free, does not count, and neither
    does a job without a promise.
    """
    steps: list[tuple[float, int]] = []
    for gang in gangs:
        if gang.user != user or gang.best_effort or gang.name not in held:
            continue
        mine = held[gang.name]
        for begin, end, pace in zip(mine.times, mine.times[1:], mine.pace_indices, strict=False):
            count = sum(gang.workers(pace).values())
            steps += [(begin, count), (end, -count)]
    total = most = 0
    for _, change in sorted(steps):
        total += change
        most = max(most, total)
    return most


@dataclass
class _Attempt:
    """What the first gangs with a deadline hold, in the order of deadlines."""

    count: int
    """Number of these gangs; those that are not asked are not counted."""
    ledger: WorkerLedger
    held: dict[str, Reservation]
    missing: list[Gang]
    """Those that did not fit."""

    def copy(self) -> _Attempt:
        return _Attempt(self.count, self.ledger.copy(), dict(self.held), list(self.missing))

    def add(
        self, gangs: Sequence[Gang], rules: Rules, new: str = "", *, lean: bool = False, careful: bool = True
    ) -> None:
        """Hold what further gangs need, each after those before it."""
        for gang in gangs:
            is_new = gang.name == new
            margin, reserve_s = _care(rules, is_new=is_new) if careful or is_new else (0.0, 0.0)
            found = self.ledger.least(gang, gang.deadline_s - reserve_s, rules, margin, lean=lean)
            if found is None and not is_new:
                found = self.ledger.least(gang, gang.deadline_s, rules, 0.0, lean=lean)
            if found is None:
                self.missing.append(gang)
            else:
                self.held[gang.name] = found
        self.count += len(gangs)


def _turn(gang: Gang) -> tuple[float, float, float, str]:
    return gang.deadline_s, -gang.value, gang.since_s, gang.name


def _asking(
    now: float, capacities: Mapping[str, DeviceCapacity], gangs: Sequence[Gang]
) -> tuple[_Attempt, Sequence[Gang]]:
    """Return what is held by gangs that are not asked, since they cannot change, and those that are, in their order."""
    empty = WorkerLedger(now, capacities)
    kept = empty.keep(gang for gang in gangs if gang.fixed and gang.held >= 0)
    asking = sorted((gang for gang in gangs if not gang.best_effort and gang.name not in kept), key=_turn)
    return _Attempt(0, empty, kept, []), asking


def _attempts_before(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    new: Sequence[Gang],
    rules: Rules,
) -> tuple[Mapping[float, _Attempt], _Attempt]:
    """Return the first attempt without the new gangs, and by deadline of these what it is before it is their turn.

    Up to there an attempt with one of them is the same.
    """
    attempt, asking = _asking(now, capacities, gangs)
    turns = [_turn(gang) for gang in asking]
    before = {}
    for one in sorted(new, key=_turn):
        attempt.add(asking[attempt.count : bisect_right(turns, _turn(one))], rules)
        before[one.deadline_s] = attempt.copy()
    attempt.add(asking[attempt.count :], rules)
    return before, attempt


def _promises(
    now: float,
    capacities: Mapping[str, DeviceCapacity],
    gangs: Sequence[Gang],
    rules: Rules,
    before: Mapping[str, Reservation] | None,
    new: str = "",
    begun: _Attempt | None = None,
) -> tuple[WorkerLedger, dict[str, Reservation]]:
    """Return what all jobs with a deadline hold, and what is then free; ``new`` needs the margin of a new promise.

    ``begun``: a part of the first attempt.
    """
    empty, asking = _asking(now, capacities, gangs)
    first: list[Gang] = []
    best: _Attempt | None = None
    for lean, careful in _TRIES:
        attempt = (begun or empty).copy()
        begun = None
        order = [*first, *(gang for gang in asking if gang not in first)]
        if best is not None and before:
            # What was held before continues, as far as it can; the others come after it.
            order = _again(attempt.ledger, order, attempt.held, before, rules)
            before = None
        attempt.add(order[attempt.count :], rules, new, lean=lean, careful=careful)
        missing = attempt.missing
        # The most valuable of those that cannot be kept gets what there is first.
        for gang in sorted(missing, key=lambda gang: (-gang.value, gang.deadline_s)):
            attempt.held[gang.name] = attempt.ledger.all_there_is(gang, rules)
        if best is None or len(missing) < len(best.missing):
            best = attempt
        if not missing or len(asking) > _MAX_REORDERED_JOBS:
            break
        first = [*missing, *(gang for gang in first if gang not in missing)] if lean else []
    assert best is not None
    return best.ledger, best.held


def _again(
    ledger: WorkerLedger,
    gangs: Sequence[Gang],
    held: dict[str, Reservation],
    before: Mapping[str, Reservation],
    rules: Rules,
) -> list[Gang]:
    """Hold what was held before, where that is still possible; returns those for which it is not."""
    others = []
    for gang in gangs:
        last = before[gang.name].on(gang) if gang.name in before else None
        found = ledger.again(gang, last, rules) if last is not None else None
        if found is None:
            others.append(gang)
        else:
            held[gang.name] = found
    return others


def _pause(gang: Gang, rules: Rules) -> float:
    return (1 + (len(gang.paces) > 1)) * rules.overhead.seconds(sum(gang.paces[-1].workers.values()))


def _more(gang: Gang, before: int, after: int) -> dict[str, int]:
    """Return what a gang needs in addition to what it has at another pace, by row of the ledger."""
    had = gang.needs(before)
    return {row: count - had.get(row, 0) for row, count in gang.needs(after).items()}


def _fits(more: Mapping[str, int], free: Mapping[str, int]) -> bool:
    return all(count <= free.get(region, 0) for region, count in more.items())


def _take(more: Mapping[str, int], free: dict[str, int]) -> None:
    for region, count in more.items():
        free[region] = free.get(region, 0) - count


def _begin(
    gangs: Sequence[Gang],
    paces: dict[str, int],
    free: dict[str, int],
    ledger: WorkerLedger,
    rules: Rules,
    capacities: Mapping[str, DeviceCapacity],
) -> None:
    """Start all gangs at least at the slowest pace, as far as there is room.

    First those with a promise, by deadline, also where they could wait: sooner is safer. Then those that run, the
    oldest first, so that the latest pauses where not all can continue; then those that wait: the least served user's
    first, in the order of arrival. After a best-effort gang that finds no room, no other best-effort gang begins in its
    regions, since large jobs would otherwise wait for ever; one that could not run alone blocks no other. A fixed gang
    begins only where no promise needs its workers before its end. A gang on preemptible workers needs no others yet.
    """
    standing = sorted(
        (gang for gang in gangs if paces[gang.name] < 0),
        key=lambda gang: (gang.deadline_s, gang.held < 0, gang.served_s * (gang.held < 0), gang.since_s, gang.name),
    )
    kept: set[str] = set()
    room = {region: capacity.devices for region, capacity in capacities.items()}
    for gang in standing:
        more = _more(gang, -1, 0)
        if gang.preemptible or (gang.fixed and not gang.best_effort):
            continue
        there = _fits(more, free) and not kept & set(more)
        if there and (not gang.fixed or _begins_now(gang, ledger, rules)):
            _take(more, free)
            paces[gang.name] = 0
        elif gang.held < 0 and gang.best_effort and _fits(more, room):
            kept |= {region for region, count in more.items() if count}


def _begins_now(gang: Gang, ledger: WorkerLedger, rules: Rules) -> bool:
    tried = ledger.copy()
    found = tried.stretch(gang, rules)
    if found is None or found.now < 0:
        return False
    ledger.become(tried)
    return True


def _grow(
    gangs: Sequence[Gang], paces: dict[str, int], free: dict[str, int], held: Mapping[str, Reservation], rules: Rules
) -> None:
    """Raise gangs by one pace at a time, up to what their owners wish, until nothing fits or helps.

    First what a gang has already, since a change costs; then paces that use workers about as well as the slowest, those
    of promises first, by deadline; then the others, by their gain for each worker. A gang that would be late may use
    all its paces. A running gang gets faster only where that is worth the change.
    """
    heap: list[tuple[int, float, float, str, int, Gang]] = []

    def wish(gang: Gang) -> int:
        late = gang.name in held and held[gang.name].late
        return len(gang.paces) - 1 if late else min(gang.wish, len(gang.paces) - 1)

    def push(gang: Gang, pace: int) -> None:
        now = paces[gang.name]
        if now < 0 or pace > wish(gang) or (gang.fixed and gang.held >= 0):
            return
        gain = (gang.paces[pace].rate - gang.paces[now].rate) / max(1, sum(_more(gang, now, pace).values()))
        gain /= gang.paces[0].rate / max(1, sum(gang.needs(0).values()))
        tier = 0 if pace <= gang.held else 1 if gain >= _LEAN else 2
        first = -gain if tier == 2 else min(gang.deadline_s, 1e15)
        heapq.heappush(heap, (tier, first, gang.since_s, gang.name, pace, gang))

    for gang in gangs:
        push(gang, paces[gang.name] + 1)
    grown: dict[str, int] = {}
    while heap:
        *_, name, pace, gang = heapq.heappop(heap)
        more = _more(gang, paces[name], pace)
        if not _fits(more, free):
            continue
        _take(more, free)
        if pace > gang.held >= 0:
            grown.setdefault(name, max(paces[name], gang.held))
        paces[name] = pace
        push(gang, pace + 1)
    for gang in gangs:
        before = grown.get(gang.name)
        if before is not None and not gang.insists and not _worthwhile(gang, before, paces[gang.name], rules):
            paces[gang.name] = before


def _worthwhile(gang: Gang, before: int, after: int, rules: Rules) -> bool:
    left_s = gang.work / gang.paces[before].rate
    saved_s = left_s - gang.work / gang.paces[after].rate
    return saved_s > rules.overhead.seconds(sum(gang.workers(after).values())) + _WORTH * left_s
