"""ElasticFlow (ASPLOS'23) as its simulator was published: slots, and bursts that are admitted or declined as a whole.

Implemented again from that simulator's behaviour, including its quirks, so that our own policy is compared with the
real one in the same simulation: shares are filled by deadline over slots; arrivals within a slot are decided together;
the cost of changes is not planned for; spare devices go to the job whose device time grows the most. `singly` makes the
one change that helps it most: the jobs of a burst are admitted one by one, by deadline. `keep`: jobs without a promise
run on what is left instead of being declined, as soft deadlines and best effort do there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.simulate._engine import PolicyDecision, RunningJob


@dataclass(slots=True)
class _Free:
    """Free devices from each instant on; the last step has no end."""

    times: list[float]
    free: list[int]

    def copy(self) -> _Free:
        return _Free(self.times[:], self.free[:])

    def cut(self, at: float) -> int:
        """Return the index of the step that begins at an instant; the step is created if needed."""
        index = bisect_left(self.times, at)
        if index == len(self.times) or self.times[index] != at:
            self.times.insert(index, at)
            self.free.insert(index, self.free[index - 1])
        return index

    def change(self, plan: _Plan, sign: int) -> None:
        """Take a plan's devices (-1), or return them (1)."""
        for begin, end, share in plan.spans():
            first, last = self.cut(begin), self.cut(end)
            for index in range(first, last):
                self.free[index] += sign * share

    def merged(self) -> _Free:
        """Without steps that change nothing."""
        keep = [i for i in range(len(self.times)) if not i or self.free[i] != self.free[i - 1]]
        return _Free([self.times[i] for i in keep], [self.free[i] for i in keep])


@dataclass(slots=True)
class _Plan:
    """Shares of one job over time."""

    times: list[float]
    """Instants of the plan; as published, steps may follow its end, without devices."""
    shares: list[int]
    end_s: float
    """End, at the edge of a slot."""
    real_end_s: float
    """Without the pauses to come."""

    def spans(self) -> list[tuple[float, float, int]]:
        ends = [*self.times[1:], self.end_s]
        return [
            (begin, min(end, self.end_s), share)
            for begin, end, share in zip(self.times, ends, self.shares, strict=True)
            if share and begin < self.end_s
        ]

    def device_s(self) -> float:
        """Device seconds; as published, the step in which it ends counts in full where another follows."""
        ends = [*self.times[1:], self.end_s]
        return sum((end - at) * share for at, end, share in zip(self.times, ends, self.shares, strict=True))

    def changes_s(self) -> float:
        """The first instant at which the share changes, though it may have ended before."""
        return next((at for at, share in zip(self.times[1:], self.shares[1:], strict=True)
                     if share != self.shares[0]), math.inf)  # fmt: skip


