"""When a job may end before its plan: its metric is good enough, or its money is spent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from control_plane.core._state import JobState, Report

__all__ = ["Reached", "federated_metrics", "may_end_early", "metrics_without_goal", "reached"]


_ROUNDS_APART = 16
"""Rounds by which regions with background exchange are together, though one is late (docs/wan.md)."""


@dataclass(frozen=True)
class Reached:
    """Why a job ends early."""

    text: str
    data: dict[str, Any]


def federated_metrics(reports: Iterable[Report]) -> dict[str, float]:
    """Over the regions, weighted by the samples that each was measured on."""
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    for report in reports:
        for name, value in report.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * report.metrics_samples
            weights[name] = weights.get(name, 0) + report.metrics_samples
    return {name: sums[name] / weights[name] for name in sums if weights[name]}


def may_end_early(state: JobState) -> bool:
    """Where one region has made its last round by the plan, the others are about to."""
    return state.phase == "running" and not state.ends_early and all(p.state != "finished" for p in state.partitions)


def reached(state: JobState) -> Reached | None:
    """Whether the goal or the budget has been reached, by the last reports of all regions; None: it continues."""
    reports = [part.report for part in state.partitions if part.report is not None]
    return _spent(state, reports) or _good_enough(state, reports)


def metrics_without_goal(state: JobState) -> list[str] | None:
    """What is measured, where all regions have measured something and none the goal's metric; None: all is well."""
    metrics = _measured(state, [part.report for part in state.partitions if part.report is not None])
    if state.goal is None or metrics is None or state.goal.metric in metrics:
        return None
    return sorted(metrics)


def _spent(state: JobState, reports: list[Report]) -> Reached | None:
    handed = [copy.report for copy in state.copies if copy.report is not None]
    usd = sum(charge.usd for report in (*reports, *handed) for charge in report.money)
    if state.budget_usd is None or usd < state.budget_usd:
        return None
    text = f"the budget of {state.budget_usd:.4f} USD is spent"
    return Reached(text, {"usd": usd, "budget_usd": state.budget_usd})


def _good_enough(state: JobState, reports: list[Report]) -> Reached | None:
    metrics, goal = _measured(state, reports), state.goal
    if goal is None or metrics is None or goal.metric not in metrics:
        return None
    value = metrics[goal.metric]
    if not (value >= goal.bound if goal.at_least else value <= goal.bound):
        return None
    sign = "at least" if goal.at_least else "at most"
    text = f"{goal.metric} is {value:.4f}, and was to be {sign} {goal.bound:g}"
    newest = max(report.metrics_round for report in reports)
    return Reached(text, {"metric": goal.metric, "value": value, "bound": goal.bound, "round": newest})


def _measured(state: JobState, reports: list[Report]) -> dict[str, float] | None:
    """The last metrics of all regions; None where they are neither all of one evaluation or the next, nor of rounds
    that are as near as those of regions which wait for each other are.

    Regions report when they can: to wait for all to be at the same round could be to wait for ever.
    """
    goal = state.goal
    if goal is None or len(reports) < len(state.partitions):
        return None
    rounds = [report.metrics_round for report in reports]
    if min(rounds) <= 0 or max(rounds) - min(rounds) > max(goal.every, _ROUNDS_APART):
        return None
    return federated_metrics(reports)
