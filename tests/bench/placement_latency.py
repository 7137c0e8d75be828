"""Latency of placing one submitted job over 1,000 regions with 10,000 active jobs.

    .venv/bin/python tests/bench/placement_latency.py [--quick] [--json PATH] [--data PATH]

The index is filled with jobs as they come; then, again and again, a job ends and another one asks. The time is that of
the offer and of taking it, from the job's description to the placement in words, in one thread: its time on the
processor, which does not depend on what else the machine does, and wall time, which does.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import replace

from placement_draws import DATA, drawn_jobs, market, multiplied_federation
from report import Bar, Report, options

from scheduler.lab.placement import Index, PlacementJob

REGIONS, ACTIVE, UNITS = 1000, 10_000, 100
RUNS, QUICK_RUNS, OFFERS = 5, 1, 1000


def main() -> int:
    given = options(__doc__, data=DATA)
    report = Report("placement_latency", given.quick)
    drawn = market(given.data)
    draw = random.Random(4711)
    federation = multiplied_federation(drawn, REGIONS, UNITS, draw)
    names = [region.name for region in federation.regions]
    index = Index(federation)
    active: list[str] = []
    begun, refused = time.perf_counter(), 0
    while len(active) < ACTIVE:
        job = replace(drawn_jobs(names, 1, draw)[0], name=f"early-{len(active) + refused}")
        refused += _come(index, job, active)[1]
    filled = time.perf_counter() - begun
    print(f"{drawn.source}; {REGIONS} regions, {len(index)} active jobs, {refused} refused while it filled", end="")
    print(f" ({filled:.0f} s)")
    print(
        f"{'run':>4}{'offers':>8}{'refused':>9}{'median ms':>11}{'p99 ms':>9}{'worst ms':>10}{'p99 ms by the wall':>20}"
    )
    for number in range(QUICK_RUNS if given.quick else RUNS):
        jobs = [replace(job, name=f"run-{number}-{job.name}") for job in drawn_jobs(names, OFFERS, draw)]
        report.runs.append(_run(index, jobs, active, draw) | {"active": len(index)})
        run = report.runs[-1]
        print(
            f"{number:>4}{OFFERS:>8}{run['refused']:>9}{run['median_ms']:>11.2f}{run['p99_ms']:>9.2f}"
            f"{run['worst_ms']:>10.2f}{run['p99_wall_ms']:>20.2f}"
        )
    report.details |= {"regions": REGIONS, "source": drawn.source, "filled_seconds": filled}
    text = f"p99 of an offer, {REGIONS} regions, {ACTIVE} active jobs, worst run"
    worst, by_wall = (max(run[key] for run in report.runs) for key in ("p99_ms", "p99_wall_ms"))
    report.bars = [Bar.at_most(text, worst, "ms", 10.0), Bar.at_most(f"{text}, by the wall", by_wall, "ms", 10.0)]
    return report.close(given.json)


def _run(index: Index, jobs: list[PlacementJob], active: list[str], draw: random.Random) -> dict[str, float]:
    took, walls, refused = [], [], 0
    for job in jobs:
        if len(active) >= ACTIVE:
            index.release(active.pop(draw.randrange(len(active))))
        begun = time.perf_counter()
        milliseconds, missed = _come(index, job, active)
        walls.append((time.perf_counter() - begun) * 1e3)
        took.append(milliseconds)
        refused += missed
    took.sort()
    walls.sort()
    return {
        "offers": len(jobs),
        "refused": refused,
        "median_ms": statistics.median(took),
        "p99_ms": took[int(0.99 * len(took))],
        "worst_ms": took[-1],
        "p99_wall_ms": walls[int(0.99 * len(walls))],
    }


def _come(index: Index, job: PlacementJob, active: list[str]) -> tuple[float, int]:
    """Milliseconds on the processor, and whether there was no place."""
    begun = time.thread_time()
    placement = index.offer(job)
    if placement is not None:
        index.hold(placement)
    took = (time.thread_time() - begun) * 1e3
    if placement is not None:
        active.append(job.name)
    return took, int(placement is None)


if __name__ == "__main__":
    sys.exit(main())
