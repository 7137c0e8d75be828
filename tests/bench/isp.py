"""ISP over K-REDUCE compared with synchronous training, ISP as published and PyTorch DDP: bytes, steps and time to a
loss.

    .venv/bin/python tests/bench/isp.py [--quick] [--json PATH] [--clicks FILE] [--ratings FILE] [--seeds N]

Two tasks, by the templates' own modules and real gradients: sparse logistic regression of Criteo lines (d = 100,014)
and matrix factorisation of ratings (rank 8, d = 87,300). Unless files are given the data are made up by the templates'
generators, with more categories and items: the popularity of categories is Zipf's with an exponent of 1.3, of items of
0.6. Every worker sees its own part of the samples, in batches of 512.

Bytes and steps: production roles, played over a modelled channel, their frames counted in both directions; 16 workers
do not fit two cores. Their seconds are MODELLED. Time is measured with 2 and 4 processes over a real Redis, each with
a link of its own, beside DDP over gloo on the same cores and links.

The loss to reach is one that every main method does reach. Learning rates and v: `isp_tuned.py`.

With `--quick` it takes 3 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import isp_processes
import torch
from isp_data import TASKS, Task, batches, prepare
from isp_learning import METHODS, Curve, Method, learn
from isp_processes import DDP, Link
from isp_tuned import tuned
from report import Bar, Report, options

OURS, LISTS = "ISP over K-REDUCE", "K-REDUCE of lists"
PUBLISHED, DENSE = "ISP as published", "dense synchronous"
WORKERS, PROCESSES = (4, 8, 16), (2, 4)
MAIN = METHODS[:6]
LINKS = (
    Link("unshaped, files", None, "file"),
    Link("unshaped, Redis", None),
    Link("1 Gbit/s, Redis", 1000.0),
    Link("100 Mbit/s, Redis", 100.0),
)
"""Virtual machines of MLLess's authors have 1 Gbit/s; a small function gets some 100 Mbit/s."""
STEPS, QUICK_STEPS, EVERY = {"clicks": 60, "ratings": 100}, {"clicks": 25, "ratings": 25}, 5
BY_ALL = 0.97
"""The loss to reach is not below where dense synchronous training has made so much of its way, of the same seed."""

_tasks: dict[str, Task] = {}


def main() -> int:
    given = options(__doc__, more=_more)
    report = Report("isp", given.quick)
    report.details["torch"] = torch.__version__
    torch.set_num_threads(1)
    seeds = given.seeds or (1 if given.quick else 3)
    with tempfile.TemporaryDirectory(prefix="geofed-bench-") as folder:
        for name in given.only:
            _tasks[name] = prepare(TASKS[name], Path(folder), getattr(given, name), given.quick)
    compute = {name: _gradient_seconds(task) for name, task in _tasks.items()}
    report.details["gradient_seconds"] = compute
    report.details["samples"] = {name: len(task.train) for name, task in _tasks.items()}
    steps = QUICK_STEPS if given.quick else STEPS
    jobs = [
        (name, method, workers, seed, steps[name], compute[name])
        for seed, name, workers in itertools.product(range(seeds), _tasks, WORKERS)
        # The mechanisms are taken apart on the first seed.
        for method in (METHODS if workers == max(WORKERS) and seed == 0 and not given.quick else MAIN)
        if not (given.quick and workers == 8) and not given.no_played
    ]
    with multiprocessing.get_context("fork").Pool(min(2, os.cpu_count() or 1)) as pool:
        played = []
        for curve in pool.imap_unordered(_play, jobs):
            played.append(curve)
            print(f"  {curve.task} {curve.workers} {curve.method}: {curve.final:.4f}", flush=True)
    for name, workers in itertools.product(_tasks, WORKERS):
        _table(name, workers, [one for one in played if (one.task, one.workers) == (name, workers)])
    report.runs += [{"source": "played", **asdict(one)} for one in played]
    if played:
        report.bars += _byte_bars(played)
    timed = [] if given.no_processes else _processes(given, seeds, steps, report)
    report.runs += [{"source": f"processes, {link}", **asdict(one)} for link, one in timed]
    # So short a run of a model so small says little of time: what counts is that nothing is out of all proportion.
    report.bars += _time_bars(timed, report.target(1.0, quick=6.0))
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clicks", type=Path, metavar="FILE", help="Criteo or LibSVM lines of yours")
    parser.add_argument("--ratings", type=Path, metavar="FILE", help="a MovieLens file of yours")
    parser.add_argument("--seeds", type=int, metavar="N", help="default: 3, with --quick 1")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks; default: all")
    parser.add_argument("--no-played", action="store_true", help="measure time only")
    parser.add_argument("--no-processes", action="store_true", help="measure no time")


