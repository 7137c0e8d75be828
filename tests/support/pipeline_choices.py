"""What is chosen from fronts of pipelines, and FuncPipe's published set-up as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from scheduler.pipeline import Cut, PipelineProblem, PlannedPipeline, evaluate, pipeline_options


def cheapest(plans: Sequence[PlannedPipeline], within_seconds: float) -> PlannedPipeline | None:
    """Return the cheapest pipeline of a front whose iteration takes no longer."""
    return min((plan for plan in plans if plan.seconds <= within_seconds), key=lambda plan: plan.usd, default=None)


def fastest(plans: Sequence[PlannedPipeline], within_usd: float) -> PlannedPipeline | None:
    """Return the fastest pipeline of a front whose iteration costs no more."""
    return min((plan for plan in plans if plan.usd <= within_usd), key=lambda plan: plan.seconds, default=None)


def uniform(problem: PipelineProblem) -> tuple[PlannedPipeline, ...]:
    """Return the front of FuncPipe's published set-up, whose planner was not published: the baseline.

    GPipe order, stages with numbers of layers as equal as possible, one memory size for all, in the first place, no
    recomputation; over the number of stages, sizes, degrees and micro-batches.
    """
    length, sizes = len(problem.profile.layers), problem.places[0].sizes
    found: list[PlannedPipeline] = []
    for way in (way for way in pipeline_options(problem) if way.order == "gpipe"):
        for stages in range(1, length + 1):
            if problem.stages not in (None, stages):
                continue
            if problem.most_workers is not None and stages * way.degree > problem.most_workers:
                break
            ends = [length * number // stages for number in range(stages + 1)]
            for size in range(len(sizes)):
                cuts = [Cut(first, after - 1, 0, size) for first, after in pairwise(ends)]
                plan = evaluate(problem, way, cuts)
                found += [plan] if plan is not None else []
    best: list[PlannedPipeline] = []
    for plan in sorted(found, key=lambda plan: (plan.seconds, plan.usd, len(plan.stages))):
        if not best or plan.usd < best[-1].usd:
            best.append(plan)
    return tuple(best)
