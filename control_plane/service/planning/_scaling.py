"""Jobs whose workers follow a tuner (`train.scaling`): what it is told of a running job, and what it wants then.

A worker keeps its batch, so that the batch of all goes with the workers, and the learning rate of a region with
`learning_rate_factor` of its own. The tuner's step is a round, its loss the goal's metric: that is what is to be
reached, and what the workers' own losses are on is other samples in each round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from control_plane.core import Goal, JobState, federated_metrics
from control_plane.spec import JobSpec
from scheduler import Plan, Staffed
from scheduler.deadline import Pace
from scheduler.scaling import (
    Decision,
    Observation,
    PublishedSettings,
    PublishedTuner,
    ScalingTuner,
    Terms,
    dealt,
    federated_terms,
    learning_rate_factor,
)
from scheduler.scaling import Goal as ScalingGoal

__all__ = ["Tuning", "batch_with", "begins_with", "is_tuned", "pool_of", "told", "tuned_paces"]

PATIENCE = 0.02
"""By how much longer than all workers would it may take a job that minimises time."""
_LEVEL = 1e-6
"""Between the rates of two numbers of workers that are as fast."""


def is_tuned(spec: JobSpec) -> bool:
    """Whether the batch goes with the workers."""
    return spec.train.scaling != "fixed"


def pool_of(chosen: Plan) -> dict[str, int]:
    """As many workers as the job may have, by region: as planned, where every one of them finds a sample in a step of
    one worker, since a round in which the batch is about to grow is ended with the batch of before."""
    return {part.region: min(part.workers, part.batch) for part in chosen.partitions}


def batch_with(spec: JobSpec, chosen: Plan, region: str, workers: int) -> tuple[int, float]:
    """Samples of a step of a region with so many workers, and what its learning rate is multiplied by; of a job that is
    not tuned, or pauses, 0: they stay.

    The optimiser's own rate is meant for as many workers as were planned. What counts is the region's own batch, since
    regions meet between rounds only.
    """
    part = next(part for part in chosen.partitions if part.region == region)
    if not is_tuned(spec) or not workers:
        return 0, 1.0
    return workers * part.batch, learning_rate_factor(workers, part.workers)


def begins_with(spec: JobSpec, chosen: Plan, staffed: Sequence[Staffed]) -> dict[str, int]:
    """Workers to begin with: all of the pool; where the plan chose it, and our tuner follows, so many as are cheaper
    for most of what the noise of gradients may be."""
    pool = pool_of(chosen)
    terms = _terms(chosen, staffed, pool)
    if spec.train.scaling != "tuned" or spec.train.workers != "auto" or terms is None:
        return pool
    deadline_s = None if spec.objective.deadline is None else 1.0
    tuner = ScalingTuner(terms, ScalingGoal(0.0, _patience(spec), deadline_s))
    return dealt(tuner.begin(), pool)


def tuned_paces(
    chosen: Plan, staffed: Sequence[Staffed], held: Mapping[str, int], *, promised: bool
) -> tuple[Pace, ...]:
    """The ways to staff a tuned job, each with no fewer workers anywhere than the one before.

    Fewer workers make a round with fewer samples, not a longer one: what is ``promised`` is that the planned rounds are
    made by then, which one worker does as well. To a job without a promise more are worth the progress that they make,
    in pools whose gradient noise is as large as the gradient (`scheduler.scaling`).
    """
    pool = pool_of(chosen)
    terms = _terms(chosen, staffed, pool)
    if terms is None:
        return ()
    slowest, most = 1 / max(terms.expected_seconds), terms.most
    ways = [dealt(workers, pool) for workers in range(terms.least, most + 1)]
    if all(held.get(region) for region in pool):
        # What it has now is one of them, also where somebody else has dealt it out.
        ways = [way for way in ways if way != dict(held) and _in_line(way, held)] + [{r: held[r] for r in sorted(pool)}]
    ways.sort(key=lambda way: sum(way.values()))

    def rate(place: int, workers: int) -> float:
        return slowest * (1 + place * _LEVEL if promised else 2 / (1 + most / workers))

    return tuple(Pace(way, rate(place, sum(way.values()))) for place, way in enumerate(ways))


def _in_line(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    differences = [one[region] - other[region] for region in one]
    return all(d >= 0 for d in differences) or all(d <= 0 for d in differences)


def _terms(chosen: Plan, staffed: Sequence[Staffed], pool: Mapping[str, int]) -> Terms | None:
    """None: a region is not known any more."""
    batches = {part.region: part.batch for part in chosen.partitions}
    if len(staffed) < len(pool):
        return None
    return federated_terms(
        [replace(one, batch=batches[one.region]) for one in staffed], pool, chosen.exchange_seconds
    )  # fmt: skip


def _patience(spec: JobSpec) -> float | None:
    return PATIENCE if spec.objective.minimise == "time" else None


@dataclass
class Tuning:
    """One running job's tuner. What it has seen is not kept over a restart of the control plane: it begins anew then,
    with the workers that there are."""

    pool: Mapping[str, int]
    samples_per_round: Mapping[str, int]
    """That one worker makes, by region."""
    goal: Goal
    terms: Terms
    tuner: ScalingTuner | PublishedTuner | None
    """None: it has failed, and nobody is asked any more."""
    _at: float | None = None
    _usd: float = 0.0
    _evaluated: int = 0
    """The last round whose metric was told to the tuner."""
    _rounds: dict[str, int] = field(default_factory=dict)
    """Completed then."""
    _samples: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: JobSpec, chosen: Plan, state: JobState, staffed: Sequence[Staffed]) -> Tuning | None:
        """None: not yet; a region is not known."""
        pool = pool_of(chosen)
        terms = _terms(chosen, staffed, pool)
        if terms is None or state.goal is None:
            return None
        tuner: ScalingTuner | PublishedTuner
        if spec.train.scaling == "mlless":
            # Its constant is of a step's loss, what it is told here comes after so many.
            slope = PublishedSettings.knee_slope * chosen.interval * state.goal.every
            tuner = PublishedTuner(PublishedSettings(least=len(pool), knee_slope=slope))
        else:
            ends = None if state.deadline_at is None else max(1.0, state.deadline_at - state.started_at)
            tuner = ScalingTuner(terms, ScalingGoal(state.goal.bound, _patience(spec), ends, chosen.rounds))
        made = {part.region: part.batch * part.steps_per_round for part in chosen.partitions}
        return cls(pool, made, state.goal, terms, tuner)

    def dealt(self, workers: int) -> dict[str, int]:
        """By region."""
        return dealt(workers, self.pool)

    def observe(self, state: JobState, at: float) -> tuple[Observation, Decision] | None:
        """What is new since the last time, as the tuner was told it, and its answer; None: nothing, or its tuner has
        failed.

        Raises what the tuner does: whoever asks calls `fails` then.
        """
        if self.tuner is None:
            return None
        told = self.observation(state, at)
        if told is None or not len(self.pool) <= told.workers <= sum(self.pool.values()):
            return None
        return told, self.tuner.observe(told)

    def fails(self, error: Exception, workers: int) -> tuple[str, dict[str, object]]:
        """The tuner broke on what it was told: the job continues with what it wanted last. For an event, as `told`."""
        self.tuner = None
        reason = f"the tuner has failed ({type(error).__name__}) and is not asked any more"
        return _worded(self._evaluated, Decision(workers, False, reason), workers, None)

    def observation(self, state: JobState, at: float) -> Observation | None:
        """All regions have measured a round again.

        Workers are as many as their samples since the last time say, since a change takes a round or two to come into
        force; between two they are rounded. Dollars are by the price list: what is metered of an invocation is told
        when it ends, up to a slice later.
        """
        reports = {part.region: part.report for part in state.partitions if part.report is not None}
        if len(reports) < len(self.pool):
            return None
        measured = [report.metrics_round for report in reports.values()]
        metric = federated_metrics(reports.values()).get(self.goal.metric)
        # Regions report when they can: to wait for all to be at the same round could be to wait for ever.
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
        at = max(at, before)  # a clock may be set back
        self._usd, self._at = self._usd + (at - before) * self.terms.rate(round(workers)), at
        return Observation(self._evaluated, at, metric, round(workers), self._usd)


def told(seen: Observation, decision: Decision) -> tuple[str, dict[str, object]]:
    """For an event: what the tuner would have changed, and why."""
    return _worded(seen.step, decision, seen.workers, seen.loss)


def _worded(step: int, decision: Decision, before: int, loss: float | None) -> tuple[str, dict[str, object]]:
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