def _play(job: tuple[str, Method, int, int, int, float]) -> Curve:
    name, method, workers, seed, steps, compute = job
    torch.set_num_threads(1)
    lr, significance = tuned(name, method.name, workers)
    return learn(_tasks[name], method, workers, seed, lr, significance, steps, EVERY, compute)


def _gradient_seconds(task: Task) -> float:
    """Of one worker on one core; the median."""
    model, stream, taken = task.model(), batches(task, 0, 16, 0), []
    optimizer = task.optimizer(model, 0.001)
    for _ in range(9):
        batch, begun = next(stream), time.perf_counter()
        optimizer.zero_grad()
        task.module.loss(model, batch).backward()
        optimizer.step()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


# What came out


def target(curves: Sequence[Curve], one: Curve) -> float:
    """The loss to reach: what every main method reaches, of the same task, seed and number of workers."""
    names = {DDP, *(method.name for method in MAIN)}
    beside = [
        curve for curve in curves
        if curve.method in names and (curve.task, curve.workers, curve.seed) == (one.task, one.workers, one.seed)
    ]  # fmt: skip
    dense = next(curve for curve in beside if curve.method in (DENSE, DDP))
    return max(dense.quality[0] - BY_ALL * (dense.quality[0] - dense.final), *(min(curve.quality) for curve in beside))


def moved(curve: Curve, index: int, zlibbed: bool = True) -> float:
    """Bytes written and read until then; as published with what zlib leaves of them."""
    whole = curve.written[index] + curve.read[index]
    return whole * (curve.zlib_ratio if zlibbed and curve.zlib_ratio is not None else 1.0)


def bytes_to(curves: Sequence[Curve], one: Curve, zlibbed: bool = True) -> float:
    """To the target; infinite where it is not reached."""
    index = one.reached(target(curves, one))
    return math.inf if index is None else moved(one, index, zlibbed)


def seconds_to(curves: Sequence[Curve], one: Curve) -> float:
    index = one.reached(target(curves, one))
    return math.inf if index is None else one.seconds[index]


