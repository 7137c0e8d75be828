"""The front by plain dynamic programming: no bounds, no shorter chains, and a label goes only for one that is no larger
in anything. For chains too long to try everything. What a stage takes is said in `program`; problems of one place."""

from __future__ import annotations

from scheduler.pipeline import PipelineOptions, PipelineProblem

from .program import Stage, stages_of

Label = tuple[float, ...]
"""Forward: sum and slowest; backward: sum and slowest; ends, what keeps shared cores busy, rate, USD of requests."""


def plain_front(problem: PipelineProblem, ways: tuple[PipelineOptions, ...]) -> list[tuple[float, float]]:
    """Seconds and USD of an iteration, the fastest first."""
    found: list[tuple[float, float]] = []
    for way in ways:
        most = len(problem.profile.layers)
        if problem.most_workers is not None:
            most = min(most, problem.most_workers // way.degree)
        for number in range(1, most + 1):
            if problem.stages in (None, number):
                found += _of_stages(problem, way, number)
    best: list[tuple[float, float]] = []
    for seconds, usd in sorted(found):
        if not best or usd < best[-1][1]:
            best.append((seconds, usd))
    return best


def _of_stages(problem: PipelineProblem, way: PipelineOptions, number: int) -> list[tuple[float, float]]:
    """Of pipelines of so many stages."""
    more, length = way.micro_batches(problem.batch) - 1, len(problem.profile.layers)
    allowed = stages_of(problem, way, number)
    labels: dict[int, list[Label]] = {length: [(0.0,) * 8]}
    for at in reversed(range(number)):
        grown: dict[int, list[Label]] = {}
        for stage in (stage for stage in allowed if stage.number == at):
            behind = labels.get(stage.cut.last + 1, [])
            grown.setdefault(stage.cut.first, []).extend(_in_front(stage, way, more, label) for label in behind)
        labels = {first: _unbeaten(some) for first, some in grown.items()}
    ends = []
    for fill_f, beat_f, _, _, end, busy, rate, other in labels.get(0, []):
        seconds = max(fill_f + more * beat_f + end, busy)
        ends.append((seconds, seconds * rate + other))
    return ends


def _in_front(stage: Stage, way: PipelineOptions, more: int, label: Label) -> Label:
    fill_f, beat_f, fill_b, beat_b, end, busy, rate, other = label
    forward, backward = sum(stage.forward), sum(stage.backward)
    slow_f, slow_b = max(stage.forward), max(stage.backward)
    if way.order == "1f1b":
        slow_f, slow_b = forward + backward, 0.0
    fill_b, beat_b = fill_b + backward, max(beat_b, slow_b)
    end = max(end, fill_b + more * beat_b + stage.merge_s)
    paid = rate + stage.rate, other + stage.other_usd
    return fill_f + forward, max(beat_f, slow_f), fill_b, beat_b, end, busy + stage.busy_s, *paid


def _unbeaten(labels: list[Label]) -> list[Label]:
    kept: list[Label] = []
    for label in sorted(set(labels)):
        if not any(all(a <= b for a, b in zip(one, label, strict=True)) for one in kept):
            kept.append(label)
    return kept
