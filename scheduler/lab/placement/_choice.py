"""A placement of one job as places in the arrays, its cost, and the same with one partition in another region.

The latter are candidates after a change of prices: where many regions are much alike, a job's cheapest placement says
little about where it goes once prices rise there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from scheduler.lab.placement._model import GB, Bill, PlacedPart, Placement
from scheduler.lab.placement._sites import SLACK, Floats, Ints, Need, Sites


@dataclass(frozen=True, eq=False)
class PlacementChoice:
    """A placement of one job, as places in the arrays."""

    need: Need
    """The pace that was chosen."""
    usd: float
    """Cost at list prices."""
    priced_usd: float
    """Cost at the prices that it was chosen for."""
    hub: int
    parts: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(site, units, shards), ascending by region."""

    @property
    def sites(self) -> list[int]:
        """Used ones."""
        return [site for site, _, _ in self.parts]

    @property
    def units(self) -> list[int]:
        """Units of each site used."""
        return [units for _, units, _ in self.parts]


def copy_usd(sites: Sites, need: Need, shard: int, regions: Ints | int) -> Floats:
    """Return the USD of a shard's transfer to regions; where there is no path the value is arbitrary."""
    held = need.job.shards[shard]
    egress = sites.egress[sites.federation.index[held.region], regions]
    return np.asarray(egress * (held.bytes / GB) if held.bytes else np.zeros_like(egress))


def rounds_usd(sites: Sites, need: Need, regions: Ints, hubs: Ints) -> Floats:
    """[region, hub] USD of all rounds between two regions, up and down; infinite where the link is too slow."""
    if need.round_gb == 0:
        return np.zeros((len(regions), len(hubs)))
    pair = np.ix_(regions, hubs)
    usd = need.round_gb * sites.both_ways[pair]
    if need.round_mbps > sites.slowest_mbps:
        usd[sites.slower_way[pair] < need.round_mbps] = math.inf
    return np.asarray(usd)


def bill_of(sites: Sites, need: Need, hub: int, parts: list[tuple[int, int, tuple[int, ...]]]) -> Bill:
    """Return the cost of a placement, term by term; infinite where a link is missing or too slow."""
    compute = servers = copies = rounds = 0.0
    for site, units, shards in parts:
        region = int(sites.region[site])
        compute += units * float(sites.usd_per_hour[site]) * need.hours
        servers += float(sites.server_usd_per_hour[region]) * need.hours
        copies += sum(float(copy_usd(sites, need, s, region)) for s in shards)
        rounds += float(rounds_usd(sites, need, np.array([region]), np.array([hub]))[0, 0])
    return Bill(compute, servers, copies, rounds)


def placement_of(sites: Sites, choice: PlacementChoice) -> Placement:
    """Return a choice with the names of regions and devices."""
    need, regions = choice.need, sites.federation.regions
    job = need.job
    partitions = []
    for site, units, shards in choice.parts:
        at = int(sites.region[site])
        device = regions[at].devices[site - sites.own(at).start]
        names = tuple(sorted(job.shards[shard].name for shard in shards))
        samples = sum(job.shards[shard].samples for shard in shards)
        partitions.append(PlacedPart(regions[at].name, device.name, units, names, samples))
    return Placement(
        job=job.name,
        partitions=tuple(sorted(partitions, key=lambda part: part.region)),
        hub=regions[choice.hub].name,
        seconds=job.start_seconds + need.seconds,
        bill=bill_of(sites, need, choice.hub, list(choice.parts)),
    )


def elsewhere(
    sites: Sites, choice: PlacementChoice, limit: Floats, scarcity: Floats, most: int
) -> list[PlacementChoice]:
    """Return for each partition without pinned shards the cheapest sites in other regions, up to a number.

    `limit` and `scarcity` [site] are what the choice was priced with. If the hub's partition moves, the hub does.
    """
    found = []
    taken = {int(sites.region[site]) for site in choice.sites}
    for place, (site, units, shards) in enumerate(choice.parts):
        here = int(sites.region[site])
        if here in choice.need.pinned:
            continue
        by_region = _by_region(sites, choice, here, shards)
        moved_hub = here == choice.hub
        needed = np.ceil(choice.need.power(shards) / sites.power * (1 - SLACK))
        listed = needed * sites.usd_per_hour * choice.need.hours + by_region[sites.region]
        added = listed - listed[site]
        priced = added + needed * scarcity - units * scarcity[site]
        priced[(needed > limit) | ~choice.need.fits | np.isin(sites.region, list(taken))] = math.inf
        for other in np.argsort(priced, kind="stable")[:most]:
            if not math.isfinite(priced[other]):
                break
            region = int(sites.region[other])
            parts = [*choice.parts[:place], (int(other), int(needed[other]), shards), *choice.parts[place + 1 :]]
            found.append(
                replace(
                    choice,
                    usd=choice.usd + float(added[other]),
                    priced_usd=choice.priced_usd + float(priced[other]),
                    hub=region if moved_hub else choice.hub,
                    parts=tuple(sorted(parts)),
                )
            )
    return found


def _by_region(sites: Sites, choice: PlacementChoice, here: int, shards: tuple[int, ...]) -> Floats:
    """Return by [region] the USD of the partition in `here`, without its machines, if it were there; infinite: not
    allowed."""
    need, regions = choice.need, np.arange(len(sites.egress))
    usd = sites.server_usd_per_hour * need.hours
    for shard in shards:
        usd = usd + copy_usd(sites, need, shard, regions)
    usd[~_allowed(need, shards)] = math.inf
    if here != choice.hub:
        return np.asarray(usd + rounds_usd(sites, need, regions, np.array([choice.hub]))[:, 0])
    others = np.array([int(sites.region[site]) for site in choice.sites if sites.region[site] != here], dtype=np.intp)
    return np.asarray(usd + rounds_usd(sites, need, others, regions).sum(axis=0))


def _allowed(need: Need, shards: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    allowed = [regions for group, regions in zip(need.free, need.allowed, strict=True) if group[0] in shards]
    return np.asarray(np.logical_and.reduce(allowed))
