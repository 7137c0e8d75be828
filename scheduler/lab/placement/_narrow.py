"""Reduction of many regions to those that can be part of a job's cheapest placement, and to those that can be its hub.

A first guess bounds the cost of the cheapest placement from above. A region is omitted if any placement that uses it
costs more: its own price of some union of shards, the least that the others could cost anywhere, and the least cost of
the rounds. Where many regions are much alike, the rounds decide, so they must be included.
"""

from __future__ import annotations

import math

import numpy as np

from scheduler.lab.placement._choice import PlacementChoice, rounds_usd
from scheduler.lab.placement._sites import SLACK, Bools, Floats, Ints, Need, Sites
from scheduler.lab.placement._split import Table, assembled, best_split, part_of, split_of

WIDE = 64
"""Number of regions from which those that cannot be part of the best placement are removed first."""
HUBS = 32
"""Number of hubs that are distinguished when regions are removed."""
SEEDS = 6
"""Regions for each union that the first guess is made of."""


def narrowed(
    sites: Sites, need: Need, table: Table, limit: Floats, unit_usd: Floats, ceiling: float, most: int
) -> tuple[Table, PlacementChoice | None, float]:
    """Return the table with the useful regions, a guess, and the least cost of placements that use another region.

    What costs `ceiling` or more is of no use. At most about `most` regions are kept.
    """
    floors = _Floors(sites, need, table)

    def guess(columns: Ints) -> PlacementChoice | None:
        split = best_split(sites, need, part_of(table, columns, columns))
        return assembled(sites, need, limit, unit_usd, split) if split is not None else None

    best: PlacementChoice | None = None
    columns, hubs, least = floors.useful(ceiling)
    for first in (True, False):
        if len(columns) <= WIDE:
            break
        promising = floors.seeds() if first else _most_promising(columns, least, WIDE)
        better = guess(np.union1d(promising, table.pinned_at))
        if better is not None and better.priced_usd < ceiling:
            best, ceiling = better, better.priced_usd
            columns, hubs, least = floors.useful(ceiling)
    left_out = ceiling
    if len(columns) > most:
        kept = np.union1d(_most_promising(columns, least, most), table.pinned_at)
        left_out = min(left_out, float(least[~np.isin(columns, kept)].min(initial=math.inf)))
        columns, hubs = kept, np.intersect1d(hubs, kept)
    return part_of(table, columns, hubs), best, left_out


def _most_promising(columns: Ints, least: Floats, count: int) -> Ints:
    return columns[np.argsort(least, kind="stable")[:count]]


class _Floors:
    """Lower bounds of a placement's cost, by one region that it uses or by its hub."""

    def __init__(self, sites: Sites, need: Need, table: Table) -> None:
        self._sites, self._need, self._table = sites, need, table
        added, everything = table.added, len(table.added) - 1
        self._pinned: Bools = np.zeros(len(table.regions), dtype=bool)
        self._pinned[table.pinned_at] = True
        # A union that is neither at the hub nor with pinned shards pays rounds, at least those of the cheapest pair.
        self._least_rounds = need.round_gb * sites.least_both_ways
        alone = np.minimum(added.min(axis=1) + self._least_rounds, added[:, self._pinned].min(axis=1, initial=math.inf))
        rest = np.array(split_of([float(usd) for usd in alone])[0])
        others = rest[everything ^ np.arange(1, everything + 1)]
        self._here: Floats = table.pinned_usd + (added[1:] + others[:, None]).min(axis=0)
        """[region] Least cost of a placement with a union there, without the rounds of that one."""
        self.as_hub: Floats = table.hub_usd + np.where(self._pinned, table.pinned_usd + rest[-1], self._here)
        """[region] Least cost of a placement with its hub there."""

    def seeds(self) -> Ints:
        """The regions that are cheapest for some union of shards, or as hub."""
        for_unions = np.argpartition(self._table.added[1:], SEEDS, axis=1)[:, :SEEDS].ravel()
        return np.union1d(for_unions, np.argpartition(self.as_hub, SEEDS)[:SEEDS])

    def useful(self, ceiling: float) -> tuple[Ints, Ints, Floats]:
        """Regions that some placement at `ceiling` or less uses, those that may be its hub, and each region's floor."""
        ceiling += SLACK * abs(ceiling)
        hubs = np.flatnonzero(np.isfinite(self.as_hub) & (self.as_hub <= ceiling))
        if len(hubs) == 0:
            return self._table.pinned_at, hubs, np.zeros(len(self._table.pinned_at))
        # A hub without pinned shards has a union, for which the others' floor has counted rounds that it does not pay.
        there = self._table.hub_usd[hubs] - np.where(self._pinned[hubs], 0.0, self._least_rounds)
        order = np.argsort(there, kind="stable")
        hubs, there = hubs[order], there[order]
        near = np.flatnonzero((self._here + there[0] <= ceiling) | self._pinned)
        # Rounds are looked up for the cheapest hubs; to the others they cost at least what the cheapest pair does.
        first, regions = hubs[:HUBS], self._table.regions
        rounds = rounds_usd(self._sites, self._need, regions[near], regions[first])
        rounds[self._pinned[near]] = 0.0  # they are in `hub_usd`
        least = self._here[near] + (rounds + there[:HUBS]).min(axis=1)
        if len(hubs) > HUBS:
            beyond = np.where(self._pinned[near], 0.0, self._least_rounds) + there[HUBS]
            least = np.minimum(least, self._here[near] + beyond)
        itself = np.isin(near, hubs)
        least[itself] = np.minimum(least[itself], self.as_hub[near[itself]])
        kept = (least <= ceiling) | self._pinned[near]
        return near[kept], np.intersect1d(hubs, near[kept]), least[kept]
