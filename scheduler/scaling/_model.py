"""Input and output of a tuner of the number of workers."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_LOSS = 1e60
"""Magnitude of a loss beyond which a step is ignored: curves are fitted to its fourth power."""


@dataclass(frozen=True)
class StepObservation:
    """A completed step; or several steps, where not each of them is reported."""

    step: int
    """Number of the step, from 1. The observation covers all steps since the one before."""
    at_seconds: float
    """When it ended, by any running clock; only differences count."""
    loss: float
    """Mean over the samples of all workers."""
    workers: int
    """Number of workers that made it."""
    usd: float
    """Spent until then."""


@dataclass(frozen=True)
class ScalingDecision:
    """The number of workers to continue with."""

    workers: int
    changed: bool
    reason: str
    """Text for users."""
    seconds_left: tuple[float, float] | None = None
    """Seconds to the target with those workers, as an interval; None: unknown."""
    usd_left: tuple[float, float] | None = None


def is_informative(step: StepObservation) -> bool:
    """Whether anything can be learned of its loss: neither of one that is not finite nor of a boundless one."""
    return abs(step.loss) <= LARGEST_LOSS


@dataclass(frozen=True)
class StepCosts:
    """What is known before the first step."""

    expected_seconds: tuple[float, ...]
    """Planned seconds of a step with 1, 2, ... workers; measurements correct them. The length is the largest number of
    workers."""
    worker_usd_per_second: float
    usd_per_second: float
    """Cost that does not depend on the workers."""
    join_seconds: float
    """Seconds for which all workers stand still when workers join."""
    least: int = 1
    leave_seconds: float | None = None
    """Seconds for which all workers stand still when workers leave. None: they leave after a merge, which is repeated
    once."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"workers cannot be between {self.least} and {self.most}")
        if min(self.expected_seconds) <= 0 or min(self.join_seconds, self.leave_seconds or 0.0) < 0:
            raise ValueError("a step takes more than no time, and joining and leaving no less than none")

    @property
    def most(self) -> int:
        """Largest number of workers that the job may have."""
        return len(self.expected_seconds)

    def rate(self, workers: int) -> float:
        """Dollars a second."""
        return self.usd_per_second + workers * self.worker_usd_per_second


@dataclass(frozen=True)
class ScalingGoal:
    """The target of a job and its time limits; without limits, it is reached at the least cost."""

    target_loss: float
    patience: float | None = 0.02
    """Share by which it may take longer than with all workers from first to last; None: any longer."""
    deadline_seconds: float | None = None
    """Seconds from the first step."""
    most_steps: int | None = None
    """Number of steps after which the job ends in any case; None: no limit."""
