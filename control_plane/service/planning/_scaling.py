"""Tuned jobs (`train.scaling`), whose number of workers a tuner changes while they run.

Each worker keeps its batch, so that the global batch is proportional to the workers; the learning rate of a region is
scaled by `learning_rate_factor`. The tuner's step is a round, and its loss the goal's metric, since the workers' own
losses are on other samples in each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from control_plane.core import Goal, JobState, federated_metrics
from control_plane.spec import JobSpec
from scheduler import Plan, RunningRegion
from scheduler.deadline import AssignmentPace
from scheduler.scaling import (
    PublishedSettings,
    PublishedTuner,
    ScalingDecision,
    ScalingTuner,
    StepCosts,
    StepObservation,
    federated_step_costs,
    learning_rate_factor,
    workers_by_region,
)
from scheduler.scaling import ScalingGoal as ScalingGoal

__all__ = ["Tuning", "batch_with", "begins_with", "is_tuned", "pool_of", "told", "tuned_paces"]

TIME_TOLERANCE = 0.02
"""Relative time by which a tuned job that minimises time may be slower than with all workers."""
_RATE_STEP = 1e-6
"""Relative difference between the rates of two equally fast numbers of workers, so that they stay in order."""


def is_tuned(spec: JobSpec) -> bool:
    """Whether a tuner changes the job's number of workers, and with it the batch."""
    return spec.train.scaling != "fixed"


def pool_of(chosen: Plan) -> dict[str, int]:
    """Return the most workers that a tuned job may have, by region: as planned, but at most the batch of one worker.

    A round that begins before a scale-out ends with the old batch, which may be that of one worker, and each worker
    needs a sample of it.
    """
    return {part.region: min(part.workers, part.batch) for part in chosen.partitions}


def batch_with(spec: JobSpec, chosen: Plan, region: str, workers: int) -> tuple[int, float]:
    """Return the batch of a region's step with `workers` workers, and the factor of its learning rate.

    A batch of 0 means unchanged: the job is not tuned, or pauses. The optimiser's own rate belongs to the planned
    number of workers. The region's own batch counts, since regions merge only between rounds.
    """
    part = next(part for part in chosen.partitions if part.region == region)
    if not is_tuned(spec) or not workers:
        return 0, 1.0
    return workers * part.batch, learning_rate_factor(workers, part.workers)


def begins_with(spec: JobSpec, chosen: Plan, assigned: Sequence[RunningRegion]) -> dict[str, int]:
    """Return the workers that a tuned job starts with, by region.

    That is the whole pool, unless the plan has chosen it and the job uses our tuner, which then starts with the number
    that is cheaper for most plausible scales of gradient noise.
    """
    pool = pool_of(chosen)
    terms = _terms(chosen, assigned, pool)
    if spec.train.scaling != "tuned" or spec.train.workers != "auto" or terms is None:
        return pool
    deadline_s = None if spec.objective.deadline is None else 1.0
    tuner = ScalingTuner(terms, ScalingGoal(0.0, _time_tolerance(spec), deadline_s))
    return workers_by_region(tuner.begin(), pool)


def tuned_paces(
    chosen: Plan, assigned: Sequence[RunningRegion], held: Mapping[str, int], *, promised: bool
) -> tuple[AssignmentPace, ...]:
    """Return the possible numbers of workers of a tuned job with their rates; each has no fewer workers anywhere than
    the one before.

    Fewer workers make a round with fewer samples, but not a longer one. A promise (``promised``) concerns the time of
    the planned rounds, which one worker meets as well. Without a promise, the rate is the progress of the loss,
    assuming gradient noise as large as the gradient (`scheduler.scaling`).
    """
    pool = pool_of(chosen)
    terms = _terms(chosen, assigned, pool)
    if terms is None:
        return ()
    slowest, most = 1 / max(terms.expected_seconds), terms.most
    ways = [workers_by_region(workers, pool) for workers in range(terms.least, most + 1)]
    if all(held.get(region) for region in pool):
        # The present numbers are one of them, even if they were not set by the tuner.
        ways = [way for way in ways if way != dict(held) and _is_monotonic(way, held)] + [
            {r: held[r] for r in sorted(pool)}
        ]
    ways.sort(key=lambda way: sum(way.values()))

    def rate(place: int, workers: int) -> float:
        return slowest * (1 + place * _RATE_STEP if promised else 2 / (1 + most / workers))

    return tuple(AssignmentPace(way, rate(place, sum(way.values()))) for place, way in enumerate(ways))