def shown(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _of(curves: Sequence[Curve], task: str, workers: int, method: str) -> list[Curve]:
    found = [one for one in curves if (one.task, one.workers, one.method) == (task, workers, method)]
    return sorted(found, key=lambda one: one.seed)


def _table(name: str, workers: int, curves: Sequence[Curve]) -> None:
    if not curves:
        return
    print(f"\n{name}, P = {workers}; to {shown([target(curves, one) for one in _of(curves, name, workers, DENSE)], 4)}")
    print(
        f"{'':<30}{'lr':>8}{'v':>6}{'MB in/step':>12}{'MB out/step':>12}{'sent %':>8}{'any %':>7}{'steps':>16}"
        f"{'MB to loss':>22}{'final loss':>26}{'s MODELLED':>14}"
    )
    for method in METHODS:
        ones = _of(curves, name, workers, method.name)
        if not ones:
            continue
        steps = [math.inf if (index := one.reached(target(curves, one))) is None else one.steps[index] for one in ones]
        rows = [(method.name, False)]
        if ones[0].zlib_ratio is not None:
            rows = [(f"{method.name}, zlib", True), (f"{method.name}, 16 B", False)]
        for label, zlibbed in rows:
            ratio = statistics.median(one.zlib_ratio or 1.0 for one in ones) if zlibbed else 1.0
            each = [
                statistics.median(getattr(one, what)[-1] / one.steps[-1] for one in ones) * ratio / 1e6
                for what in ("written", "read")
            ]
            print(
                f"{label:<30}{ones[0].lr:>8.4g}{ones[0].significance:>6.3g}{each[0]:>12.3f}{each[1]:>12.3f}"
                f"{100 * ones[0].density:>8.1f}{100 * ones[0].union:>7.1f}{shown(steps, 0):>16}"
                f"{shown([bytes_to(curves, one, zlibbed) / 1e6 for one in ones]):>22}"
                f"{shown([one.final for one in ones], 4):>26}"
                f"{shown([seconds_to(curves, one) for one in ones], 2):>14}"
            )


def _ratios(
    curves: Sequence[Curve], task: str, workers: int, than: str, zlibbed: bool = True, ours: str = OURS
) -> list[float]:
    """Times fewer bytes of ours to the target, by seed."""
    return [
        bytes_to(curves, other, zlibbed) / bytes_to(curves, one)
        for one, other in zip(_of(curves, task, workers, ours), _of(curves, task, workers, than), strict=True)
    ]


def _byte_bars(curves: Sequence[Curve]) -> list[Bar]:
    bars, workers = [], max(WORKERS)
    print(f"\nattribution, P = {workers}: times fewer bytes to the loss than ISP as published (16 B an entry)")
    for name in _tasks:
        for method in METHODS:
            ones = _of(curves, name, workers, method.name)
            published = _of(curves, name, workers, PUBLISHED)[: len(ones)]
            ratios = [
                bytes_to(curves, base, False) / bytes_to(curves, one, False)
                for base, one in zip(published, ones, strict=True)
            ]
            if ratios:
                print(f"  {name:<9}{method.name:<30}{shown(ratios, 2):>22}")
    for name in _tasks:
        ours, dense = (_of(curves, name, workers, method) for method in (OURS, DENSE))
        text = f"{name}, P = {workers}: bytes to the loss"
        rows = ((f"{PUBLISHED}, zlib", PUBLISHED, True, 3.0), (f"{PUBLISHED}, 16 B an entry", PUBLISHED, False, 3.0),
                (DENSE, DENSE, True, 10.0))  # fmt: skip
        for label, than, zlibbed, least in rows:
            ratios = _ratios(curves, name, workers, than, zlibbed)
            print(f"{text} against {label}: {shown(ratios, 2)} times fewer")
            bars.append(Bar.at_least(f"{text} against {label}", statistics.median(ratios), "times fewer", least))
        ratios = _ratios(curves, name, workers, DENSE, ours=LISTS)
        print(f"{text} of {LISTS} against {DENSE}: {shown(ratios, 2)} times fewer")
        bars.append(Bar.at_least(f"{text} of {LISTS} against {DENSE}", statistics.median(ratios), "times fewer", 10.0))
        published = _of(curves, name, workers, PUBLISHED)
        for label, others in ((DENSE, dense), (PUBLISHED, published)):
            # Of seeds, of whichever of the two has more of it; with one seed, a hundredth of the way.
            apart = [max(one.final for one in ones) - min(one.final for one in ones) for ones in (ours, others)]
            allowed = max(*apart, 0.01 * (dense[0].quality[0] - dense[0].final))
            above = statistics.median(one.final for one in ours) - statistics.median(one.final for one in others)
            bars.append(Bar.at_most(f"{name}, P = {workers}: final loss above {label}", above, "", allowed))
        each = [
            statistics.median(moved(one, -1) / one.steps[-1] / count for one in _of(curves, name, count, OURS))
            for count in (min(WORKERS), max(WORKERS))
        ]
        bars.append(
            Bar.at_most(f"{name}: bytes of a worker and step, P = 16 against 4", each[-1] / each[0], "times", 4.0)
        )
    return bars


# Time


def _processes(given: argparse.Namespace, seeds: int, steps: dict[str, int], report: Report) -> list[tuple[str, Curve]]:
    reason = isp_processes.possible()
    if reason is not None:
        report.details["not_run"] = reason
        print(f"\nno time is measured: {reason}")
        return []
    timed: list[tuple[str, Curve]] = []
    print("\nprocesses, in turn with DDP; time to the loss that DDP shows")
    for name, workers, link in itertools.product(_tasks, PROCESSES, LINKS):
        if given.quick and (workers, link) != (2, LINKS[3]):
            continue
        rows: list[Method | None] = [None, *(MAIN if not given.quick else (MAIN[1], MAIN[2], MAIN[4], MAIN[5]))]
        for seed, method in itertools.product(range(seeds), rows):
            label = DDP if method is None else method.name
            lr, significance = tuned(name, DENSE if method is None else method.name, workers)
            curve = isp_processes.run(
                _tasks[name], label, method, workers, link, seed, lr, significance, steps[name], EVERY
            )
            timed.append((link.name, curve))
        curves = [one for at, one in timed if at == link.name]
        print(f"{name}, P = {workers}, {link.name}")
        for method in rows:
            ones = _of(curves, name, workers, DDP if method is None else method.name)
            print(
                f"  {ones[0].method:<28}{shown([1e3 * one.seconds[-1] / one.steps[-1] for one in ones]):>20} ms/step"
                f"{shown([seconds_to(curves, one) for one in ones], 2):>20} s to loss"
                f"{shown([bytes_to(curves, one, False) / 1e6 for one in ones]):>22} MB to loss (links)"
                f"{shown([one.final for one in ones], 4):>26}",
                flush=True,
            )
    return timed


def _time_bars(timed: Sequence[tuple[str, Curve]], most: float) -> list[Bar]:
    bars = []
    for name, workers, link in itertools.product(_tasks, PROCESSES, LINKS):
        curves = [one for at, one in timed if at == link.name]
        ours, theirs = (_of(curves, name, workers, method) for method in (OURS, DDP))
        if ours:
            ratios = [seconds_to(curves, a) / seconds_to(curves, b) for a, b in zip(ours, theirs, strict=True)]
            text = f"{name}, P = {workers}, {link.name}: time to loss against DDP gloo"
            bars.append(Bar.at_most(text, statistics.median(ratios), "times", most))
            fewer = [bytes_to(curves, b) / bytes_to(curves, a, False) for a, b in zip(ours, theirs, strict=True)]
            print(f"{text}: {shown(ratios, 2)}; {shown(fewer, 1)} times fewer bytes over the links")
    return bars


if __name__ == "__main__":
    sys.exit(main())
