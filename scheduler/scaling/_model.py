"""What a tuner of the number of workers is told, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_LOSS = 1e60
"""Beyond it, on either side of zero, what a step told is not looked at: curves are fitted to its fourth power."""


@dataclass(frozen=True)
class StepObservation:
    """One step, as it ended; or several alike, where not each of them is told."""

    step: int
    """From 1 on. What is told is of all steps since the one before."""
    at_seconds: float
    """When it ended, by any clock under way; only differences count."""
    loss: float
    """Mean over the samples of all workers."""
    workers: int
    """Who made it."""
    usd: float
    """Spent until then."""


@dataclass(frozen=True)
class ScalingDecision:
    """With how many workers to continue."""

    workers: int
    changed: bool
    reason: str
    """For people."""
    seconds_left: tuple[float, float] | None = None
    """To the target with those workers, an interval; None: not known."""
    usd_left: tuple[float, float] | None = None


def tells(step: StepObservation) -> bool:
    """Whether anything can be learned of its loss: neither of one that is not finite nor of a boundless one."""
    return abs(step.loss) <= LARGEST_LOSS


@dataclass(frozen=True)
class Terms:
    """What is known beforehand."""

    expected_seconds: tuple[float, ...]
    """Of a step with 1, 2, ... workers, as planned; what is measured corrects it. Its length is the most workers."""
    worker_usd_per_second: float
    usd_per_second: float
    """Of what does not depend on the workers."""
    join_seconds: float
    """For which all stand still when workers join."""
    least: int = 1
    leave_seconds: float | None = None
    """The same, when workers leave. None: they do so after a merge, which is made once more."""

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
    """What a job is to reach, and in which time; with neither bound, for as little money as can be."""

    target_loss: float
    patience: float | None = 0.02
    """By how much longer it may take than all workers would from first to last; None: any longer."""
    deadline_seconds: float | None = None
    """From the first step on."""
    most_steps: int | None = None
    """After which the job ends anyway, with any number of workers; None: it does not."""
