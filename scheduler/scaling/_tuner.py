"""Tuner of the number of workers: the least cost to the target in the permitted time; workers leave and join.

A worker's batch stays the same, so the batch of all is workers x batch, and the learning rate is proportional to its
square root: the rule for Adam and similar optimisers, whose steps have the same length whatever the gradient's size
(Malladi et al., NeurIPS'22, arXiv 2205.10287). Time to the target is steps(W) x seconds(W): the first by the noise
scale (`_outlook`), the second as planned and corrected by measurements. Nothing changes while the gain may as well be a
loss.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from scheduler.scaling._curve import Floats
from scheduler.scaling._model import ScalingDecision, ScalingGoal, StepObservation, Terms, tells
from scheduler.scaling._outlook import Outlook, outlook, unseen

__all__ = ["ScalingSettings", "ScalingTuner", "learning_rate_factor"]

_SPEEDS = 20
"""Number of last steps whose median is the time of a step with a number of workers."""
_TOLD_BY = 2
"""Factor on the workers to begin with: with so many, a step is worth once to twice as much, by the noise, and when half
of them leave the losses show by how much."""


@dataclass(frozen=True)
class ScalingSettings:
    """Settings of the tuner: how certain it must be."""

    least_observations: int = 8
    """Observations before the first change."""
    every: int = 4
    """Steps between two decisions, and at least after a change."""
    sure: float = 0.8
    """Probability with which a bound must be kept, or broken, for that to count."""
    worth: float = 0.02
    """Share of the money that is left to spend that a change must save beyond its own cost."""


@dataclass(frozen=True)
class _Evaluated:
    """The consequences of continuing with a number of workers, for each explanation; shape (E,)."""

    workers: int
    seconds: Floats
    usd: Floats
    in_time: float
    """Probability that it ends in time."""
    ends: float
    """Probability that it ends within the deadline and the steps, whatever the patience."""
    late: float
    """Mean of the additional time compared with all workers, relative to their time; a gain counts as 0."""


@dataclass
class ScalingTuner:
    """The tuner: it gets each step in turn."""

    terms: Terms
    goal: ScalingGoal
    settings: ScalingSettings = field(default_factory=ScalingSettings)
    _seen: list[StepObservation] = field(default_factory=list)
    _speeds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _began: tuple[float, float] | None = None
    """Seconds and dollars before the first step."""
    _rests: int = 0
    """Steps until the next decision."""

    def begin(self) -> int:
        """Return the number of workers to begin with.

        Fewer than the most only where that is cheaper for most of the possible noises, and no later than patience
        permits, as a mean in which earlier counts as in time. Where even fewer would be cheaper, were it not for
        patience, and leaving costs only a merge: twice as many, or all. Half of them leave after a few steps, which
        shows the noise, while trying fewer and returning would be expensive. With a deadline: the most, since the
        distance to the target is still unknown.
        """
        most, sure = self.terms.most, self.settings.sure
        if self.goal.deadline_seconds is not None:
            return most
        ahead = unseen(most)

        def seconds(workers: int) -> Floats:
            return np.asarray(ahead.steps(workers) * self.terms.expected_seconds[workers - 1])

        whole = seconds(most)
        patience = math.inf if self.goal.patience is None else self.goal.patience
        in_time, cheapest = {most: 0.0}, (math.inf, most)
        for workers in range(self.terms.least, most):
            takes = seconds(workers)
            usd = takes * self.terms.rate(workers)
            if ahead.quantile(whole * self.terms.rate(most) - usd, 1 - sure) <= 0:
                continue
            # Nothing is known of the way's length, which drops out of the mean of logarithms.
            expected = ahead.mean(np.log(usd / (whole * self.terms.rate(most))))
            cheapest = min(cheapest, (expected, workers))
            if ahead.mean(np.maximum(takes / whole - 1, 0.0)) <= patience:
                in_time[workers] = expected
        chosen = min(in_time, key=lambda workers: (in_time[workers], workers))
        more = min(_TOLD_BY * chosen, most)
        return more if cheapest[1] < chosen and more in in_time and self.terms.leave_seconds is None else chosen

    def observe(self, told: StepObservation) -> ScalingDecision:
        """Decide after one more step; one with a loss beyond all bounds is ignored.

        Raises ``ValueError`` if steps are out of order, or the number of workers is impossible.
        """
        if not self.terms.least <= told.workers <= self.terms.most:
            raise ValueError(f"{told.workers} workers are not among those that may be")
        if self._seen and (told.step <= self._seen[-1].step or told.at_seconds < self._seen[-1].at_seconds):
            raise ValueError("steps are told in the order in which they ended")
        if not tells(told):
            return ScalingDecision(told.workers, False, "")
        self._learn(told)
        self._rests -= 1
        if self._rests > 0 or len(self._seen) < self.settings.least_observations:
            return ScalingDecision(told.workers, False, "")
        # The longer it goes, the less a few steps tell.
        self._rests = max(self.settings.every, len(self._seen) // 16)
        return self._decide(told)

    def _learn(self, told: StepObservation) -> None:
        step = self.terms.expected_seconds[told.workers - 1]
        if not self._seen:
            took = told.step * step
            self._began = (told.at_seconds - took, told.usd - self.terms.rate(told.workers) * took)
        elif self._seen[-1].workers == told.workers:  # else there was a change on the way
            last = self._seen[-1]
            self._speeds[told.workers].append((told.at_seconds - last.at_seconds) / (told.step - last.step))
        self._seen.append(told)

    def step_seconds(self, workers: int) -> float:
        """Return the measured seconds of a step; of a number not tried, the planned ones times the nearest one's
        deviation."""
        tried = [count for count, speeds in self._speeds.items() if len(speeds) >= 2]
        planned = self.terms.expected_seconds
        if not tried:
            return planned[workers - 1]
        near = min(tried, key=lambda count: (abs(count - workers), count))
        return planned[workers - 1] * statistics.median(self._speeds[near][-_SPEEDS:]) / planned[near - 1]

    def _decide(self, told: StepObservation) -> ScalingDecision:
        ahead = outlook(self._seen, self.terms.most, self.goal.target_loss)
        choices = {count: self._evaluate(ahead, count, told) for count in range(self.terms.least, self.terms.most + 1)}
        now = choices[told.workers]
        sure, patient = self.settings.sure, now.in_time > 1 - self.settings.sure
        # A mean takes into account how late it may become, not only whether.
        spare = math.inf if self.goal.patience is None else self.goal.patience
        kept = [
            one for one in choices.values()
            if (one.ends >= sure and one.late <= spare) or (one is now and patient)
        ]  # fmt: skip
        if kept:
            best = min(kept, key=lambda one: (float(ahead.weights @ one.usd), one.workers))
        else:
            best = min(choices.values(), key=lambda one: (float(ahead.weights @ one.seconds), one.workers))
        if best is now:
            return self._told(ahead, now, told, "")
        if not patient:
            if ahead.quantile(now.seconds - best.seconds, 1 - sure) > 0:
                return self._told(ahead, best, told, f"{told.workers} workers would take too long, or too many steps")
            return self._told(ahead, now, told, "")
        saves = now.usd * (1 - self.settings.worth) - best.usd
        if ahead.quantile(saves, 1 - sure) > 0:
            share = 1 - float(ahead.weights @ best.usd) / float(ahead.weights @ now.usd)
            return self._told(ahead, best, told, f"saves {100 * share:.0f} % of what is left to pay")
        if ahead.likely(saves > 0) > 0.5 and self._may_try(ahead, best, now, told):
            return self._told(ahead, best, told, f"tries what {best.workers} workers make of a step")
        return self._told(ahead, now, told, "")

    def _may_try(self, ahead: Outlook, one: _Evaluated, now: _Evaluated, told: StepObservation) -> bool:
        """Return whether a few steps with other workers, and the way back, cost next to nothing even if they prove
        worse.

        Steps with one number of workers do not show the value of those with another.
        """
        steps, back = self.settings.every, self.terms.join_seconds
        took, takes = self.step_seconds(told.workers), self.step_seconds(one.workers)
        # Steps that the workers of now would need for the same progress.
        same = steps * (1 + ahead.noises / told.workers) / (1 + ahead.noises / one.workers)
        seconds = steps * takes + back - same * took
        usd = steps * takes * self.terms.rate(one.workers) - same * took * self.terms.rate(told.workers)
        usd = usd + back * self.terms.rate(max(told.workers, one.workers))
        sure, worth = self.settings.sure, self.settings.worth
        if ahead.quantile(usd - worth * now.usd, sure) > 0:
            return False
        share = self.goal.patience
        return share is None or ahead.quantile(seconds - share / 2 * now.seconds, sure) <= 0

    def _evaluate(self, ahead: Outlook, workers: int, told: StepObservation) -> _Evaluated:
        most = self.terms.most
        step, pause, paid = self.step_seconds(workers), 0.0, max(workers, told.workers)
        if workers > told.workers:
            pause = self.terms.join_seconds
        elif workers < told.workers:
            leaving = self.terms.leave_seconds
            pause = self.step_seconds(told.workers) if leaving is None else leaving
        seconds = ahead.steps(workers) * step + pause
        usd = ahead.steps(workers) * step * self.terms.rate(workers) + pause * self.terms.rate(paid)
        assert self._began is not None
        elapsed = told.at_seconds - self._began[0]
        until, late, patient = elapsed + seconds, 0.0, np.full_like(seconds, math.inf)
        if self.goal.patience is not None:
            whole = (ahead.done + ahead.left) * (1 + ahead.noises / most) * self.step_seconds(most)
            late, patient = ahead.mean(np.maximum(until / whole - 1, 0.0)), whole * (1 + self.goal.patience)
        last = math.inf if self.goal.most_steps is None else self.goal.most_steps
        ends = told.step + ahead.steps(workers) <= last
        if self.goal.deadline_seconds is not None:
            ends &= until <= self.goal.deadline_seconds * (1 + 1e-9)
        in_time = ends & (until <= patient * (1 + 1e-9))
        return _Evaluated(workers, seconds, usd, ahead.likely(in_time), ahead.likely(ends), late)

    def _told(self, ahead: Outlook, one: _Evaluated, told: StepObservation, reason: str) -> ScalingDecision:
        share = self.settings.sure
        assert self._began is not None
        # What is billed may differ from the price list.
        alike = [pair for pair in pairwise(self._seen) if pair[0].workers == pair[1].workers]
        listed = sum((after.at_seconds - before.at_seconds) * self.terms.rate(after.workers) for before, after in alike)
        billed = sum(after.usd - before.usd for before, after in alike)
        factor = billed / listed if listed > 0 else 1.0
        return ScalingDecision(
            workers=one.workers,
            changed=one.workers != told.workers,
            reason=reason,
            seconds_left=(ahead.quantile(one.seconds, 1 - share), ahead.quantile(one.seconds, share)),
            usd_left=(factor * ahead.quantile(one.usd, 1 - share), factor * ahead.quantile(one.usd, share)),
        )


def learning_rate_factor(workers: int, most: int) -> float:
    """Return the factor on the learning rate that fits the most workers: the square root of the ratio of the batches of
    all."""
    return math.sqrt(workers / most)
