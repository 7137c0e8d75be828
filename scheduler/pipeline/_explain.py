"""The reasons for a pipeline's cuts, in sentences for users."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.pipeline._evaluate import held_bytes
from scheduler.pipeline._model import MIB, Cut, PipelineProblem, PlannedPipeline, PlannedStage

__all__ = ["cuts_of", "explain"]

NEIGHBOURS = 2
"""Cuts to either side that a cut is compared with."""
CLEARLY = 0.8
"""Share of its neighbours' bytes below which what a cut sends is worth mentioning."""
BUSY = 0.5
"""Share of an iteration for which shared cores must be busy for that to be worth mentioning."""


def explain(problem: PipelineProblem, plan: PlannedPipeline) -> tuple[str, ...]:
    """Return one sentence about the whole pipeline, then two for each stage: what it holds, and why it ends there."""
    way = plan.way
    order = "all forward passes before all backward passes" if way.order == "gpipe" else "one forward, one backward"
    said = [
        f"{_count(len(plan.stages), 'stage')} of {_count(way.degree, 'replica')}, "
        f"{_count(plan.micro_batches, 'micro-batch')} of {_count(way.micro_batch, 'sample')}, {order}: "
        f"{plan.seconds:.2f} s and ${plan.usd:.6f} an iteration"
    ]
    if problem.sent_share < 1.0 and len(plan.stages) > 1:
        said[0] += f", with {100 * problem.sent_share:.0f} % of the bytes over cuts"
    cuts = cuts_of(problem, plan)
    for place in problem.places:
        busy = sum(way.degree * stage.core_s for stage in plan.stages if stage.place == place.name)
        if place.cores and busy / place.cores >= BUSY * plan.seconds:
            said[0] += f"; the functions share {_count_cores(place.cores)}, which have {busy:.2f} s of work in it"
    for number, stage in enumerate(plan.stages):
        again = ", computing its forward pass twice" if stage.rematerialise else ""
        said.append(
            f"{_layers(stage)} need {stage.needed_mb:,.0f} MB of {stage.memory_mb:,} in {stage.place}{again}; "
            + _room(problem, plan, cuts, number)
        )
        if number + 1 < len(plan.stages):
            said.append(_cut(problem, stage, plan.stages[number + 1]))
    return tuple(said)


def cuts_of(problem: PipelineProblem, plan: PlannedPipeline) -> tuple[Cut, ...]:
    """Return a pipeline's stages as decisions. A place that occurs twice is taken at its first possible position."""
    cuts, place = [], 0
    for stage in plan.stages:
        place = next(
            (n for n in range(place, len(problem.places)) if problem.places[n].name == stage.place), place
        )  # fmt: skip
        sizes = problem.places[place].sizes
        size = next(n for n, size in enumerate(sizes) if size.memory_mb == stage.memory_mb)
        cuts.append(Cut(stage.first, stage.last, place, size, stage.rematerialise))
    return tuple(cuts)


def _room(problem: PipelineProblem, plan: PlannedPipeline, cuts: Sequence[Cut], number: int) -> str:
    """Return what one more layer would need, or what a smaller function could not hold."""
    cut = cuts[number]
    sizes = problem.places[cut.place].sizes
    memory_mb, from_end = sizes[cut.size].memory_mb, len(cuts) - number
    if cut.last + 1 < len(problem.profile.layers):
        longer = Cut(cut.first, cut.last + 1, cut.place, cut.size, cut.rematerialise)
        # One stage less may follow; in 1F1B that never needs more.
        needed = held_bytes(problem, plan.way, longer, from_end) / MIB
        if needed > memory_mb:
            return f"one more would need {needed:,.0f} MB and not fit"
    smaller = [size.memory_mb for size in sizes if size.memory_mb < memory_mb]
    if smaller and max(smaller) < plan.stages[number].needed_mb:
        return f"the next smaller function has {max(smaller):,} MB and would not do"
    return "memory would allow others, balance and price decide"


def _cut(problem: PipelineProblem, stage: PlannedStage, after: PlannedStage) -> str:
    layers = problem.profile.layers
    own = layers[stage.last].output_bytes
    around = range(max(stage.first, stage.last - NEIGHBOURS), min(after.last, stage.last + 1 + NEIGHBOURS))
    others = [layers[n].output_bytes for n in around if n != stage.last]
    said = f"cut after layer {stage.last} ({layers[stage.last].name}): it sends {_mb(own)} MB a sample"
    if others and own < CLEARLY * min(others):
        said += f", its neighbours {_mb(min(others))} to {_mb(max(others))}"
    said += f"; a micro-batch computes {_seconds(stage)} before it and {_seconds(after)} behind it"
    return said + (f", and it crosses from {stage.place} to {after.place}" if stage.place != after.place else "")


def _layers(stage: PlannedStage) -> str:
    return f"layers {stage.first}-{stage.last}"


def _seconds(stage: PlannedStage) -> str:
    return f"{stage.forward_s + stage.backward_s:.2g} s"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.3g}"


def _count_cores(cores: float) -> str:
    return f"{cores:g} core{'s' if cores != 1 else ''}"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"
