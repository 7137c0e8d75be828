"""The best split of a job's free shards: a recursion over their subsets, for all hubs of the WAN star at once.

Free groups of shards (at most five) are split into unions; each union goes to one region, as a partition of its own or
into a partition that pinned shards need there anyway. Given the hub, the cost of a union depends on its region alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from scheduler.lab.placement._choice import PlacementChoice, bill_of, copy_usd, rounds_usd
from scheduler.lab.placement._sites import SLACK, Floats, Ints, Need, Sites


@dataclass(frozen=True, eq=False)
class Table:
    """Cost of each union of a job's shard groups in some regions; row 0 is the empty union."""

    regions: Ints
    """Ascending."""
    added: Floats
    """USD that a union adds in a region, without the WAN traffic of a new partition; shape (unions, regions)."""
    pinned_at: Ints
    """Columns of the regions of pinned shards."""
    pinned_usd: float
    hub_usd: Floats
    """Cost of the pinned partitions' rounds by region of the hub; shape (regions,)."""
    hubs: Ints
    """Columns of the regions that may be the hub."""


@dataclass(frozen=True)
class SplitBound:
    """The best split of the free groups; two unions may still be in one region."""

    usd: float
    hub: int
    unions: tuple[tuple[int, int], ...]
    """(union as a bit mask of groups, region)."""


def table_of(sites: Sites, need: Need, limit: Floats, unit_usd: Floats) -> Table | None:
    """Return the table of all regions, with at most `limit` units of each site; None: the pinned shards do not fit."""
    rows, regions = 1 << len(need.free), np.arange(len(sites.egress))
    powers, copies = np.zeros(rows), np.zeros((rows, len(regions)))
    for place, (shards, allowed) in enumerate(zip(need.free, need.allowed, strict=True)):
        bit = 1 << place
        powers[bit : 2 * bit] = powers[:bit] + need.power(shards)
        own = sum(copy_usd(sites, need, shard, regions) for shard in shards)
        copies[bit : 2 * bit] = copies[:bit] + np.where(allowed, own, math.inf)
    usd = _covered(powers[:, None], sites.power, unit_usd, limit)
    added = np.minimum.reduceat(usd, sites.starts, axis=1) + copies
    added += sites.server_usd_per_hour * need.hours
    pinned_usd, hub_usd = 0.0, np.zeros(len(regions))
    for region, shards in need.pinned.items():
        here = sites.own(region)
        joint = _covered(powers[:, None] + need.power(shards), sites.power[here], unit_usd[here], limit[here])
        together = joint.min(axis=1)
        if not math.isfinite(together[0]):
            return None
        added[:, region] = together - together[0] + copies[:, region]
        pinned_usd += float(together[0] + sites.server_usd_per_hour[region] * need.hours)
        pinned_usd += sum(float(copy_usd(sites, need, shard, region)) for shard in shards)
        hub_usd = hub_usd + rounds_usd(sites, need, np.array([region]), regions)[0]
    added[0] = 0.0
    return Table(regions, added, np.array(list(need.pinned), dtype=np.intp), pinned_usd, hub_usd, regions)


def _covered(powers: Floats, power: Floats, price: Floats, most: Floats) -> Floats:
    """Return [union, site] the USD of the fewest units with enough power; infinite where there are too few."""
    units = np.ceil(powers / power * (1 - SLACK))
    return np.where(units <= most, units * price, math.inf)


def part_of(table: Table, columns: Ints, hubs: Ints) -> Table:
    """Some columns of a table, those of pinned shards among them; `hubs` are some of `columns`."""
    pinned, hubs = np.searchsorted(columns, table.pinned_at), np.searchsorted(columns, hubs)
    added = table.added[:, columns]
    return Table(table.regions[columns], added, pinned, table.pinned_usd, table.hub_usd[columns], hubs)


def barring(table: Table, barred: tuple[tuple[int, int], ...]) -> Table:
    """Return the table with some choices forbidden, each a (union, column of the region)."""
    if not barred:
        return table
    added = table.added.copy()
    for union, column in barred:
        added[union, column] = math.inf
    return replace(table, added=added)


def meeting_of(split: SplitBound) -> tuple[tuple[int, int], int] | None:
    """Return two unions that go to the same region, and that region; None: there are none."""
    seen: dict[int, int] = {}
    for union, region in split.unions:
        if region in seen:
            return (seen[region], union), region
        seen[region] = union
    return None


