"""Deadlines met on published traces: by the control plane's core, by ElasticFlow as published, and by others.

    nice .venv/bin/python tests/bench/deadlines.py [--quick] [--json PATH] [--traces PATH] [--prices PATH]

Every policy gets the same jobs, speeds, buddy placement and pauses: what ElasticFlow's simulator charges for a change,
and any change pauses everybody. "Own pauses" is ours where a change pauses whom it changes, as our runtime does; bars
are of these. A declined job counts as not met; a promise that was broken is counted besides. Beside each figure stands
what no scheduler could exceed: a linear programme that knows the future and lets shares flow (HiGHS). First our ports
of three rivals are held against the figures of the published simulator, ElasticFlow's with its clock and pauses.
`--quick` takes the traces of 195 jobs alone.

Settings were tuned on the two traces of 195 jobs; the other traces were only measured.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import csv
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from deadlines_published import simulate_published
from deadlines_spot import SpotSettings, simulate_spot
from report import Bar, Report, options

from scheduler.deadline import Overhead, curve_from_table
from scheduler.lab.policies import POLICIES, ElasticFlow, ceiling, policy_named
from scheduler.simulate import Incidents, Pauses, SimulationRun, Tables, TraceJob, read_table, read_trace, simulate

Result = TypeVar("Result")

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
T4, MS, PHILLY = "elasticVpollux_e", "195job", "philly_103959"
SLOTS = {T4: 60.0, MS: 240.0}
"""With which they were published; others: 60 s."""
PUBLISHED = [
    # trace, nodes, devices of each, then deadlines met: ElasticFlow, EDF, Tiresias
    (T4, 16, 4, 142, 23, 56),
    (MS, 16, 8, 146, 17, 90),
    (MS, 8, 8, 137, 2, 65),
    (MS, 4, 8, 118, 2, 48),
    (PHILLY, 32, 8, 797, 382, 408),
    (PHILLY, 8, 8, 797, 9, 396),
]
MOST = {(T4, "bert"): 16}
"""Devices of which ElasticFlow's simulator gives a model no more, though speeds were measured on more."""
QUICK = [(T4, 16, 4), (MS, 16, 8), (MS, 8, 8), (MS, 4, 8)]
ALL = [
    *QUICK,
    *((PHILLY, nodes, 8) for nodes in (32, 16, 8)),
    *(("cluster01", nodes, 8) for nodes in (64, 32, 16)),
    ("cluster03", 64, 8),
    ("cluster02", 64, 8),
]
LARGE_JOBS = 1000
BY_PRICE = "geofed-by-price"
QUICK_ENOUGH = ("geofed", "edf", "tiresias")
SOME = ("geofed", "elasticflow", "elasticflow-singly", "edf", "tiresias")
"""Policies for larger traces; on the largest ElasticFlow's decisions would take too long."""
OWN_PAUSES = ", own pauses"
SHARES = {1: 95.0, 2: 94.0, 4: 82.0}
"""Per cent of the ceiling, by the part of a trace's largest cluster."""
NEAR_POINTS = 3.0
SPOT_SEEDS = 20
"""Draws of preemptions."""


def main() -> int:
    given = options(__doc__, traces=DATA / "traces", prices=DATA / "prices" / "instance_prices.csv")
    report = Report("deadlines", given.quick)
    traces = _Traces(given.traces)
    if not traces.there():
        print(f"{given.traces} is not there; --traces names the folder with the published traces")
        return 2
    _calibrate(report, traces)
    ratios = _deadlines(report, traces)
    _errors(report, traces)
    _spot(report, traces, given.prices)
    report.details["traces"] = traces.hashes
    report.details["ratios"] = ratios
    return report.close(given.json)


