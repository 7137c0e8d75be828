"""A placement with one of its partitions in another region: the candidates after a change of prices.

Where many regions are much alike, a job's cheapest placement says little about where it goes once prices rise there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scheduler.placement._choice import PlacementChoice, copy_usd, rounds_usd
from scheduler.placement._sites import SLACK, Floats, Need, Sites


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
