"""The planner's core: the best plan of one job over shards that lie where they are processed.

Inputs: regions with capacity, prices, links and measurements (`Snapshot`), and what is asked for (`Demand`).

Decisions, each fixed by the demand or searched: for every region its workers, function memory, collective and K, or the
replicas of its pipeline (`configurations`); for the federation the interval, codec, topology, and whether training
continues during the exchange (`ways_of`).

Cost: `course`, with everything that the meter bills.

Constraints: upper bounds of time and money within deadline and budget; points given up by the exchange within the
tolerance (`exchange_points`), or the least that an interval allows; passes over each shard that differ by more than a
step and `MOST_OFF` count as points. Money is saved by a larger global batch only within the tolerance too
(`batch_points`), unless the limits cannot be kept otherwise.

Objective: money, or time, for the same progress: times `samples_factor`. Where plans hardly differ in it, what they
give up of the metric decides (`POINT_WORTH`), then the other measure (`OTHER_WORTH`).

Method: if the staffings are few, all are evaluated. Else for every pace of a pass over the data each region takes its
cheapest configuration that keeps it, at several prices of a sample in the global batch, and every interval and exchange
is evaluated with these. From the best of them, one region's configuration at a time is changed while that helps, then
those of two regions; in the end, all regions' together so that their whole steps fit another interval. Whether limits
can be kept is searched for in the same way, so that a plan is refused only if none is found by any objective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler._configurations import Configured
from scheduler._course import Bools, Floats, Occasion, Staffs, course
from scheduler._exchange import Ways, policy_of
from scheduler._model import Demand
from scheduler.tuning._learning import (
    PRIOR_NOISE_SAMPLES,
    batch_points,
    exchange_points,
    samples_factor,
)

__all__ = ["Evaluated", "Ints", "Limits", "Place", "Search", "Spread"]

Ints = npt.NDArray[np.int64]

USUAL_INTERVAL = 20
"""Local steps between WAN exchanges that count as giving up nothing: H = 20, as in measurements of WAN policies."""
FEWEST_ROUNDS = 20.0
"""Rounds below which a job gives up something however short it is: in so many, local steps cost easy tasks a quarter of
a point, and the hardest measured five (`exchange_points`)."""
POINT_WORTH = 0.1
"""Share of the objective that a point of the metric is worth: within the tolerance a plan gives up 0.1 points only to
save 1 %, since what it gives up is predicted less accurately than what it saves."""
BEYOND_WORTH = 1.0
"""The same for a point beyond the tolerance, where no interval keeps it: other staffings that do are preferred."""
CAREFUL_WORTH = 0.005
"""The same for a point that a plan gives up less than the usual exchange does: a twentieth, as easy tasks lose."""
OTHER_WORTH = 0.005
"""The same for the other measure, time or money: half of it is worth 0.35 % of the objective."""
LOSSY_WORTH = 0.001
"""Share of the objective that a codec must save to be chosen although it loses bits, even if no metric shows it."""
_LEAST = 1e-12
"""Seconds or USD below which a plan counts as free; the objective is compared by logarithms."""
MOST_OFF = 0.02
"""Share by which the passes over a shard may differ from what is asked, beyond one step: rounds have whole steps."""
OFF_POINTS = 10.0
"""Points that count as given up where a shard gets twice the passes that are asked for, or none. A choice: other passes
are made only where a job would merge far less often otherwise."""
MOST_PACES = 48
"""Paces that are tried; of more they are thinned out evenly, and the search from the best ones fills the gaps."""
MOST_FIGURES = 4_000_000
"""Numbers in an array of the search: 32 MB, so that planning over a thousand regions takes seconds."""
MOST_AT_ONCE = 100_000
"""Numbers in an array of an evaluation: 800 kB, so that it stays in a processor's cache."""
MOST_ENUMERATED = 1_000_000
"""Numbers up to which all staffings are evaluated with all intervals and exchanges: that takes a tenth of a second."""
MOST_WHOLLY_EVALUATED = 1_000_000
"""Numbers up to which the changes of a found plan are evaluated with all intervals and exchanges, too."""
_INTERVALS = (*range(13, 41), 50, 60, 80, 120, 160, 320)
"""Intervals that are tried, in steps: around the usual one all, so that whole steps fit the shards; longer ones to save
egress in long jobs."""
_SHORT_INTERVALS = range(1, 13)
"""Intervals that are tried, too, where a job has less than `FEWEST_ROUNDS` of the usual one."""
MOST_TRIED = 400_000
"""Numbers up to which changes of a plan are evaluated at once."""
_MOST_LOOKED_AT = 12
"""Changes of which all intervals and exchanges are evaluated: those that are best with the present ones."""
_LEAST_GAIN = 1e-9
"""Gain of a change below which it is rounding, as a share of the objective."""
_MOST_JOINED = 256
"""Changes that are looked at for those that help together."""
_SAMPLE_PRICES = (0.0, 0.03, 0.3)
"""Shares of the price of samples in the global batch, when a region's configuration is chosen for a pace: the more they
count, the smaller the batch."""
_MOST_STARTS = 3
"""Plans from which the search begins."""
_MOST_CHANGES = 30
"""Changes of single regions after which a search ends, at most; few searches make more than ten."""


