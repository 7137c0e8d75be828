"""The planner of pipelines: stages, memory sizes, replicas and order."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.pipeline._evaluate import evaluate, held_bytes
from scheduler.pipeline._model import MIB, Cut, NothingFitsError, PipelineOptions, PipelineProblem, PlannedPipeline
from scheduler.pipeline._search import search

__all__ = ["front", "pipeline_options"]


def front(problem: PipelineProblem, within: float = 0.0) -> tuple[PlannedPipeline, ...]:
    """Return all pipelines that no other one beats in both seconds and USD of an iteration, the fastest first.

    Over all cuts, places and memory of each stage, degrees, micro-batches and orders; of pipelines that are equal in
    both, one. Exact by `evaluate`'s model where ``within`` is 0. A share above 0 shortens the work for long models: for
    every possible pipeline, one of those found has at most 1 + within times its seconds and its USD.

    Raises NothingFitsError where no pipeline fits, and ValueError for a negative share.
    """
    if not problem.profile.layers or problem.batch < 1:
        raise ValueError("a pipeline needs at least one layer and one sample")
    if within < 0:
        raise ValueError("a pipeline cannot be within less than nothing of the front")
    found = search(problem, pipeline_options(problem), within)
    if not found:
        raise NothingFitsError(_why_not(problem))
    plans = (evaluate(problem, way, cuts) for way, cuts in found)
    return _best_of(plan for plan in plans if plan is not None)


def _best_of(plans: Iterable[PlannedPipeline]) -> tuple[PlannedPipeline, ...]:
    """Return the pipelines that no other one beats, the fastest first."""
    best: list[PlannedPipeline] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.usd, len(plan.stages))):
        if not best or plan.usd < best[-1].usd:
            best.append(plan)
    return tuple(best)


def pipeline_options(problem: PipelineProblem) -> tuple[PipelineOptions, ...]:
    """Return all degrees, micro-batches and orders that are tried."""
    found = []
    for degree in sorted({degree for degree in problem.degrees if degree <= problem.batch}):
        share = -(-problem.batch // degree)
        sizes = problem.micro_batches or [size for size in range(1, share + 1) if share % size == 0]
        found += [
            PipelineOptions(degree, size, order)
            for size in sorted({min(share, s) for s in sizes})
            for order in problem.orders
        ]
    return tuple(found)


def _why_not(problem: PipelineProblem) -> str:
    """Return the first layer that fits no function alone, whatever the way, or another reason."""
    roomiest = [
        (size.memory_mb, p, s) for p, place in enumerate(problem.places) for s, size in enumerate(place.sizes)
    ]  # fmt: skip
    most_mb, place, size = max(roomiest)
    for number, layer in enumerate(problem.profile.layers):
        cut = Cut(number, number, place, size)
        least = min(held_bytes(problem, way, cut, 1) for way in pipeline_options(problem))
        if least > most_mb * MIB:
            needed = least / MIB
            return (
                f"layer {number} ({layer.name}) alone needs {needed:,.0f} MB, the largest function has {most_mb:,} MB"
            )
    return f"no cut fits the functions, the largest of which has {most_mb:,} MB, with the workers and places allowed"
