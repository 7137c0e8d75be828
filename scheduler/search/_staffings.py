"""Staffings that a search tries: for every pace, around one that it has found, and for every interval."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from scheduler._cost_model import Floats, Staffs
from scheduler.search._evaluation import MOST_OFF, OFF_POINTS, Ints, PlanEvaluation, off_share

__all__ = ["BEYOND_WORTH", "MOST_ENUMERATED", "MOST_TRIED", "Staffings", "joined", "logarithm"]

BEYOND_WORTH = 1.0
"""Share of the objective that a point of the metric beyond the tolerance is worth, where no interval keeps it: other
staffings that do are preferred."""
_LEAST = 1e-12
"""Seconds or USD below which a plan counts as free; the objective is compared by logarithms."""
MOST_PACES = 48
"""Paces that are tried; of more they are thinned out evenly, and the search from the best ones fills the gaps."""
MOST_FIGURES = 4_000_000
"""Numbers in an array of the search: 32 MB, so that planning over a thousand regions takes seconds."""
MOST_ENUMERATED = 1_000_000
"""Numbers up to which all staffings are evaluated with all intervals and exchanges: that takes a tenth of a second."""
MOST_TRIED = 400_000
"""Numbers up to which changes of a plan are evaluated at once."""
_SAMPLE_PRICES = (0.0, 0.03, 0.3)
"""Shares of the price of samples in the global batch, when a region's configuration is chosen for a pace: the more they
count, the smaller the batch."""


class Staffings:
    """Arrays of shape (staffings, regions)."""

    def __init__(self, evaluation: PlanEvaluation, only: Ints | None = None) -> None:
        """``evaluation``: of the plans that are searched. ``only``: the one staffing that is tried."""
        self._of, self._only = evaluation, only
        # All configurations of all regions: whose, and its number there.
        self._regions = np.repeat(np.arange(len(evaluation.sizes)), evaluation.sizes)
        self._numbers = np.concatenate([np.arange(size) for size in evaluation.sizes])

    @cached_property
    def all_tried(self) -> bool:
        """Whether the staffings are so few that all are evaluated."""
        if self._only is not None:
            return True
        count = math.prod(int(size) for size in self._of.sizes)
        return count * len(self._of.intervals) * len(self._of.useful_ways) * len(self._of.sizes) <= MOST_ENUMERATED

    @cached_property
    def by_pace(self) -> Ints:
        """All staffings if they are few; else for every pace the cheapest configurations that keep it, and the
        fastest of every region."""
        if self._only is not None:
            return self._only[None, :]
        if self.all_tried:
            numbers = np.meshgrid(*(np.arange(size) for size in self._of.sizes), indexing="ij")
            return np.stack(numbers, -1).reshape(-1, len(numbers))
        staffs = self._of.configured
        loads = self._of.samples[:, None] / staffs.step_samples
        passes = loads * staffs.step_seconds
        slowest = passes.min(axis=1).max()
        paces = np.unique(passes[passes >= slowest])
        each = passes.size * max(1, len(self._of.intervals)) * len(self._of.useful_ways) * len(_SAMPLE_PRICES)
        most = max(4, min(MOST_PACES, MOST_FIGURES // each * passes.shape[1]))
        if len(paces) > most:
            paces = paces[np.unique(np.linspace(0, len(paces) - 1, most).round().astype(int))]
        found = []
        for pace in paces:
            # A hair more, so that a pace which comes from the region itself is kept.
            beyond = passes > pace * (1 + 1e-9)
            for priced in self._priced(staffs, pace):
                priced[beyond] = np.inf
                found.append(priced.argmin(axis=1))
        few = np.where(staffs.step_samples <= staffs.step_samples.min(axis=1, keepdims=True), 0.0, np.inf)
        cheap = (few + (staffs.worker_usd + staffs.server_usd) * passes + staffs.merge_usd * loads).argmin(axis=1)
        return np.unique(np.array([*found, cheap, passes.argmin(axis=1)]), axis=0)

    def _priced(self, staffs: Staffs, pace: float) -> list[Floats]:
        """Return the USD of a pass over the data at a pace, by region and configuration, at each price of samples."""
        standing, merging = self._paid
        usd = standing * pace + merging
        samples = usd.min(axis=1).sum() * staffs.step_samples / self._of.least_samples
        return [usd * (1 - price) + samples * price for price in _SAMPLE_PRICES]

    @cached_property
    def _paid(self) -> tuple[Floats, Floats]:
        """USD per second, and of the merges of a pass over the data, by region and configuration."""
        staffs = self._of.configured
        merging = staffs.merge_usd * self._of.samples[:, None] / staffs.step_samples
        return staffs.worker_usd + staffs.server_usd, merging

    def fitted(self, choice: Ints, most: int) -> Ints:
        """Return a staffing changed so that rounds of whole steps fit the shards, for every interval; none if they are
        more than ``most``: each region takes the cheapest configuration that keeps the pace, where other passes than
        asked count."""
        staffs, (total, _) = self._of.configured, self._of.loads(self._of.staffs(choice[None, :]))
        regions = np.arange(len(choice))
        seconds = self._of.samples[:, None] / staffs.step_samples * staffs.step_seconds
        pace = float(seconds[regions, choice].max())
        each = (
            1.0 / staffs.step_seconds
            if self._of.demand.balance == "speed"
            else self._of.samples[:, None] / staffs.step_samples
        )
        # The region that makes the most steps, by which they are counted.
        first = int(each[regions, choice].argmax())
        counts = np.unique(each[first])
        if len(counts) * len(self._of.intervals) * each.size > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        found, prices = [choice[None, :]], [logarithm(usd) for usd in self._priced(staffs, pace)]
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
        """Return all staffings whose steps have so many samples at most; None: they may have more ``figures``."""
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
        """Return a staffing with the configuration of one region changed, in every way; none if these are many."""
        if self._only is not None or len(self._regions) * len(choice) > MOST_FIGURES:
            return np.empty((0, len(choice)), np.int64)
        other = self._numbers != choice[self._regions]
        return _with(choice, (self._regions[other], self._numbers[other]))

    def changed_twice(self, choice: Ints) -> Ints:
        """Return a staffing with the configurations of two regions changed, in every way; none if they are many."""
        sizes = self._of.sizes
        if int(sizes.sum() ** 2 - (sizes**2).sum()) // 2 * len(choice) > MOST_TRIED:
            return np.empty((0, len(choice)), np.int64)
        first, second = np.triu_indices(len(self._regions), 1)
        two = self._regions[first] != self._regions[second]
        return _with(choice, *((self._regions[at[two]], self._numbers[at[two]]) for at in (first, second)))


def _with(choice: Ints, *changes: tuple[Ints, Ints]) -> Ints:
    """Return a staffing with other configurations, each change a row of regions and their configurations."""
    rows = np.repeat(choice[None, :], len(changes[0][0]), axis=0)
    for regions, configurations in changes:
        rows[np.arange(len(rows)), regions] = configurations
    return rows


def joined(choice: Ints, rows: Ints) -> Ints:
    """Return changes of a staffing together: the first two of different regions, the first three, and so on."""
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