@dataclass(frozen=True)
class Limits:
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


@dataclass(frozen=True)
class Place:
    """One evaluated plan, by its place on the axes."""

    staff: int
    interval: int
    way: int


@dataclass(frozen=True)
class Evaluated:
    """Staffings with all intervals and ways to exchange that were tried: arrays with these three axes."""

    choice: Ints
    """By staffing and region: number of the configuration."""
    ways: tuple[int, ...]
    """Numbers of the ways on the last axis."""
    intervals: Ints
    """Numbers of the intervals on the middle axis."""
    interval: Floats
    rounds: Floats
    """By staffing and interval."""
    seconds: Floats
    usd: Floats
    points: Floats
    """Points that the exchange gives up against the usual one; below 0 where it is more careful."""
    off_points: Floats
    """Points that count as given up by other passes over the shards than asked, by staffing and interval."""
    tolerated: Bools
    """Whether both are within the tolerance, or the least that any interval allows."""
    factor: Floats
    """`samples_factor`, by staffing."""
    batch_points: Floats
    """Points that the global batch gives up, by staffing."""


_BY_STAFFING = tuple(field.name for field in fields(Evaluated) if field.name not in ("ways", "intervals"))


class Search:
    """All plans of one demand over given regions."""

    def __init__(
        self,
        fronts: Sequence[Sequence[Configured]],
        figures: Sequence[Sequence[tuple[float, ...]]],
        ways: Ways,
        occasion: Occasion,
        spread: Spread,
        demand: Demand,
        noise: float | None,
    ) -> None:
        self._fronts, self._ways, self._occasion, self._spread, self._demand = fronts, ways, occasion, spread, demand
        self._noise = noise or PRIOR_NOISE_SAMPLES
        most = max(len(front) for front in fronts)
        # Regions with fewer configurations repeat their last one.
        self._table = np.array([[*own, *[own[-1]] * (most - len(own))] for own in figures])
        self._sizes = np.array([len(front) for front in fronts])
        # All configurations of all regions: whose, and its number there.
        self._regions = np.repeat(np.arange(len(fronts)), self._sizes)
        self._numbers = np.concatenate([np.arange(size) for size in self._sizes])
        self._samples = np.array([float(front[0].part.samples) for front in fronts])
        self._least_samples = float(self._table[:, :, 0].min(axis=1).sum())
        self._useful_ways = _undominated(ways)
        wanted = policy_of(demand).interval_steps
        self._usual = demand.interval or wanted or USUAL_INTERVAL
        free = demand.interval is None and wanted is None
        self._intervals = np.array(self._tried_intervals() if free else (self._usual,), float)

    # What can be asked

    @cached_property
    def paces(self) -> Evaluated:
        """Every pace that was tried; all staffings if they are few."""
        return self._evaluate(self._choices())

    def best(self, limits: Limits) -> tuple[Evaluated, Place] | None:
        """Return the best plan within the limits; None: no plan keeps them."""
        careful = limits.progress and not limits.possible
        return (careful and self._best(replace(limits, careful=True))) or self._best(limits)

    def _best(self, limits: Limits) -> tuple[Evaluated, Place] | None:
        if self._all_tried:
            place = self._picked(self.paces, limits)
            return None if place is None else (self.paces, place)
        starts = self._starts(limits)
        if not limits.possible and (math.isfinite(limits.deadline_seconds) or math.isfinite(limits.budget_usd)):
            starts += [(found, at) for found, _ in (self._soonest, self._least) if (at := self._picked(found, limits))]
        if not starts:
            starts = [(found, at) for found in self._limited(limits) if (at := self._picked(found, limits))]
        return self._best_climbed(starts, limits)

    def least(self, limits: Limits) -> tuple[float, float]:
        """Return the upper bounds of seconds and USD of the plan that needs least, by what the limits minimise."""
        found = self.best(limits)
        if found is None:
            return math.inf, math.inf
        evaluated, place = found
        at = place.staff, place.interval, place.way
        seconds, usd = self.highest(evaluated)
        return float(seconds[at]), float(usd[at])

    def around(self, evaluated: Evaluated, place: Place) -> Evaluated:
        """Return a plan with all intervals and ways of its staffing."""
        return self._evaluate(evaluated.choice[place.staff][None, :], ways=tuple(range(len(self._ways.each))))

    def neighbours(self, evaluated: Evaluated, place: Place) -> Evaluated:
        """Return a plan's exchange with other staffings: every pace, and one region changed."""
        others = np.concatenate([self._changed(evaluated.choice[place.staff]), self._choices()])
        return self._evaluate(others, int(evaluated.intervals[place.interval]), (evaluated.ways[place.way],))

    def score(self, evaluated: Evaluated, limits: Limits) -> Floats:
        """Return the objective of every plan, as a logarithm; the smallest is best."""
        usd, seconds = evaluated.usd + self._spread.copied_usd, evaluated.seconds
        main, other = (seconds, usd) if limits.minimise == "time" else (usd, seconds)
        if limits.possible:
            return _log(main)
        progress = _log(evaluated.factor) + POINT_WORTH * evaluated.batch_points if limits.progress else np.zeros(1)
        lost = np.maximum(0.0, evaluated.points) + evaluated.off_points[..., None]
        return (
            _log(main)
            + progress[:, None, None]
            + OTHER_WORTH * _log(other)
            + POINT_WORTH * lost
            + BEYOND_WORTH * np.maximum(0.0, evaluated.points - self._demand.tolerance)
            + CAREFUL_WORTH * np.minimum(0.0, evaluated.points)
            + LOSSY_WORTH * self._ways.lossy[list(evaluated.ways)]
        )

    def kept(self, evaluated: Evaluated, limits: Limits) -> Bools:
        """Return whether plans keep deadline and budget."""
        seconds, usd = self.highest(evaluated)
        return np.asarray((seconds <= limits.deadline_seconds) & (usd <= limits.budget_usd))

    def given_up(self, evaluated: Evaluated, place: Place, limits: Limits) -> float:
        """Return the points that a plan may give up, by its exchange and, where progress counts, its global batch."""
        exchange = max(0.0, float(evaluated.points[place.staff, place.interval, place.way]))
        batch = float(evaluated.batch_points[place.staff]) if limits.progress else 0.0
        return min(100.0, exchange + batch)

    def highest(self, evaluated: Evaluated) -> tuple[Floats, Floats]:
        """Return the upper bounds of seconds and USD."""
        spread = self._spread
        copied = spread.copied_usd * spread.copied_high
        return evaluated.seconds * spread.high, evaluated.usd * spread.high + copied

    # The search

    @cached_property
    def _soonest(self) -> tuple[Evaluated, Place]:
        return self._unlimited("time")

    @cached_property
    def _least(self) -> tuple[Evaluated, Place]:
        return self._unlimited("cost")

    def _unlimited(self, minimise: str) -> tuple[Evaluated, Place]:
        limits = Limits(minimise, possible=True)
        best = self._best_climbed(self._starts(limits), limits)
        assert best is not None
        return best

    def _starts(self, limits: Limits) -> list[tuple[Evaluated, Place]]:
        """Return the best plans of the paces that were tried, each with another staffing."""
        score = np.where(self.allowed(self.paces, limits), self.score(self.paces, limits), np.inf)
        by_staff = score.reshape(len(score), -1)
        order = by_staff.min(axis=1).argsort(kind="stable")[:_MOST_STARTS]
        return [
            (self.paces, Place(int(n), *(int(k) for k in np.unravel_index(by_staff[n].argmin(), score.shape[1:]))))
            for n in order
            if np.isfinite(by_staff[n].min())
        ]

    def _limited(self, limits: Limits) -> list[Evaluated]:
        """Return the plans by which limits can be kept if any plan keeps them: the fastest and, of those within the
        deadline, the cheapest."""
        if limits.possible and math.isinf(limits.deadline_seconds):
            return []
        tried = [Limits("time", possible=True)]
        if not (limits.possible and limits.minimise == "cost"):
            tried.append(Limits("cost", limits.deadline_seconds, possible=True))
        return [found[0] for other in tried if (found := self.best(other)) is not None]

    def _best_climbed(
        self, starts: Sequence[tuple[Evaluated, Place]], limits: Limits
    ) -> tuple[Evaluated, Place] | None:
        """Return the best plan that is reached from the starts; None: there are none."""
        seen: set[tuple[bytes, int, int]] = set()
        found = [self._climbed(evaluated, place, limits, seen) for evaluated, place in starts]
        best = min(found, key=lambda one: self._score(one[0], one[1], limits), default=None)
        while best is not None and (better := self._improved_wholly(*best, limits)) is not None:
            best = self._climbed(*better, limits, seen)
        return best

    def _climbed(
        self, evaluated: Evaluated, place: Place, limits: Limits, seen: set[tuple[bytes, int, int]]
    ) -> tuple[Evaluated, Place]:
        """Change one region at a time while that helps, then two; until a plan that was seen from another start."""
        for _ in range(_MOST_CHANGES):
            choice = evaluated.choice[place.staff]
            own = choice.tobytes(), int(evaluated.intervals[place.interval]), evaluated.ways[place.way]
            if own in seen:
                break
            seen.add(own)
            for change in (self._changed, self._changed_twice):
                found = self._improved(change(choice), evaluated, place, limits)
                if found is not None:
                    evaluated, place = found
                    break
            else:
                break
        return evaluated, place

    def _improved(
        self, others: Ints, evaluated: Evaluated, place: Place, limits: Limits
    ) -> tuple[Evaluated, Place] | None:
        """Return a staffing that is better, with the best of all intervals and ways for it; None: none was found.

        Those are looked at that are best with the present interval and way, and those that help there together.
        """
        if not len(others) or others.size > MOST_TRIED:
            return None
        present = int(evaluated.intervals[place.interval]), (evaluated.ways[place.way],)
        rough = self._evaluate(others, *present, roughly=True)
        score = np.where(self.allowed(rough, limits), self.score(rough, limits), np.inf)[:, 0, 0]
        order = score.argsort(kind="stable")
        best = self._score(evaluated, place, limits)
        joined = _joined(evaluated.choice[place.staff], others[order[: np.count_nonzero(score < best)][:_MOST_JOINED]])
        return self._better(np.concatenate([others[order[:_MOST_LOOKED_AT]], *joined]), best, limits)

    def _improved_wholly(self, evaluated: Evaluated, place: Place, limits: Limits) -> tuple[Evaluated, Place] | None:
        """Return the best of the changes that suit an interval, of one region or of two, each with all intervals and
        ways; None: none is better. Where they are too many to be evaluated so, they are not."""
        choice, best = evaluated.choice[place.staff], self._score(evaluated, place, limits)
        for change in (self._fitted, self._changed, self._changed_twice):
            others = change(choice)
            numbers = others.size * len(self._intervals) * len(self._useful_ways)
            if 0 < numbers <= MOST_WHOLLY_EVALUATED and (better := self._better(others, best, limits)) is not None:
                return better
        return None

    def _better(self, others: Ints, than: float, limits: Limits) -> tuple[Evaluated, Place] | None:
        """Return the best of some staffings, each with all intervals and ways; None: none has a better score."""
        whole = self._evaluate(others)
        found = self._picked(whole, limits)
        return (whole, found) if found is not None and self._score(whole, found, limits) < than - _LEAST_GAIN else None

    def _score(self, evaluated: Evaluated, place: Place, limits: Limits) -> float:
        return float(self.score(evaluated, limits)[place.staff, place.interval, place.way])

    def _picked(self, evaluated: Evaluated, limits: Limits) -> Place | None:
        """Return the best of some plans; None: none keeps the limits."""
        allowed = self.allowed(evaluated, limits)
        if not allowed.any():
            return None
        score = np.where(allowed, self.score(evaluated, limits), np.inf)
        return Place(*(int(n) for n in np.unravel_index(score.argmin(), score.shape)))

    def allowed(self, evaluated: Evaluated, limits: Limits) -> Bools:
        """Return whether plans keep the limits and the tolerance."""
        allowed = evaluated.tolerated & self.kept(evaluated, limits)
        if limits.careful:
            batch = evaluated.batch_points[:, None, None]
            given = batch + np.maximum(0.0, evaluated.points)
            allowed &= (batch <= 0.0) | (given <= self._demand.tolerance + 1e-9)
        return np.asarray(allowed)

    # Staffings

    @cached_property
    def _all_tried(self) -> bool:
        """Whether the staffings are so few that all are evaluated."""
        count = math.prod(int(size) for size in self._sizes)
        return count * len(self._intervals) * len(self._useful_ways) * len(self._sizes) <= MOST_ENUMERATED

    def _choices(self) -> Ints:
        """Return all staffings if they are few; else for every pace the cheapest configurations that keep it, and the
        fastest of every region."""
        if self._all_tried:
            return np.stack(np.meshgrid(*(np.arange(n) for n in self._sizes), indexing="ij"), -1).reshape(
                -1, len(self._sizes)
            )
        staffs = Staffs.of(self._table)
        loads = self._samples[:, None] / staffs.step_samples
        passes = loads * staffs.step_seconds
        slowest = passes.min(axis=1).max()
        paces = np.unique(passes[passes >= slowest])
        each = passes.size * max(1, len(self._intervals)) * len(self._useful_ways) * len(_SAMPLE_PRICES)
        most = max(4, min(MOST_PACES, MOST_FIGURES // each * passes.shape[1]))
        if len(paces) > most:
            paces = paces[np.unique(np.linspace(0, len(paces) - 1, most).round().astype(int))]
        found = [
            # A hair more, so that a pace which comes from the region itself is kept.
            np.where(passes <= pace * (1 + 1e-9), priced, np.inf).argmin(axis=1)
            for pace in paces
            for priced in self._priced(staffs, pace)
        ]
        few = np.where(staffs.step_samples <= staffs.step_samples.min(axis=1, keepdims=True), 0.0, np.inf)
        cheap = (few + (staffs.worker_usd + staffs.server_usd) * passes + staffs.merge_usd * loads).argmin(axis=1)
        return np.unique(np.array([*found, cheap, passes.argmin(axis=1)]), axis=0)

    def _priced(self, staffs: Staffs, pace: float) -> list[Floats]:
        """Return the USD of a pass over the data at a pace, by region and configuration, at each price of samples."""
        usd = (staffs.worker_usd + staffs.server_usd) * pace
        usd = usd + staffs.merge_usd * self._samples[:, None] / staffs.step_samples
        samples = usd.min(axis=1).sum() * staffs.step_samples / self._least_samples
        return [usd * (1 - price) + samples * price for price in _SAMPLE_PRICES]

    def _fitted(self, choice: Ints) -> Ints:
        """Return a staffing changed so that rounds of whole steps fit the shards, for every interval; none if they are
        many: each region takes the cheapest configuration that keeps the pace, where other passes than asked count."""
        staffs, (total, _) = Staffs.of(self._table), self._loads(self._staffs(choice[None, :]))
        regions = np.arange(len(choice))
        seconds = self._samples[:, None] / staffs.step_samples * staffs.step_seconds
        pace = float(seconds[regions, choice].max())
        each = (
            1.0 / staffs.step_seconds
            if self._demand.balance == "speed"
            else self._samples[:, None] / staffs.step_samples
        )
        # The region that makes the most steps, by which they are counted.
        first = int(each[regions, choice].argmax())
        counts = np.unique(each[first])
        if len(counts) * len(self._intervals) * each.size > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        found, prices = [choice], self._priced(staffs, pace)
        for most in counts:
            keeps = (seconds <= pace * (1 + 1e-9)) & (each <= most * (1 + 1e-9))
            keeps[first] &= each[first] == most
            if not keeps.any(axis=1).all():
                continue
            of_most = total if self._demand.steps is not None else total * most / each[first, choice[first]]
            intervals, rounds = self._rounds(of_most, self._intervals)
            for interval, count in zip(intervals[0], rounds[0], strict=True):
                steps = np.maximum(1.0, np.round(interval * each / most))
                off = _off(count, steps, of_most * each / most)
                worse = np.where(keeps, BEYOND_WORTH * OFF_POINTS * np.maximum(0.0, off - MOST_OFF), np.inf)
                found += [(_log(usd) + worse).argmin(axis=1) for usd in prices]
        return np.unique(np.array(found), axis=0)

    def _changed(self, choice: Ints) -> Ints:
        """Return a staffing with the configuration of one region changed, in every way; none if these are many."""
        if len(self._regions) * len(choice) > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        other = self._numbers != choice[self._regions]
        return _with(choice, (self._regions[other], self._numbers[other]))

    def _changed_twice(self, choice: Ints) -> Ints:
        """Return a staffing with the configurations of two regions changed, in every way; none if they are many."""
        sizes = self._sizes
        if int(sizes.sum() ** 2 - (sizes**2).sum()) // 2 * len(choice) > MOST_TRIED:
            return np.empty((0, len(choice)), np.int64)
        first, second = np.triu_indices(len(self._regions), 1)
        two = self._regions[first] != self._regions[second]
        return _with(choice, *((self._regions[at[two]], self._numbers[at[two]]) for at in (first, second)))

    # Evaluation

    def _evaluate(
        self, choice: Ints, interval: int | None = None, ways: tuple[int, ...] = (), *, roughly: bool = False
    ) -> Evaluated:
        """Evaluate staffings with all intervals, or with one, and with the given ways or all that may be best.

        Roughly: whether another interval would fit the shards better does not count.
        """
        ways = ways or self._useful_ways
        intervals = 1 if roughly and interval is not None else len(self._intervals)
        size = max(1, MOST_AT_ONCE // (intervals * max(len(self._sizes), len(ways))))
        parts = [
            self._evaluated(choice[at : at + size], interval, ways, roughly=roughly)
            for at in range(0, len(choice), size)
        ]
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_STAFFING
        }
        return replace(parts[0], **joined)

    def _evaluated(self, choice: Ints, interval: int | None, ways: tuple[int, ...], *, roughly: bool) -> Evaluated:
        staffs = self._staffs(choice)
        total, shares = self._loads(staffs)
        numbers = np.arange(len(self._intervals)) if interval is None or not roughly else np.array([interval])
        steps_of, rounds = self._rounds(total, self._intervals[numbers])
        steps = _steps(steps_of, shares)
        points = self._points(staffs, rounds, steps, total, ways)
        another = roughly and len(self._intervals) > 1
        off = np.zeros(rounds.shape) if another else _off_points(rounds, steps, total, shares)
        tolerated = np.ones(points.shape, bool) if roughly else self._tolerated(points, off, rounds, total)
        if interval is not None and not roughly:
            numbers, only = numbers[[interval]], slice(interval, interval + 1)
            steps_of, rounds, steps, off = steps_of[:, only], rounds[:, only], steps[:, only], off[:, only]
            points, tolerated = points[:, only], tolerated[:, only]
        took = course(staffs, self._occasion, rounds, steps, self._ways.figures.at(ways))
        factor = samples_factor(staffs.step_samples.sum(axis=1), self._least_samples, self._noise)
        return Evaluated(
            choice, ways, numbers, steps_of, rounds, took.seconds, took.usd, points, off, tolerated, factor,
            self._batch_points(factor),
        )  # fmt: skip

    def steps(self, evaluated: Evaluated, place: Place) -> Floats:
        """Return the steps of a plan's rounds, by region."""
        shares = self._loads(self._staffs(evaluated.choice[place.staff][None, :]))[1]
        return np.asarray(_steps(evaluated.interval[place.staff][None, [place.interval]], shares)[0, 0])

    def _staffs(self, choice: Ints) -> Staffs:
        return Staffs.of(self._table[np.arange(len(self._sizes)), choice])

    def _batch_points(self, factor: Floats) -> Floats:
        """Return what larger batches give up where the number of samples is fixed."""
        demand = self._demand
        if demand.epochs is None or demand.to_goal:
            return np.zeros_like(factor)
        return batch_points(factor, self._least_samples, demand.epochs * float(self._samples.sum()))

    def _tolerated(self, points: Floats, off: Floats, rounds: Floats, total: Floats) -> Bools:
        """Return whether points are within the tolerance, or no more than what the most careful way has to give up."""
        careful = (exchange_points(rounds, self._ways.coding.min(), np.zeros(1)) - self._careful(total)).clip(0.0) + off
        most = np.maximum(self._demand.tolerance, careful.min(axis=1))
        return np.asarray(points.clip(0.0) + off[..., None] <= most[:, None, None] + 1e-9)

    def _careful(self, total: Floats) -> Floats:
        """Return the points that the usual exchange costs, shape (staffings, 1)."""
        _, usual = self._rounds(total, np.array([float(self._usual)]))
        if self._demand.interval is None:
            usual = np.maximum(usual, np.minimum(FEWEST_ROUNDS, np.maximum(1.0, np.round(total))[:, None]))
        return exchange_points(usual, self._ways.coding.min(), np.zeros(1))

    def _points(self, staffs: Staffs, rounds: Floats, steps: Floats, total: Floats, ways: tuple[int, ...]) -> Floats:
        """Return the points given up against the usual exchange of the same staffing."""
        figures = self._ways.figures.at(ways)
        compute = (steps * staffs.step_seconds[:, None, :]).max(-1)[..., None]
        late = figures.background * figures.seconds / compute if self._ways.optional_background else np.zeros((1, 1, 1))
        found = exchange_points(rounds[..., None], self._ways.coding[list(ways)], late)
        return np.asarray(found - self._careful(total)[..., None])

    def _loads(self, staffs: Staffs) -> tuple[Floats, Floats]:
        """Return the steps of the region that makes the most, and each region's as a part of them."""
        demand, epochs = self._demand, self._demand.epochs or 1.0
        if demand.balance == "speed":
            # All rounds take equally long; together the regions make the demanded epochs.
            rates = 1.0 / staffs.step_seconds
            fastest = rates.max(axis=1)
            total = epochs * self._samples.sum() / (rates * staffs.step_samples).sum(axis=1) * fastest
            shares = rates / fastest[:, None]
        else:
            # All regions make the same epochs.
            passes = self._samples / staffs.step_samples
            total, shares = epochs * passes.max(axis=1), passes / passes.max(axis=1)[:, None]
        if demand.steps is not None:
            total = np.full(len(total), float(demand.steps))
        return total, shares

    def _rounds(self, total: Floats, intervals: Floats) -> tuple[Floats, Floats]:
        """Return interval and number of rounds, by staffing and interval.

        An interval that the demand states stays, unless it would change the number of steps by more than `MOST_OFF`.
        """
        total = np.asarray(np.round(np.maximum(total, 1.0)), float)[:, None]
        interval = np.minimum(intervals[None, :], total)
        rounds = np.ceil(total / interval)
        shorter = np.ceil(total / rounds)
        if self._demand.interval is None:
            return shorter, rounds
        whole = np.maximum(1.0, np.round(total / interval))
        stays = np.abs(whole * interval - total) <= MOST_OFF * total
        return np.where(stays, interval, shorter), np.where(stays, whole, rounds)

    def _tried_intervals(self) -> tuple[int, ...]:
        table = Staffs.of(self._table.swapaxes(0, 1))
        fewest = float(self._loads(table)[0].min()) if self._demand.steps is None else float(self._demand.steps)
        return (*_SHORT_INTERVALS, *_INTERVALS) if fewest < FEWEST_ROUNDS * USUAL_INTERVAL else _INTERVALS


def _steps(interval: Floats, shares: Floats) -> Floats:
    """Return the whole steps of a round, by staffing, interval and region."""
    return np.maximum(1.0, np.round(interval[..., None] * shares[:, None, :]))


def _off_points(rounds: Floats, steps: Floats, total: Floats, shares: Floats) -> Floats:
    """Return the points that count as given up by other passes over the shards than asked."""
    off = _off(rounds[..., None], steps, total[:, None, None] * shares[:, None, :]).max(axis=-1)
    return np.asarray(OFF_POINTS * np.maximum(0.0, off - MOST_OFF))


def _off(rounds: Floats, steps: Floats, asked: Floats) -> Floats:
    """Return the share by which steps differ from what is asked, beyond one step."""
    return np.asarray(np.maximum(0.0, np.abs(rounds * steps - asked) - 1.0) / asked)


def _with(choice: Ints, *changes: tuple[Ints, Ints]) -> Ints:
    """Return a staffing with other configurations, each change a row of regions and their configurations."""
    rows = np.repeat(choice[None, :], len(changes[0][0]), axis=0)
    for regions, configurations in changes:
        rows[np.arange(len(rows)), regions] = configurations
    return rows


def _joined(choice: Ints, rows: Ints) -> list[Ints]:
    """Return changes of a staffing together: the first two of different regions, the first three, and so on."""
    together, found = choice, list[Ints]()
    for row in rows:
        changed = row != choice
        if (together[changed] == choice[changed]).all():
            together = np.where(changed, row, together)
            found.append(together[None, :])
    return found[1:]


def _log(figures: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(figures, _LEAST)))


def _undominated(ways: Ways) -> tuple[int, ...]:
    """Return the ways that no other equals or beats in every figure; of equal ones the first."""
    its = ways.figures
    rows = np.stack([its.seconds, its.usd, its.contact, ways.coding, 1.0 * ways.lossy, 1.0 * its.background], axis=1)
    left, kept = np.lexsort(rows.T[::-1]), list[int]()
    while len(left):
        first = rows[left[0]]
        kept.append(int(left[0]))
        left = left[(rows[left] < first).any(axis=1) | (rows[left, -1] != first[-1])]
    return tuple(sorted(kept))
