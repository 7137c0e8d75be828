"""ElasticFlow (ASPLOS'23) as its simulator was published: slots, and bursts that are admitted or declined as a whole.

Written anew from what that simulator does, its quirks included, so that our own policy has the real rival in the same
simulation: shares are filled by deadline over slots; whatever arrives within a slot is decided on together; nothing
that changes take is planned for; spare devices go to the job whose device time grows the most. `singly` makes the one
change that helps it most: the jobs of a burst are admitted one by one, by deadline. `keep`: whoever has no promise runs
on what is left instead of being sent away, as soft deadlines and best effort do there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.simulate._engine import Decision, Running

_LEAST = -math.inf


@dataclass(slots=True)
class _Free:
    """Free devices from each instant on; the last step has no end."""

    times: list[float]
    free: list[int]

    def copy(self) -> _Free:
        return _Free(self.times[:], self.free[:])

    def cut(self, at: float) -> int:
        """Index of the step that begins at an instant, made where it is not there."""
        index = bisect_left(self.times, at)
        if index == len(self.times) or self.times[index] != at:
            self.times.insert(index, at)
            self.free.insert(index, self.free[index - 1])
        return index

    def change(self, plan: _Plan, sign: int) -> None:
        """Take a plan's devices (-1), or give them back (1)."""
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
    shares: list[int]
    end_s: float
    """At the edge of a slot."""
    real_end_s: float

    def spans(self) -> list[tuple[float, float, int]]:
        ends = [*self.times[1:], self.end_s]
        return [
            (begin, min(end, self.end_s), share)
            for begin, end, share in zip(self.times, ends, self.shares, strict=True)
            if share and begin < self.end_s
        ]

    def device_s(self) -> float:
        return sum((end - begin) * share for begin, end, share in self.spans())

    def changes_s(self) -> float:
        """The first instant after the beginning at which the share changes, or the end of the first step."""
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

    def decide(self, now: float, devices: int, active: Sequence[Running], arrived: Sequence[Running]) -> Decision:
        new = {job.name for job in arrived}
        taken = [job for job in active if job.name not in new]
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
        free = self._spread(now, free, plans, taken)
        shares = {job.name: plans[job.name].shares[0] for job in taken}
        wake_s = min((plan.changes_s() for plan in plans.values()), default=math.inf)
        return Decision(shares, declined, promised, wake_s)

    @staticmethod
    def _sure(job: Running, promised: dict[str, float]) -> bool:
        return math.isfinite(job.promised_s) or job.name in promised

    def _fill_all(self, now: float, devices: int, jobs: Sequence[Running]) -> tuple[_Free, dict[str, _Plan], bool]:
        free, plans, all_meet = _Free([now], [devices]), {}, True
        for job in sorted(jobs, key=lambda job: job.spec.deadline_s):
            plan, meets = self._fill(now, devices, job, free, None)
            free.change(plan, -1)
            free = free.merged()
            plans[job.name] = plan
            all_meet = all_meet and meets
        return free, plans, all_meet

    def _curve(self, job: Running) -> tuple[list[int], list[float]]:
        """Levels up to the first that is slower than the one before; theirs stop there too."""
        if job.name not in self.levels:
            levels: list[int] = []
            rates: list[float] = []
            for level, rate in zip(job.believed.levels, job.believed.rates, strict=True):
                if not levels or level == 2 * levels[-1]:
                    levels.append(level)
                    rates.append(rate)
            self.levels[job.name] = levels, rates
        return self.levels[job.name]

    def _fill(self, now: float, devices: int, job: Running, free: _Free, first: int | None) -> tuple[_Plan, bool]:
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
            left -= (min(next_s, deadline_s) if next_s >= edge_s else next_s) * rate - now * rate
            times, shares, begin_s = [now], [first], next_s
            if left <= 0:
                return _Plan(times, shares, next_s, next_s), next_s <= deadline_s
        if begin_s < edge_s:
            free.cut(begin_s)
            free.cut(edge_s)
            steps = [
                (at, end, min(end, deadline_s) - at, bisect_right(levels, amount))
                for at, end, amount in zip(free.times, [*free.times[1:], math.inf], free.free, strict=True)
                if begin_s <= at < edge_s
            ]
            for top in range(1, len(levels) + 1):
                plan = self._level(now, steps, top, levels, rates, left, times, shares)
                if plan is not None:
                    return plan, plan.real_end_s <= deadline_s
            for at, _, span, fit in steps:
                times.append(at)
                shares.append(levels[fit - 1] if fit else 0)
                left -= span * rates[fit - 1] if fit else 0.0
        return self._late(now, max(edge_s, begin_s), free, levels, rates, left, times, shares), False

    def _level(
        self, now: float, steps: list[tuple[float, float, float, int]], top: int, levels: list[int],
        rates: list[float], left: float, times: list[float], shares: list[int],
    ) -> _Plan | None:  # fmt: skip
        """A plan whose late part is at one level and whose early part is at the one below, if that is enough."""
        work, point = 0.0, None
        for index in range(len(steps) - 1, -1, -1):
            fit = min(top, steps[index][3])
            work += steps[index][2] * rates[fit - 1] if fit else 0.0
            if work >= left:
                point = index
                break
        if point is None:
            return None
        times, shares = times[:], shares[:]
        for index, (at, _, span, fits) in enumerate(steps):
            fit = min(top if index >= point else top - 1, fits)
            times.append(at)
            shares.append(levels[fit - 1] if fit else 0)
            done = span * rates[fit - 1] if fit else 0.0
            if done >= left - 1e-9 and fit:
                took = math.ceil(left / rates[fit - 1])
                return _Plan(times, shares, at + math.ceil(took / self.slot_s) * self.slot_s, at + took)
            left -= done
        last = steps[-1]
        return _Plan(times, shares, last[1], last[0] + last[2])

    def _late(
        self, now: float, from_s: float, free: _Free, levels: list[int], rates: list[float], left: float,
        times: list[float], shares: list[int],
    ) -> _Plan:  # fmt: skip
        """After the deadline, the largest level that is free."""
        free.cut(from_s)
        for at, end, amount in zip(free.times, [*free.times[1:], math.inf], free.free, strict=True):
            if at < from_s:
                continue
            fit = bisect_right(levels, amount)
            times.append(at)
            shares.append(levels[fit - 1] if fit else 0)
            if fit and (end - at) * rates[fit - 1] >= left:
                real_end_s = math.ceil(at + left / rates[fit - 1])
                return _Plan(times, shares, self._edge(now, real_end_s), real_end_s)
            left -= (end - at) * rates[fit - 1] if fit else 0.0
        return _Plan(times, shares, times[-1] + self.slot_s, math.inf)

    def _edge(self, now: float, at: float) -> float:
        return now + math.ceil((at - now) / self.slot_s) * self.slot_s

    def _spread(self, now: float, free: _Free, plans: dict[str, _Plan], jobs: Sequence[Running]) -> _Free:
        """Raise shares while anything fits: who has none first, then whose device time would grow the most."""
        offers: dict[str, tuple[float, _Plan, int]] = {}
        for job in jobs:
            self._offer(now, free, plans, job, offers)
        by_name = {job.name: job for job in jobs}
        while free.free[0] > 0:
            able = [
                (gain, name)
                for name, (gain, _, level) in offers.items()
                if level - plans[name].shares[0] <= free.free[0]
            ]
            if not able:
                break
            _, name = max(able)
            self._offer(now, free, plans, by_name[name], offers)
            if name not in offers:
                continue
            free.change(plans[name], 1)
            plans[name] = offers[name][1]
            free.change(plans[name], -1)
            free = free.merged()
            self._offer(now, free, plans, by_name[name], offers)
        return free

    def _offer(
        self, now: float, free: _Free, plans: dict[str, _Plan], job: Running,
        offers: dict[str, tuple[float, _Plan, int]],
    ) -> None:  # fmt: skip
        """What the next level of a job would mean."""
        offers.pop(job.name, None)
        plan = plans[job.name]
        levels, _ = self._curve(job)
        above = bisect_right(levels, plan.shares[0])
        if above == len(levels) or levels[above] - plan.shares[0] > free.free[0]:
            return
        level = levels[above]
        without = free.copy()
        without.change(plan, 1)
        raised, _ = self._fill(now, 0, job, without.merged(), level)
        growth = (raised.device_s() - plan.device_s()) / (level - plan.shares[0])
        offers[job.name] = (math.inf if not plan.shares[0] else growth, raised, level)