def best_split(sites: Sites, need: Need, table: Table) -> SplitBound | None:
    """Return the cheapest split, hub and regions; None: there is none."""
    regions, added, hubs = table.regions, table.added, table.hubs
    everything = len(added) - 1
    if everything == 0:
        at_pinned = table.hub_usd[table.pinned_at]
        if not np.isfinite(at_pinned).any():
            return None
        hub = int(table.pinned_at[at_pinned.argmin()])
        return SplitBound(float(table.pinned_usd + at_pinned.min()), int(regions[hub]), ())
    if len(hubs) == 0:
        return None
    rounds = rounds_usd(sites, need, regions, regions[hubs])
    rounds[table.pinned_at] = 0.0  # their rounds are in `hub_usd`
    # [union, hub]: each union in the region that is best for that hub
    least = np.array([(added[union][:, None] + rounds).min(axis=0) for union in range(everything + 1)])
    least[0] = 0.0
    loose, tied = _splits(least, added[:, hubs])
    pinned = np.isin(hubs, table.pinned_at)
    totals = table.pinned_usd + table.hub_usd[hubs] + np.where(pinned, loose, tied)
    best = int(totals.argmin())
    if not math.isfinite(totals[best]):
        return None
    hub = int(hubs[best])
    at_hub = None if pinned[best] else added[:, hub]
    unions = []
    for union in _unions([float(usd) for usd in least[:, best]], at_hub):
        column = hub if union < 0 else int((added[union] + rounds[:, best]).argmin())
        unions.append((abs(union), int(regions[column])))
    return SplitBound(float(totals[best]), int(regions[hub]), tuple(unions))


def _splits(least: Floats, added: Floats) -> tuple[Floats, Floats]:
    """Return the least sums, shape (hubs,): over all splits of the groups, and over those with a union at the hub."""
    loose, tied = np.zeros_like(least), np.full_like(least, math.inf)
    for mask in range(1, len(least)):
        low, part = mask & -mask, mask
        loose[mask] = math.inf
        while part:
            if part & low:
                rest = mask ^ part
                np.minimum(loose[mask], least[part] + loose[rest], out=loose[mask])
                np.minimum(tied[mask], least[part] + tied[rest], out=tied[mask])
                np.minimum(tied[mask], added[part] + loose[rest], out=tied[mask])
            part = (part - 1) & mask
    return loose[-1], tied[-1]


def split_of(row: list[float]) -> tuple[list[float], list[int]]:
    """Return for each set of groups the least sum over its splits into unions, and the union with its first group."""
    best, first = [0.0] * len(row), [0] * len(row)
    for mask in range(1, len(row)):
        low, least, union = mask & -mask, math.inf, mask
        part = mask
        while part:
            if part & low:
                usd = row[part] + best[mask ^ part]
                if usd < least:
                    least, union = usd, part
            part = (part - 1) & mask
        best[mask], first[mask] = least, union
    return best, first


def _unions(least: list[float], at_hub: Floats | None) -> list[int]:
    """Return the best split of all groups for one hub; a minus marks the union at the hub."""
    best, first = split_of(least)
    everything = len(least) - 1
    chosen, left = [], everything
    if at_hub is not None:
        tied = min(range(1, everything + 1), key=lambda union: float(at_hub[union]) + best[everything ^ union])
        chosen, left = [-tied], everything ^ tied
    while left:
        chosen.append(first[left])
        left ^= first[left]
    return chosen


def assembled(sites: Sites, need: Need, limit: Floats, unit_usd: Floats, split: SplitBound) -> PlacementChoice | None:
    """Return a split as a choice, with the cheapest device in each region; None: combined unions do not fit."""
    shards = dict(need.pinned)
    for union, region in split.unions:
        for group, members in enumerate(need.free):
            if union >> group & 1:
                shards[region] = shards.get(region, ()) + members
    parts, scarce = [], 0.0
    for region in sorted(shards):
        own = sites.own(region)
        units = np.ceil(need.power(shards[region]) / sites.power[own] * (1 - SLACK))
        usd = np.where(units <= limit[own], units * unit_usd[own], math.inf)
        best = int(usd.argmin())
        if not math.isfinite(usd[best]):
            return None
        parts.append((own.start + best, int(units[best]), tuple(sorted(shards[region]))))
        scarce += float(units[best] * (unit_usd[own][best] - sites.usd_per_hour[own][best] * need.hours))
    usd_listed = bill_of(sites, need, split.hub, parts).usd
    return PlacementChoice(need, usd_listed, usd_listed + scarce, split.hub, tuple(parts))
