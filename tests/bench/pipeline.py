"""Pipelines of functions: the planner's speed, exactness and gain; and the runtime's figures for its plans.

    nice .venv/bin/python tests/bench/pipeline.py [--quick] [--json PATH] [--part PART] [--instances N]

Parts are planner, live, large (a model of three times a function's memory through real daemons) and all of them; quick
is the planner's alone where no part is asked for.
The planner's part computes alone. Exactness: an independent mixed-integer program (HiGHS) must find the same price at
both ends and in the middle of the front of random problems, of up to 4 layers and 2 sizes, each fourth one of up to 5
and 3. Speed: models of made-up layers, 8 memory sizes, degrees 1 to 8, every divisor as micro-batch, both orders; exact
and within proven shares, with what these miss; the time that passes, and beside it the processor's: the planner has one
thread. Medians of three runs, in turn, or one run with --quick. A plan of a job has one function size and one
number of replicas: 60 layers of that are measured apart. Gain: the planner against equal cuts and equal memory in GPipe
order, FuncPipe's set-up, by its own model of time; with one mechanism switched off at a time.

With `--quick` it takes 1 minute.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import Bar, Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scheduler.pipeline import (
    FunctionSize,
    Layer,
    LayerProfile,
    LinearCost,
    NothingFitsError,
    PipelineProblem,
    PlannedPipeline,
    StageChannel,
    StageRegion,
    front,
)
from scheduler.pipeline._planner import pipeline_options
from tests.scheduler.pipeline.problems import problem as small_problem
from tests.scheduler.pipeline.program import least_usd
from tests.support.pipeline_choices import cheapest, fastest, uniform

MB = 1 << 20
MEMORIES_MB = (512, 1024, 1536, 2048, 3072, 4096, 6144, 10240)
SHARES = (0.0, 0.01, 0.05)
"""Proven bounds of fronts, in seconds and in USD."""
LAYERS = (8, 16, 24, 40, 60)
PLAN_SHARE = 0.01
"""The same, for plans of jobs."""
GAIN_LAYERS = 8
QUICK_SECONDS = 10.0
"""One run alone, on a machine that does other work as well."""
REL = 1e-5


def main() -> int:
    given = options(__doc__, more=_more)
    report = Report("pipeline", given.quick)
    given.part = given.part or ("planner" if given.quick else "all")
    if given.part in ("planner", "all"):
        _exactness(report, given.instances or (12 if given.quick else 200))
        _speed(report, 1 if given.quick else 3)
        _gain(report, 2 if given.quick else 5)
    if given.part in ("live", "all"):
        import pipeline_live  # loads torch

        pipeline_live.measure(report, quick=given.quick)
    if given.part in ("large", "all"):
        import pipeline_large  # loads torch

        pipeline_large.measure(report, quick=given.quick)
    return report.close(given.json)


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("planner", "live", "large", "all"), help="default: all, quick the planner's")
    parser.add_argument("--instances", type=int, metavar="N", help="random problems; default: 200, with --quick 12")


def chain(layers: int, seed: int, *, most_workers: int = 64) -> PipelineProblem:
    """A model as deep as asked for, whose layers are all of the same kind, give or take; AWS Lambda's sizes."""
    draw = random.Random(seed)
    share = 12 / layers
    made = []
    for number in range(layers):
        forward = draw.uniform(0.02, 0.06) * share
        backward = forward * draw.uniform(1.6, 2.4)
        made.append(
            Layer(
                f"layer{number}",
                int(draw.uniform(10, 60) * MB * share),
                int(draw.uniform(4, 16) * MB * share),
                int(draw.uniform(0.1, 1.5) * MB),
                LinearCost(forward / 10, forward),
                LinearCost(backward / 10, backward),
            )
        )
    sizes = tuple(FunctionSize(size, min(1.0, size / 1769), 1.66667e-5) for size in MEMORIES_MB)
    store = StageChannel(0.03, 0.02, 5e7, 7e7, 8, 5e-6, 4e-7)
    return PipelineProblem(
        LayerProfile(tuple(made), 600_000, 1.0),
        64,
        (StageRegion("a", sizes, store),),
        degrees=tuple(range(1, 9)),
        most_workers=most_workers,
    )


