"""Published rules that choose workers, on the planner's own model: baselines that a user can ask for.

A rule chooses the workers of every region, their memory and their collective. Data stay where they are, and updates are
sent in the least lossy codec, as in the published systems; interval, topology and exchange are searched as always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler._cost_model import Assignments, Floats
from scheduler.search import Ints, PlanEvaluation

__all__ = ["METHODS", "PublishedMethod"]


@dataclass(frozen=True)
class PublishedMethod:
    """One rule."""

    assignment: Callable[[PlanEvaluation], Ints]
    """Chooses a configuration for each region of those that there are; shape (regions,)."""
    collective: str | None = None
    """What its workers merge by; None: as the plan chooses."""
    by_region: bool = False
    """Whether it chooses the configuration of each region alone, from its profile (`fasdl_heuristic`)."""


def _passes(assignments: Assignments, evaluation: PlanEvaluation) -> Floats:
    """Return the seconds of a pass over each shard; shape (regions, configurations)."""
    return np.asarray(evaluation.samples[:, None] / assignments.step_samples * assignments.step_seconds)


def _greedy(evaluation: PlanEvaluation) -> Ints:
    """All workers that are free in each region, at the memory with which they are fastest."""
    assignments = evaluation.configured
    most = assignments.step_samples >= assignments.step_samples.max(axis=1, keepdims=True)
    return np.asarray(np.where(most, _passes(assignments, evaluation), np.inf).argmin(axis=1))


def _load_power(evaluation: PlanEvaluation) -> Ints:
    """Load-power matching (Cloudless-Training, arXiv 2303.05330): the region that is slowest with all its
    workers sets the pace, and each takes what costs least of what keeps it."""
    assignments = evaluation.configured
    passes = _passes(assignments, evaluation)
    pace = passes.min(axis=1).max()
    return np.asarray(np.where(passes <= pace * (1 + 1e-9), assignments.worker_usd, np.inf).argmin(axis=1))


def _only(evaluation: PlanEvaluation) -> Ints:
    """What each region has chosen by itself, the first of its configurations."""
    return np.zeros(len(evaluation.sizes), np.int64)


METHODS = {
    "load-power": PublishedMethod(_load_power),
    "fasdl": PublishedMethod(_only, collective="k-reduce", by_region=True),
    "greedy": PublishedMethod(_greedy),
}
"""Rules by name."""
