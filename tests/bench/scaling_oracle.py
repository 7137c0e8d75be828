"""What could have been had: schedules of workers by loss, found on the curves of runs with a fixed number.

The loss is cut into stretches. How many steps each stretch takes with each number of workers is read off the recorded
runs, which supposes that the way on depends on the loss alone. Dynamic programming over stretches and workers finds the
schedule of least dollars + weight x seconds, changes included, for many weights; the best of them are then played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scaling_learning import JOIN_SECONDS, PoolTime, Run

__all__ = ["Schedule", "schedules"]

STRETCHES = 12
WEIGHTS = (0.0, *np.geomspace(1e-6, 1e-2, 40).tolist())


@dataclass(frozen=True)
class Schedule:
    """Workers from the first loss that is no higher than a level on."""

    levels: tuple[float, ...]
    """From high to low; the first one always holds."""
    workers: tuple[int, ...]
    seconds: float
    """As the recorded curves have it."""
    usd: float

    def at(self, loss: float) -> int:
        reached = sum(loss <= level for level in self.levels[1:])
        return self.workers[reached]


def schedules(
    runs: Mapping[int, Run], times: PoolTime, target: float, most_seconds: float, count: int
) -> list[Schedule]:
    """The cheapest that are predicted to keep the time; ``runs``: by their number of workers, all to the target."""
    pool = runs[max(runs)]
    begun, low = pool.quality[0], np.minimum.accumulate(pool.quality)
    # As many steps of the pool in each stretch.
    at = np.linspace(0, len(low) - 1, STRETCHES + 1).astype(int)
    levels = [begun, *(float(low[place]) for place in at[1:-1]), target]
    reach = {count: [_step_at(run, level) for level in levels] for count, run in runs.items()}
    found: dict[tuple[int, ...], Schedule] = {}
    for weight in WEIGHTS:
        one = _best(levels, reach, times, weight)
        if one.seconds <= most_seconds:
            found.setdefault(one.workers, one)
    return sorted(found.values(), key=lambda one: one.usd)[:count]


def _step_at(run: Run, level: float) -> float:
    """The first step at which the loss is no higher, between looks by a straight line."""
    before_step, before = 0.0, run.quality[0]
    low = before
    for step, quality in zip(run.steps, run.quality, strict=True):
        low = min(low, quality)
        if low <= level:
            share = 1.0 if before == low else (before - level) / (before - low)
            return before_step + max(0.0, min(1.0, share)) * (step - before_step)
        before_step, before = float(step), low
    return float(run.steps[-1])


def _best(levels: Sequence[float], reach: Mapping[int, Sequence[float]], times: PoolTime, weight: float) -> Schedule:
    terms, counts = times.terms(), sorted(reach)
    value: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
    for stretch in range(len(levels) - 1):
        after: dict[int, tuple[float, float, float, tuple[int, ...]]] = {}
        for count in counts:
            taken = (reach[count][stretch + 1] - reach[count][stretch]) * times.step(count)
            options = []
            for before, (_, seconds, usd, way) in (value or {count: (0.0, 0.0, 0.0, ())}).items():
                pause = 0.0
                if way and before != count:
                    pause = JOIN_SECONDS if count > before else times.merges[before - 1]
                total = seconds + taken + pause
                paid = usd + taken * terms.rate(count) + pause * terms.rate(max(before, count))
                options.append((paid + weight * total, total, paid, (*way, count)))
            after[count] = min(options)
        value = after
    _, seconds, usd, way = min(value.values())
    return Schedule(tuple(levels[:-1]), way, seconds, usd)
