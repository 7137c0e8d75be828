"""How accurately a configuration's time is predicted, and the gain of the best one.

    .venv/bin/python tests/bench/tuning.py [--quick] [--json PATH] [--only predicted|chosen]

Predicted: live iterations over a real redis-server and an S3 server that is as slow as S3 (`tuning_live.py`). Compute
is a sleep of calibrated length, the tensors and requests are real. Coefficients are fitted to a few configurations, and
all others, which the fit has not seen, are predicted. Chosen: the best of all for a deadline, run live beside
LambdaML's set-up and FasDL's choice, in turn. Steps to the target follow from a gradient noise scale that was measured
of a real task (`docs/tuning.md`); they are modelled. Quick leaves out what is chosen, unless that is asked for.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from channel_prices import REQUEST_PRICES
from report import Bar, Report, options
from support.tuning_draws import cheapest
from tuning_baselines import as_published
from tuning_baselines import fasdl as fasdl_heuristic
from tuning_live import MB, Measured, Setting, compute_seconds, measured

from scheduler.tuning import (
    ChannelProfile,
    Configuration,
    Convergence,
    Memory,
    MergePoint,
    PlatformCosts,
    Prediction,
    Space,
    StepPoint,
    TaskModel,
    TuningLimits,
    fit_compute,
    fit_correction,
    predict,
    step_seconds,
)
from sync.collective import ChannelCosts, Correction, Merges, collectives, merge_terms

USD_PER_GB_SECOND = 0.0000166667
"""AWS Lambda, us-east-1."""
NOISE_SAMPLES = 313.0
"""Of the image template's task, as `geofed profile` has measured it."""
LEAST_STEPS = 60.0
HEAVY = 0.03
"""Seconds a sample, of what is chosen for: with less, one worker would be best."""
MOST = {"redis": (8, 14), "s3": (16, 4)}
"""Workers, and megabytes of their vector."""
BATCHES, MEMORIES = (16, 32, 64), (1769, 885, 3008)
QUICK_SECONDS = 0.002
"""A sample."""


@dataclass(frozen=True)
class Learned:
    """All that is fitted."""

    channels: dict[str, ChannelProfile]
    corrections: dict[str, Correction]
    task: TaskModel


# Predicted


