"""Early end of a job: its goal is reached, or its budget is spent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from control_plane._figures import metric_text
from control_plane.core._state import Evaluation, JobState, Report
from sync.histograms import Histogram, bounded, sums_by_name

__all__ = [
    "EndReason",
    "federated_histograms",
    "federated_metrics",
    "is_together",
    "may_end_early",
    "metrics_lacking_goal",
    "reached",
]


_MAX_ROUNDS_APART = 16
"""Largest difference in rounds at which regions with background exchange still count as together (docs/wan.md)."""


@dataclass(frozen=True)
class EndReason:
    """Why a job ends early."""

    text: str
    data: dict[str, Any]


def federated_metrics(evaluations: Iterable[Evaluation]) -> dict[str, float]:
    """Return the mean of each metric over the regions, weighted by the number of evaluated samples."""
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    for one in evaluations:
        for name, value in one.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * one.samples
            weights[name] = weights.get(name, 0) + one.samples
    return {name: sums[name] / weights[name] for name in sums if weights[name]}


def federated_histograms(evaluations: Iterable[Evaluation]) -> tuple[dict[str, Histogram], str]:
    """Return the sum of each histogram over the regions, and a text that says what was left out; empty: nothing."""
    sums, unlike = sums_by_name(one.histograms for one in evaluations)
    kept, beyond = bounded(sums)
    return kept, unlike or beyond


def may_end_early(state: JobState) -> bool:
    """Whether the job can still be ended early: it runs, and no region has finished its last planned round."""
    return state.phase == "running" and not state.ends_early and all(p.state != "finished" for p in state.partitions)


def reached(state: JobState, at: float) -> EndReason | None:
    """Return why the job ends early by the time and the last reports of all regions; None: it continues."""
    reports = [part.report for part in state.partitions if part.report is not None]
    ends = _budget_spent(state, reports) or _goal_reached(state, reports) or _not_improved(state)
    return ends or _time_over(state, at)


def metrics_lacking_goal(state: JobState) -> list[str] | None:
    """Return the names of the measured metrics if all regions report metrics but none the goal's; else None."""
    metrics = _measured(state, [part.report for part in state.partitions if part.report is not None])
    if state.goal is None or metrics is None or state.goal.metric in metrics:
        return None
    return sorted(metrics)


def _budget_spent(state: JobState, reports: list[Report]) -> EndReason | None:
    """Return why the job ends if the budget does not last for another round: it ends with a round of all regions.

    So it costs at most one round more than the budget, if each round is reported.
    """
    usd = state.usd
    round_usd = sum(report.totals.usd / report.round for report in reports if report.round)
    if state.budget_usd is None or usd + round_usd < state.budget_usd:
        return None
    text = f"the budget of {state.budget_usd:.4f} USD is spent, but for less than another round costs"
    return EndReason(text, {"usd": usd, "round_usd": round_usd, "budget_usd": state.budget_usd})


def _goal_reached(state: JobState, reports: list[Report]) -> EndReason | None:
    metrics, goal = _measured(state, reports), state.goal
    if goal is None or metrics is None or goal.metric not in metrics:
        return None
    value = metrics[goal.metric]
    if not (value >= goal.bound if goal.at_least else value <= goal.bound):
        return None
    sign = "at least" if goal.at_least else "at most"
    text = f"{goal.metric} is {metric_text(value)}; the goal is {sign} {goal.bound:g}"
    newest = max(report.evaluation.round for report in reports)
    return EndReason(text, {"metric": goal.metric, "value": value, "bound": goal.bound, "round": newest})


def _not_improved(state: JobState) -> EndReason | None:
    models, metric = state.models, state.keep.metric
    if not state.patience or models.not_improved < state.patience:
        return None
    text = f"{metric} has not improved in {models.not_improved} evaluations since round {models.best_round}"
    best = {"metric": metric, "value": models.best_value, "best_round": models.best_round}
    return EndReason(f"{text}, where it was {metric_text(models.best_value)}", {**best, "round": models.evaluated})


def _time_over(state: JobState, at: float) -> EndReason | None:
    limit = state.time_limit_seconds
    if limit is None or not state.started_at or at - state.started_at < limit:
        return None
    return EndReason(f"the training time of {limit:.0f} s is over", {"seconds": at - state.started_at})


def is_together(rounds: list[int], every: int) -> bool:
    """Whether evaluations of these rounds, one of each region, may be put together; ``every``: their interval."""
    return min(rounds) > 0 and max(rounds) - min(rounds) <= max(every, _MAX_ROUNDS_APART)


def _measured(state: JobState, reports: list[Report]) -> dict[str, float] | None:
    """Return the federated metrics of the regions' latest evaluations.

    Return None if a region has no evaluation, or if their rounds differ by more than both the evaluation interval and
    `_MAX_ROUNDS_APART`. Equal rounds are not required, since regions report independently and may never be at the same
    round.
    """
    goal = state.goal
    if goal is None or len(reports) < len(state.partitions):
        return None
    evaluations = [report.evaluation for report in reports]
    if not is_together([one.round for one in evaluations], goal.every):
        return None
    return federated_metrics(evaluations)
