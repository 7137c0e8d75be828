"""Jobs with deadlines on preemptible capacity."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.deadline import Overhead, latest_exit, preemptible_share
from scheduler.simulate._trace import TraceJob

_SHORTEST_S = 30.0
"""A stay on preemptible capacity that would last less is not begun."""
_SHORTEST_LOW, _SHORTEST_LOW_S = 0.02, 5.0
"""Share of the window, and seconds, for which a job has the smaller of two levels at least."""


@dataclass(frozen=True)
class SpotSettings:
    """The market, and the cost of a preemption."""

    preempted_per_hour: float
    """Preemptions of a job, however large its share; Poisson."""
    price_ratio: float
    """Price of preemptible capacity over that of capacity on demand."""
    wait_s: float = 120.0
    """Seconds until preempted capacity is available again."""
    lost_s: float = 120.0
    """Run time lost with a preemption, at most: what was done since the last checkpoint."""
    overhead: Overhead = field(default_factory=Overhead)
    margin: float = 0.03
    seed: int = 1


@dataclass(frozen=True)
class SpotRun:
    """The results of all jobs that on-demand capacity alone would bring to their deadline."""

    jobs: int
    met: int
    preemptions: int
    cost: float
    """Cost in device seconds on demand."""
    cost_on_demand: float
    """The same jobs on demand alone, each at its leanest level that meets the deadline."""
    least_cost: float
    """A lower bound for who knows all preemptions beforehand: each job on preemptible capacity alone, never preempted,
    with the fewest device seconds that meet its deadline."""
    spot_device_s: float
    """Device seconds on preemptible capacity."""


def simulate_spot(jobs: Sequence[TraceJob], settings: SpotSettings) -> SpotRun:
    """Run every job by itself on preemptible capacity, which it leaves at the last safe moment.

    Capacity of both kinds suffices for all: this measures the decision to stay or leave, not a queue.
    """
    draw = random.Random(settings.seed)
    count = met = preemptions = 0
    cost = on_demand = spot = least = 0.0
    for spec in jobs:
        if not spec.deadlines:
            continue
        alone = latest_exit(spec.work, spec.deadline_s, spec.curve, spec.submit_s, settings.overhead, 0.0)
        if not alone.share:
            continue
        count += 1
        takes_s = spec.work / spec.curve.rate(alone.share) + settings.overhead.seconds(alone.share)
        on_demand += alone.share * takes_s
        least += settings.price_ratio * _least_device_s(spec)
        one = _Stay(spec, settings, draw)
        end_s = one.run()
        met += end_s <= spec.deadline_s + 1e-6
        preemptions += one.preemptions
        spot += one.spot_s
        cost += one.spot_s * settings.price_ratio + one.on_demand_s
    return SpotRun(count, met, preemptions, cost, on_demand, least, spot)


def _least_device_s(spec: TraceJob) -> float:
    """Return the device seconds that meet the deadline between two neighbouring levels of the curve's lower hull, the
    cost of changes included."""
    (levels, rates), window, changes = spec.curve.ladder, spec.deadline_s - spec.submit_s, Overhead()
    for at in range(1, len(levels)):
        need = spec.work + rates[at] * changes.seconds(levels[at]) + rates[at - 1] * changes.seconds(levels[at - 1])
        if need > rates[at] * window:
            continue
        low_s = min(window, (rates[at] * window - need) / (rates[at] - rates[at - 1]))
        # A stay that is too short is not begun.
        low_s = low_s if low_s >= max(_SHORTEST_LOW_S, _SHORTEST_LOW * window) else 0.0
        return levels[at - 1] * low_s + levels[at] * (window - low_s)
    # By the cost of changes some jobs are late, which keep their deadline exactly.
    return min(n * spec.work / spec.curve.rate(n) for n in spec.curve.levels)


class _Stay:
    """One job, from its submission to its end."""

    def __init__(self, spec: TraceJob, settings: SpotSettings, draw: random.Random) -> None:
        self.spec, self.settings, self.draw = spec, settings, draw
        self.preemptions = 0
        self.spot_s = self.on_demand_s = 0.0
        """Device seconds of each kind."""

    def run(self) -> float:
        """The instant at which the job ends."""
        now, left, share = self.spec.submit_s, self.spec.work, 0
        deadline_s, curve, overhead = self.spec.deadline_s, self.spec.curve, self.settings.overhead
        preempted_s = self._next_preemption(now)
        while True:
            way_out = latest_exit(left, deadline_s, curve, now, overhead, self.settings.margin, self.settings.lost_s)
            lean = preemptible_share(left, deadline_s, curve, now, self.settings.margin)
            begin_s = now if share else now + overhead.seconds(lean)
            if way_out.leave_s - begin_s < _SHORTEST_S:
                return self._on_demand(now, left, way_out.share)
            share = share or lean
            rate = curve.rate(share)
            end_s = begin_s + left / rate
            until_s = min(way_out.leave_s, end_s, preempted_s)
            self.spot_s += share * (until_s - now)
            if until_s == end_s:
                return end_s
            left -= max(0.0, until_s - begin_s) * rate
            now = until_s
            if now >= preempted_s:
                self.preemptions += 1
                left = min(self.spec.work, left + self.draw.uniform(0, self.settings.lost_s) * rate)
                again = latest_exit(left, deadline_s, curve, now, overhead, self.settings.margin)
                if again.leave_s < now + self.settings.wait_s + _SHORTEST_S:
                    return self._on_demand(now, left, again.share)
                share, now = 0, now + self.settings.wait_s
                preempted_s = self._next_preemption(now)

    def _next_preemption(self, now: float) -> float:
        return now + self.draw.expovariate(self.settings.preempted_per_hour / 3600)

    def _on_demand(self, now: float, left: float, share: int) -> float:
        """Continue on demand to the end; where no level meets the deadline any more, at the fastest."""
        share = share or self.spec.curve.levels[-1]
        took_s = self.settings.overhead.seconds(share) + left / self.spec.curve.rate(share)
        self.on_demand_s += share * took_s
        return now + took_s
