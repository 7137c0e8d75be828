"""Policies that share without knowing deadlines: after Gandiva, Themis and Pollux. Each is the idea, not the code."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scheduler.simulate._engine import PolicyDecision, RunningJob


class TimeSlices:
    """After Gandiva (OSDI'18): the shares that users asked for, in turns, so that all jobs progress.

    The job that has run least is next; packing several jobs onto one device and growing onto idle ones are omitted.
    """

    at_edges = False

    def __init__(self, slot_s: float = 60.0, turn_s: float = 600.0) -> None:
        self.name, self.slot_s, self.turn_s = "gandiva-like", slot_s, turn_s
        self.turn_ends_s: dict[str, float] = {}

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Give jobs what they asked for, those in their turn first, then those that have run least."""

        def place(job: RunningJob) -> tuple[bool, float, float]:
            in_turn = bool(job.share) and self.turn_ends_s.get(job.name, 0.0) > now
            return (not in_turn, job.run_s, job.spec.submit_s)

        return _granted(now, devices, sorted(active, key=place), self.turn_ends_s, self.turn_s)


class FinishTimeFairness:
    """After Themis (NSDI'20): leases for the jobs whose finish time suffers most from sharing.

    A job's ρ is the time from submission to its end, were it to continue as it asked for now, over the time that it
    would take on an equal part of the cluster; the largest ρ is served first. The auction is omitted.
    """

    at_edges = False

    def __init__(self, slot_s: float = 60.0, lease_s: float = 600.0) -> None:
        self.name, self.slot_s, self.lease_s = "themis-like", slot_s, lease_s
        self.lease_ends_s: dict[str, float] = {}

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Give jobs what they asked for, those with a lease first, then those with the largest ρ."""
        part = devices / max(1, len(active))

        def rho(job: RunningJob) -> float:
            want = min(job.spec.devices, devices)
            rate = job.believed.rate(want) or job.believed.rates[0]
            alone_s = job.spec.work / rate / min(1.0, part / want)
            return (now - job.spec.submit_s + job.left / rate) / alone_s

        def place(job: RunningJob) -> tuple[bool, float]:
            return (not (job.share and self.lease_ends_s.get(job.name, 0.0) > now), -rho(job))

        return _granted(now, devices, sorted(active, key=place), self.lease_ends_s, self.lease_s)


class Speedups:
    """After Pollux (OSDI'21): elastic shares that maximise the mean of the speed-ups, by its power mean with p = -1.

    Rounds of a minute, as published. A greedy search replaces its genetic one, and a share changes only where that pays
    over two minutes; the batch stays the same, since the traces contain no statistical efficiency.
    """

    at_edges = False

    def __init__(self, slot_s: float = 60.0) -> None:
        self.name, self.slot_s = "pollux-like", slot_s

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Add devices greedily where the power mean of the speed-ups gains most for each device."""
        shares = {job.name: 0 for job in active}
        free = devices
        heap: list[tuple[float, float, str, int, RunningJob]] = []

        def offer(job: RunningJob) -> None:
            curve, share = job.believed, shares[job.name]
            one = curve.rates[0]
            for level, rate in zip(curve.levels, curve.rates, strict=True):
                if level > share:
                    before = one / curve.rate(share) if share else 100.0
                    gain = (before - one / rate) / (level - share)
                    if level == job.share:
                        gain *= 1.25
                    heapq.heappush(heap, (-gain, job.spec.submit_s, job.name, level, job))
                    return

        for job in active:
            offer(job)
        while heap and free:
            _, _, name, level, job = heapq.heappop(heap)
            if level - shares[name] <= free:
                free -= level - shares[name]
                shares[name] = level
                offer(job)
        return PolicyDecision(shares)


def _granted(
    now: float, devices: int, order: Sequence[RunningJob], ends_s: dict[str, float], lasts_s: float
) -> PolicyDecision:
    """Grant each job what it asked for, as long as it fits; a job that begins, or whose time is over, has it for a new
    term."""
    shares, free = {}, devices
    for job in order:
        want = min(job.spec.devices, devices)
        if want <= free:
            shares[job.name] = want
            free -= want
            if not job.share or ends_s.get(job.name, 0.0) <= now:
                ends_s[job.name] = now + lasts_s
    waits = len(shares) < len(order)
    wake_s = min((ends_s[name] for name in shares), default=now) if waits else float("inf")
    return PolicyDecision(shares, wake_s=wake_s)
