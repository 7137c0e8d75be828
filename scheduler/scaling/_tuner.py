"""Tuner of the number of workers: it minimises the cost to the target loss within the permitted time.

The batch of a worker is constant, so the global batch is workers x batch. The learning rate is proportional to the
square root of the global batch: the rule for Adam and similar optimisers, whose steps have the same length whatever the
gradient's size (Malladi et al., NeurIPS'22, arXiv 2205.10287). The time to the target with W workers is steps(W) x
seconds(W). Steps are predicted from the noise scale (`_forecast`); seconds are those of the plan, corrected by
measurements. The number of workers is not changed while the gain is uncertain.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from scheduler.scaling._curve import Floats
from scheduler.scaling._forecast import Forecast, forecast, unseen
from scheduler.scaling._model import ScalingDecision, ScalingGoal, StepCosts, StepObservation, is_informative

__all__ = ["ScalingSettings", "ScalingTuner", "learning_rate_factor"]

_RECENT_STEPS = 20
"""Number of last steps whose median is the time of a step with a number of workers."""
_INITIAL_FACTOR = 2
"""Factor on the initial number of workers. A step with twice the workers is worth one to two steps, depending on the
noise scale; once half of them leave, the losses show how many."""


@dataclass(frozen=True)
class ScalingSettings:
    """Settings of the tuner: how certain its decisions must be."""

    least_observations: int = 8
    """Number of observations before the first change."""
    every: int = 4
    """Number of steps between two decisions, at least."""
    sure: float = 0.8
    """Probability from which a bound counts as kept, or as broken."""
    worth: float = 0.02
    """Share of the remaining cost that a change must save beyond its own cost."""


@dataclass(frozen=True)
class _Evaluated:
    """Predictions for continuing with a number of workers. Arrays have one value for each of the E explanations."""

    workers: int
    seconds: Floats
    """Remaining time."""
    usd: Floats
    """Remaining cost."""
    in_time: float
    """Probability of reaching the target within deadline, steps and patience."""
    ends: float
    """Probability of reaching the target within deadline and steps, regardless of patience."""
    late: float
    """Mean additional time compared with all workers, relative to their time; a shorter time counts as 0."""


@dataclass
class ScalingTuner:
    """The tuner of one job; it receives the job's steps in order."""

    step_costs: StepCosts
    goal: ScalingGoal
    settings: ScalingSettings = field(default_factory=ScalingSettings)
    _seen: list[StepObservation] = field(default_factory=list)
    _speeds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _began: tuple[float, float] | None = None
    """Seconds and USD at the job's start."""
    _wait_steps: int = 0
    """Number of steps until the next decision."""

    def begin(self) -> int:
        """Return the initial number of workers.

        With a deadline it is the maximum, since the distance to the target is still unknown. Otherwise it is a smaller
        number only if that is cheaper for most possible noise scales, and if its mean delay is within the patience (a
        shorter time counts as no delay).

        If a still smaller number would be cheaper but exceeds the patience, and leaving costs only a merge, it is twice
        the chosen number, or the maximum. Half of the workers leave after a few steps, which shows the noise scale;
        trying fewer workers and returning would be expensive.
        """
        most, sure = self.step_costs.most, self.settings.sure
        if self.goal.deadline_seconds is not None:
            return most
        ahead = unseen(most)

        def seconds(workers: int) -> Floats:
            return np.asarray(ahead.steps(workers) * self.step_costs.expected_seconds[workers - 1])

        whole = seconds(most)
        patience = math.inf if self.goal.patience is None else self.goal.patience
        in_time, cheapest = {most: 0.0}, (math.inf, most)
        for workers in range(self.step_costs.least, most):
            takes = seconds(workers)
            usd = takes * self.step_costs.rate(workers)
            if ahead.quantile(whole * self.step_costs.rate(most) - usd, 1 - sure) <= 0:
                continue
            # The distance to the target is unknown; it cancels out in the mean of logarithms.
            expected = ahead.mean(np.log(usd / (whole * self.step_costs.rate(most))))
            cheapest = min(cheapest, (expected, workers))
            if ahead.mean(np.maximum(takes / whole - 1, 0.0)) <= patience:
                in_time[workers] = expected
        chosen = min(in_time, key=lambda workers: (in_time[workers], workers))
        more = min(_INITIAL_FACTOR * chosen, most)
        return more if cheapest[1] < chosen and more in in_time and self.step_costs.leave_seconds is None else chosen

    def observe(self, observed: StepObservation) -> ScalingDecision:
        """Decide after one more step. A step whose loss is not finite or out of range is ignored.

        Raises ``ValueError`` if steps are out of order, or the number of workers is impossible.
        """
        if not self.step_costs.least <= observed.workers <= self.step_costs.most:
            raise ValueError(
                f"{observed.workers} workers are not within {self.step_costs.least} to {self.step_costs.most}"
            )
        if self._seen and (observed.step <= self._seen[-1].step or observed.at_seconds < self._seen[-1].at_seconds):
            raise ValueError("steps must be observed in the order in which they ended")
        if not is_informative(observed):
            return ScalingDecision(observed.workers, False, "")
        self._record(observed)
        self._wait_steps -= 1
        if self._wait_steps > 0 or len(self._seen) < self.settings.least_observations:
            return ScalingDecision(observed.workers, False, "")
        # The more steps have been observed, the less a few more change the prediction.
        self._wait_steps = max(self.settings.every, len(self._seen) // 16)
        return self._decide(observed)

    def _record(self, observed: StepObservation) -> None:
        step = self.step_costs.expected_seconds[observed.workers - 1]
        if not self._seen:
            took = observed.step * step
            self._began = (observed.at_seconds - took, observed.usd - self.step_costs.rate(observed.workers) * took)
        elif self._seen[-1].workers == observed.workers:  # otherwise the time includes a change
            last = self._seen[-1]
            self._speeds[observed.workers].append((observed.at_seconds - last.at_seconds) / (observed.step - last.step))
        self._seen.append(observed)

    def step_seconds(self, workers: int) -> float:
        """Return the measured seconds of a step.

        For a number of workers that was not tried: the planned seconds times the nearest tried number's ratio of
        measured to planned ones.
        """
        tried = [count for count, speeds in self._speeds.items() if len(speeds) >= 2]
        planned = self.step_costs.expected_seconds
        if not tried:
            return planned[workers - 1]
        near = min(tried, key=lambda count: (abs(count - workers), count))
        return planned[workers - 1] * statistics.median(self._speeds[near][-_RECENT_STEPS:]) / planned[near - 1]

    def _decide(self, observed: StepObservation) -> ScalingDecision:
        ahead = forecast(self._seen, self.step_costs.most, self.goal.target_loss)
        choices = {
            count: self._evaluate(ahead, count, observed)
            for count in range(self.step_costs.least, self.step_costs.most + 1)
        }
        now = choices[observed.workers]
        sure, patient = self.settings.sure, now.in_time > 1 - self.settings.sure
        # A mean delay takes into account how late the end may be, not only whether it is late.
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
            return self._decision(ahead, now, observed, "")
        if not patient:
            if ahead.quantile(now.seconds - best.seconds, 1 - sure) > 0:
                return self._decision(
                    ahead, best, observed, f"{observed.workers} workers would take too long, or too many steps"
                )
            return self._decision(ahead, now, observed, "")
        saves = now.usd * (1 - self.settings.worth) - best.usd
        if ahead.quantile(saves, 1 - sure) > 0:
            share = 1 - float(ahead.weights @ best.usd) / float(ahead.weights @ now.usd)
            return self._decision(ahead, best, observed, f"saves {100 * share:.0f} % of what is left to pay")
        if ahead.likely(saves > 0) > 0.5 and self._may_try(ahead, best, now, observed):
            return self._decision(ahead, best, observed, f"tries {best.workers} workers for a few steps")
        return self._decision(ahead, now, observed, "")

    def _may_try(self, ahead: Forecast, one: _Evaluated, now: _Evaluated, observed: StepObservation) -> bool:
        """Return whether trying another number of workers for a few steps, and returning, costs next to nothing even if
        it proves worse.

        A trial is needed since steps with one number of workers do not show the value of steps with another.
        """
        steps, back = self.settings.every, self.step_costs.join_seconds
        took, takes = self.step_seconds(observed.workers), self.step_seconds(one.workers)
        # Steps that the present workers would need for the same progress.
        same = steps * (1 + ahead.noises / observed.workers) / (1 + ahead.noises / one.workers)
        seconds = steps * takes + back - same * took
        usd = steps * takes * self.step_costs.rate(one.workers) - same * took * self.step_costs.rate(observed.workers)
        usd = usd + back * self.step_costs.rate(max(observed.workers, one.workers))
        sure, worth = self.settings.sure, self.settings.worth
        if ahead.quantile(usd - worth * now.usd, sure) > 0:
            return False
        share = self.goal.patience
        return share is None or ahead.quantile(seconds - share / 2 * now.seconds, sure) <= 0

    def _evaluate(self, ahead: Forecast, workers: int, observed: StepObservation) -> _Evaluated:
        most = self.step_costs.most
        step, pause, paid = self.step_seconds(workers), 0.0, max(workers, observed.workers)
        if workers > observed.workers:
            pause = self.step_costs.join_seconds
        elif workers < observed.workers:
            leaving = self.step_costs.leave_seconds
            pause = self.step_seconds(observed.workers) if leaving is None else leaving
        seconds = ahead.steps(workers) * step + pause
        usd = ahead.steps(workers) * step * self.step_costs.rate(workers) + pause * self.step_costs.rate(paid)
        assert self._began is not None
        elapsed = observed.at_seconds - self._began[0]
        until, late, patient = elapsed + seconds, 0.0, np.full_like(seconds, math.inf)
        if self.goal.patience is not None:
            whole = (ahead.done + ahead.left) * (1 + ahead.noises / most) * self.step_seconds(most)
            late, patient = ahead.mean(np.maximum(until / whole - 1, 0.0)), whole * (1 + self.goal.patience)
        last = math.inf if self.goal.most_steps is None else self.goal.most_steps
        ends = observed.step + ahead.steps(workers) <= last
        if self.goal.deadline_seconds is not None:
            ends &= until <= self.goal.deadline_seconds * (1 + 1e-9)
        in_time = ends & (until <= patient * (1 + 1e-9))
        return _Evaluated(workers, seconds, usd, ahead.likely(in_time), ahead.likely(ends), late)

    def _decision(self, ahead: Forecast, one: _Evaluated, observed: StepObservation, reason: str) -> ScalingDecision:
        share = self.settings.sure
        assert self._began is not None
        # The bill may differ from the price list.
        alike = [pair for pair in pairwise(self._seen) if pair[0].workers == pair[1].workers]
        listed = sum(
            (after.at_seconds - before.at_seconds) * self.step_costs.rate(after.workers) for before, after in alike
        )
        billed = sum(after.usd - before.usd for before, after in alike)
        factor = billed / listed if listed > 0 else 1.0
        return ScalingDecision(
            workers=one.workers,
            changed=one.workers != observed.workers,
            reason=reason,
            seconds_left=(ahead.quantile(one.seconds, 1 - share), ahead.quantile(one.seconds, share)),
            usd_left=(factor * ahead.quantile(one.usd, 1 - share), factor * ahead.quantile(one.usd, share)),
        )


def learning_rate_factor(workers: int, most: int) -> float:
    """Return the factor on the learning rate of the most workers: the square root of the ratio of global batches."""
    return math.sqrt(workers / most)