class _Traces:
    """Jobs by trace, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hashes: dict[str, str] = {}
        self._tables: dict[str, Tables] = {}
        self._jobs: dict[str, list[TraceJob]] = {}

    def there(self) -> bool:
        return (self.folder / "elasticflow").is_dir()

    def jobs(self, trace: str) -> list[TraceJob]:
        if trace not in self._jobs:
            kind = "T4" if trace == T4 else "A100"
            path = self.folder / "elasticflow" / f"{trace}.csv"
            self._jobs[trace] = self._read(path, self._speeds(kind))
        return self._jobs[trace]

    def _read(self, path: Path, tables: Tables) -> list[TraceJob]:
        self.hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        with path.open(newline="") as lines:
            return read_trace(lines, tables, path.name)

    def _speeds(self, kind: str) -> Tables:
        if kind not in self._tables:
            found: dict[tuple[str, int], dict[int, float]] = {}
            for path in sorted((self.folder / f"throughputs_{kind}").glob("*.csv")):
                with path.open() as lines:
                    found |= read_table(lines, path.stem, path.name)
            self._tables[kind] = found
        return self._tables[kind]


def _in_parallel(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """The results in their order, from a process for each core: a simulation uses one, and shares nothing."""
    with ProcessPoolExecutor() as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _run(
    trace: str, jobs: Sequence[TraceJob], policy: str, nodes: int, per_node: int, everyone: bool
) -> tuple[SimulationRun, float]:
    """The run and the CPU seconds that it took."""
    chosen, pauses = policy_named(policy, nodes * per_node, SLOTS.get(trace, 60.0), everyone=everyone)
    begun = time.process_time()
    run = simulate(jobs, chosen, nodes, per_node, pauses)
    return run, time.process_time() - begun


def _note(report: Report, part: str, trace: str, run: SimulationRun, **more: object) -> None:
    report.runs.append(
        {"part": part, "trace": trace, "devices": run.devices, "policy": run.policy, "jobs": len(run.outcomes)}
        | {"met": run.met, "ratio": run.ratio, "promised": run.promised, "broken": run.broken}
        | {"changes": run.changes, "moved": run.moved, "failures": run.failures}
        | more
    )


def _calibrate(report: Report, traces: _Traces) -> None:
    """Our ports, under the published simulator's rules for pauses, against what it prints."""
    print("calibration: deadlines met by our ports, and by the published simulator")
    print(f"{'trace':<18}{'devices':>8}{'ElasticFlow':>18}{'EDF':>14}{'Tiresias':>14}")
    for trace, nodes, per_node, *published in PUBLISHED:
        if report.quick and trace == PHILLY:
            continue
        jobs, devices, slot = traces.jobs(trace), nodes * per_node, SLOTS.get(trace, 60.0)
        base = 7.0 if devices >= 256 else 2.0
        ways = {
            "elasticflow": partial(simulate_published, _at_most(trace, jobs), ElasticFlow(slot), nodes, per_node),
            "edf": partial(_paused, "edf", jobs, slot, nodes, per_node, Overhead(0.0, 0.0)),
            "tiresias": partial(_paused, "tiresias", jobs, slot, nodes, per_node, Overhead(base)),
        }
        cells = []
        for name, run, printed in zip(ways, _in_parallel(ways.values()), published, strict=True):
            _note(report, "calibration", trace, run, published=printed)
            off = 100 * abs(run.met - printed) / len(jobs)
            near = 0.0 if name == "elasticflow" else NEAR_POINTS
            report.bars.append(
                Bar.at_most(f"calibration of {name} on {trace} at {devices}: off by", off, "points", near)
            )
            cells.append(f"{run.met} / {printed}")
        print(f"{trace:<18}{devices:>8}{cells[0]:>18}{cells[1]:>14}{cells[2]:>14}")


def _paused(
    name: str, jobs: Sequence[TraceJob], slot: float, nodes: int, per_node: int, overhead: Overhead
) -> SimulationRun:
    return simulate(jobs, policy_named(name, nodes * per_node, slot)[0], nodes, per_node, Pauses(overhead))


