"""Statistics of past jobs: the errors of speed curves, the time of pauses, and the usual size of a job."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping

from scheduler.deadline._curve import SpeedCurve, curve_from_table

_QUANTILE = 0.95
"""Quantile of the seen errors that a curve is trusted to keep within: one level in twenty may be slower than the
caution covers. A choice between promises that break and jobs that are declined."""
_MIN_REQUESTS = 10
"""Number of jobs that must have asked before their median counts as usual."""
_DECAY_S = 1800.0
"""Time constant of the average of pauses, in seconds."""
_HIGH_DEMAND = 0.5
"""Share of all capacity until the latest deadline from which what was asked for counts as high demand."""


class JobStatistics:
    """Statistics that the caller of ``admit`` keeps and feeds; it makes no decisions itself.

    Curves: the rate on a level that a job has run on is the measured one; on others it is the curve's less the error
    seen so far (its 95th percentile), so that margins grow with the error of the curves, and vanish where curves are
    right. Sizes: where demand is high, the median request is the usual size that prices start from.
    """

    def __init__(self, curve_error: float = 0.0) -> None:
        """`curve_error`: how far off curves may be, as a part, before anything was seen."""
        self._prior = curve_error
        self._errors: list[float] = []
        self._sizes: list[float] = []
        self._paused, self._paused_s = 0.0, -math.inf
        self._asked_s = 0.0
        self._begin_s, self._until_s = math.inf, -math.inf

    def record_rate(self, told: float, seen: float) -> None:
        """Record one job's rate on one level, as its curve predicts it (`told`) and as measured (`seen`)."""
        insort(self._errors, max(0.0, 1.0 - seen / told))

    @property
    def curve_error(self) -> float:
        """Share of its rate by which an untried level may be slower than its curve predicts."""
        count = len(self._errors)
        if not count:
            return self._prior
        seen = self._errors[min(count - 1, int(_QUANTILE * count))]
        return max(seen, self._prior / (1 + count / _MIN_REQUESTS))

    def cautious(self, curve: SpeedCurve, seen: Mapping[int, float]) -> SpeedCurve:
        """Return a curve to promise on: `seen` rates by level where known, predicted ones less the error elsewhere."""
        error = self.curve_error
        if not seen and not error:
            return curve
        rates = {
            level: seen.get(level, rate * (1.0 - error)) for level, rate in zip(curve.levels, curve.rates, strict=True)
        }
        return curve_from_table(rates) or curve

    def record_pause(self, now: float, seconds: float) -> None:
        """Record a pause of all jobs."""
        self._paused = self.pause_share(now) + seconds / _DECAY_S
        self._paused_s = now

    def pause_share(self, now: float) -> float:
        """Return the share of the recent time that pauses of all jobs have taken."""
        return self._paused * math.exp((self._paused_s - now) / _DECAY_S) if self._paused else 0.0

    def record_request(self, now: float, deadline_s: float, device_s: float, value: float = 1.0) -> None:
        """A request: the least device seconds that it takes; infinite where it cannot be met at all."""
        if math.isfinite(device_s):
            insort(self._sizes, device_s / max(value, 1e-9))
            self._asked_s += device_s
            self._begin_s, self._until_s = min(self._begin_s, now), max(self._until_s, deadline_s)

    def usual_device_s(self, devices: int) -> float:
        """Return the value for ``Rules.usual_device_s``; infinite while demand is not high."""
        if len(self._sizes) < _MIN_REQUESTS or self._asked_s < _HIGH_DEMAND * devices * (self._until_s - self._begin_s):
            return math.inf
        return self._sizes[len(self._sizes) // 2]
