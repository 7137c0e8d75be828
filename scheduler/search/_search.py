"""The planner's core: the best plan of one job over shards that lie where they are processed.

Inputs: regions with capacity, prices, links and measurements (`Snapshot`), and what is asked for (`Demand`).

Decisions, each fixed by the demand or searched: for every region its workers, function memory, collective and K, or the
replicas of its pipeline (`configurations`); for the federation the interval, codec, topology, and whether training
continues during the exchange (`exchange_options`).

Cost: `course`, with everything that the meter bills.

Constraints: upper bounds of time and money within deadline and budget; points given up by the exchange within the
tolerance (`exchange_points`), or the least that an interval allows; passes over each shard that differ by more than a
step and `MOST_OFF` count as points. Money is saved by a larger global batch only within the tolerance too
(`batch_points`), unless the limits cannot be kept otherwise.

Objective: money, or time, for the same progress: times `samples_factor`. Where plans hardly differ in it, what they
give up of the metric decides (`POINT_WORTH`), then the other measure (`OTHER_WORTH`).

Method: if the assignments are few, all are evaluated. Else for every pace of a pass over the data each region takes its
cheapest configuration that keeps it, at several prices of a sample in the global batch, and every interval and exchange
is evaluated with these. From the best of them, one region's configuration at a time is changed while that helps, then
those of two regions; in the end, all regions' together so that their whole steps fit another interval. Whether limits
can be kept is searched for in the same way, so that a plan is refused only if none is found by any objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from scheduler._cost_model import Bools, Floats
from scheduler.search._assignments import BEYOND_WORTH, MOST_TRIED, AssignmentSearch, joined, logarithm
from scheduler.search._evaluation import MOST_AT_ONCE, EvaluatedPlans, Ints, PlanEvaluation, PlanIndex

__all__ = ["PlanCriteria", "PlanSearch", "Spread"]

POINT_WORTH = 0.1
"""Share of the objective that a point of the metric is worth: within the tolerance a plan gives up 0.1 points only to
save 1 %, since what it gives up is predicted less accurately than what it saves."""
CAREFUL_WORTH = 0.005
"""The same for a point that a plan gives up less than the usual exchange does: a twentieth, as easy tasks lose."""
OTHER_WORTH = 0.03
"""The same for the other measure, time or money: half of it is worth 2 % of the objective. Predictions are off by as
much in the median (docs/benchmarks/planning.md): which of two plans that differ less is faster is not known."""
LOSSY_WORTH = 0.001
"""Share of the objective that a codec must save to be chosen although it loses bits, even if no metric shows it."""
CHANGED_WORTH = 1.0
"""What the logarithm of the objective is raised by where codec or interval would be changed while the job runs, so that
no prediction would hold: such a plan is chosen only where each other one takes e times as much. A choice."""
MOST_WHOLLY_EVALUATED = 1_000_000
"""Numbers up to which the changes of a found plan are evaluated with all intervals and exchanges, too."""
_MOST_LOOKED_AT = 12
"""Changes of which all intervals and exchanges are evaluated: those that are best with the present ones."""
_LEAST_GAIN = 1e-9
"""Gain of a change below which it is rounding, as a share of the objective."""
_ROUNDING_POINTS = 1e-6
"""Points by which two ways to compute them may differ."""
_LEAST_BOUNDED = 320
"""Assignments times ways from which bounds take less time than they save."""
_MOST_JOINED = 256
"""Changes that are looked at for those that help together."""
_MOST_STARTS = 3
"""Plans from which the search begins."""
_MOST_CHANGES = 30
"""Changes of single regions after which a search ends, at most; few searches make more than ten."""


@dataclass(frozen=True)
class PlanCriteria:
    """What a plan is chosen by."""

    minimise: str
    deadline_seconds: float = math.inf
    budget_usd: float = math.inf
    progress: bool = True
    """Whether plans are compared for the same progress; False: for the samples that are asked for."""
    possible: bool = False
    """Whether the measure alone counts, to find out what is possible."""
    careful: bool = False
    """Whether a larger global batch may give up no more points than the tolerance."""


@dataclass(frozen=True)
class Spread:
    """Upper bounds of a plan: what limits must hold for."""

    high: float
    """Factor of the expected seconds and USD."""
    copied_usd: float
    copied_high: float
    """Factor of the USD of copies."""


class PlanSearch:
    """The best of all plans of one demand over given regions."""

    def __init__(self, evaluation: PlanEvaluation, spread: Spread, only: Ints | None = None) -> None:
        """``spread``: the upper bounds of what plans are expected to take. ``only``: the one
        assignment that is tried."""
        self.evaluation, self._assignments, self._spread = evaluation, AssignmentSearch(evaluation, only), spread
        self._found: dict[PlanCriteria, tuple[EvaluatedPlans, PlanIndex] | None] = {}
        self._scores: dict[PlanCriteria, dict[bytes, float]] = {}
        """By assignment, a score that no interval and way betters, as far as it is known."""

    # What can be asked

    @cached_property
    def paces(self) -> EvaluatedPlans:
        """Every pace that was tried; all assignments if they are few."""
        return self.evaluation.evaluate(self._assignments.by_pace)

    def best(self, limits: PlanCriteria) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return the best plan within the limits; None: no plan keeps them."""
        if limits not in self._found:
            careful = limits.progress and not limits.possible and self.may_be_careful
            self._found[limits] = (careful and self._best(replace(limits, careful=True))) or self._best(limits)
        return self._found[limits]

    @property
    def may_be_careful(self) -> bool:
        """Whether some assignment may give up no more points than the tolerance: the smallest global batch must."""
        return self.evaluation.least_batch_points <= max(0.0, self.evaluation.demand.tolerance) + _ROUNDING_POINTS

    def roughly(self, limits: PlanCriteria) -> tuple[float, ...]:
        """Return 0, the objective's measure and the other one, with copies, of the best pace that was tried; or 1 and
        the least factor by which all of them exceed the limits. A search finds a plan as good as that, or better."""
        careful = [replace(limits, careful=True)] if limits.progress and not limits.possible else []
        place = next((at for one in (*careful, limits) if (at := self._picked(self.paces, one)) is not None), None)
        if place is None:
            seconds, usd = self.highest(self.paces)
            over = np.maximum(seconds / limits.deadline_seconds, usd / limits.budget_usd)
            return 1.0, float(np.where(self.paces.tolerated, over, np.inf).min())
        own = place.assignment, place.interval, place.way
        measures = float(self.paces.seconds[own]), float(self.paces.usd[own]) + self._spread.copied_usd
        return (0.0, *(measures if limits.minimise == "time" else measures[::-1]))

    def _best(self, limits: PlanCriteria) -> tuple[EvaluatedPlans, PlanIndex] | None:
        if self._assignments.all_tried:
            return self._best_of_all(limits)
        starts = self._starts(limits)
        if not limits.possible and (math.isfinite(limits.deadline_seconds) or math.isfinite(limits.budget_usd)):
            starts += [(found, at) for found, _ in (self._soonest, self._least) if (at := self._picked(found, limits))]
        if not starts and not (limits.careful and self._never_careful(limits)):
            starts = [(found, at) for found in self._limited(limits) if (at := self._picked(found, limits))]
        return self._best_climbed(starts, limits)

    def least(self, limits: PlanCriteria) -> tuple[float, float]:
        """Return the upper bounds of seconds and USD of the plan that needs least, by what the limits minimise."""
        found = self.best(limits)
        if found is None:
            return math.inf, math.inf
        evaluated, place = found
        at = place.assignment, place.interval, place.way
        seconds, usd = self.highest(evaluated)
        return float(seconds[at]), float(usd[at])

    def around(self, evaluated: EvaluatedPlans, place: PlanIndex) -> EvaluatedPlans:
        """Return a plan with all intervals and ways of its assignment."""
        return self.evaluation.evaluate(
            evaluated.choice[place.assignment][None, :], ways=tuple(range(len(self.evaluation.ways.each)))
        )

    def neighbours(self, evaluated: EvaluatedPlans, place: PlanIndex) -> EvaluatedPlans:
        """Return a plan's exchange with other assignments: every pace, and one region changed."""
        others = np.concatenate(
            [self._assignments.changed(evaluated.choice[place.assignment]), self._assignments.by_pace]
        )
        return self.evaluation.evaluate(others, evaluated.intervals[[place.interval]], (evaluated.ways[place.way],))

    def score(self, evaluated: EvaluatedPlans, limits: PlanCriteria) -> Floats:
        """Return the objective of every plan, as a logarithm; the smallest is best."""
        usd, seconds = evaluated.usd + self._spread.copied_usd, evaluated.seconds
        main, other = (seconds, usd) if limits.minimise == "time" else (usd, seconds)
        if limits.possible:
            return logarithm(main)
        progress = (
            logarithm(evaluated.factor) + POINT_WORTH * evaluated.batch_points if limits.progress else np.zeros(1)
        )
        lost = np.maximum(0.0, evaluated.points) + evaluated.off_points[..., None]
        return np.asarray(
            logarithm(main)
            + progress[:, None, None]
            + OTHER_WORTH * logarithm(other)
            + POINT_WORTH * lost
            + BEYOND_WORTH * np.maximum(0.0, evaluated.points - self.evaluation.demand.tolerance)
            + CAREFUL_WORTH * np.minimum(0.0, evaluated.points)
            + CHANGED_WORTH * evaluated.changed
            + LOSSY_WORTH * self.evaluation.ways.lossy[list(evaluated.ways)]
        )

    def tolerates(self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria) -> bool:
        """Return whether a plan gives up no more than the tolerance by its global batch, too, where progress counts."""
        allowed = self.allowed(evaluated, replace(limits, careful=limits.progress))
        return bool(allowed[place.assignment, place.interval, place.way])

    def kept(self, evaluated: EvaluatedPlans, limits: PlanCriteria) -> Bools:
        """Return whether plans keep deadline and budget."""
        if math.isinf(limits.deadline_seconds) and math.isinf(limits.budget_usd):
            return np.ones((1, 1, 1), bool)
        seconds, usd = self.highest(evaluated)
        return np.asarray((seconds <= limits.deadline_seconds) & (usd <= limits.budget_usd))

    def changed(self, evaluated: EvaluatedPlans) -> Bools:
        """Return whether codec or interval would be changed while the job runs."""
        return np.broadcast_to(evaluated.changed, evaluated.seconds.shape)

    def given_up(self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria) -> float:
        """Return the points that a plan may give up, by its exchange and, where progress counts, its global batch."""
        exchange = max(0.0, float(evaluated.points[place.assignment, place.interval, place.way]))
        batch = float(evaluated.batch_points[place.assignment]) if limits.progress else 0.0
        return min(100.0, exchange + batch)

    def highest(self, evaluated: EvaluatedPlans) -> tuple[Floats, Floats]:
        """Return the upper bounds of seconds and USD."""
        spread = self._spread
        copied = spread.copied_usd * spread.copied_high
        return evaluated.seconds * spread.high, evaluated.usd * spread.high + copied

    # The search

    @cached_property
    def _soonest(self) -> tuple[EvaluatedPlans, PlanIndex]:
        return self._unlimited("time")

    @cached_property
    def _least(self) -> tuple[EvaluatedPlans, PlanIndex]:
        return self._unlimited("cost")

    def _unlimited(self, minimise: str) -> tuple[EvaluatedPlans, PlanIndex]:
        limits = PlanCriteria(minimise, possible=True)
        best = self._best_climbed(self._starts(limits), limits)
        assert best is not None
        return best

    def _starts(self, limits: PlanCriteria) -> list[tuple[EvaluatedPlans, PlanIndex]]:
        """Return the best plans of the paces that were tried, each with another assignment."""
        score = self._scored(self.paces, limits)
        by_assignment = score.reshape(len(score), -1)
        order = by_assignment.min(axis=1).argsort(kind="stable")[:_MOST_STARTS]
        return [
            (
                self.paces,
                PlanIndex(int(n), *(int(k) for k in np.unravel_index(by_assignment[n].argmin(), score.shape[1:]))),
            )
            for n in order
            if np.isfinite(by_assignment[n].min())
        ]

    def _limited(self, limits: PlanCriteria) -> list[EvaluatedPlans]:
        """Return the plans by which limits can be kept if any plan keeps them: the fastest and, of those within the
        deadline, the cheapest."""
        if limits.possible and math.isinf(limits.deadline_seconds):
            return []
        found = [self._soonest[0]]
        if limits.possible and limits.minimise == "cost":
            return found
        if math.isinf(limits.deadline_seconds):
            return [*found, self._least[0]]
        cheapest = self.best(PlanCriteria("cost", limits.deadline_seconds, possible=True))
        return found if cheapest is None else [*found, cheapest[0]]

    def _never_careful(self, limits: PlanCriteria) -> bool:
        """Return whether it is known that no plan gives up so few points by its global batch: all assignments that
        do are so few that they are evaluated."""
        least = self.evaluation.least_ways
        few = self._assignments.of_samples(
            self.evaluation.most_step_samples, MOST_AT_ONCE // (len(least) * len(self.evaluation.intervals))
        )
        return few is not None and not self.allowed(self.evaluation.evaluate(few, ways=least), limits).any()

    def _best_climbed(
        self, starts: Sequence[tuple[EvaluatedPlans, PlanIndex]], limits: PlanCriteria
    ) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return the best plan that is reached from the starts; None: there are none."""
        seen: set[tuple[bytes, int, int]] = set()
        found = [self._climbed(evaluated, place, limits, seen) for evaluated, place in starts]
        best = min(found, key=lambda one: self.score_of(one[0], one[1], limits), default=None)
        while best is not None and (better := self._improved_wholly(*best, limits)) is not None:
            best = self._climbed(*better, limits, seen)
        return best

    def _climbed(
        self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria, seen: set[tuple[bytes, int, int]]
    ) -> tuple[EvaluatedPlans, PlanIndex]:
        """Change one region at a time while that helps, then two; until a plan that was seen from another start."""
        for _ in range(_MOST_CHANGES):
            choice = evaluated.choice[place.assignment]
            own = choice.tobytes(), int(evaluated.intervals[place.interval]), evaluated.ways[place.way]
            if own in seen:
                break
            seen.add(own)
            for change in (self._assignments.changed, self._assignments.changed_twice):
                found = self._improved(change(choice), evaluated, place, limits)
                if found is not None:
                    evaluated, place = found
                    break
            else:
                break
        return evaluated, place

    def _improved(
        self, others: Ints, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria
    ) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return an assignment that is better, with the best of all intervals and ways for it; None: none was found.

        Those are looked at that are best with the present interval and way, and those that help there together.
        """
        if not len(others) or others.size > MOST_TRIED:
            return None
        present = evaluated.intervals[[place.interval]], (evaluated.ways[place.way],)
        rough = self.evaluation.evaluate(others, *present, roughly=True)
        score = self._scored(rough, limits)[:, 0, 0]
        order = score.argsort(kind="stable")
        best = self.score_of(evaluated, place, limits)
        helps = others[order[: np.count_nonzero(score < best)][:_MOST_JOINED]]
        together = joined(evaluated.choice[place.assignment], helps)
        return self._better(np.concatenate([others[order[:_MOST_LOOKED_AT]], together]), best, limits)

    def _improved_wholly(
        self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria
    ) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return the best of the changes that suit an interval, of one region or of two, each with all intervals and
        ways; None: none is better. Where they are too many to be evaluated so, they are not."""
        choice, best = evaluated.choice[place.assignment], self.score_of(evaluated, place, limits)
        each = len(self.evaluation.sizes) * len(self.evaluation.intervals) * len(self.evaluation.useful_ways)
        most, assignments = MOST_WHOLLY_EVALUATED // each, self._assignments
        for change in (partial(assignments.fitted, most=most), assignments.changed, assignments.changed_twice):
            others = change(choice)
            if 0 < len(others) <= most and (better := self._better(others, best, limits)) is not None:
                return better
        return None

    def _better(self, others: Ints, than: float, limits: PlanCriteria) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return the best of some assignments, each with all intervals and ways; None: none has a better score."""
        known = self._scores.setdefault(limits, {})
        rows, intervals, most = [row.tobytes() for row in others], None, None
        if not limits.possible:
            # Plans that are chosen by other limits start from all that were evaluated for what is possible.
            left = np.flatnonzero([known.get(row, -math.inf) < than for row in rows])
            if len(left) * len(self.evaluation.useful_ways) >= _LEAST_BOUNDED and self._bounds_pay:
                bounds = self.evaluation.evaluate(others[left], ways=self.evaluation.least_ways)
                least = self._scored(bounds, limits).min(axis=2)
                better = (least < than).any(axis=1)
                known.update((rows[n], than) for n in left[~better].tolist())
                # Of most assignments hardly an interval may be better.
                intervals, left, most = np.flatnonzero((least < than).any(axis=0)), left[better], bounds.most[better]
            others, rows = others[left], [rows[n] for n in left.tolist()]
            if not len(others):
                return None
        whole = self.evaluation.evaluate(others, intervals, most=most)
        score = self._scored(whole, limits)
        known.update(zip(rows, score.min(axis=(1, 2), initial=than).tolist(), strict=True))
        found = PlanIndex(*(int(n) for n in np.unravel_index(score.argmin(), score.shape)))
        best = float(score[found.assignment, found.interval, found.way])
        return (whole, found) if best < than - _LEAST_GAIN else None

    @property
    def _bounds_pay(self) -> bool:
        """Whether plans are evaluated sooner if bounds tell which need not be."""
        # A way takes as long as a region: with many regions bounds would hardly take less time.
        ways, least_ways = self.evaluation.useful_ways, self.evaluation.least_ways
        return len(ways) > len(least_ways) + len(self.evaluation.sizes)

    @cached_property
    def _least_of_all(self) -> EvaluatedPlans:
        """What all assignments take at least, where they are few."""
        return self.evaluation.evaluate(self._assignments.by_pace, ways=self.evaluation.least_ways)

    def _best_of_all(self, limits: PlanCriteria) -> tuple[EvaluatedPlans, PlanIndex] | None:
        """Return the best plan of all assignments, which are few."""
        found = self.paces if "paces" in self.__dict__ or not self._bounds_pay else None
        if found is None:
            bounds = self._least_of_all
            least = self._scored(bounds, limits).min(axis=2)
            # The best plan of the assignment that is best at most rules most others out.
            first = self.evaluation.evaluate(bounds.choice[[least.min(axis=1).argmin()]])
            may = (least <= self._scored(first, limits).min()) & (least < np.inf)
            rows, intervals = np.flatnonzero(may.any(axis=1)), np.flatnonzero(may.any(axis=0))
            if not len(rows):
                return None
            found = self.evaluation.evaluate(bounds.choice[rows], intervals, most=bounds.most[rows])
        place = self._picked(found, limits)
        return None if place is None else (found, place)

    def _scored(self, evaluated: EvaluatedPlans, limits: PlanCriteria) -> Floats:
        """Return the objective of every plan; infinite where it is not allowed."""
        return np.where(self.allowed(evaluated, limits), self.score(evaluated, limits), np.inf)

    def score_of(self, evaluated: EvaluatedPlans, place: PlanIndex, limits: PlanCriteria) -> float:
        return float(self.score(evaluated, limits)[place.assignment, place.interval, place.way])

    def _picked(self, evaluated: EvaluatedPlans, limits: PlanCriteria) -> PlanIndex | None:
        """Return the best of some plans; None: none keeps the limits."""
        score = self._scored(evaluated, limits)
        if not (score < np.inf).any():
            return None
        return PlanIndex(*(int(n) for n in np.unravel_index(score.argmin(), score.shape)))

    def allowed(self, evaluated: EvaluatedPlans, limits: PlanCriteria) -> Bools:
        """Return whether plans keep the limits and the tolerance."""
        allowed = evaluated.tolerated & self.kept(evaluated, limits)
        if limits.careful:
            batch = evaluated.batch_points[:, None, None]
            given = batch + np.maximum(0.0, evaluated.points)
            allowed &= (batch <= 0.0) | (given <= self.evaluation.demand.tolerance + 1e-9)
        return np.asarray(allowed)
