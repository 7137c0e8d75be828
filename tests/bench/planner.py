"""How good plans are, against trying everything, and how long one takes.

    .venv/bin/python tests/bench/planner.py [--quick] [--json PATH]

Regret: random federations of two to five regions (workers, memory, collective, interval, codec, topology and exchange;
both objectives, some decisions fixed, with and without deadline and budget). Each is planned twice: as shipped, where
the assignments of such small federations are all evaluated, and by the search that large ones get. Plan time: CPU
seconds of whole plans, `explain`'s alternatives included; also where the plan chooses the batch.

With `--quick` it takes two minutes.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Bar, Report, options
from support.planner_draws import drawn_demand, drawn_federation, regret

from control_plane.serving._garbage import short_collections
from scheduler import BatchPlanner, Demand, Planner, Snapshot, plan, tried_batches
from scheduler.search import _assignments

FEDERATIONS, QUICK_FEDERATIONS = 500, 48
PLANS = {3: (100, 0.2), 20: (20, 0.5), 1000: (10, 3.0)}
"""By number of regions: plans whose time is measured, and the bar of the slowest hundredth, in seconds."""
QUICK_PLANS = {3: 20, 20: 4, 1000: 2}


def regrets(count: int, report: Report) -> None:
    """Plan random federations as shipped, and by search alone."""
    shipped = _assignments.MOST_ENUMERATED
    for name, enumerated in (("as shipped", shipped), ("by search alone", 0)):
        found: list[float | None] = []
        for seed in range(count):
            rng = random.Random(seed)
            snapshot = drawn_federation(rng, regions=2 + seed % 4)
            demand = drawn_demand(rng, snapshot)
            _assignments.MOST_ENUMERATED = enumerated
            found.append(regret(snapshot, demand))
            _assignments.MOST_ENUMERATED = shipped
            report.runs.append({"part": "regret", "how": name, "seed": seed, "regret": found[-1]})
        told = [one for one in found if one is not None and math.isfinite(one)]
        refused = sum(one == math.inf for one in found)
        print(f"{name}: {len(told)} plans, {sum(one is None for one in found)} rightly refused")
        report.bars.append(Bar.at_most(f"median regret, {name}", 100 * statistics.median(told), "%", 0.5))
        report.bars.append(Bar.at_most(f"worst regret, {name}", 100 * max(told), "%", 3.0))
        report.bars.append(Bar.at_most(f"false refusals, {name}", float(refused), "plans", 0.0))


def plan_times(report: Report) -> None:
    """Measure the CPU seconds of plans, with up to 16 workers in each region."""
    for regions, (count, most) in PLANS.items():
        took = []
        for seed in range(QUICK_PLANS[regions] if report.quick else count):
            rng = random.Random(seed)
            snapshot = drawn_federation(rng, regions, most=16)
            demand = Demand("job", "data", batch=32, epochs=10.0, steps=None, seed=1, divides_batch=True)
            wanted = replace(demand, minimise=rng.choice(["cost", "time"]))
            took.append(_cpu_seconds(partial(plan, snapshot, wanted)))
            report.runs.append({"part": "time", "regions": regions, "seed": seed, "seconds": took[-1]})
        slowest = sorted(took)[max(0, math.ceil(0.99 * len(took)) - 1)]
        print(f"{regions} regions: median {statistics.median(took):.3f} s, slowest {max(took):.3f} s")
        report.bars.append(Bar.at_most(f"plan of {regions} regions, p99", slowest, "s", most))


def auto_batch_times(report: Report) -> None:
    """Measure the same where the plan chooses the batch, too, of tasks that a probe has timed at four batches."""
    for regions, (count, most) in PLANS.items():
        took = []
        for seed in range(QUICK_PLANS[regions] if report.quick else count):
            rng = random.Random(seed)
            snapshot = drawn_federation(rng, regions, most=16)
            minimise = rng.choice(["cost", "time"])
            demand = Demand("job", "data", batch=32, epochs=10.0, steps=None, seed=1, minimise=minimise)
            tried = tried_batches(snapshot, demand, frozenset((16, 32, 64, 128)))
            took.append(_cpu_seconds(partial(_plan_and_batch, snapshot, tried, demand)))
            report.runs.append({"part": "time, auto batch", "regions": regions, "seed": seed, "seconds": took[-1]})
        slowest = sorted(took)[max(0, math.ceil(0.99 * len(took)) - 1)]
        print(f"{regions} regions, batch auto: median {statistics.median(took):.3f} s, slowest {max(took):.3f} s")
        report.bars.append(Bar.at_most(f"plan of {regions} regions with batch auto, p99", slowest, "s", most))


def _cpu_seconds(planned: Callable[[], object]) -> float:
    """Return the CPU seconds of a plan. Garbage is collected as in the control plane: what is there before is not
    looked at."""
    with short_collections():
        begun = time.thread_time()
        planned()
        return time.thread_time() - begun


def _plan_and_batch(snapshot: Snapshot, tried: Sequence[int], demand: Demand) -> None:
    first = Planner(snapshot)
    BatchPlanner(partial(_at_batch, snapshot, first), tried).plan(demand)


def _at_batch(snapshot: Snapshot, like: Planner, batch: int) -> Planner:
    """Return a planner for a batch, where a step of `batch` samples takes as long as 20 samples and a fixed time."""
    speeds = {name: speed * batch / (batch + 20) for name, speed in snapshot.speeds.items()}
    return Planner(replace(snapshot, speeds=speeds), like=like)


def main() -> int:
    """Run all parts."""
    chosen = options(__doc__)
    report = Report("planner", chosen.quick)
    plan(drawn_federation(random.Random(0), 3), Demand("job", "data", batch=32, epochs=1.0, steps=None, seed=1))
    regrets(QUICK_FEDERATIONS if chosen.quick else FEDERATIONS, report)
    plan_times(report)
    auto_batch_times(report)
    return report.close(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
