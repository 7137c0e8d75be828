"""How fast running jobs turn out to be, and what they would rather have then.

The decision is the scheduler's (`scheduler.restaff`); here is when to ask it, and of what. It is asked for jobs whose
file leaves the number of workers to the plan, while all their regions train and can be reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from control_plane.core import Report
from control_plane.service.planning._scaling import Tuning

__all__ = ["FEWEST_ROUNDS", "FIRST_REST_SECONDS", "REVIEW_SECONDS", "Watched"]

REVIEW_SECONDS = 5.0
FEWEST_ROUNDS = 3
"""Of every region since the last change, before its speed counts as known."""
FIRST_REST_SECONDS = 10.0
"""After a change; twice as long after each further one, so that a job does not go to and fro."""
_WEIGHT = 0.3
"""Of the newest round in a region's speed."""


@dataclass
class _Pace:
    """One region's speed since the last change."""

    seen_round: int = -1
    rounds: int = 0
    samples_per_second: float = 0.0

    def record(self, report: Report) -> None:
        speed = report.round_samples_per_second
        if report.round <= self.seen_round or speed <= 0:
            return
        if self.seen_round >= 0:
            # What is there at the first look may be of before the change.
            known = self.samples_per_second or speed
            self.samples_per_second = (1 - _WEIGHT) * known + _WEIGHT * speed
            self.rounds += 1
        self.seen_round = report.round


@dataclass
class Watched:
    """One job. What was seen of it is not kept over a restart."""

    wanted: dict[str, int] = field(default_factory=dict)
    """Workers that it would have if nobody else needed them, where that is not what was planned."""
    reason: str = ""
    late: bool = False
    """Its promise is in danger, and that was told."""
    tuning: Tuning | None = None
    """Of a job whose workers follow a tuner, from its first round on."""
    _paces: dict[str, _Pace] = field(default_factory=dict)
    _known: dict[str, float] = field(default_factory=dict)
    """Speeds as they were before the last change."""
    _reviewed: float = 0.0
    _changes: int = 0
    _changed: float = 0.0
    _leaning: dict[str, int] = field(default_factory=dict)
    """What the last review wanted."""

    def record(self, region: str, report: Report) -> None:
        """An agent has told how a partition stands."""
        self._paces.setdefault(region, _Pace()).record(report)

    def speed(self, region: str) -> float | None:
        """Samples/s of one worker, as lately measured; None: not yet."""
        pace = self._paces.get(region)
        if pace is not None and pace.rounds >= FEWEST_ROUNDS:
            return pace.samples_per_second
        return self._known.get(region)

    def rested(self, at: float) -> bool:
        """Whether the last change is long enough ago for one that nobody needs."""
        if self.tuning is not None:
            return True  # the tuner rests by itself
        rest = FIRST_REST_SECONDS * 2 ** (self._changes - 1) if self._changes else 0.0
        return at >= self._changed + rest

    def due(self, regions: Iterable[str], at: float) -> bool:
        """Whether it is time for a review; it then counts as made."""
        known = all((pace := self._paces.get(name)) is not None and pace.rounds >= FEWEST_ROUNDS for name in regions)
        if not (known and self.rested(at) and at >= self._reviewed + REVIEW_SECONDS):
            return False
        self._reviewed = at
        return True

    def tuned_by_now(self, workers: dict[str, int]) -> None:
        """Until the tuner has said anything, such a job would have the workers that it began with, or has."""
        if not self.wanted and all(workers.values()):
            self.wanted = workers

    def leans(self, wanted: dict[str, int], reason: str) -> None:
        """A review's answer; two in turn must agree before it counts."""
        if wanted and wanted == self._leaning:
            self.wanted, self.reason = wanted, reason
        self._leaning = wanted

    def changed(self, at: float, *, by_itself: bool) -> None:
        """The job continues with other workers; ``by_itself``: not because others need them."""
        self._changes, self._changed = self._changes + by_itself, at
        self._known |= {name: pace.samples_per_second for name, pace in self._paces.items() if pace.rounds}
        self._paces.clear()
        self._leaning = {}