def _at_most(trace: str, jobs: Sequence[TraceJob]) -> list[TraceJob]:
    """The jobs with no more devices than the published simulator lets their model have."""
    found = []
    for job in jobs:
        most = MOST.get((trace, job.model), job.curve.levels[-1])
        curve = curve_from_table({devices: rate for devices, rate in job.table.items() if devices <= most})
        found.append(replace(job, curve=curve or job.curve))
    return found


def _deadlines(report: Report, traces: _Traces) -> dict[str, float]:
    """All policies over the traces, at their published size and below."""
    ratios: dict[str, float] = {}
    broken = 0
    largest: dict[str, int] = {}
    for trace, nodes, per_node in QUICK if report.quick else ALL:
        jobs, devices = traces.jobs(trace), nodes * per_node
        most = ceiling(jobs, devices)
        names = _names(jobs, devices == largest.setdefault(trace, devices))
        print(f"\n{trace}, {len(jobs)} jobs, {devices} devices; ceiling {most.met:.1f}", end="")
        print(" (all that fit alone)" if not most.columns else f" (of {most.alone} that fit alone)")
        print(f"  {'policy':<29}{'met':>6}{'ratio %':>9}{'of ceiling %':>14}{'promised':>10}{'broken':>8}{'CPU s':>8}")
        ways = [*((name, True) for name in names), ("geofed", False), (BY_PRICE, False)]
        runs = _in_parallel(partial(_run, trace, jobs, name, nodes, per_node, everyone) for name, everyone in ways)
        for (name, everyone), (run, cpu_s) in zip(ways, runs, strict=True):
            more = {"cpu_s": cpu_s, "ceiling": most.met, "pauses_everyone": everyone}
            _note(report, "deadlines", trace, run, **more)
            shown = name if everyone else name + OWN_PAUSES
            print(
                f"  {shown:<29}{run.met:>6}{100 * run.ratio:>9.1f}{100 * run.met / most.met:>14.1f}"
                f"{run.promised:>10}{run.broken:>8}{cpu_s:>8.1f}"
            )
            if everyone:
                ratios[f"{trace}@{devices} {name}"] = run.ratio
            if name in ("geofed", BY_PRICE):
                broken += run.broken
            if name in ("geofed", BY_PRICE) and not everyone:
                _deadline_bars(report, trace, devices, run, most.met, largest[trace] // devices)
    report.bars.append(Bar.at_most("admitted and missed with exact curves, all runs", broken, "jobs", 0))
    return ratios


def _names(jobs: Sequence[TraceJob], at_full_size: bool) -> Sequence[str]:
    if len(jobs) < 200:
        return tuple(name for name in POLICIES if name != BY_PRICE)
    if len(jobs) < LARGE_JOBS:
        return SOME
    return (*QUICK_ENOUGH, "elasticflow") if at_full_size and len(jobs) < 2 * LARGE_JOBS else QUICK_ENOUGH


def _deadline_bars(report: Report, trace: str, devices: int, run: SimulationRun, most: float, part: int) -> None:
    """Add the bars of a run in which a change pauses whom it changes, as in the runtime."""
    least = {(T4, 64): 86.0, (MS, 128): 90.0, (MS, 64): 84.0}.get((trace, devices))
    if least is not None:
        name = f"deadlines met on {trace} at {devices} by {run.policy}"
        report.bars.append(Bar.at_least(name, 100 * run.ratio, "%", least))
    if trace != T4:
        name = f"share of the ceiling ({most:.1f}) on {trace} at {devices} by {run.policy}"
        report.bars.append(Bar.at_least(name, 100 * run.met / most, "%", SHARES[part]))


def _errors(report: Report, traces: _Traces) -> None:
    """Curves that are off by up to a tenth on every level, and a node failure every 1,000 device hours."""
    promised = broken = failures = 0
    cases = [(*case, seed) for case in QUICK[:3] for seed in (1, 2, 3)]
    runs = _in_parallel(
        partial(_with_errors, traces.jobs(trace), nodes, per_node, seed) for trace, nodes, per_node, seed in cases
    )
    for (trace, *_, seed), run in zip(cases, runs, strict=True):
        _note(report, "errors", trace, run, seed=seed)
        promised, broken, failures = promised + run.promised, broken + run.broken, failures + run.failures
    print(f"\ncurves off by up to 10 %, {failures} node failures: {broken} of {promised} promises broken")
    report.bars.append(
        Bar.at_most("admitted and missed with 10 % curve error and failures", 100 * broken / promised, "%", 0.5)
    )


def _with_errors(jobs: Sequence[TraceJob], nodes: int, per_node: int, seed: int) -> SimulationRun:
    policy, pauses = policy_named("geofed", nodes * per_node, everyone=False, curve_error=0.1)
    return simulate(jobs, policy, nodes, per_node, pauses, Incidents(1e-3, seed=seed), 0.1, seed)


def _spot(report: Report, traces: _Traces, prices: Path) -> None:
    """Preemptible capacity at its median price; every draw of preemptions beside a bound for who knows them."""
    ratio = _price_ratio(prices)
    print(f"\npreemptible capacity at {ratio:.2f} of the price on demand, left at the last safe moment")
    print(f"{'trace':<18}{'an hour %':>10}{'preemptions':>12}{'met %':>8}{'cost %':>8}{'of the bound':>14}")
    chosen = (T4, MS) if report.quick else (T4, MS, PHILLY, "cluster01")
    cases = [(trace, often) for trace in chosen for often in (0.05, 0.1, 0.2)]
    overheads = {trace: Overhead(7.0 if trace in (PHILLY, "cluster01") else 2.0) for trace in chosen}
    runs = _in_parallel(
        partial(simulate_spot, traces.jobs(trace), SpotSettings(often, ratio, overhead=overheads[trace], seed=seed))
        for trace, often in cases
        for seed in range(1, SPOT_SEEDS + 1)
    )
    for number, (trace, often) in enumerate(cases):
        own = runs[number * SPOT_SEEDS : (number + 1) * SPOT_SEEDS]
        met = 100 * sum(run.met for run in own) / sum(run.jobs for run in own)
        cost = 100 * sum(run.cost for run in own) / sum(run.cost_on_demand for run in own)
        bound = sum(run.cost for run in own) / sum(run.least_cost for run in own)
        preempted = statistics.mean(run.preemptions for run in own)
        print(f"{trace:<18}{100 * often:>10.0f}{preempted:>12.1f}{met:>8.2f}{cost:>8.1f}{bound:>14.2f}")
        report.runs.append(
            {"part": "spot", "trace": trace, "per_hour": often, "met": met, "cost": cost, "of_bound": bound}
        )
        name = f"at {100 * often:.0f} % preemptions an hour on {trace}"
        report.bars.append(Bar.at_least(f"deadlines kept {name}", met, "%", 99.0))
        report.bars.append(Bar.at_most(f"cost over that on demand {name}", cost, "%", 55.0))
        report.bars.append(Bar.at_most(f"cost, of a bound without preemptions, {name}", bound, "", 1.15))


def _price_ratio(prices: Path) -> float:
    """Median of preemptible over on-demand price, of instance types that have both."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    with prices.open(newline="") as lines:
        for row in csv.DictReader(lines):
            key = (row["cloud"], row["region"], row["instance_type"])
            found.setdefault(key, {})[row["purchase"]] = float(row["usd_per_hour"])
    both = [
        price / entry["on_demand"]
        for entry in found.values()
        if entry.get("on_demand")
        for purchase, price in entry.items()
        if purchase != "on_demand"
    ]
    return statistics.median(both)


if __name__ == "__main__":
    sys.exit(main())
