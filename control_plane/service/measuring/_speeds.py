"""Measured speeds of running jobs, and the numbers of workers that they would prefer by these.

The scheduler decides (`scheduler.worker_change`); this module collects speeds and limits how often it is asked. It is
asked for jobs whose file leaves the number of workers to the plan, while all their regions are reachable and train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from control_plane.core import Report
from control_plane.service.planning._scaling import Tuning

__all__ = ["FEWEST_ROUNDS", "FIRST_REST_SECONDS", "REVIEW_SECONDS", "JobSpeeds"]

REVIEW_SECONDS = 5.0
"""Least time between two reviews of a job."""
FEWEST_ROUNDS = 3
"""Number of rounds of a region since the last change before its speed counts as known."""
FIRST_REST_SECONDS = 10.0
"""Least time between two changes; it doubles with each change, so that a job does not oscillate."""
_SMOOTHING = 0.3
"""Weight of the latest round in the moving average of a region's speed."""


@dataclass
class _Pace:
    """One region's speed since the last change."""

    seen_round: int = -1
    rounds: int = 0
    samples_per_second: float = 0.0

    def record(self, report: Report) -> None:
        speed = report.speed.round_samples_per_second
        if report.round <= self.seen_round or speed <= 0:
            return
        if self.seen_round >= 0:
            # The first report may be of a round before the change.
            known = self.samples_per_second or speed
            self.samples_per_second = (1 - _SMOOTHING) * known + _SMOOTHING * speed
            self.rounds += 1
        self.seen_round = report.round


@dataclass
class JobSpeeds:
    """Speeds and preferred workers of one job, kept in memory only."""

    wanted: dict[str, int] = field(default_factory=dict)
    """Workers by region that the job would prefer if no other job needed any; empty: as planned."""
    reason: str = ""
    """Why it prefers these."""
    late: bool = False
    """Whether it was recorded that its promise is in danger."""
    tuning: Tuning | None = None
    """Tuner of a tuned job, from its first round on."""
    _paces: dict[str, _Pace] = field(default_factory=dict)
    _known: dict[str, float] = field(default_factory=dict)
    """Speeds before the last change, in samples/s of one worker."""
    _reviewed: float = 0.0
    _changes: int = 0
    _changed: float = 0.0
    _last_review: dict[str, int] = field(default_factory=dict)
    """Workers that the last review preferred."""

    def record(self, region: str, report: Report) -> None:
        """Record an agent's report."""
        self._paces.setdefault(region, _Pace()).record(report)

    def version(self) -> tuple[object, ...]:
        """Return what changes whenever `speed` or `wanted` may have changed; the same of all jobs without either."""
        known = (pace for pace in self._paces.values() if pace.rounds >= FEWEST_ROUNDS)
        return (
            self.wanted or None,
            self._known or None,
            *(count for pace in known for count in (pace.rounds, id(pace))),
        )

    def speed(self, region: str) -> float | None:
        """Return the measured samples/s of one worker; None: not measured yet."""
        pace = self._paces.get(region)
        if pace is not None and pace.rounds >= FEWEST_ROUNDS:
            return pace.samples_per_second
        return self._known.get(region)

    def rested(self, at: float) -> bool:
        """Whether the last change is long enough ago for an optional one."""
        if self.tuning is not None:
            return True  # the tuner limits its changes itself
        rest = FIRST_REST_SECONDS * 2 ** (self._changes - 1) if self._changes else 0.0
        return at >= self._changed + rest

    def due(self, regions: Iterable[str], at: float) -> bool:
        """Whether it is time for a review; it then counts as done."""
        known = all((pace := self._paces.get(name)) is not None and pace.rounds >= FEWEST_ROUNDS for name in regions)
        if not (known and self.rested(at) and at >= self._reviewed + REVIEW_SECONDS):
            return False
        self._reviewed = at
        return True

    def tuned_by_now(self, workers: dict[str, int]) -> None:
        """Set the workers that a tuned job prefers before its tuner's first decision."""
        if not self.wanted and all(workers.values()):
            self.wanted = workers

    def reviewed(self, wanted: dict[str, int], reason: str) -> None:
        """Record a review's result; it counts once two consecutive reviews agree."""
        if wanted and wanted == self._last_review:
            self.wanted, self.reason = wanted, reason
        self._last_review = wanted

    def changed(self, at: float, *, by_itself: bool) -> None:
        """Record a change of the job's workers; ``by_itself``: not because other jobs need them."""
        self._changes, self._changed = self._changes + by_itself, at
        self._known = self._known | {name: pace.samples_per_second for name, pace in self._paces.items() if pace.rounds}
        self._paces.clear()
        self._last_review = {}
