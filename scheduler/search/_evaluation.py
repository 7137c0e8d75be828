"""Evaluates plans of one demand over given regions, many at once: seconds, money, and points that are given up.

An assignment is one configuration for each region, by its number there. Every assignment is evaluated with several
intervals and ways to exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler._cost_model import Assignments, Bools, Exchanges, Floats, JobConstants, course
from scheduler._exchange import ExchangeOptions, policy_of
from scheduler._model import Demand
from scheduler.tuning._learning import (
    PRIOR_NOISE_SAMPLES,
    batch_points,
    exchange_points,
    samples_factor,
    step_samples_of,
)
from sync.policy import HIDDEN_FRACTION, HIDING_MARGIN, LONGEST_ROUNDS

__all__ = [
    "MOST_OFF",
    "EvaluatedPlans",
    "Ints",
    "PlanEvaluation",
    "PlanIndex",
    "off_points",
    "off_share",
    "whole_steps",
]

Ints = npt.NDArray[np.int64]

USUAL_INTERVAL = 20
"""Local steps between WAN exchanges that count as giving up nothing: H = 20, as in measurements of WAN policies."""
FEWEST_ROUNDS = 20.0
"""Rounds below which a job gives up something however short it is: in so many, local steps cost easy tasks a quarter of
a point, and the hardest measured five (`exchange_points`)."""
MOST_OFF = 0.02
"""Share by which the passes over a shard may differ from what is asked, beyond one step: rounds have whole steps."""
OFF_POINTS = 10.0
"""Points that count as given up where a shard gets twice the passes that are asked for, or none. A choice: other passes
are made only where a job would merge far less often otherwise."""
MOST_AT_ONCE = 100_000
"""Numbers in an array of an evaluation: 800 kB, so that it stays in a processor's cache."""
_INTERVALS = (*range(13, 41), 50, 60, 80, 120, 160, 320)
"""Intervals that are tried, in steps: around the usual one all, so that whole steps fit the shards; longer ones to save
egress in long jobs."""
_SHORT_INTERVALS = range(1, 13)
"""Intervals that are tried, too, where a job has less than `FEWEST_ROUNDS` of the usual one."""


@dataclass(frozen=True)
class PlanIndex:
    """One evaluated plan, by its place on the axes."""

    assignment: int
    interval: int
    way: int


@dataclass(frozen=True)
class EvaluatedPlans:
    """Assignments with all intervals and ways to exchange that were tried: arrays with these three axes."""

    choice: Ints
    """By assignment and region: number of the configuration."""
    ways: tuple[int, ...]
    """Numbers of the ways on the last axis."""
    intervals: Ints
    """Numbers of the intervals on the middle axis."""
    interval: Floats
    rounds: Floats
    """By assignment and interval."""
    seconds: Floats
    usd: Floats
    points: Floats
    """Points that the exchange gives up against the usual one; below 0 where it is more careful."""
    off_points: Floats
    """Points that count as given up by other passes over the shards than asked, by assignment and interval."""
    most: Floats
    """Points by both that are tolerated, by assignment: the tolerance, or the least that any interval allows."""
    factor: Floats
    """`samples_factor`, by assignment."""
    batch_points: Floats
    """Points that the global batch gives up, by assignment."""
    changed: Bools
    """Whether the exchange takes so much of a round's compute that its codec or interval would be changed while the job
    runs."""

    @cached_property
    def tolerated(self) -> Bools:
        """Whether plans give up no more than is tolerated."""
        return np.asarray(self.points.clip(0.0) + self.off_points[..., None] <= self.most[:, None, None] + 1e-9)


_BY_STAFFING = tuple(field.name for field in fields(EvaluatedPlans) if field.name not in ("ways", "intervals"))


