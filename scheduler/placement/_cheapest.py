"""The cheapest placement of one job at given prices and limits: exact, by a recursion over its free shards.

Free groups of shards (at most five) are split into unions; each union goes to one region, as a partition of its own or
into a partition that pinned shards need there anyway. Given the hub of the WAN star, the money of a union depends on
its region alone, so the best split is a recursion over subsets, done for all hubs at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.placement._model import GB, Bill, Partition, Placement
from scheduler.placement._sites import SLACK, Floats, Ints, Need, Sites

WIDE = 64
"""From so many regions on, those that cannot be part of the best placement are left out first."""
SEEDS = 6
"""Regions for each union that the first guess is made of."""
NODES = 64
"""Splits that are tried for one job, at most; more than one only where unions meet in a region."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A placement of one job, as places in the arrays."""

    need: Need
    """The pace that was chosen."""
    usd: float
    """At list prices."""
    priced_usd: float
    """At the prices that it was chosen for."""
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
    """The prices of a job's unions in some regions; row 0 is the empty union."""

    regions: Ints
    """Ascending."""
    added: Floats
    """[union, region] USD that a union adds where it goes, without the WAN of a new partition."""
    pinned_at: Ints
    """Columns of the regions of pinned shards."""
    pinned_usd: float
    hub_usd: Floats
    """[region] What the rounds of the pinned partitions cost if the hub is there."""


def cheapest(
    sites: Sites, paces: Sequence[Need], limit: Floats, scarcity: Floats | None = None, nodes: int = NODES
) -> Choice | None:
    """The cheapest placement with at most `limit` units of each site; None: none was found."""
    return priced(sites, paces, limit, scarcity, nodes)[0]


def priced(
    sites: Sites, paces: Sequence[Need], limit: Floats, scarcity: Floats | None = None, nodes: int = NODES
) -> tuple[Choice | None, float]:
    """The cheapest placement at any pace, and what none can cost less than (infinite: there is none).

    `scarcity` [site] is added to the price of a unit, in USD for the whole job: the price of a capacity that other
    jobs want. The two figures differ only where `nodes` were not enough, or where more than `WIDE` regions came close.
    """
    best: Choice | None = None
    bound = math.inf
    for need in paces:
        ceiling = best.priced_usd if best is not None else math.inf
        choice, least = _paced(sites, need, limit, scarcity, nodes, ceiling)
        bound = min(bound, least)
        if choice is not None and choice.priced_usd < ceiling:
            best = choice
    return best, bound


def _paced(
    sites: Sites, need: Need, limit: Floats, scarcity: Floats | None, nodes: int, ceiling: float
) -> tuple[Choice | None, float]:
    """At one pace; what costs `ceiling` or more need not be found."""
    if need.nowhere:
        return None, math.inf
    unit_usd = sites.usd_per_hour * need.hours
    if scarcity is not None:
        unit_usd = unit_usd + scarcity
    limit = np.where(need.fits, limit, 0.0)
    table = _table(sites, need, limit, unit_usd)
    if table is None:
        return None, math.inf
    left_out = math.inf
    if len(table.regions) > WIDE and need.free:
        table, left_out = _narrowed(sites, need, table, limit, unit_usd)
    best: Choice | None = None
    bound = math.inf
    forbidden: list[tuple[float, tuple[tuple[int, int], ...]]] = [(-math.inf, ())]
    for _ in range(nodes):
        if not forbidden:
            break
        barred = forbidden.pop()[1]
        found = _best_split(sites, need, _barred(table, barred))
        if found is not None:
            bound = ceiling  # of what is not looked at further
        if found is None or found.usd >= (ceiling if best is None else min(ceiling, best.priced_usd)):
            continue
        choice = _assembled(sites, need, limit, unit_usd, found)
        if choice is not None and (best is None or choice.priced_usd < best.priced_usd):
            best = choice
        # The model has one partition in a region: of two unions that met there, one must go elsewhere.
        meeting = _meeting(found)
        if meeting is not None and (choice is None or choice.priced_usd > found.usd * (1 + SLACK)):
            column = int(np.searchsorted(table.regions, meeting[1]))
            forbidden += [(found.usd, (*barred, (union, column))) for union in meeting[0]]
    if best is not None:
        bound = min(bound, best.priced_usd)
    return best, min([bound, left_out, *(usd for usd, _ in forbidden)])


@dataclass(frozen=True)
class _Split:
    """The best split of the free groups, before it is known whether two unions meet."""

    usd: float
    hub: int
    unions: tuple[tuple[int, int], ...]
    """(union as a bit mask of groups, region)."""


def _meeting(split: _Split) -> tuple[tuple[int, int], int] | None:
    seen: dict[int, int] = {}
    for union, region in split.unions:
        if region in seen:
            return (seen[region], union), region
        seen[region] = union
    return None


def _barred(table: _Table, barred: tuple[tuple[int, int], ...]) -> _Table:
    if not barred:
        return table
    added = table.added.copy()
    for union, column in barred:
        added[union, column] = math.inf
    return replace(table, added=added)


