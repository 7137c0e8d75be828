"""Assignments that a search tries: for every pace, around one that it has found, and for every interval."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cached_property

import numpy as np

from scheduler._cost_model import Assignments, Floats
from scheduler.search._evaluation import MOST_OFF, OFF_POINTS, Ints, PlanEvaluation, off_share

__all__ = ["BEYOND_WORTH", "MOST_ENUMERATED", "MOST_TRIED", "AssignmentSearch", "joined", "logarithm"]

BEYOND_WORTH = 1.0
"""Share of the objective that a point of the metric beyond the tolerance is worth, where no interval keeps it: other
assignments that do are preferred."""
_LEAST = 1e-12
"""Seconds or USD below which a plan counts as free; the objective is compared by logarithms."""
MOST_PACES = 48
"""Paces that are tried; of more they are thinned out evenly, and the search from the best ones fills the gaps."""
MOST_FIGURES = 4_000_000
"""Numbers in an array of the search: 32 MB, so that planning over a thousand regions takes seconds."""
MOST_ENUMERATED = 1_000_000
"""Numbers up to which all assignments are evaluated with all intervals and exchanges, in a tenth of a second."""
MOST_TRIED = 400_000
"""Numbers up to which changes of a plan are evaluated at once."""
_SAMPLE_PRICES = (0.0, 0.03, 0.3)
"""Shares of the price of samples in the global batch, when a region's configuration is chosen for a pace: the more they
count, the smaller the batch."""


class AssignmentSearch:
    """Which assignments of configurations to regions are evaluated: arrays of shape (assignments, regions)."""

    def __init__(self, evaluation: PlanEvaluation, only: Ints | None = None) -> None:
        """``evaluation``: of the plans that are searched. ``only``: the one assignment that is tried."""
        self._of, self._only = evaluation, only
        # All configurations of all regions: whose, and its number there.
        self._regions = np.repeat(np.arange(len(evaluation.sizes)), evaluation.sizes)
        self._numbers = np.concatenate([np.arange(size) for size in evaluation.sizes])

    @cached_property
    def all_tried(self) -> bool:
        """Whether the assignments are so few that all are evaluated."""
        if self._only is not None:
            return True
        count = math.prod(int(size) for size in self._of.sizes)
        return count * len(self._of.intervals) * len(self._of.useful_ways) * len(self._of.sizes) <= MOST_ENUMERATED

    @cached_property
    def by_pace(self) -> Ints:
        """All assignments if they are few; else for every pace the cheapest configurations that keep it, and the
        fastest of every region."""
        if self._only is not None:
            return self._only[None, :]
        if self.all_tried:
            numbers = np.meshgrid(*(np.arange(size) for size in self._of.sizes), indexing="ij")
            return np.stack(numbers, -1).reshape(-1, len(numbers))
        # Of many regions most have far fewer configurations than the one with most: each is one place here.
        every, here = self._of.configured, (self._regions, self._numbers)
        shape = every.step_samples.shape
        assignments = Assignments(*(getattr(every, field.name)[here] for field in fields(Assignments)))
        loads = self._of.samples[self._regions] / assignments.step_samples
        passes = loads * assignments.step_seconds
        fastest = self._least(passes)
        paces = np.unique(passes[passes >= fastest.max()])
        each = math.prod(shape) * max(1, len(self._of.intervals)) * len(self._of.useful_ways)
        most = max(4, min(MOST_PACES, MOST_FIGURES // (each * len(_SAMPLE_PRICES)) * shape[1]))
        if len(paces) > most:
            paces = paces[np.unique(np.linspace(0, len(paces) - 1, most).round().astype(int))]
        standing, merging = _paid(assignments, self._of.samples[self._regions])
        found = []
        for pace in paces:
            # A hair more, so that a pace which comes from the region itself is kept.
            beyond, usd = passes > pace * (1 + 1e-9), standing * pace + merging
            for priced in self._priced(usd, self._least(usd), assignments):
                priced[beyond] = np.inf
                found.append(self._first_least(priced))
        fewest = self._least(assignments.step_samples)[self._regions]
        few = np.where(assignments.step_samples <= fewest, 0.0, np.inf)
        cheap = few + standing * passes + assignments.merge_usd * loads
        return np.unique(np.array([*found, self._first_least(cheap), self._first_least(passes)]), axis=0)

    def _least(self, figures: Floats) -> Floats:
        """Return the least figure of each region, of those of all configurations."""
        return np.asarray(np.minimum.reduceat(figures, np.cumsum(self._of.sizes) - self._of.sizes))

    def _first_least(self, figures: Floats) -> Ints:
        """Return the number of the first configuration of each region that has its least figure."""
        found, least = np.empty(len(self._of.sizes), np.int64), figures == self._least(figures)[self._regions]
        # Of several assignments to a place the last one counts.
        found[self._regions[least][::-1]] = self._numbers[least][::-1]
        return found

    def _priced(self, usd: Floats, least: Floats, assignments: Assignments) -> list[Floats]:
        """Return the USD of a pass over the data at each price of samples, where these are free and the least of each
        region is known."""
        samples = least.sum() * assignments.step_samples / self._of.least_samples
        return [usd * (1 - price) + samples * price for price in _SAMPLE_PRICES]

    def fitted(self, choice: Ints, most: int) -> Ints:
        """Return an assignment changed so that rounds of whole steps fit the shards, for every interval; none if they
        are more than ``most``: each region takes the cheapest configuration that keeps the pace, where other passes
        than asked count."""
        assignments, (total, _) = self._of.configured, self._of.loads(self._of.assignments(choice[None, :]))
        regions = np.arange(len(choice))
        seconds = self._of.samples[:, None] / assignments.step_samples * assignments.step_seconds
        pace = float(seconds[regions, choice].max())
        each = (
            1.0 / assignments.step_seconds
            if self._of.demand.balance == "speed"
            else self._of.samples[:, None] / assignments.step_samples
        )
        # The region that makes the most steps, by which they are counted.
        first = int(each[regions, choice].argmax())
        counts = np.unique(each[first])
        if len(counts) * len(self._of.intervals) * each.size > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        standing, merging = _paid(assignments, self._of.samples[:, None])
        usd = standing * pace + merging
        found, prices = [choice[None, :]], [logarithm(one) for one in self._priced(usd, usd.min(axis=1), assignments)]
        different = set[bytes]()
        for count in counts:
            keeps = (seconds <= pace * (1 + 1e-9)) & (each <= count * (1 + 1e-9))
            keeps[first] &= each[first] == count
            if not keeps.any(axis=1).all():
                continue
            of_most = total if self._of.demand.steps is not None else total * count / each[first, choice[first]]
            intervals, rounds = self._of.rounds(of_most, self._of.intervals)
            steps = np.maximum(1.0, np.round(intervals[0][:, None, None] * each / count))
            off = off_share(rounds[0][:, None, None], steps, of_most * each / count)
            worse = np.where(keeps, BEYOND_WORTH * OFF_POINTS * np.maximum(0.0, off - MOST_OFF), np.inf)
            for price in prices:
                found.append((price + worse).argmin(axis=2))
                different.update(row.tobytes() for row in found[-1])
            if len(different) > most:
                return np.empty((0, len(choice)), np.int64)
        return np.unique(np.concatenate(found), axis=0)

    def of_samples(self, most: float, figures: int) -> Ints | None:
        """Return all assignments whose steps have so many samples at most; None: they may have more ``figures``."""
        each = self._of.configured.step_samples
        least = each.min(axis=1)
        room, rows, sums = most - least.sum(), np.zeros((1, 0), np.int64), np.zeros(1)
        for region, size in enumerate(self._of.sizes):
            more = each[region, :size] - least[region]
            own, number = np.nonzero(sums[:, None] + more <= room)
            if len(own) * len(each) > figures:
                return None
            sums, rows = sums[own] + more[number], np.column_stack([rows[own], number])
        return rows

    def changed(self, choice: Ints) -> Ints:
        """Return an assignment with the configuration of one region changed, in every way; none if these are many."""
        if self._only is not None or len(self._regions) * len(choice) > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        other = self._numbers != choice[self._regions]
        return _with(choice, (self._regions[other], self._numbers[other]))

    def changed_twice(self, choice: Ints) -> Ints:
        """Return an assignment with the configurations of two regions changed, in every way; none if they are many."""
        sizes = self._of.sizes
        if int(sizes.sum() ** 2 - (sizes**2).sum()) // 2 * len(choice) > MOST_TRIED:
            return np.empty((0, len(choice)), np.int64)
        first, second = np.triu_indices(len(self._regions), 1)
        two = self._regions[first] != self._regions[second]
        return _with(choice, *((self._regions[at[two]], self._numbers[at[two]]) for at in (first, second)))


def _paid(assignments: Assignments, samples: Floats) -> tuple[Floats, Floats]:
    """Return the USD per second, and those of the merges of a pass over the data, by configuration."""
    return assignments.worker_usd + assignments.server_usd, assignments.merge_usd * samples / assignments.step_samples


def _with(choice: Ints, *changes: tuple[Ints, Ints]) -> Ints:
    """Return an assignment with other configurations, each change a row of regions and their configurations."""
    rows = np.repeat(choice[None, :], len(changes[0][0]), axis=0)
    for regions, configurations in changes:
        rows[np.arange(len(rows)), regions] = configurations
    return rows


def joined(choice: Ints, rows: Ints) -> Ints:
    """Return changes of an assignment together: the first two of different regions, the first three, and so on."""
    changes: dict[int, list[int]] = {}
    for row, region in zip(*(places.tolist() for places in np.nonzero(rows != choice)), strict=True):
        changes.setdefault(row, []).append(region)
    together, taken, found = choice.copy(), set[int](), list[Ints]()
    for row, regions in changes.items():
        if taken.isdisjoint(regions):
            taken.update(regions)
            together[regions] = rows[row, regions]
            found.append(together.copy())
    return np.array(found[1:], np.int64).reshape(-1, len(choice))


def logarithm(figures: Floats) -> Floats:
    """Return the logarithm of seconds or USD, of 0 that of almost nothing."""
    return np.asarray(np.log(np.maximum(figures, _LEAST)))
