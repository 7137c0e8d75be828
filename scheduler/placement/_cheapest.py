"""The cheapest placement of one job at given prices and limits: exact, by a recursion over its free shards.

Free groups of shards (at most five) are split into unions; each union goes to one region, as a partition of its own or
into a partition that pinned shards need there anyway. Given the hub of the WAN star, the money of a union depends on
its region alone, so the best split is a recursion over subsets, done for all hubs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scheduler.placement._model import GB, Bill, Partition, Placement
from scheduler.placement._sites import SLACK, Floats, Ints, Need, Scope, Sites

WIDE = 64
"""From so many regions on, those that cannot be part of the best placement are left out first."""
SEEDS = 6
"""Regions for each union that the first guess is made of."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A placement of one job, as places in the arrays."""

    usd: float
    """At list prices."""
    priced_usd: float
    """At the prices that it was chosen for."""
    least_usd: float
    """No placement within the limits costs less at those prices."""
    hub: int
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(site, units, shards), ascending by region."""

    @property
    def sites(self) -> list[int]:
        """Used ones."""
        return [site for site, _, _ in self.parts]

    @property
    def units(self) -> list[int]:
        """Of each site used."""
        return [units for _, units, _ in self.parts]


@dataclass(frozen=True, eq=False)
class _Table:
    """The prices of a job's unions in the regions of a scope; row 0 is the empty union."""

    scope: Scope
    added: Floats
    """[union, region] USD that a union adds where it goes, without the WAN of a new partition."""
    pinned_at: Ints
    """Columns of the regions of pinned shards."""
    pinned_usd: float
    hub_usd: Floats
    """[region] What the rounds of the pinned partitions cost if the hub is there."""


def cheapest(
    sites: Sites, need: Need, limit: Floats, scarcity: Floats | None = None, scope: Scope | None = None
) -> Choice | None:
    """The cheapest placement with at most `limit` units of each site; None: there is none.

    `scarcity` [site] is added to the price of a unit, in USD for the whole job: the price of a capacity that other
    jobs want. Where two unions would meet in one region, they become one; then `usd` may lie above `least_usd`.
    """
    if need.nowhere:
        return None
    unit_usd = sites.usd_per_hour * need.hours
    if scarcity is not None:
        unit_usd = unit_usd + scarcity
    limit = np.where(need.fits, limit, 0.0)
    table = _table(sites, need, limit, unit_usd, scope or sites.scope)
    if table is None:
        return None
    if len(table.scope.regions) > WIDE and need.free:
        table = _narrowed(sites, need, table)
    found = _best_split(sites, need, table)
    if found is None:
        return None
    least, hub, where = found
    return _assembled(sites, need, limit, unit_usd, hub, where, least)


def _table(sites: Sites, need: Need, limit: Floats, unit_usd: Floats, scope: Scope) -> _Table | None:
    rows = 1 << len(need.free)
    powers, copies = np.zeros(rows), np.zeros((rows, len(scope.regions)))
    for place, (shards, allowed) in enumerate(zip(need.free, need.allowed, strict=True)):
        bit = 1 << place
        powers[bit : 2 * bit] = powers[:bit] + need.power(shards)
        own = sum(_copy(sites, need, shard, scope.regions) for shard in shards)
        copies[bit : 2 * bit] = copies[:bit] + np.where(allowed[scope.regions], own, math.inf)
    at = scope.sites
    power, price, most = sites.power[at], unit_usd[at], limit[at]
    usd = _covered(powers[:, None], power, price, most)
    added = np.minimum.reduceat(usd, scope.starts, axis=1) + copies
    added += sites.server_usd_per_hour[scope.regions] * need.hours
    pinned_usd, columns = 0.0, []
    for region, shards in need.pinned.items():
        column = int(np.searchsorted(scope.regions, region))
        begin = scope.starts[column]
        end = scope.starts[column + 1] if column + 1 < len(scope.starts) else len(at)
        here = slice(begin, end)
        joint = _covered(powers[:, None] + need.power(shards), power[here], price[here], most[here]).min(axis=1)
        if not math.isfinite(joint[0]):
            return None
        added[:, column] = joint - joint[0] + copies[:, column]
        pinned_usd += joint[0] + sites.server_usd_per_hour[region] * need.hours
        pinned_usd += sum(float(_copy(sites, need, s, region)) for s in shards)
        columns.append(column)
    added[0] = 0.0
    hub_usd = np.zeros(len(scope.regions))
    for region in need.pinned:
        hub_usd = hub_usd + _rounds(sites, need, np.array([region]), scope.regions)[0]
    return _Table(scope, added, np.array(columns, dtype=np.intp), float(pinned_usd), hub_usd)


