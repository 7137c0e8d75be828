"""Scaling of workers while training: a fixed pool, MLLess's tuner, ours, and the best possible.

    .venv/bin/python tests/bench/scaling.py [--quick] [--json PATH] [--seeds N] [--data DIR]
        [--only clicks|ratings|images|mnist ...] [--channels "own cards"|"one card" ...]
    .venv/bin/python tests/bench/scaling.py --live [--quick] [--json PATH] [--seeds N]

Gradients are real (`scaling_learning.py`): sparse logistic regression and matrix factorisation of the templates, on the
made-up data of `isp.py`, a small CNN on scikit-learn's digits, which are real, for a job that ends soon, and LeNet-5 on
MNIST for one that does not. Seconds and dollars are MODELLED: measured compute, closed forms of merges, prices of
functions. Two channels: each worker has 1 Gbit/s of its own, or all go through the one card of 1 Gbit/s that the Redis
has, as in MLLess's experiments.

The pool has 24. MLLess's tuner begins with all of them; ours with as many as its belief has it, and once more with
all, so that the gain of either can be told apart. MLLess's may choose its constants for each task and channel, on a
seed of its own; ours has the same everywhere, and is told a compute that is a fifth too long. The oracle is the
cheapest run that keeps the time, of all numbers of workers and of the schedules that dynamic programming finds on their
curves, of that seed.
DDP (gloo) is measured, two processes on the cores of this machine, at the price of a virtual machine of two; not with
`--quick`, where no bar needs it.

With `--live` nothing of that is run: the tuners steer real jobs instead (`scaling_live.py`).

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from threading import BrokenBarrierError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import isp_processes
import torch
from isp_data import Task
from isp_processes import DDP, Link
from quality_federation import default_folder
from report import Bar, Report, options
from scaling_learning import POOL, SETTINGS, PoolTime, Run, play, pool_time, task_of
from scaling_live import live
from scaling_oracle import schedules

from scheduler.scaling import PublishedSettings, PublishedTuner, ScalingGoal, ScalingTuner

COUNTS, QUICK_COUNTS = (POOL, 20, 16, 14, 12, 10, 8, 6, 4, 3, 2, 1), (POOL, 16, 10, 6, 3)
QUICK_ONLY = ("clicks", "images")
WAY = 0.95
"""The loss to reach: so much of the way that the pool makes at all, of the same seed."""
SLOWER = 1.02
COMPUTE_OFF = 1.2
TUNING_SEED = 100
PLAYED = 3
"""Schedules of dynamic programming."""
VM_USD_PER_HOUR = 0.085
"""AWS c5.large, us-east-1: two virtual cores."""
DDP_WORKERS, DDP_SHARE, DDP_EVERY = 2, 4, 4
"""Processes; batches of a function that one of them takes; steps between looks."""
CHANNELS, QUICK_CHANNELS = ("own cards", "one card"), ("one card",)
FIXED, PUBLISHED, ORACLE = "fixed pool", "MLLess", "oracle"
OURS, FROM_POOL, FREE = "ours", "ours, from pool", "ours, any time"


def main() -> int:
    given = options(__doc__, more=_more, data=default_folder())
    given.only = given.only or (QUICK_ONLY if given.quick else tuple(SETTINGS))
    given.channels = given.channels or (QUICK_CHANNELS if given.quick else CHANNELS)
    report = Report("scaling", given.quick)
    if given.live:
        report.bars += live(report, quick=given.quick, seeds=given.seeds, memories_mb=given.memory_mb)
        report.details["load_after"] = os.getloadavg()[0]
        return report.close(given.json)
    torch.set_num_threads(1)
    seeds = given.seeds or (2 if given.quick else 5)
    rows: dict[tuple[str, str, str], list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="geofed-bench-") as folder:
        for name in given.only:
            task = task_of(name, Path(folder), True, given.data)
            times = pool_time(task, SETTINGS[name].batch)
            report.details[name] = {
                "samples": len(task.train), "held_out": len(task.test), "compute_seconds": times.compute,
                "merge_seconds": times.merge, "at_store_seconds": times.at_store,
            }  # fmt: skip
            _measure(task, name, times, given.channels, seeds, given.quick, rows, report)
            for channel in given.channels:
                _table(name, channel, rows)
    report.details["load_after"] = os.getloadavg()[0]
    report.runs += [
        {"channel": key[1], **asdict(run)} for key, runs in rows.items() for run in runs
    ]  # fmt: skip
    report.bars += [
        bar for name in given.only for channel in given.channels for bar in _bars(name, channel, rows, report)
    ]
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--live", action="store_true", help="real daemons, instead of what is modelled")
    parser.add_argument(
        "--memory-mb", nargs="+", type=int, default=[1024, 4096], help="of a worker, live; default: both"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="default: 5, live 3, with --quick 2, live 1")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), help="tasks; default: all, quick two")
    parser.add_argument("--channels", nargs="+", choices=CHANNELS, help="default: both, quick the one card")


Rows = dict[tuple[str, str, str], list[Run]]


def _measure(
    task: Task, name: str, times: PoolTime, channels: Sequence[str], seeds: int, quick: bool, rows: Rows, report: Report
) -> None:
    over = {channel: replace(times, shared=channel == "one card") for channel in channels}
    target, _ = _fixed(task, name, TUNING_SEED, times, (POOL,))
    chosen = {label: _published_tuned(task, name, one, target, quick) for label, one in over.items()}
    report.details[name]["published"] = {label: asdict(one) for label, one in chosen.items()}
    for seed in range(seeds):
        target, constant = _fixed(task, name, seed, times, QUICK_COUNTS if quick else COUNTS)
        for label, one in over.items():
            recorded = {count: _recosted(run, times, one, count) for count, run in constant.items()}
            rows.setdefault((name, label, FIXED), []).append(recorded[POOL])
            published = PublishedTuner(chosen[label])
            run = play(task, name, PUBLISHED, seed, POOL, lambda o, t=published: t.observe(o).workers, one, target)
            rows.setdefault((name, label, PUBLISHED), []).append(run)
            for policy, patience in ((OURS, SLOWER - 1), (FROM_POOL, SLOWER - 1), (FREE, None)):
                ours = ScalingTuner(one.terms(COMPUTE_OFF), ScalingGoal(target, patience))
                begin = POOL if policy == FROM_POOL else ours.begin()
                run = play(task, name, policy, seed, begin, lambda o, t=ours: t.observe(o).workers, one, target)
                rows.setdefault((name, label, policy), []).append(run)
            rows.setdefault((name, label, ORACLE), []).append(_oracle(task, name, seed, recorded, one, target, quick))
            for key, runs in rows.items():
                if key[:2] == (name, label):
                    print(f"  {name}, {label}, seed {seed}: {key[2]:<18}{_shown(runs[-1])}", flush=True)
        if not quick:
            ddp = _ddp(task, name, seed, target, constant[POOL].steps[-1], report)
            if ddp is not None:
                for label in over:
                    rows.setdefault((name, label, DDP), []).append(ddp)


def _fixed(task: Task, name: str, seed: int, times: PoolTime, counts: Sequence[int]) -> tuple[float, dict[int, Run]]:
    """The loss to reach, and runs to it with fixed numbers of workers."""
    whole = play(task, name, FIXED, seed, POOL, lambda _: POOL, times, 0.0)
    target = whole.quality[0] - WAY * (whole.quality[0] - min(whole.quality))
    runs = {}
    for count in counts:
        run = play(task, name, f"{count} workers", seed, count, lambda _, c=count: c, times, target)
        if run.quality[-1] <= target:
            runs[count] = run
    return target, runs


def _recosted(run: Run, before: PoolTime, after: PoolTime, workers: int) -> Run:
    """The same run over another channel: what was learnt is the same."""
    share = after.step(workers) / before.step(workers)
    return replace(run, seconds=[s * share for s in run.seconds], usd=[u * share for u in run.usd])


def _published_tuned(task: Task, name: str, times: PoolTime, target: float, quick: bool) -> PublishedSettings:
    """Its constants: the cheapest that keep the time on a seed of its own, or the cheapest where none does."""
    fixed = play(task, name, FIXED, TUNING_SEED, POOL, lambda _: POOL, times, target)
    whole, steps = fixed.seconds[-1], fixed.steps[-1]
    slope = (fixed.quality[0] - target) / steps
    tried = []
    for least, knee, interval in itertools.product(
        (4,) if quick else (10, 4), (2.0,) if quick else (4.0, 1.0), (0.01, 0.04)
    ):
        # Runs are of seconds, not minutes: spans and intervals are in proportion, the projection half an interval.
        settings = PublishedSettings(
            least=least, span=5, knee_slope=-knee * slope, interval_seconds=interval * whole,
            ahead_seconds=interval * whole / 2, settling_steps=1,
        )  # fmt: skip
        tuner = PublishedTuner(settings)
        run = play(task, name, PUBLISHED, TUNING_SEED, POOL, lambda o, t=tuner: t.observe(o).workers, times, target)
        seconds, usd = run.to(target)
        tried.append((seconds > SLOWER * whole, usd, len(tried), settings))
    return min(tried)[3]


def _oracle(
    task: Task, name: str, seed: int, recorded: dict[int, Run], times: PoolTime, target: float, quick: bool
) -> Run:
    limit = SLOWER * recorded[POOL].seconds[-1]
    played = list(recorded.values())
    for one in schedules(recorded, times, target, limit, 1 if quick else PLAYED):
        played.append(
            play(task, name, ORACLE, seed, one.workers[0], lambda o, s=one: s.at(o.loss), times, target)
        )  # fmt: skip
    kept = [run for run in played if run.to(target)[0] <= limit]
    return replace(min(kept, key=lambda run: run.to(target)[1]), policy=ORACLE)


def _ddp(task: Task, name: str, seed: int, target: float, steps: int, report: Report) -> Run | None:
    reason = isp_processes.possible()
    if reason is not None:
        report.details["no_ddp"] = reason
        return None
    batch = DDP_SHARE * SETTINGS[name].batch
    share = DDP_WORKERS * DDP_SHARE / POOL
    try:
        # The bridge has one name on the machine.
        with (Path(tempfile.gettempdir()) / "geofed-bench-bridge.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            curve = isp_processes.run(
                replace(task, kind=replace(task.kind, batch=batch)), DDP, None, DDP_WORKERS, Link("unshaped", None),
                seed, SETTINGS[name].lr * math.sqrt(share), 0.0, 4 * math.ceil(steps * 3 / 4), DDP_EVERY,
            )  # fmt: skip
    except (subprocess.CalledProcessError, BrokenBarrierError, OSError) as error:
        report.details.setdefault("ddp_failed", []).append(f"{name}, seed {seed}: {error}")
        print(f"  {name}, seed {seed}: {DDP} failed: {error}", flush=True)
        return None
    usd = [one * VM_USD_PER_HOUR / 3600 for one in curve.seconds]
    place = next((at for at, quality in enumerate(curve.quality) if quality <= target), len(curve.steps) - 1)
    cut = slice(0, place + 1)
    return Run(
        name,
        DDP,
        seed,
        curve.steps[cut],
        curve.quality[cut],
        curve.seconds[cut],
        usd[cut],
        [DDP_WORKERS] * (place + 1),
        reached=curve.quality[place] <= target,
    )


# What came out


def _shown(run: Run) -> str:
    ways = [f"{workers} from step {step}" for step, workers in run.changes]
    told = ", ".join((*ways[:3], "...", ways[-1]) if len(ways) > 4 else ways)
    return f"{run.seconds[-1]:.2f} s, {1e6 * run.usd[-1]:.0f} u$, {run.workers[0]} workers {told}"


def _end(run: Run, column: str) -> float:
    """At the target, at which runs end; infinite where it was not reached."""
    values: list[float] = getattr(run, column)
    return values[-1] if run.reached else math.inf


def _ratios(rows: Rows, name: str, channel: str, one: str, other: str, column: str) -> list[float]:
    beside = {run.seed: run for run in rows[name, channel, other]}
    return [_end(run, column) / _end(beside[run.seed], column) for run in rows[name, channel, one]]


def _table(name: str, channel: str, rows: Rows) -> None:
    print(f"\n{name}, {channel}: medians to the loss; against the fixed pool")
    for policy in (FIXED, PUBLISHED, OURS, FROM_POOL, FREE, ORACLE, DDP):
        runs = rows.get((name, channel, policy))
        if not runs:
            continue
        seconds, usd = (statistics.median(_end(run, column) for run in runs) for column in ("seconds", "usd"))
        less, longer = (
            statistics.median(_ratios(rows, name, channel, policy, FIXED, column)) - 1 for column in ("usd", "seconds")
        )
        last = statistics.median(run.workers[-1] for run in runs)
        print(
            f"  {policy:<18}{seconds:>8.2f} s{1e6 * usd:>9.0f} u${100 * less:>+8.0f} % dollars"
            f"{100 * longer:>+8.0f} % time{last:>6.0f} workers at the end"
        )


def _bars(name: str, channel: str, rows: Rows, report: Report) -> list[Bar]:
    def median(one: str, other: str, column: str) -> float:
        return statistics.median(_ratios(rows, name, channel, one, other, column))

    text = f"{name}, {channel}: ours"
    return [
        Bar.at_least(f"{text} cheaper than the fixed pool", 100 * (1 - median(OURS, FIXED, "usd")), "%", 25),
        Bar.at_most(f"{text} slower than the fixed pool", 100 * (median(OURS, FIXED, "seconds") - 1), "%", 2),
        Bar.at_least(f"{text} cheaper than MLLess's tuner", 100 * (1 - median(OURS, PUBLISHED, "usd")), "%", 10),
        Bar.at_most(f"{text} dearer than the oracle", 100 * (median(OURS, ORACLE, "usd") - 1), "%",
                    report.target(10, quick=30)),
        Bar.at_least(f"{name}, {channel}: oracle cheaper than the fixed pool (ceiling)",
                     100 * (1 - median(ORACLE, FIXED, "usd")), "%", 25),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
