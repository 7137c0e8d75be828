"""A placement of one job as places in the arrays, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scheduler.placement._model import GB, Bill, PlacedPart, Placement
from scheduler.placement._sites import Floats, Ints, Need, Sites


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
