"""The federation and one job as arrays: a region's prices for a job, and the job's needs there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.lab.placement._model import GB, PlacementFederation, PlacementJob, PlacementShard

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

MOST_FREE = 5
"""Groups of shards that may move on their own; the tables have a row for each of their 2^5 - 1 unions."""
FASTER = (3.0, 9.0)
"""Factors by which a job may also run faster than needed."""
SLACK = 1e-9
"""Share of a need that may stay unmet, so that rounding errors do not take one unit more."""


@dataclass(frozen=True, eq=False)
class Sites:
    """All (region, device) pairs, region by region."""

    federation: PlacementFederation
    region: Ints
    """Region of each site."""
    units: Floats
    power: Floats
    """Samples/s of one unit."""
    usd_per_hour: Floats
    memory: Floats
    server_usd_per_hour: Floats
    """Price of each region."""
    mbps: Floats
    """[source, destination]; infinite on the diagonal, 0 without a path."""
    egress: Floats
    """USD/GB; 0 on the diagonal, infinite without a path."""

    @cached_property
    def both_ways(self) -> Floats:
        """USD of a GB up and a GB down between two regions."""
        return self.egress + self.egress.T

    @cached_property
    def least_both_ways(self) -> float:
        """Least price between two different regions; 0 if there is only one region."""
        pairs = self.both_ways[~np.eye(len(self.egress), dtype=bool)]
        return float(pairs.min()) if np.isfinite(pairs).any() else 0.0

    @cached_property
    def slowest_mbps(self) -> float:
        """Rate of the slowest link; 0 if there is none."""
        rates = self.mbps[np.isfinite(self.mbps) & (self.mbps > 0)]
        return float(rates.min()) if rates.size else 0.0

    @cached_property
    def slower_way(self) -> Floats:
        """Mbit/s of the slower direction between two regions."""
        return np.minimum(self.mbps, self.mbps.T)

    @cached_property
    def clouds(self) -> NDArray[np.str_]:
        """Cloud of each region."""
        return np.array([region.cloud for region in self.federation.regions])

    @cached_property
    def starts(self) -> Ints:
        """Index of each region's first site."""
        return np.searchsorted(self.region, np.arange(len(self.egress)))

    @cached_property
    def index(self) -> dict[tuple[str, str], int]:
        """The place of each site, by the names of region and device."""
        pairs = [(region.name, device.name) for region in self.federation.regions for device in region.devices]
        return {pair: place for place, pair in enumerate(pairs)}

    def own(self, region: int) -> slice:
        """The sites of a region."""
        begin = int(self.starts[region])
        return slice(begin, begin + len(self.federation.regions[region].devices))


def sites_of(federation: PlacementFederation) -> Sites:
    """The arrays of a federation."""
    devices = [(at, device) for at, region in enumerate(federation.regions) for device in region.devices]
    linked = federation.mbps > 0
    mbps = np.where(linked, federation.mbps, 0.0)
    egress = np.where(linked, federation.egress_usd_per_gb, math.inf)
    np.fill_diagonal(mbps, math.inf)
    np.fill_diagonal(egress, 0.0)
    return Sites(
        federation=federation,
        region=np.array([at for at, _ in devices]),
        units=np.array([float(device.units) for _, device in devices]),
        power=np.array([device.samples_per_second for _, device in devices]),
        usd_per_hour=np.array([device.usd_per_unit_hour for _, device in devices]),
        memory=np.array([float(device.memory_bytes) for _, device in devices]),
        server_usd_per_hour=np.array([region.server_usd_per_hour for region in federation.regions]),
        mbps=mbps,
        egress=egress,
    )


@dataclass(frozen=True, eq=False)
class Need:
    """The needs of a job, independent of prices. Groups of shards are either pinned to a region or free."""

    job: PlacementJob
    seconds: float
    """Seconds in which the work is done, after the start."""
    hours: float
    """Hours for which machines are held and paid, the start included."""
    fits: Bools
    """Sites whose units have the memory."""
    pinned: dict[int, tuple[int, ...]]
    """Region -> places of the shards that can be nowhere else, ascending by region."""
    free: tuple[tuple[int, ...], ...]
    """Groups of shards that go together; at most `MOST_FREE`."""
    allowed: tuple[Bools, ...]
    """Allowed regions of each free group."""
    nowhere: tuple[int, ...]
    """Shards that no region can take. A job that has one cannot be placed."""
    powers: Floats
    """Samples/s (of work 1) that each shard needs."""
    round_gb: float
    """Traffic of all rounds, in one direction of one link."""
    round_mbps: float
    """Least rate of a link that carries the rounds in time."""

    def power(self, shards: tuple[int, ...]) -> float:
        """Samples/s that some shards need together."""
        return float(sum(self.powers[shard] for shard in shards))