def _table(sites: Sites, need: Need, limit: Floats, unit_usd: Floats) -> _Table | None:
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
    return _Table(regions, added, np.array(list(need.pinned), dtype=np.intp), pinned_usd, hub_usd)


def copy_usd(sites: Sites, need: Need, shard: int, regions: Ints | int) -> Floats:
    """USD of a shard's way to some regions; where there is no way it may be anything."""
    held = need.job.shards[shard]
    egress = sites.egress[sites.federation.index[held.region], regions]
    return np.asarray(egress * (held.bytes / GB) if held.bytes else np.zeros_like(egress))


def _covered(powers: Floats, power: Floats, price: Floats, most: Floats) -> Floats:
    """[union, site] USD of the fewest units that give a power; infinite where there are not so many."""
    units = np.ceil(powers / power * (1 - SLACK))
    return np.where(units <= most, units * price, math.inf)


def rounds_usd(sites: Sites, need: Need, regions: Ints, hubs: Ints) -> Floats:
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


def _narrowed(sites: Sites, need: Need, table: _Table, limit: Floats, unit_usd: Floats) -> tuple[_Table, float]:
    """The table with the regions that may be of use, and what any placement costs that uses one left out.

    A region is of no use where even the best that the other unions could add, without any rounds, makes it dearer than
    a first guess. Of the others, the most promising stay; there are hardly ever more.
    """
    added, everything = table.added, len(table.added) - 1
    seeds = np.argpartition(added[1:], SEEDS, axis=1)[:, :SEEDS]
    kept = np.unique(np.concatenate([seeds.ravel(), table.pinned_at]))
    split = _best_split(sites, need, _part(table, kept))
    guess = _assembled(sites, need, limit, unit_usd, split) if split is not None else None
    floor = table.pinned_usd + (float(table.hub_usd.min()) if len(table.pinned_at) else 0.0)
    rest, _ = _split([float(usd) for usd in added.min(axis=1)])
    others = np.array(rest)[everything ^ np.arange(1, everything + 1)]
    least = (added[1:] + others[:, None]).min(axis=0) + floor
    least[kept] = math.inf
    useful = np.flatnonzero(least <= (guess.priced_usd if guess is not None else math.inf))
    useful = useful[np.isfinite(least[useful])]
    left_out = math.inf
    if len(useful) > WIDE:
        order = useful[np.argsort(least[useful], kind="stable")]
        useful, left_out = order[:WIDE], float(least[order[WIDE]])
    return _part(table, np.unique(np.concatenate([kept, useful]))), left_out


def _part(table: _Table, columns: Ints) -> _Table:
    pinned = np.searchsorted(columns, table.pinned_at)
    return _Table(table.regions[columns], table.added[:, columns], pinned, table.pinned_usd, table.hub_usd[columns])


def _best_split(sites: Sites, need: Need, table: _Table) -> _Split | None:
    regions, added = table.regions, table.added
    everything = len(added) - 1
    if everything == 0:
        at_pinned = table.hub_usd[table.pinned_at]
        if not np.isfinite(at_pinned).any():
            return None
        hub = int(table.pinned_at[at_pinned.argmin()])
        return _Split(float(table.pinned_usd + at_pinned.min()), int(regions[hub]), ())
    rounds = rounds_usd(sites, need, regions, regions)
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
    unions = []
    for union in _unions([float(usd) for usd in least[:, hub]], at_hub):
        column = hub if union < 0 else int((added[union] + rounds[:, hub]).argmin())
        unions.append((abs(union), int(regions[column])))
    return _Split(float(totals[hub]), int(regions[hub]), tuple(unions))


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


def _assembled(sites: Sites, need: Need, limit: Floats, unit_usd: Floats, split: _Split) -> Choice | None:
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
    return Choice(need, usd_listed, usd_listed + scarce, split.hub, tuple(parts))


def bill_of(sites: Sites, need: Need, hub: int, parts: list[tuple[int, int, tuple[int, ...]]]) -> Bill:
    """What a placement costs, term by term; infinite where a link is missing or too slow."""
    compute = servers = copies = rounds = 0.0
    for site, units, shards in parts:
        region = int(sites.region[site])
        compute += units * float(sites.usd_per_hour[site]) * need.hours
        servers += float(sites.server_usd_per_hour[region]) * need.hours
        copies += sum(float(copy_usd(sites, need, s, region)) for s in shards)
        rounds += float(rounds_usd(sites, need, np.array([region]), np.array([hub]))[0, 0])
    return Bill(compute, servers, copies, rounds)


def placement_of(sites: Sites, choice: Choice) -> Placement:
    """A choice in words."""
    need, regions = choice.need, sites.federation.regions
    job = need.job
    partitions = []
    for site, units, shards in choice.parts:
        at = int(sites.region[site])
        device = regions[at].devices[site - sites.own(at).start]
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
