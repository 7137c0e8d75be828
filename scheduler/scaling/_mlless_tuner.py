"""The scale-in tuner of MLLess, as published: after the knee of the loss curve, workers leave one by one.

Sánchez-Artigas and Sarroca, Middleware'21 (10.1145/3464298.3494884) and JPDC 2023 (10.1016/j.jpdc.2023.104764), and
their code, commit 231b600 (§3.3 of the notes in it). Differences: their curves are fitted by a search from a start
point, ours over a grid (`_curve`); the caller chooses which worker leaves; and there is no knee before twice the span
of the averages has been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler._nonnegative import nonnegative_least_squares
from scheduler.scaling._curve import Floats, LossCurve, fit
from scheduler.scaling._model import ScalingDecision, StepObservation, is_informative

_SLOW_FORM = [(p, 0.0) for p in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)]
"""The reference: f(t) = 1 / (c0 t^c2 + c1) + c3."""
_LATER_FORM = [(2.0, 1.0, 0.0)]
"""Since the last removal: g(t) = 1 / (c0 t² + c1 t + c2) + c3."""
_LEAST_POINTS = 5
"""Steps that a fit needs: one more than the four coefficients of the reference curve."""


@dataclass(frozen=True)
class PublishedSettings:
    """Constants of the published example."""

    least: int = 10
    span: int = 20
    """Span of the moving averages, in steps."""
    knee_slope: float = -7.5e-5
    """Slope of the loss by step; where it falls no faster, the slow region has begun."""
    knee_checks: int = 5
    """Successive checks in which the knee must not have moved forward."""
    interval_seconds: float = 20.0
    """Seconds between two removals."""
    ahead_seconds: float = 10.0
    """Seconds ahead at which the curves are compared."""
    tolerance_percent: float = 15.0
    """Percentage of the reference by which the loss may be worse."""
    settling_steps: int = 5
    """Steps after a removal that do not count for speeds."""


@dataclass
class PublishedTuner:
    """Takes each step in turn. It never adds workers, and knows no price, deadline or target."""

    settings: PublishedSettings = field(default_factory=PublishedSettings)
    _seen: list[StepObservation] = field(default_factory=list)
    _seconds: list[tuple[int, float]] = field(default_factory=list)
    """Workers, and the seconds of one of their steps."""
    _candidate: int = -1
    _checks: int = 0
    _knee: int | None = None
    _reference: LossCurve | None = None
    _removed_at: int = 0
    """Index of the first step after the last removal."""
    _decided_seconds: float = 0.0

    def observe(self, told: StepObservation) -> ScalingDecision:
        """Record one more step; one with a loss beyond all bounds is ignored. Raises ``ValueError`` if steps are out of
        order."""
        if self._seen and (told.step <= self._seen[-1].step or told.at_seconds < self._seen[-1].at_seconds):
            raise ValueError("steps must be observed in the order in which they ended")
        if not is_informative(told):
            return ScalingDecision(told.workers, False, "")
        if self._seen and len(self._seen) >= self._removed_at + self._settling:
            self._seconds.append((told.workers, told.at_seconds - self._seen[-1].at_seconds))
        self._seen.append(told)
        stays = ScalingDecision(told.workers, False, "")
        if self._knee is None:
            self._look_for_knee()
        if self._knee is None or told.workers <= self.settings.least:
            return stays
        if self._reference is None:
            since = self._seen[self._knee :]
            if len(since) < _LEAST_POINTS:
                return stays
            self._reference = _fitted(since, _SLOW_FORM)
            return self._remove(told, "the loss falls slowly")
        if told.at_seconds - self._decided_seconds < self.settings.interval_seconds:
            return stays
        since = self._seen[self._removed_at :]
        if len(since) < _LEAST_POINTS:
            return stays
        self._decided_seconds = told.at_seconds
        better = self._better_percent(told, _fitted(since, _LATER_FORM))
        if better <= -self.settings.tolerance_percent:
            return stays
        return self._remove(told, f"the loss will be {-better:.1f} % worse than the reference")

    @property
    def _settling(self) -> int:
        return self.settings.settling_steps if self._removed_at else 1

    def _remove(self, told: StepObservation, reason: str) -> ScalingDecision:
        self._removed_at, self._decided_seconds = len(self._seen), told.at_seconds
        return ScalingDecision(told.workers - 1, True, reason)

    def _look_for_knee(self) -> None:
        """The first step from which the smoothed loss falls slowly, once it has not moved forward for some looks."""
        if len(self._seen) < 2 * self.settings.span:  # averages of less are flat
            return
        losses = np.array([one.loss for one in self._seen])
        slopes = smoothed(np.diff(smoothed(losses, self.settings.span)), self.settings.span)
        slow = np.flatnonzero(slopes > self.settings.knee_slope)
        if not len(slow):
            self._candidate, self._checks = -1, 0
            return
        found = int(slow[0])
        self._checks = self._checks + 1 if 0 <= found <= self._candidate else 0
        self._candidate = found
        if self._checks >= self.settings.knee_checks:
            self._knee = found

    def _better_percent(self, told: StepObservation, now: LossCurve) -> float:
        """100 (L_ref - L_now) / L_ref, some seconds ahead; each curve's steps are as fast as its workers make them."""
        assert self._reference is not None
        assert self._knee is not None
        workers, ahead = np.array([w for w, _ in self._seconds], float), self.settings.ahead_seconds
        taken = _without_outliers(np.array([s for _, s in self._seconds]))
        # h(w) = c0 + (w - 1) c1 + w c2 has two terms that are linear in w; without one of them it is the same form.
        rows = np.stack([np.ones(len(workers)), workers], axis=1)
        start, each = nonnegative_least_squares(rows, taken)
        before = self._seen[self._knee].workers
        step_before, step_now = (max(start + each * w, 1e-9) for w in (before, told.workers))
        reference = self._reference.at(len(self._seen) - self._knee + ahead / step_before)
        later = now.at(len(self._seen) - self._removed_at + ahead / step_now)
        return 100 * (reference - later) / reference


def _fitted(seen: list[StepObservation], form: Sequence[tuple[float, ...]]) -> LossCurve:
    """The error of point i is taken as 1 / i: later ones count more."""
    t = np.arange(1.0, len(seen) + 1)
    return fit(t, np.array([one.loss for one in seen]), t**2, form)


def smoothed(values: Floats, span: int) -> Floats:
    """The mean of exponential moving averages forward and backward; shape (N,)."""
    return (_average(values, span) + _average(values[::-1], span)[::-1]) / 2


def _average(values: Floats, span: int) -> Floats:
    """Return an exponential moving average whose weights add up to 1 from the first value on."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = np.empty(len(values))
    for place, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        found[place] = total / weight
    return found


def _without_outliers(seconds: Floats) -> Floats:
    """Replace values that deviate from the median of the ten around them by more than a twentieth by that median."""
    around = np.array([np.median(seconds[max(0, i - 5) : i + 5]) for i in range(len(seconds))])
    return np.where(np.abs(seconds - around) > 0.05 * around, around, seconds)