def need_of(sites: Sites, job: PlacementJob, seconds: float | None = None) -> Need | None:
    """A job's need, when its work is to be done within `seconds`; None where its deadline leaves no time.

    Without `seconds` the job is paced to its deadline: what runs at the least power leaves the most room. It is never
    stretched beyond what one unit of the slowest type, or the slowest link, would take for all.
    """
    work = np.array([shard.samples * job.work_per_sample * job.passes for shard in job.shards])
    fits = (sites.memory >= job.memory_bytes) & (sites.units > 0)
    if seconds is None:
        seconds = job.deadline_seconds - job.start_seconds
        if fits.any():
            seconds = min(seconds, max(float(work.sum() / sites.power[fits].min()), _carried(sites, job)))
    if seconds <= 0 or any(shard.region not in sites.federation.index for shard in job.shards):
        return None
    having = np.zeros(len(sites.egress), dtype=bool)
    having[sites.region[fits]] = True
    pinned: dict[int, tuple[int, ...]] = {}
    free: list[tuple[tuple[int, ...], Bools]] = []
    nowhere = []
    for place, shard in enumerate(job.shards):
        # Copies stream in during the first pass, so the link must keep up with that.
        rate = shard.bytes * 8 / 1e6 * max(1.0, job.passes) / seconds
        at = sites.federation.index[shard.region]
        allowed = _residents(sites, shard) & having & (sites.mbps[at] >= rate) & np.isfinite(sites.egress[at])
        count = int(allowed.sum())
        if count == 0:
            nowhere.append(place)
        elif count == 1:
            only = int(allowed.argmax())
            pinned[only] = (*pinned.get(only, ()), place)
        else:
            free.append(((place,), allowed))
    _join(free, work, pinned)
    return Need(
        job=job,
        seconds=seconds,
        hours=(job.start_seconds + seconds) / 3600,
        fits=fits,
        pinned=dict(sorted(pinned.items())),
        free=tuple(shards for shards, _ in free),
        allowed=tuple(allowed for _, allowed in free),
        nowhere=tuple(nowhere),
        powers=work / seconds,
        round_gb=job.rounds * job.model_bytes / GB,
        round_mbps=job.rounds * job.model_bytes * 8 / 1e6 / seconds,
    )


def _carried(sites: Sites, job: PlacementJob) -> float:
    """Seconds that the slowest link takes for what a job may have to send on one."""
    if sites.slowest_mbps == 0:
        return 0.0
    largest = max(shard.bytes for shard in job.shards) * max(1.0, job.passes)
    return float(max(job.rounds * job.model_bytes, largest) * 8 / 1e6 / sites.slowest_mbps)


def paces_of(sites: Sites, job: PlacementJob) -> tuple[Need, ...]:
    """Return a job's needs at several paces, the slowest that meets its deadline first; empty if there is none.

    A slow pace leaves the most room; a fast one is cheaper where a whole unit is far more than a region's share needs,
    and where parameter servers are a large part of the cost.
    """
    slowest = need_of(sites, job)
    if slowest is None or slowest.nowhere:
        return ()
    faster = (need_of(sites, job, slowest.seconds / times) for times in FASTER)
    return (slowest, *(need for need in faster if need is not None and not need.nowhere))


def _residents(sites: Sites, shard: PlacementShard) -> Bools:
    """Regions where a shard may be by its rule alone."""
    index = sites.federation.index
    here = index[shard.region]
    if shard.residency == "anywhere":
        return np.ones(len(sites.egress), dtype=bool)
    if shard.residency == "cloud":
        return np.asarray(sites.clouds == sites.clouds[here], dtype=bool)
    regions = np.zeros(len(sites.egress), dtype=bool)
    regions[here] = True
    if isinstance(shard.residency, frozenset):
        regions[[index[name] for name in shard.residency if name in index]] = True
    return regions


def _join(free: list[tuple[tuple[int, ...], Bools]], work: Floats, pinned: dict[int, tuple[int, ...]]) -> None:
    """Combine the smallest groups until few enough are left."""
    while len(free) > MOST_FREE:
        free.sort(key=lambda group: -float(work[list(group[0])].sum()))
        shards, allowed = free.pop()
        for place in range(len(free) - 1, -1, -1):
            common = free[place][1] & allowed
            if common.sum() > 1:
                free[place] = (free[place][0] + shards, common)
                break
        else:
            # Nobody goes with it: it goes to the region of its own data, or the first that may have it.
            only = int(allowed.argmax())
            pinned[only] = (*pinned.get(only, ()), *shards)
