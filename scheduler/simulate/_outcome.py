"""The results of a simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

_IN_TIME_S = 1e-6
"""Tolerance for the rounding of instants, in seconds."""


@dataclass(frozen=True)
class JobOutcome:
    """The result for one job."""

    name: str
    submit_s: float
    deadline_s: float
    promised_s: float
    """Infinite: no promise."""
    declined: bool
    started_s: float
    ended_s: float
    device_s: float
    value: float
    best_effort: bool
    user: str

    @property
    def met(self) -> bool:
        """Ended by its first deadline."""
        return not self.best_effort and self.ended_s <= self.deadline_s + _IN_TIME_S

    @property
    def broken(self) -> bool:
        """Had a promise that was not kept."""
        return math.isfinite(self.promised_s) and self.ended_s > self.promised_s + _IN_TIME_S


@dataclass(frozen=True)
class SimulationRun:
    """The results of one simulation."""

    policy: str
    devices: int
    outcomes: tuple[JobOutcome, ...]
    decisions: int
    changes: int
    """Decisions that changed a share."""
    moved: int
    """Jobs that buddy placement moved to make room."""
    failures: int
    timeline: tuple[tuple[float, int, int], ...]
    """(instant, devices in use, jobs in the system) after each decision."""

    @property
    def met(self) -> int:
        """Number of jobs that ended by their first deadline."""
        return sum(outcome.met for outcome in self.outcomes)

    @property
    def ratio(self) -> float:
        """Deadlines met of all jobs that had one; declined ones count as not met."""
        return self.met / max(1, sum(not outcome.best_effort for outcome in self.outcomes))

    @property
    def promised(self) -> int:
        """Number of jobs that had a promise."""
        return sum(math.isfinite(outcome.promised_s) for outcome in self.outcomes)

    @property
    def broken(self) -> int:
        """Number of jobs whose promise was not kept."""
        return sum(outcome.broken for outcome in self.outcomes)