def tried(quick: bool) -> list[Setting]:
    """All configurations, so that batches and memories are spread over them."""
    places = {
        "redis": ((2, (1, 4, 14)), (4, (0.25, 1, 4, 14)), (8, (0.25, 1, 4, 14))),
        "s3": ((2, (1, 4, 14)), (4, (0.25, 1, 4, 14)), (8, (0.25, 4, 14)), (16, (4,))),
    }
    if quick:
        places = {"redis": ((4, (0.25, 1, 14)),), "s3": ((4, (0.25, 4)),)}
    found = []
    for kind, rows in places.items():
        for workers, sizes in rows:
            for size in sizes:
                for pattern, chunks in _ways(workers):
                    number = len(found)
                    batch, memory = BATCHES[number % 3], MEMORIES[number // 3 % 3]
                    found.append(Setting(kind, size, workers, pattern, chunks, batch, memory))
    return [replace(one, per_sample_seconds=QUICK_SECONDS) for one in found] if quick else found


def _ways(workers: int) -> Iterator[tuple[str, int]]:
    yield "all-reduce", 1
    yield "pipelined-scatter-reduce", workers
    if workers > 2:
        yield "scatter-reduce", workers
        yield from (("k-reduce", chunks) for chunks in sorted({2, workers // 2}))


def learned_from(one: Setting) -> bool:
    """The few that coefficients are fitted to: the smallest and the largest vector of four workers, and between the
    fewest workers and the most there are, so that what is predicted lies between what was seen."""
    if one.workers == 2:
        return one.size_mb == 1 and one.pattern == "all-reduce"
    if one.workers == 4:
        return one.size_mb == 0.25 or (one.size_mb == 14 and one.pattern != "scatter-reduce")
    halved = one.pattern == "k-reduce" and one.chunks == one.workers // 2
    more = one.workers == 8 and one.size_mb == 14 and (halved or one.pattern == "pipelined-scatter-reduce")
    return more or ((one.workers, one.size_mb) == MOST[one.kind] and (halved or one.pattern == "all-reduce"))


def taken_from(path: Path) -> Iterator[tuple[Setting, Measured, ChannelCosts]]:
    """What an earlier run has measured."""
    for run in json.loads(path.read_text())["runs"]:
        if run["part"] == "predicted":
            setting, costs = Setting(**run["setting"]), ChannelCosts(**run["probed"])
            took = {name: run[name] for name in Measured.__dataclass_fields__ if name != "setting"}
            yield setting, Measured(setting, **took), costs


def predicted(report: Report, measurements: Iterable[tuple[Setting, Measured, ChannelCosts]]) -> Learned:
    """Measure all settings, learn from a few, and judge what is predicted of the others."""
    rows: list[tuple[Setting, Measured, ChannelCosts]] = []
    print(
        f"{'':<7}{'MB':>6}{'W':>4}{'':<2}{'pattern':<25}{'K':>3}{'seconds':>9}{'min':>8}{'max':>8}{'merge':>8}{'load':>6}"
    )
    for setting, took, costs in measurements:
        rows.append((setting, took, costs))
        print(
            f"{setting.kind:<7}{setting.size_mb:>6g}{setting.workers:>4}  {setting.pattern:<25}{setting.chunks:>3}"
            f"{took.seconds:>9.4f}{took.least:>8.3f}{took.most:>8.3f}{took.merge_seconds:>8.4f}{took.load:>6.1f}",
            flush=True,
        )
    known = learn(rows, report.quick)
    report.bars += judge(report, rows, known)
    return known


def learn(rows: Sequence[tuple[Setting, Measured, ChannelCosts]], quick: bool = False) -> Learned:
    """Fit compute to a few sleeps, and each channel's correction to a few merges over its probed constants."""
    probed: dict[str, list[ChannelCosts]] = {}
    for one, _, costs in rows:
        probed.setdefault(one.kind, []).append(costs)
    mine = [
        (one, took) for one, took, _ in rows if (one.size_mb != 1 and one.size_mb != 4 if quick else learned_from(one))
    ]
    steps = [StepPoint(one.batch, one.memory_mb, took.compute_seconds) for one, took in mine]
    channels = {kind: _channel(kind, costs) for kind, costs in probed.items()}
    corrections = {
        kind: fit_correction([_point(one, took) for one, took in mine if one.kind == kind], channel)
        for kind, channel in channels.items()
    }
    platform = PlatformCosts(USD_PER_GB_SECOND, 2e-7, 0.0, 30.0, 1.0, 0.05)
    progress = Convergence(least_steps=LEAST_STEPS, noise_samples=NOISE_SAMPLES)
    task = TaskModel(
        4 * MB, fit_compute(steps), Memory(300.0, 1.0), progress, platform, tuple(channels.values()), corrections
    )
    return Learned(channels, corrections, task)


def _channel(kind: str, costs: Sequence[ChannelCosts]) -> ChannelProfile:
    """The median of what was probed."""
    names = [name for name in ChannelCosts.__dataclass_fields__ if name != "parallel"]
    values = {name: statistics.median(getattr(one, name) for one in costs) for name in names}
    prices = REQUEST_PRICES["s3/us-east-1" if kind == "s3" else "redis"]
    values |= {"put_usd": prices.put or 0.0, "get_usd": prices.get or 0.0, "list_usd": prices.list or 0.0}
    return ChannelProfile(**values, parallel=16, name=kind)


def _point(one: Setting, took: Measured) -> MergePoint:
    return MergePoint(
        one.pattern, one.workers, one.chunks, one.size_mb * MB, took.merge_seconds, 1.0, took.compute_seconds
    )


def prediction(one: Setting, known: Learned) -> tuple[float, float]:
    """Seconds of an iteration, and of its merge."""
    row = Merges.of([(one.pattern, one.workers, one.chunks, 1.0)])
    told = merge_terms(row, one.size_mb * MB, known.channels[one.kind])
    merge = float(told.seconds(known.corrections[one.kind])[0])
    return float(step_seconds(known.task.compute, one.batch, one.memory_mb)) + merge, merge


def judge(report: Report, rows: Sequence[tuple[Setting, Measured, ChannelCosts]], known: Learned) -> list[Bar]:
    errors: dict[str, list[float]] = {}
    merges: list[float] = []
    raw: list[float] = []
    plain = replace(known, corrections={kind: Correction() for kind in known.channels})
    worst: list[tuple[float, Setting]] = []
    for one, took, costs in rows:
        seconds, merge = prediction(one, known)
        fitted = learned_from(one) if not report.quick else one.size_mb not in (1, 4)
        report.runs.append(
            {
                "part": "predicted",
                "fitted": fitted,
                **asdict(took),
                "probed": asdict(costs),
                "told_seconds": seconds,
                "told_merge_seconds": merge,
            }
        )
        if fitted:
            continue
        error = abs(seconds / took.seconds - 1)
        errors.setdefault(one.kind, []).append(error)
        merges.append(abs(merge / took.merge_seconds - 1))
        raw.append(abs(prediction(one, plain)[0] / took.seconds - 1))
        worst.append((error, one))
    every = [error for found in errors.values() for error in found]
    report.details["corrections"] = {kind: asdict(one) for kind, one in known.corrections.items()}
    report.details["compute"] = asdict(known.task.compute)
    report.details["channels"] = {kind: asdict(one) for kind, one in known.channels.items()}
    for error, one in sorted(worst, key=lambda row: -row[0])[:5]:
        print(f"off by {error:.1%}: {one}")
    print(f"of the merges alone: median {statistics.median(merges):.1%}, worst {max(merges):.1%}")
    print(f"without what was learned: median {statistics.median(raw):.1%}, worst {max(raw):.1%}")
    report.details["merge_errors"] = {"median": statistics.median(merges), "worst": max(merges)}
    report.details["uncorrected_errors"] = {"median": statistics.median(raw), "worst": max(raw)}
    median, worst_of_all = report.target(3, quick=10), report.target(6, quick=30)
    bars = [
        Bar.at_least("configurations that were predicted and not fitted", len(every), "", report.target(60, quick=8)),
        Bar.at_most("iteration time, median error", 100 * statistics.median(every), "%", median),
        Bar.at_most("iteration time, worst error", 100 * max(every), "%", worst_of_all),
    ]
    for kind, found in errors.items():
        bars.append(Bar.at_most(f"{kind}: iteration time, median error", 100 * statistics.median(found), "%", median))
        bars.append(Bar.at_most(f"{kind}: iteration time, worst error", 100 * max(found), "%", worst_of_all))
    return bars


# Chosen


@dataclass
class Rival:
    """A way to choose, its choice, and what came of it."""

    name: str
    choice: Configuration
    faithful: bool
    told: Prediction | None
    took: list[Measured]

    def seconds(self, task: TaskModel) -> float:
        """To the target: measured iterations, as many as the noise scale says."""
        return self._iterations(task) * statistics.median(one.seconds for one in self.took)

    def usd(self, task: TaskModel) -> float:
        prices, one = REQUEST_PRICES["s3/us-east-1"], self.took[-1].requests
        puts, lists = one.get("puts", 0), one.get("lists", 0)
        gets = one.get("gets", 0) + one.get("misses", 0) + one.get("looks", 0)
        asked = puts * (prices.put or 0) + lists * (prices.list or 0) + gets * (prices.get or 0)
        rate = self.choice.workers * self.choice.memory_mb / 1024 * USD_PER_GB_SECOND
        return self.seconds(task) * rate + self._iterations(task) * asked

    def _iterations(self, task: TaskModel) -> int:
        told = predict(task, [self.choice])[0]
        assert told is not None
        return told.iterations


def chosen(report: Report, known: Learned) -> None:
    """One setting, live: S3, 4 MB, at most 8 workers, a second of compute for a batch of 32."""
    points = [
        StepPoint(batch, memory, compute_seconds(batch, memory, HEAVY)) for batch in BATCHES for memory in MEMORIES
    ]
    task = replace(
        known.task,
        compute=fit_compute(points),
        channels=(known.channels["s3"],),
        corrections={"s3": known.corrections["s3"]},
    )
    space = Space(
        (885, 1024, 1536, 1769, 3008),
        tuple(range(1, 9)),
        (16, 32, 64),
        collectives(lambda one: one.predictable and one.worker),
    )
    theirs = Configuration(3008, 8, 32, "scatter-reduce", 8, "s3")
    rivals = [Rival("LambdaML: scatter-reduce, 8 workers of 3008 MB", theirs, True, None, [])]
    _run(rivals, 1)
    limits = TuningLimits(2 / 3 * rivals[0].seconds(task))
    ours = cheapest(task, space, limits)
    published = as_published(replace(task, corrections={}))
    fasdl = fasdl_heuristic(published, replace(space, collectives=("k-reduce",)), limits, "s3")
    heuristic = fasdl_heuristic(task, replace(space, collectives=("k-reduce",)), limits, "s3")
    in_time = fasdl is not None
    if fasdl is None:
        print("FasDL's heuristic over collectives as published finds nothing within the deadline")
        fasdl = fasdl_heuristic(published, replace(space, collectives=("k-reduce",)), TuningLimits(), "s3")
    assert ours is not None, "the search finds nothing within two thirds of LambdaML's time"
    more = [Rival("ours", ours.configuration, False, ours, [])]
    if fasdl is not None:
        name = "FasDL: its search, its K-REDUCE" + ("" if in_time else ", no deadline")
        more.append(Rival(name, fasdl.configuration, True, fasdl, []))
    if heuristic is not None:
        more.append(Rival("FasDL's search over our collectives", heuristic.configuration, False, heuristic, []))
    _run([*more, rivals[0]], 1 if report.quick else 2)
    rivals += more
    print(
        f"\nS3, {task.model_bytes / MB:g} MB, to the target, whose steps are modelled, with iterations that were "
        f"measured; deadline {limits.deadline_seconds:.0f} s"
    )
    print(f"{'':<48}{'W':>3}{'M':>6}{'B':>4}{'K':>3}{'iteration':>10}{'told':>8}{'seconds':>9}{'$':>9}")
    for one in rivals:
        c, iteration = one.choice, statistics.median(took.seconds for took in one.took)
        told = f"{one.told.iteration_seconds:.3f}" if one.told else "-"
        print(
            f"{one.name:<48}{c.workers:>3}{c.memory_mb:>6}{c.batch:>4}{c.chunks:>3}{iteration:>10.3f}{told:>8}"
            f"{one.seconds(task):>9.1f}{one.usd(task):>9.5f}  {c.collective}"
        )
        report.runs.append(
            {
                "part": "chosen", "name": one.name, "choice": asdict(c), "faithful": one.faithful,
                "told": asdict(one.told) if one.told else None, "took": [asdict(took) for took in one.took],
                "seconds": one.seconds(task), "usd": one.usd(task),
            }
        )  # fmt: skip
    by = {one.name: one for one in rivals}
    mine, base = by["ours"], rivals[0]
    report.bars += [
        Bar.at_least(
            "chosen: time saved against LambdaML", 100 * (1 - mine.seconds(task) / base.seconds(task)), "%", 30
        ),
        Bar.at_least("chosen: money saved against LambdaML", 100 * (1 - mine.usd(task) / base.usd(task)), "%", 45),
    ]
    report.bars += [
        Bar.at_least(f"chosen: money saved against {one.name}", 100 * (1 - mine.usd(task) / one.usd(task)), "%", 0)
        for one in rivals[2:]
        # What misses the deadline is shown, and is no choice.
        if not one.name.endswith("no deadline")
    ]


def _run(rivals: Sequence[Rival], repeats: int) -> None:
    """In turn."""
    for _ in range(repeats):
        by_workers = sorted(rivals, key=lambda one: one.choice.workers)
        settings = [
            Setting(
                "s3", 4, one.choice.workers, one.choice.collective, one.choice.chunks, one.choice.batch,
                one.choice.memory_mb, one.faithful, HEAVY,
            )
            for one in by_workers
        ]  # fmt: skip
        for one, (_, took, _) in zip(by_workers, measured(settings), strict=True):
            one.took.append(took)


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--measured", type=Path, metavar="PATH", help="take what an earlier run's JSON has measured"
        )
        parser.add_argument("--only", choices=("predicted", "chosen"), help="this part alone")

    given = options(__doc__, more=more)
    report = Report("tuning", given.quick)
    live = measured(tried(given.quick), quick=given.quick) if given.measured is None else taken_from(given.measured)
    known = predicted(report, live)
    if given.only == "chosen" or not (given.only or given.quick):
        chosen(report, known)
    return report.close(given.json)


if __name__ == "__main__":
    sys.exit(main())