def _copy(sites: Sites, need: Need, shard: int, regions: Ints | int) -> Floats:
    """USD of a shard's way to some regions; where there is no way it may be anything."""
    held = need.job.shards[shard]
    egress = sites.egress[sites.federation.index[held.region], regions]
    return np.asarray(egress * (held.bytes / GB) if held.bytes else np.zeros_like(egress))


def _covered(powers: Floats, power: Floats, price: Floats, most: Floats) -> Floats:
    """[union, site] USD of the fewest units that give a power; infinite where there are not so many."""
    units = np.ceil(powers / power * (1 - SLACK))
    return np.where(units <= most, units * price, math.inf)


def _rounds(sites: Sites, need: Need, regions: Ints, hubs: Ints) -> Floats:
    """[region, hub] USD of all rounds between two regions, up and down; infinite where the link is too slow."""
    if need.round_gb == 0:
        return np.zeros((len(regions), len(hubs)))
    pair = np.ix_(regions, hubs)
    slow = sites.slower_way[pair] < need.round_mbps
    return np.where(slow, math.inf, need.round_gb * sites.both_ways[pair])


def _split(row: list[float]) -> tuple[list[float], list[int]]:
    """For each set of groups the least sum over its splits into unions, and the union with its first group."""
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


def _narrowed(sites: Sites, need: Need, table: _Table) -> _Table:
    """The table without regions that no placement as cheap as a first guess can use: nothing is lost."""
    added, everything = table.added, len(table.added) - 1
    seeds = np.argpartition(added[1:], SEEDS, axis=1)[:, :SEEDS]
    guess = _part(table, np.unique(np.concatenate([seeds.ravel(), table.pinned_at])))
    found = _best_split(sites, need, guess)
    if found is None:
        return table
    floor = table.pinned_usd + (float(table.hub_usd.min()) if len(table.pinned_at) else 0.0)
    rest, _ = _split([float(usd) for usd in added.min(axis=1)])
    others = np.array(rest)[everything ^ np.arange(len(added))]
    possible = ((added + others[:, None])[1:] + floor <= found[0] * (1 + 1e-12) + 1e-12).any(axis=0)
    possible[table.pinned_at] = True
    possible[np.searchsorted(table.scope.regions, guess.scope.regions)] = True
    return _part(table, np.flatnonzero(possible))


def _part(table: _Table, columns: Ints) -> _Table:
    scope = Scope(table.scope.regions[columns], table.scope.sites[:0], table.scope.starts[:0])
    pinned = np.searchsorted(columns, table.pinned_at)
    return _Table(scope, table.added[:, columns], pinned, table.pinned_usd, table.hub_usd[columns])


def _best_split(sites: Sites, need: Need, table: _Table) -> tuple[float, int, dict[int, int]] | None:
    """Least USD, the hub's region, and the region of each free group."""
    regions, added = table.scope.regions, table.added
    everything = len(added) - 1
    if everything == 0:
        at_pinned = table.hub_usd[table.pinned_at]
        if not np.isfinite(at_pinned).any():
            return None
        hub = int(table.pinned_at[at_pinned.argmin()])
        return float(table.pinned_usd + at_pinned.min()), int(regions[hub]), {}
    rounds = _rounds(sites, need, regions, regions)
    rounds[table.pinned_at] = 0.0  # their rounds are in `hub_usd`
    # [union, hub]: each union in the region that is best for that hub
    least = np.array([(added[union][:, None] + rounds).min(axis=0) for union in range(everything + 1)])
    least[0] = 0.0
    loose, tied = _splits(least, added)
    totals = table.pinned_usd + table.hub_usd + tied
    totals[table.pinned_at] = (table.pinned_usd + table.hub_usd + loose)[table.pinned_at]
    hub = int(totals.argmin())
    if not math.isfinite(totals[hub]):
        return None
    at_hub = None if hub in table.pinned_at else added[:, hub]
    where = {}
    for union in _unions([float(usd) for usd in least[:, hub]], at_hub):
        column = hub if union < 0 else int((added[union] + rounds[:, hub]).argmin())
        for group in range(len(need.free)):
            if abs(union) >> group & 1:
                where[group] = int(regions[column])
    return float(totals[hub]), int(regions[hub]), where


