"""Points at which the workers of a partition wait for each other: the merge of a step, and the evaluation of a
round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from geofed_pb.bounds import MOST_LOGGED, bounded_metrics, clean
from sync.histograms import bounded, sums_by_name
from sync.ps.core.actions import Action, MergeGradients, Refuse, Reply, StoreMetrics
from sync.ps.core.answers import EvaluatedAnswer, ReduceAnswer
from sync.ps.core.events import BoundaryArrived, Evaluated, GradientsMerged, LoggedSums, ReduceArrived, ResourceUsage

__all__ = ["LoggedValues", "ModelEvaluation", "StepMerge", "mean_loss", "usage_of"]


@dataclass
class StepMerge:
    """The gradients of the current step, from one attempt's workers."""

    workers: int
    parts: dict[int, ReduceArrived] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    """Waiting calls, and the step that each waits for."""
    merging: int = 0
    """The step whose gradients are being merged; 0: none."""
    merged: dict[int, GradientsMerged] = field(default_factory=dict)
    """Results of the last two steps, for a worker that missed the answer."""

    def arrived(self, event: ReduceArrived) -> list[Action]:
        """Add a worker's gradient. The last gradient of a step starts the merge."""
        if event.step in self.merged:
            return [Reply(event.call, _answer(self.merged[event.step]))]
        held = next(iter(self.parts.values()), None)
        if held is not None and event.step < held.step:
            return [Refuse(event.call, "FENCED", f"step {event.step} is over")]
        self.waiting[event.call] = event.step
        if event.step == self.merging:
            return []
        if held is not None and held.step != event.step:
            self.parts.clear()
        self.parts[event.worker] = event
        if len(self.parts) < self.workers:
            return []
        parts = [part for _, part in sorted(self.parts.items())]
        self.parts, self.merging = {}, event.step
        return [
            MergeGradients(
                event.attempt, event.step, tuple((part.key, part.samples) for part in parts), mean_loss(parts)
            )
        ]

    def done(self, event: GradientsMerged) -> list[Action]:
        """Answer the workers, because the merged gradient is in the channel."""
        self.merging = 0
        self.merged[event.step] = event
        for step in [step for step in self.merged if step < event.step - 1]:
            del self.merged[step]
        ready = [call for call, step in self.waiting.items() if step == event.step]
        for call in ready:
            del self.waiting[call]
        return [Reply(call, _answer(event)) for call in ready]


@dataclass
class ModelEvaluation:
    """The workers' measurements of the current model."""

    workers: int
    parts: dict[int, Evaluated] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Calls to answer once the metrics are durable."""
    keeping: bool = False
    """Whether the metrics are being made durable."""

    def arrived(self, event: Evaluated) -> list[Action]:
        """Add a worker's measurement. The last one yields the metrics, which are made durable."""
        self.parts[event.worker] = event
        self.waiting.add(event.call)
        if len(self.parts) < self.workers or self.keeping:
            return []
        self.keeping = True
        return [_mean_metrics(event.sequence, [part for _, part in sorted(self.parts.items())])]

    def done(self) -> list[Action]:
        """Answer the workers, because the metrics are durable."""
        return [Reply(call, EvaluatedAnswer()) for call in sorted(self.waiting)]


@dataclass
class LoggedValues:
    """What the task's code has logged in the workers, by round."""

    sequence: int = 0
    """Last round whose values are complete; 0: none."""
    means: dict[str, float] = field(default_factory=dict)
    """Means of that round over all values that its workers have logged, by name."""
    parts: dict[int, dict[int, Mapping[str, tuple[float, int]]]] = field(default_factory=dict)
    """Sums and numbers of values in later rounds, by round and worker."""

    def add(self, worker: int, last: int, logged: LoggedSums) -> None:
        """Add what a worker has reported of rounds up to ``last``, in place of what it has reported of them before."""
        for sequence, sums in logged.items():
            if self.sequence < sequence <= last:
                self.parts.setdefault(sequence, {})[worker] = sums

    def complete(self, sequence: int) -> None:
        """Compute the means of a round, and forget those before."""
        if sequence <= self.sequence:
            return
        sums: dict[str, tuple[float, int]] = {}
        for _, of_worker in sorted(self.parts.get(sequence, {}).items()):
            for name, (total, count) in of_worker.items():
                if name in sums or len(sums) < MOST_LOGGED:
                    before, counted = sums.get(name, (0.0, 0))
                    sums[name] = before + total, counted + count
        self.sequence = sequence
        self.means = {name: total / count for name, (total, count) in sums.items() if count}
        self.parts = {one: part for one, part in self.parts.items() if one > sequence}


def usage_of(parts: list[BoundaryArrived]) -> ResourceUsage:
    """Return what the workers have used together: the sum of their cores, and the memory of the largest."""
    used = [part.usage for part in parts]
    return ResourceUsage(
        sum(one.cpu_cores for one in used),
        max(one.memory_bytes for one in used),
        max(one.gpu_memory_bytes for one in used),
    )


def _answer(event: GradientsMerged) -> ReduceAnswer:
    return ReduceAnswer(event.key, event.samples)


def _mean_metrics(sequence: int, parts: list[Evaluated]) -> StoreMetrics:
    error = next((part.error for part in parts if part.error), "")
    if any(part.error and not part.metrics and not part.histograms for part in parts):
        return StoreMetrics(sequence, 0.0, {}, clean(error))
    total = sum(part.samples for part in parts)
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * part.samples
    kept, left_out = bounded_metrics({name: value / total for name, value in sums.items()} if total else {})
    summed, unlike = sums_by_name(part.histograms for part in parts)
    histograms, beyond = bounded(summed)
    return StoreMetrics(sequence, total, kept, clean(error or left_out or unlike or beyond), histograms)


def mean_loss(parts: list[ReduceArrived] | list[BoundaryArrived]) -> float:
    """Return the mean of the workers' losses, weighted by their samples."""
    total = sum(part.samples for part in parts)
    return sum(part.loss * part.samples for part in parts) / total if total else 0.0