def tapered(layers: int, seed: int) -> PipelineProblem:
    """The same, but what layers keep and send shrinks towards the end, and their parameters grow, as in a CNN."""
    alike = chain(layers, seed)
    factors = [4.0 ** (1 - 2 * number / (layers - 1)) for number in range(layers)]
    made = tuple(
        replace(
            layer,
            parameter_bytes=int(layer.parameter_bytes / factor),
            activation_bytes=int(layer.activation_bytes * factor),
            output_bytes=int(layer.output_bytes * factor),
        )
        for layer, factor in zip(alike.profile.layers, factors, strict=True)
    )
    return replace(alike, profile=replace(alike.profile, layers=made))


def one_size(layers: int, seed: int) -> PipelineProblem:
    """What a plan of a job asks for: two replicas, and one function size for all stages."""
    problem = chain(layers, seed)
    place = replace(problem.places[0], sizes=(problem.places[0].sizes[4],))
    return replace(problem, batch=2 * problem.batch, degrees=(2,), places=(place,))


@dataclass(frozen=True)
class Took:
    """Of one front: as somebody waits for it, and of the processor."""

    wall_s: float
    cpu_s: float


def _exactness(report: Report, instances: int) -> None:
    compared = wrong = 0
    begun = time.perf_counter()
    for seed in range(instances):
        # The program's time grows fast with both.
        asked = small_problem(seed) if seed % 4 == 0 else small_problem(seed, layers=4, sizes=2)
        ways = pipeline_options(asked)
        try:
            plans = front(asked)
        except NothingFitsError:
            plans = ()
        limits = [plan.seconds * (1 - 1e-6) for plan in plans] + [1e6]
        apart = []
        for number in sorted({0, len(plans) // 2, len(plans)}):
            found = [usd for way in ways if (usd := least_usd(asked, way, limits[number])) is not None]
            own = plans[number - 1].usd if number else None
            apart.append(
                own is not None if not found else own is None or not math.isclose(min(found), own, rel_tol=REL)
            )
        compared, wrong = compared + len(apart), wrong + any(apart)
        report.runs.append({"part": "exactness", "seed": seed, "plans": len(plans), "compared": len(apart)})
        report.runs[-1]["differ"] = sum(apart)
    print(f"{instances} problems, {compared} points against the program: {wrong} problems differ", end="")
    print(f" ({time.perf_counter() - begun:.0f} s)")
    report.bars += [
        Bar.at_least(
            "random problems compared with the mixed-integer program",
            instances,
            "problems",
            report.target(200, quick=12),
        ),
        Bar.at_most("of these, where the front differs", wrong, "problems", 0),
    ]


def _timed(problem: PipelineProblem, within: float) -> tuple[tuple[PlannedPipeline, ...], Took]:
    begun, worked = time.perf_counter(), time.process_time()
    plans = front(problem, within)
    return plans, Took(time.perf_counter() - begun, time.process_time() - worked)


def _speed(report: Report, times: int) -> None:
    print(f"\n{'layers':>6} {'within':>7} {'points':>7} {'s':>7} {'CPU s':>7}  what the share costs: median, worst")
    took: dict[tuple[int, float], float] = {}
    for layers in LAYERS:
        fronts, seconds = _in_turn(chain(layers, 0), times)
        for share, plans in fronts.items():
            took[layers, share] = seconds[share].wall_s
            _row(report, layers, share, plans, seconds[share], _missed(fronts[0.0], plans) if share else ())
    fronts, seconds = _in_turn(one_size(60, 0), times)
    for share, plans in fronts.items():
        _row(report, 60, share, plans, seconds[share], _missed(fronts[0.0], plans) if share else (), "one size")
    enough = max((layers for layers in LAYERS if took[layers, 0.0] <= 1.0), default=0)
    most = report.target(1.0, quick=QUICK_SECONDS)
    of_plan = seconds[PLAN_SHARE].wall_s
    report.bars += [
        Bar.at_least("layers whose exact front takes at most 1 s", enough, "layers", report.target(60, quick=8)),
        *(Bar.at_most(f"60 layers, front {_within(share)}", took[60, share], "s", most) for share in SHARES),
        Bar.at_most(f"60 layers, front {_within(PLAN_SHARE)}, one size and degree as in a plan", of_plan, "s", most),
    ]


def _in_turn(
    problem: PipelineProblem, times: int
) -> tuple[dict[float, tuple[PlannedPipeline, ...]], dict[float, Took]]:
    """By share: the front, and the medians of so many runs."""
    runs = [{share: _timed(problem, share) for share in SHARES} for _ in range(times)]
    fronts = {share: plans for share, (plans, _) in runs[0].items()}
    took = {share: [run[share][1] for run in runs] for share in SHARES}
    return fronts, {
        share: Took(statistics.median(one.wall_s for one in some), statistics.median(one.cpu_s for one in some))
        for share, some in took.items()
    }


def _within(share: float) -> str:
    return f"within {100 * share:.0f} %" if share else "exact"


def _row(
    report: Report,
    layers: int,
    within: float,
    plans: Sequence[PlannedPipeline],
    took: Took,
    missed: Sequence[float] = (),
    note: str = "",
) -> None:
    said = f"{100 * statistics.median(missed):.2f} %, {100 * max(missed):.2f} %" if missed else ""
    share = f"{100 * within:.0f} %" if within else "exact"
    print(f"{layers:>6} {share:>7} {len(plans):>7} {took.wall_s:>7.2f} {took.cpu_s:>7.2f}  {said} {note}")
    report.runs.append({"part": "speed", "layers": layers, "within": within, "points": len(plans)})
    report.runs[-1] |= {"wall_s": took.wall_s, "cpu_s": took.cpu_s, "missed": list(missed), "note": note}


def _missed(exact: Sequence[PlannedPipeline], near: Sequence[PlannedPipeline]) -> list[float]:
    """For each point of the front: by what share something else is dearer that is found as fast, give or take."""
    return [
        min(max(plan.seconds / one.seconds, plan.usd / one.usd) for plan in near) - 1.0 for one in exact
    ]  # fmt: skip


def _gain(report: Report, models: int) -> None:
    """Against FuncPipe's set-up, at its own seconds and at its own USD; medians over its front. Exact fronts."""
    print("\nby the planner's model, against equal cuts and memory in GPipe order:")
    print(f"{'':<40}{'cheaper at its time':>22}{'faster at its price':>22}")
    kinds: dict[str, dict[str, Any]] = {
        "all": {},
        "without 1F1B": {"orders": ("gpipe",)},
        "without re-materialisation": {"rematerialise": False},
        "neither": {"orders": ("gpipe",), "rematerialise": False},
    }
    for name, made in {"layers alike": chain, "as in a CNN": tapered}.items():
        problems = [made(GAIN_LAYERS, seed) for seed in range(models)]
        bases = [uniform(problem) for problem in problems]
        for kind, less in kinds.items():
            cheaper, faster = [], []
            for problem, base in zip(problems, bases, strict=True):
                plans = front(replace(problem, **less))
                for one in base:
                    as_fast, as_cheap = cheapest(plans, one.seconds), fastest(plans, one.usd)
                    cheaper.append(1 - as_fast.usd / one.usd if as_fast else 0.0)
                    faster.append(one.seconds / as_cheap.seconds if as_cheap else 1.0)
            saved, sped = 100 * statistics.median(cheaper), statistics.median(faster)
            report.runs.append({"part": "gain", "model": name, "kind": kind, "cheaper": cheaper, "faster": faster})
            print(f"{name + ', ' + kind:<40}{saved:>20.1f} %{sped:>20.2f} x")
            if kind == "all":
                report.bars += [
                    Bar.at_least(
                        f"{name}: cheaper than FuncPipe's set-up, predicted, median",
                        saved,
                        "%",
                        report.target(20, quick=5),
                    ),
                    Bar.at_least(
                        f"{name}: faster than FuncPipe's set-up, predicted, median",
                        sped,
                        "x",
                        report.target(1.3, quick=1.03),
                    ),
                ]


if __name__ == "__main__":
    sys.exit(main())