class ElasticFlow:
    """The published scheduler."""

    at_edges = True

    def __init__(self, slot_s: float = 60.0, singly: bool = False, keep: bool = False) -> None:
        self.slot_s, self.singly, self.keep = slot_s, singly, keep
        self.name = "elasticflow-singly" if singly else "elasticflow"
        self.levels: dict[str, tuple[list[int], list[float]]] = {}
        self.unsure: set[str] = set()
        """Jobs without a promise."""
        self.plans: dict[str, _Plan] = {}
        """Plans of the last decision by job."""
        self.order: dict[str, int] = {}
        """Order of equals: by the share of the last decision, the largest first."""

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Admit arrivals whose deadlines fit together with all promises, one at a time or as one burst, and share the
        devices."""
        new = {job.name for job in arrived}
        taken = sorted((job for job in active if job.name not in new), key=lambda job: self.order.get(job.name, 0))
        declined: list[str] = []
        promised: dict[str, float] = {}
        asked = sorted((job for job in arrived if job.spec.deadlines), key=lambda job: job.spec.deadline_s)
        for burst in [[job] for job in asked] if self.singly else [asked] if asked else []:
            sure = [job for job in taken if self._sure(job, promised)]
            if self._fill_all(now, devices, [*sure, *burst])[2]:
                taken += burst
                promised.update((job.name, job.spec.deadline_s) for job in burst)
            elif self.keep:
                taken += burst
            else:
                declined += [job.name for job in burst]
        taken += [job for job in arrived if not job.spec.deadlines]
        free, plans, _ = self._fill_all(now, devices, [job for job in taken if self._sure(job, promised)])
        self.unsure = {job.name for job in taken if not self._sure(job, promised)}
        for job in taken:
            if job.name in self.unsure:
                plans[job.name] = _Plan([now], [0], now, now)
        order = self._spread(now, free, plans, taken)
        self.plans = plans
        shares = {name: plans[name].shares[0] for name in order}
        self.order = {name: place for place, name in enumerate(sorted(order, key=lambda name: -shares[name]))}
        wake_s = min((plan.changes_s() for plan in plans.values()), default=math.inf)
        return PolicyDecision(shares, declined, promised, wake_s)

    @staticmethod
    def _sure(job: RunningJob, promised: dict[str, float]) -> bool:
        return math.isfinite(job.promised_s) or job.name in promised

    def _fill_all(self, now: float, devices: int, jobs: Sequence[RunningJob]) -> tuple[_Free, dict[str, _Plan], bool]:
        free, plans, all_meet = _Free([now], [devices]), {}, True
        for job in sorted(jobs, key=lambda job: job.spec.deadline_s):
            plan, meets = self._fill(now, devices, job, free, None)
            free.change(plan, -1)
            free = free.merged()
            plans[job.name] = plan
            all_meet = all_meet and meets
        return free, plans, all_meet

    def _curve(self, job: RunningJob) -> tuple[list[int], list[float]]:
        """Return the levels up to the first that is slower than the one before, as in the published simulator."""
        if job.name not in self.levels:
            levels: list[int] = []
            rates: list[float] = []
            for level, rate in zip(job.believed.levels, job.believed.rates, strict=True):
                if not levels or level == 2 * levels[-1]:
                    levels.append(level)
                    rates.append(rate)
            self.levels[job.name] = levels, rates
        return self.levels[job.name]

    def _fill(self, now: float, devices: int, job: RunningJob, free: _Free, first: int | None) -> tuple[_Plan, bool]:
        """The least shares that meet the deadline, with `first` devices up to the next change of what is free."""
        levels, rates = self._curve(job)
        deadline_s, left = job.spec.deadline_s, job.left
        if job.name in self.unsure and first is not None:
            real_end_s = math.ceil(now + left / rates[levels.index(first)])
            return _Plan([now], [first], self._edge(now, real_end_s), real_end_s), True
        edge_s = now + math.ceil(max(0.0, deadline_s - now) / self.slot_s) * self.slot_s
        free = free.copy()
        times: list[float] = []
        shares: list[int] = []
        begin_s = now
        if first is not None:
            rate = rates[levels.index(first)]
            next_s = free.times[1] if len(free.times) > 1 else max(edge_s, now + self.slot_s)
            real_end_s = math.ceil(now + left / rate)
            end_s = self._edge(now, real_end_s)
            if next_s >= end_s and real_end_s <= deadline_s:
                return _Plan([now], [first], end_s, real_end_s), True
            left -= ((deadline_s if next_s == edge_s else next_s) - now) * rate
            times, shares, begin_s = [now], [first], next_s
            if left <= 0:
                return _Plan(times, shares, next_s, next_s), next_s <= deadline_s
        if begin_s < edge_s:
            free.cut(begin_s)
            free.cut(edge_s)
            steps = [
                (at, min(end, deadline_s) - at, bisect_right(levels, amount))
                for at, end, amount in zip(free.times, [*free.times[1:], math.inf], free.free, strict=True)
                if begin_s <= at < edge_s
            ]
            plan, left = self._by_deadline(steps, levels, rates, left, times, shares)
            if plan is not None:
                return plan, plan.real_end_s <= deadline_s
        return self._late(now, max(edge_s, begin_s), free, levels, rates, left, times, shares, first), False

    def _by_deadline(
        self, steps: list[tuple[float, float, int]], levels: list[int], rates: list[float], left: float,
        times: list[float], shares: list[int],
    ) -> tuple[_Plan | None, float]:  # fmt: skip
        """The lowest level that is enough from some step on, with the one below it before; else what is left to do.

        A step is (begin, length, how many levels fit). Adds to `times` and `shares`.
        """
        for top in range(1, len(levels) + 1):
            point = self._point(steps, top, rates, left)
            if point is not None:
                break
        else:
            top, point = len(levels), 0
        for index, (at, span, fits) in enumerate(steps):
            fit = min(top if index >= point else top - 1, fits)
            times.append(at)
            shares.append(levels[fit - 1] if fit else 0)
            done = span * rates[fit - 1] if fit else 0.0
            if index >= point and fit and done >= left:
                took = math.ceil(left / rates[fit - 1])
                times += [step[0] for step in steps[index + 1 :]]
                shares += [0] * (len(steps) - index - 1)
                return _Plan(times, shares, at + math.ceil(took / self.slot_s) * self.slot_s, at + took), 0.0
            left -= done
        return None, left  # by no more than a rounding even, which makes it late as published

    @staticmethod
    def _point(steps: list[tuple[float, float, int]], top: int, rates: list[float], left: float) -> int | None:
        """The latest step from which on a level is enough; none: it is not enough from the first on."""
        work = 0.0
        for index in range(len(steps) - 1, -1, -1):
            _, span, fits = steps[index]
            fit = min(top, fits)
            work += span * rates[fit - 1] if fit else 0.0
            if fit and work >= left:
                return index
        return None

    def _late(
        self, now: float, from_s: float, free: _Free, levels: list[int], rates: list[float], left: float,
        times: list[float], shares: list[int], first: int | None,
    ) -> _Plan:  # fmt: skip
        """Return the plan after the deadline: the largest level that is free; after all others, the level that was
        offered."""
        free.cut(from_s)
        for at, end, amount in zip(free.times, [*free.times[1:], math.inf], free.free, strict=True):
            if at < from_s:
                continue
            fit = bisect_right(levels, amount)
            if first is not None and math.isinf(end):
                fit = bisect_right(levels, first)
            times.append(at)
            shares.append(levels[fit - 1] if fit else 0)
            if fit and (end - at) * rates[fit - 1] >= left:
                real_end_s = math.ceil(at + left / rates[fit - 1])
                return _Plan(times, shares, self._edge(now, real_end_s), real_end_s)
            left -= (end - at) * rates[fit - 1] if fit else 0.0
        return _Plan(times, shares, times[-1] + self.slot_s, math.inf)

    def _edge(self, now: float, at: float) -> float:
        return now + math.ceil((at - now) / self.slot_s) * self.slot_s

    def _spread(self, now: float, free: _Free, plans: dict[str, _Plan], jobs: Sequence[RunningJob]) -> list[str]:
        """Raise shares while anything fits: who has none first, then whose device time would grow the most.

        Of equals whoever was first in the round before, at first by deadline; so too those without a promise, of which
        nothing was published. Returns names in the order of the last round.
        """
        order = sorted(jobs, key=lambda job: job.spec.deadline_s)
        gains: dict[str, float] = {}
        raised = "" if free.free[0] else None
        while raised is not None:
            offers: dict[str, _Plan] = {}
            for job in order:
                share = plans[job.name].shares[0]
                level = self._above(job, share)
                if level and level - share <= free.free[0]:
                    gains[job.name], offers[job.name] = self._offer(now, free, plans[job.name], job, level)
                elif level or job.name not in gains:  # a job at the highest level keeps its last gain
                    gains[job.name] = -math.inf
            order.sort(key=lambda job: gains[job.name], reverse=True)
            raised = next((job.name for job in order if job.name in offers), None)
            if raised is not None:
                free.change(plans[raised], 1)
                plans[raised] = offers[raised]
                free.change(plans[raised], -1)
                free = free.merged()
        return [job.name for job in order]

    def _above(self, job: RunningJob, share: int) -> int:
        """Return the next level; 0: there is none."""
        levels, _ = self._curve(job)
        above = bisect_right(levels, share)
        return levels[above] if above < len(levels) else 0

    def _offer(self, now: float, free: _Free, plan: _Plan, job: RunningJob, level: int) -> tuple[float, _Plan]:
        """Return the growth of device time by the next level, for each device, and the plan with it."""
        without = free.copy()
        without.change(plan, 1)
        raised, _ = self._fill(now, 0, job, without.merged(), level)
        growth = (raised.device_s() - plan.device_s()) / (level - plan.shares[0])
        return growth if plan.shares[0] else math.inf, raised