class PlanEvaluation:
    """The plans of one demand over given regions."""

    def __init__(
        self,
        figures: Sequence[Floats],
        samples: Sequence[int],
        ways: ExchangeOptions,
        constants: JobConstants,
        demand: Demand,
        noise: float | None,
    ) -> None:
        """``figures``: by region, `Assignments.figures` of its configurations, shape (figures, configurations).
        ``samples``: of each region's shards. ``noise``: the measured noise scale in samples."""
        self.useful_ways, self.demand = _undominated(ways), demand
        self.ways, self.least_ways = _with_least(ways, self.useful_ways)
        """``least_ways``: one that waits and one that does not, each of which is no worse than any useful one in any
        respect: what plans take at least."""
        self._figures_of_ways: dict[tuple[int, ...], tuple[Exchanges, Floats]] = {}
        self._constants, self.measured_noise, self._noise = constants, noise, noise or PRIOR_NOISE_SAMPLES
        self.sizes = np.array([own.shape[1] for own in figures])
        # What all configurations of each region have in common is held once: of many regions that is most of all.
        every, begins = np.concatenate(figures, axis=1), self.sizes.cumsum() - self.sizes
        first = every[:, begins]
        common = np.array(
            [bool((own == np.repeat(one, self.sizes)).all()) for own, one in zip(every, first, strict=True)]
        )
        self._common = np.flatnonzero(common), np.ascontiguousarray(first[common].T).T[:, :, None]
        # Regions with fewer configurations repeat their last one.
        places = begins[:, None] + np.minimum(np.arange(self.sizes.max()), self.sizes[:, None] - 1)
        self._others = np.flatnonzero(~common), every[~common].take(places, axis=1)
        each, self._told_once = self._others[1], Assignments.told_once()
        self.configured = self._assignments(
            np.broadcast_to(self._common[1], (int(common.sum()), *each.shape[1:])), each
        )
        """Every configuration of every region, shape (regions, configurations)."""
        self.samples = np.array(samples, float)
        self.least_samples = float(self.configured.step_samples.min(axis=1).sum())
        self._compared_samples = self.least_samples * (demand.least_batch or demand.batch) / demand.batch
        wanted = policy_of(demand).interval_steps
        self._usual = demand.interval or wanted or USUAL_INTERVAL
        free = demand.interval is None and wanted is None
        self.intervals = np.array(self._tried_intervals() if free else (self._usual,), float)

    def evaluate(
        self,
        choice: Ints,
        intervals: Ints | None = None,
        ways: tuple[int, ...] = (),
        *,
        most: Floats | None = None,
        roughly: bool = False,
    ) -> EvaluatedPlans:
        """Evaluate assignments with all intervals, or with some, and with the given ways or all that may be best.

        ``most``: `EvaluatedPlans.most` of the assignments, if it is known. Roughly: whether another interval would fit
        the shards better does not count.
        """
        ways = ways or self.useful_ways
        count = len(self.intervals) if intervals is None or not (roughly or most is not None) else len(intervals)
        size = max(1, MOST_AT_ONCE // (count * max(len(self.sizes), len(ways))))
        parts = [
            self._evaluated(
                choice[at : at + size], intervals, ways, None if most is None else most[at : at + size], roughly=roughly
            )
            for at in range(0, len(choice), size)
        ]
        if len(parts) == 1:
            return parts[0]
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in _BY_STAFFING
        }
        return replace(parts[0], **joined)

    def _evaluated(
        self, choice: Ints, intervals: Ints | None, ways: tuple[int, ...], most: Floats | None, *, roughly: bool
    ) -> EvaluatedPlans:
        assignments = self.assignments(choice)
        total, shares = self.loads(assignments)
        numbers, usual = np.arange(len(self.intervals)) if intervals is None else intervals, self._careful(total)
        if roughly:
            most = np.full(len(choice), np.inf)
        if most is None:
            # What is tolerated follows from all intervals.
            steps_of, rounds, steps, off = self._lengths(self.intervals, total, shares)
            most = self._most(off, rounds, usual)
            if intervals is not None:
                steps_of, rounds, steps, off = (figure[:, numbers] for figure in (steps_of, rounds, steps, off))
        else:
            another = roughly and len(self.intervals) > 1
            steps_of, rounds, steps, off = self._lengths(self.intervals[numbers], total, shares, exact=another)
        exchanges, coding = self._of_ways(ways)
        took = course(assignments, self._constants, rounds, steps, exchanges)
        late = exchanges.background * exchanges.seconds / took.compute if self.ways.optional_background else 0.0
        # What is given up against the usual exchange of the same assignment.
        points = exchange_points(rounds[..., None], coding, late) - usual[..., None]
        factor = samples_factor(assignments.step_samples.sum(axis=1), self._compared_samples, self._noise)
        return EvaluatedPlans(
            choice, ways, numbers, steps_of, rounds, took.seconds, took.usd, points, off, most, factor,
            self._batch_points(factor), self._changed(rounds, took.compute, list(ways)),
        )  # fmt: skip

    def _changed(self, rounds: Floats, compute: Floats, ways: list[int]) -> Bools:
        """Return `EvaluatedPlans.changed` by the rule of the job: a longer interval must leave it rounds."""
        own = self.ways.adapted_seconds[ways]
        if not own.any():
            return np.zeros((len(rounds), 1, 1), bool)
        may = self.ways.adapts_codec[ways] | (rounds > LONGEST_ROUNDS)[..., None]
        return np.asarray(may & (own > HIDDEN_FRACTION * HIDING_MARGIN * compute))

    def _lengths(
        self, intervals: Floats, total: Floats, shares: Floats, *, exact: bool = False
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return interval, number of rounds, whole steps by region, and `off_points`, 0 where all intervals are taken
        as exact."""
        steps_of, rounds = self.rounds(total, intervals)
        steps = whole_steps(steps_of, shares)
        return steps_of, rounds, steps, np.zeros(rounds.shape) if exact else off_points(rounds, steps, total, shares)

    def steps(self, evaluated: EvaluatedPlans, place: PlanIndex) -> Floats:
        """Return the steps of a plan's rounds, by region."""
        shares = self.loads(self.assignments(evaluated.choice[place.assignment][None, :]))[1]
        return np.asarray(whole_steps(evaluated.interval[place.assignment][None, [place.interval]], shares)[0, 0])

    def assignments(self, choice: Ints) -> Assignments:
        """Return the figures of assignments."""
        figures, regions, most = self._others[1].shape
        at = np.arange(regions)[:, None] * most + choice.T
        chosen = self._others[1].reshape(figures, regions * most).take(at, axis=1)
        # Each region's figures lie together, as in `Assignments.of`.
        common = [
            self._common[1][place].T
            if number in self._told_once
            else np.repeat(self._common[1][place], len(choice), 1).T
            for place, number in enumerate(self._common[0].tolist())
        ]
        return self._assignments(common, np.swapaxes(chosen, 1, 2))

    def _assignments(self, common: Iterable[Floats], others: Iterable[Floats]) -> Assignments:
        """Return assignments of figures of both kinds, each of shape (figures, ...)."""
        numbers = [*self._common[0].tolist(), *self._others[0].tolist()]
        figures = dict(zip(numbers, [*common, *others], strict=True))
        return Assignments(*(figures[number] for number in sorted(figures)))

    @cached_property
    def least_batch_points(self) -> float:
        """Points that the smallest global batch of all assignments gives up."""
        factor = samples_factor(np.array([self.least_samples]), self._compared_samples, self._noise)
        return float(self._batch_points(factor)[0])

    @property
    def most_step_samples(self) -> float:
        """Samples of the largest global batch that gives up no more points than the tolerance, or slightly more."""
        demand = self.demand
        if demand.epochs is None or demand.to_goal:
            return math.inf
        samples, most = demand.epochs * float(self.samples.sum()), max(0.0, demand.tolerance) + 1e-6
        return step_samples_of(most, self._compared_samples, self._noise, samples)

    def _batch_points(self, factor: Floats) -> Floats:
        """Return what larger batches give up where the number of samples is fixed."""
        demand = self.demand
        if demand.epochs is None or demand.to_goal:
            return np.zeros_like(factor)
        return batch_points(factor, self._compared_samples, demand.epochs * float(self.samples.sum()))

    def _most(self, off: Floats, rounds: Floats, usual: Floats) -> Floats:
        """Return the tolerance, or what the most careful way has to give up; by assignment."""
        careful = (exchange_points(rounds, self.ways.coding.min(), 0.0) - usual).clip(0.0) + off
        return np.asarray(np.maximum(self.demand.tolerance, careful.min(axis=1)))

    def _careful(self, total: Floats) -> Floats:
        """Return the points that the usual exchange costs, shape (assignments, 1)."""
        _, usual = self.rounds(total, np.array([float(self._usual)]))
        if self.demand.interval is None:
            usual = np.maximum(usual, np.minimum(FEWEST_ROUNDS, np.maximum(1.0, np.round(total))[:, None]))
        return exchange_points(usual, self.ways.coding.min(), 0.0)

    def _of_ways(self, ways: tuple[int, ...]) -> tuple[Exchanges, Floats]:
        """Return the figures of some ways, and their `coding_points`."""
        if ways not in self._figures_of_ways:
            self._figures_of_ways[ways] = self.ways.figures.at(ways), self.ways.coding[list(ways)]
        return self._figures_of_ways[ways]

    def loads(self, assignments: Assignments) -> tuple[Floats, Floats]:
        """Return the steps of the region that makes the most, and each region's as a part of them."""
        demand, epochs = self.demand, self.demand.epochs or 1.0
        if demand.balance == "speed":
            # All rounds take equally long; together the regions make the demanded epochs.
            rates = 1.0 / assignments.step_seconds
            fastest = rates.max(axis=1)
            total = epochs * self.samples.sum() / (rates * assignments.step_samples).sum(axis=1) * fastest
            shares = rates / fastest[:, None]
        else:
            # All regions make the same epochs.
            passes = self.samples / assignments.step_samples
            most = passes.max(axis=1)
            total, shares = epochs * most, passes / most[:, None]
        if demand.clients is not None:
            # A step is a round of clients, of which all regions make the same number.
            shares = np.ones_like(shares)
        if demand.steps is not None:
            total = np.full(len(total), float(demand.steps))
        return total, shares

    def rounds(self, total: Floats, intervals: Floats) -> tuple[Floats, Floats]:
        """Return interval and number of rounds, by assignment and interval.

        An interval that the demand states stays, unless it would change the number of steps by more than `MOST_OFF`.
        """
        total = np.asarray(np.round(np.maximum(total, 1.0)), float)[:, None]
        interval = np.minimum(intervals[None, :], total)
        rounds = np.ceil(total / interval)
        shorter = np.ceil(total / rounds)
        if self.demand.interval is None:
            return shorter, rounds
        whole = np.maximum(1.0, np.round(total / interval))
        stays = np.abs(whole * interval - total) <= MOST_OFF * total
        return np.where(stays, interval, shorter), np.where(stays, whole, rounds)

    def _tried_intervals(self) -> tuple[int, ...]:
        every = Assignments(*(getattr(self.configured, field.name).T for field in fields(Assignments)))
        fewest = float(self.loads(every)[0].min()) if self.demand.steps is None else float(self.demand.steps)
        return (*_SHORT_INTERVALS, *_INTERVALS) if fewest < FEWEST_ROUNDS * USUAL_INTERVAL else _INTERVALS


def whole_steps(interval: Floats, shares: Floats) -> Floats:
    """Return the whole steps of a round, by assignment, interval and region."""
    return np.maximum(1.0, np.round(interval[..., None] * shares[:, None, :]))


def off_points(rounds: Floats, steps: Floats, total: Floats, shares: Floats) -> Floats:
    """Return the points that count as given up by other passes over the shards than asked."""
    off = off_share(rounds[..., None], steps, total[:, None, None] * shares[:, None, :]).max(axis=-1)
    return np.asarray(OFF_POINTS * np.maximum(0.0, off - MOST_OFF))


def off_share(rounds: Floats, steps: Floats, asked: Floats) -> Floats:
    """Return the share by which steps differ from what is asked, beyond one step."""
    return np.asarray(np.maximum(0.0, np.abs(rounds * steps - asked) - 1.0) / asked)


def _with_least(ways: ExchangeOptions, useful: tuple[int, ...]) -> tuple[ExchangeOptions, tuple[int, ...]]:
    """Return the figures of ways with those of one more of each kind, and the numbers of these."""
    its, own = ways.figures, np.array(useful)
    groups = [own[its.background[own] == background] for background in (False, True)]
    groups = [group for group in groups if len(group)]

    def added(figures: Any, best: Any) -> Any:
        return np.concatenate([figures, [best(figures[group]) for group in groups]])

    figures = {field.name: added(getattr(its, field.name), np.min) for field in fields(its)}
    figures["links"] = added(its.links, np.max)
    count = len(ways.each)
    extended = replace(
        ways, figures=replace(its, **figures), coding=added(ways.coding, np.min), lossy=added(ways.lossy, np.min),
        adapted_seconds=added(ways.adapted_seconds, np.min), adapts_codec=added(ways.adapts_codec, np.min),
    )  # fmt: skip
    return extended, tuple(range(count, count + len(groups)))


def _undominated(ways: ExchangeOptions) -> tuple[int, ...]:
    """Return the ways that no other equals or beats in every figure; of equal ones the first."""
    its = ways.figures
    rows = np.stack(
        [
            its.seconds,
            its.seconds - its.links,
            its.apart,
            its.usd,
            its.contact,
            ways.coding,
            1.0 * ways.lossy,
            ways.adapted_seconds,
            1.0 * ways.adapts_codec,
            1.0 * its.background,
        ],
        axis=1,
    )
    left, kept = np.lexsort(rows.T[::-1]), list[int]()
    while len(left):
        first = rows[left[0]]
        kept.append(int(left[0]))
        left = left[(rows[left] < first).any(axis=1) | (rows[left, -1] != first[-1])]
    return tuple(sorted(kept))
