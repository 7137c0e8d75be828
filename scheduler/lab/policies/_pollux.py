"""A policy that shares without knowing deadlines, after Pollux: the idea, not the code."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from scheduler.simulate._engine import PolicyDecision, RunningJob


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