def _is_monotonic(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    differences = [one[region] - other[region] for region in one]
    return all(d >= 0 for d in differences) or all(d <= 0 for d in differences)


def _terms(chosen: Plan, assigned: Sequence[RunningRegion], pool: Mapping[str, int]) -> StepCosts | None:
    """Return the tuner's cost and speed model; None if a region is not known any more."""
    batches = {part.region: part.batch for part in chosen.partitions}
    if len(assigned) < len(pool):
        return None
    return federated_step_costs(
        [replace(one, batch=batches[one.region]) for one in assigned], pool, chosen.exchange_seconds
    )  # fmt: skip


def _time_tolerance(spec: JobSpec) -> float | None:
    return TIME_TOLERANCE if spec.objective.minimise == "time" else None


@dataclass
class Tuning:
    """Tuner of one running job. Its observations are kept in memory only; after a restart of the control plane it
    starts again with the present workers."""

    pool: Mapping[str, int]
    """Most workers by region."""
    samples_per_round: Mapping[str, int]
    """Samples of one worker in a round, by region."""
    goal: Goal
    terms: StepCosts
    tuner: ScalingTuner | PublishedTuner | None
    """None: the tuner has failed, and is not asked any more."""
    _at: float | None = None
    """Time of the last observation."""
    _usd: float = 0.0
    """Cost up to the last observation."""
    _evaluated: int = 0
    """Last round whose metric was observed."""
    _rounds: dict[str, int] = field(default_factory=dict)
    """Completed rounds by region at the last observation."""
    _samples: dict[str, int] = field(default_factory=dict)
    """Processed samples by region at the last observation."""

    @classmethod
    def of(cls, spec: JobSpec, chosen: Plan, state: JobState, assigned: Sequence[RunningRegion]) -> Tuning | None:
        """Create the tuner of a job; None if the job has no goal or a region is not known."""
        pool = pool_of(chosen)
        terms = _terms(chosen, assigned, pool)
        if terms is None or state.goal is None:
            return None
        tuner: ScalingTuner | PublishedTuner
        if spec.train.scaling == "mlless":
            # The published constant is per step, but this tuner observes once per evaluation.
            slope = PublishedSettings.knee_slope * chosen.interval * state.goal.every
            tuner = PublishedTuner(PublishedSettings(least=len(pool), knee_slope=slope))
        else:
            ends = None if state.deadline_at is None else max(1.0, state.deadline_at - state.started_at)
            tuner = ScalingTuner(terms, ScalingGoal(state.goal.bound, _time_tolerance(spec), ends, chosen.rounds))
        made = {part.region: part.batch * part.steps_per_round for part in chosen.partitions}
        return cls(pool, made, state.goal, terms, tuner)

    def workers_by_region(self, workers: int) -> dict[str, int]:
        """Distribute a number of workers to the regions."""
        return workers_by_region(workers, self.pool)

    def observe(self, state: JobState, at: float) -> tuple[StepObservation, ScalingDecision] | None:
        """Pass a new evaluation to the tuner; return it and the decision, or None if there is nothing new.

        Raises what the tuner raises; the caller then calls `fails`.
        """
        if self.tuner is None:
            return None
        seen = self.observation(state, at)
        if seen is None or not len(self.pool) <= seen.workers <= sum(self.pool.values()):
            return None
        return seen, self.tuner.observe(seen)

    def fails(self, error: Exception, workers: int) -> tuple[str, dict[str, object]]:
        """Disable the tuner after it has raised; the job keeps its last workers. Return text and data of an event."""
        self.tuner = None
        reason = f"the tuner has failed ({type(error).__name__}) and is not asked any more"
        return _event_of(self._evaluated, ScalingDecision(workers, False, reason), workers, None)

    def observation(self, state: JobState, at: float) -> StepObservation | None:
        """Return an observation for the tuner if all regions have evaluated a new round, else None.

        The number of workers is computed from the processed samples, since a change of workers takes effect a round or
        two later, and is rounded. Costs are computed from prices, since an invocation's meter is reported only when it
        ends, up to a slice later.
        """
        reports = {part.region: part.report for part in state.partitions if part.report is not None}
        if len(reports) < len(self.pool):
            return None
        measured = [report.evaluation.round for report in reports.values()]
        metric = federated_metrics(report.evaluation for report in reports.values()).get(self.goal.metric)
        # Regions report independently and may never be at the same round.
        late = max(measured) - min(measured) > self.goal.every
        if late or metric is None or not math.isfinite(metric) or min(measured) <= self._evaluated:
            return None
        workers = 0.0
        for region, report in reports.items():
            rounds = report.round - self._rounds.get(region, 0)
            made = report.samples - self._samples.get(region, 0)
            if rounds <= 0:
                return None
            workers += made / (rounds * self.samples_per_round[region])
        self._evaluated = min(measured)
        self._rounds = {region: report.round for region, report in reports.items()}
        self._samples = {region: report.samples for region, report in reports.items()}
        before = state.started_at if self._at is None else self._at
        at = max(at, before)  # the clock may have been set back
        self._usd, self._at = self._usd + (at - before) * self.terms.rate(round(workers)), at
        return StepObservation(self._evaluated, at, metric, round(workers), self._usd)


def told(seen: StepObservation, decision: ScalingDecision) -> tuple[str, dict[str, object]]:
    """Return text and data of the event for a tuner's decision."""
    return _event_of(seen.step, decision, seen.workers, seen.loss)


def _event_of(step: int, decision: ScalingDecision, before: int, loss: float | None) -> tuple[str, dict[str, object]]:
    text = f"{before} → {decision.workers} workers after round {step}: {decision.reason}"
    data: dict[str, object] = {
        "before": before,
        "workers": decision.workers,
        "reason": decision.reason,
        "round": step,
        "loss": loss,
        "seconds_left": decision.seconds_left,
        "usd_left": decision.usd_left,
    }
    return text, data