def _splits(least: Floats, added: Floats) -> tuple[Floats, Floats]:
    """[hub] The least sum over splits of all groups, and over those with a union at the hub."""
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


def _unions(least: list[float], at_hub: Floats | None) -> list[int]:
    """The best split of all groups for one hub; the union at the hub is told by a minus."""
    best, first = _split(least)
    everything = len(least) - 1
    chosen, left = [], everything
    if at_hub is not None:
        tied = min(range(1, everything + 1), key=lambda union: float(at_hub[union]) + best[everything ^ union])
        chosen, left = [-tied], everything ^ tied
    while left:
        chosen.append(first[left])
        left ^= first[left]
    return chosen


def _assembled(
    sites: Sites, need: Need, limit: Floats, unit_usd: Floats, hub: int, where: dict[int, int], least: float
) -> Choice | None:
    shards = dict(need.pinned)
    for group, region in where.items():
        shards[region] = shards.get(region, ()) + need.free[group]
    parts, priced = [], 0.0
    for region in sorted(shards):
        own = np.flatnonzero(sites.region == region) if len(sites.egress) <= WIDE else _own(sites, region)
        units = np.ceil(need.power(shards[region]) / sites.power[own] * (1 - SLACK))
        usd = np.where(units <= limit[own], units * unit_usd[own], math.inf)
        best = int(usd.argmin())
        if not math.isfinite(usd[best]):
            return None
        parts.append((int(own[best]), int(units[best]), tuple(sorted(shards[region]))))
        priced += float(units[best] * (unit_usd[own[best]] - sites.usd_per_hour[own[best]] * need.hours))
    usd_listed = bill_of(sites, need, hub, parts).usd
    return Choice(usd_listed, usd_listed + priced, least, hub, tuple(parts))


def _own(sites: Sites, region: int) -> Ints:
    return np.arange(*np.searchsorted(sites.region, [region, region + 1]))


def bill_of(sites: Sites, need: Need, hub: int, parts: list[tuple[int, int, tuple[int, ...]]]) -> Bill:
    """What a placement costs, term by term; infinite where a link is missing or too slow."""
    compute = servers = copies = rounds = 0.0
    for site, units, shards in parts:
        region = int(sites.region[site])
        compute += units * float(sites.usd_per_hour[site]) * need.hours
        servers += float(sites.server_usd_per_hour[region]) * need.hours
        copies += sum(float(_copy(sites, need, s, region)) for s in shards)
        rounds += float(_rounds(sites, need, np.array([region]), np.array([hub]))[0, 0])
    return Bill(compute, servers, copies, rounds)


def placement_of(sites: Sites, need: Need, choice: Choice) -> Placement:
    """A choice in words."""
    regions, job = sites.federation.regions, need.job
    partitions = []
    for site, units, shards in choice.parts:
        at = int(sites.region[site])
        device = regions[at].devices[site - int(np.searchsorted(sites.region, at))]
        names = tuple(sorted(job.shards[shard].name for shard in shards))
        samples = sum(job.shards[shard].samples for shard in shards)
        partitions.append(Partition(regions[at].name, device.name, units, names, samples))
    return Placement(
        job=job.name,
        partitions=tuple(sorted(partitions, key=lambda part: part.region)),
        hub=regions[choice.hub].name,
        seconds=job.start_seconds + need.seconds,
        bill=bill_of(sites, need, choice.hub, list(choice.parts)),
    )
