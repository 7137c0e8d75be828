"""Input and output of placement. Plain frozen dataclasses; units are in the names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler._link import LinkTable
from scheduler._model import Reason

GB = 1e9
"""Bytes of a gigabyte, the unit of egress prices."""


class UnknownPriceError(ValueError):
    """An unknown price, which never counts as zero."""


@dataclass(frozen=True)
class Device:
    """One type of machine that a region gives to workers."""

    name: str
    units: int
    """Units that can be held at one time."""
    samples_per_second: float
    """Speed of one unit, for a job whose work per sample is 1."""
    usd_per_unit_hour: float
    memory_bytes: int
    """Memory that one unit gives to a worker."""

    def __post_init__(self) -> None:
        _priced(self.usd_per_unit_hour, f"an hour of {self.name}")
        if self.units < 0 or not self.samples_per_second > 0:
            raise ValueError(f"device {self.name}: units must not be negative, and samples per second positive")


@dataclass(frozen=True)
class PlacementRegion:
    """A region with machines, and its prices of them and of the parameter server."""

    name: str
    cloud: str
    devices: tuple[Device, ...]
    """At least one device; names are unique."""
    server_usd_per_hour: float
    """The machine that runs a parameter server."""

    def __post_init__(self) -> None:
        _priced(self.server_usd_per_hour, f"a parameter server in {self.name}")
        if not self.devices or len({device.name for device in self.devices}) < len(self.devices):
            raise ValueError(f"region {self.name} needs devices, each with a name of its own")


@dataclass(frozen=True, eq=False)
class PlacementFederation:
    """All regions, and the links between them as matrices: [source, destination] in the order of the regions."""

    regions: tuple[PlacementRegion, ...]
    mbps: NDArray[np.float64]
    """Rates; 0: there is no direct path. The diagonal is not read."""
    egress_usd_per_gb: NDArray[np.float64]
    """Prices; NaN where there is no path. The diagonal is not read."""

    def __post_init__(self) -> None:
        count = len(self.regions)
        if len({region.name for region in self.regions}) < count:
            raise ValueError("two regions have the same name")
        if self.mbps.shape != (count, count) or self.egress_usd_per_gb.shape != (count, count):
            raise ValueError(f"the link matrices must be {count} by {count}")
        untold = (self.mbps > 0) & ~(self.egress_usd_per_gb >= 0) & ~np.eye(count, dtype=bool)
        if untold.any():
            source, destination = (self.regions[index].name for index in np.argwhere(untold)[0])
            raise UnknownPriceError(f"no price is known of a GB from {source} to {destination}")

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each region, by name."""
        return {region.name: place for place, region in enumerate(self.regions)}


def federation(regions: tuple[PlacementRegion, ...], links: LinkTable) -> PlacementFederation:
    """A federation of regions and the directed links that are known; other pairs have no path.

    Raises `UnknownPriceError` where a link has a rate but no price, `KeyError` where it names an unknown region.
    """
    index = {region.name: place for place, region in enumerate(regions)}
    mbps = np.zeros((len(regions), len(regions)))
    egress = np.full_like(mbps, math.nan)
    for (source, destination), path in links.items():
        mbps[index[source], index[destination]] = path.mbps
        egress[index[source], index[destination]] = path.usd_per_gb
    return PlacementFederation(regions, mbps, egress)


@dataclass(frozen=True)
class PlacementShard:
    """A part of a job's data, which is trained on in one region, as a whole."""

    name: str
    region: str
    """Region that holds it."""
    samples: int
    bytes: int
    residency: str | frozenset[str] = "region"
    """Where it may be processed: "region", "cloud", "anywhere", or the names of the regions (its own is always
    allowed)."""

    def __post_init__(self) -> None:
        if isinstance(self.residency, str) and self.residency not in ("region", "cloud", "anywhere"):
            raise ValueError(f"shard {self.name}: residency is region, cloud, anywhere or a set of regions")
        if self.samples <= 0 or self.bytes < 0:
            raise ValueError(f"shard {self.name}: it needs samples, and bytes must not be negative")


@dataclass(frozen=True)
class PlacementJob:
    """A job to be placed."""

    name: str
    shards: tuple[PlacementShard, ...]
    """At least one shard; names are unique."""
    deadline_seconds: float
    """Seconds from now."""
    model_bytes: int
    """Size of one parameter server's update on the WAN."""
    rounds: int
    """WAN exchanges until the end, by the WAN policy and its interval."""
    work_per_sample: float = 1.0
    """Work relative to the one that devices' samples per second are stated for."""
    passes: float = 1.0
    """Epochs over the data."""
    memory_bytes: int = 0
    """Memory that a worker needs."""
    start_seconds: float = 0.0
    """Seconds from now to the first step; machines are held and paid meanwhile."""

    def __post_init__(self) -> None:
        if not self.shards or len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError(f"job {self.name} needs shards, each with a name of its own")
        if not (self.work_per_sample > 0 and self.passes > 0 and math.isfinite(self.deadline_seconds)):
            raise ValueError(f"job {self.name}: work and passes must be positive, and the deadline finite")
        if min(self.rounds, self.model_bytes, self.memory_bytes, self.start_seconds) < 0:
            raise ValueError(f"job {self.name}: rounds, bytes and seconds must not be negative")


@dataclass(frozen=True)
class PlacedPart:
    """The part of a job that runs in one region, on one type of device."""

    region: str
    device: str
    units: int
    shards: tuple[str, ...]
    """Shards that are trained on here, sorted."""
    samples: int
    """Samples of those shards."""


@dataclass(frozen=True)
class Bill:
    """The cost of a placement, in USD."""

    compute: float
    servers: float
    """Parameter servers, one in each region used."""
    copies: float
    """Egress of shards that are trained on elsewhere."""
    rounds: float
    """Egress of the updates, up to the hub and down from it."""

    @property
    def usd(self) -> float:
        """Total cost."""
        return self.compute + self.servers + self.copies + self.rounds


@dataclass(frozen=True)
class Placement:
    """The regions and machines of a job."""

    job: str
    partitions: tuple[PlacedPart, ...]
    """Sorted by region."""
    hub: str
    """The region whose parameter server the others exchange with; one of those used."""
    seconds: float
    """Seconds from now until the end, for which machines are held."""
    bill: Bill

    @property
    def usd(self) -> float:
        """Total cost."""
        return self.bill.usd


@dataclass(frozen=True)
class PlacementRefusal:
    """The reason for which a job is not placed."""

    job: str
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class PlacementOutcome:
    """The placements of all jobs, in the order of the jobs."""

    placements: tuple[Placement, ...]
    refusals: tuple[PlacementRefusal, ...]
    bound_usd: float | None = None
    """No placement of the same jobs costs less, refusals counted at their penalty; None: not asked for."""
    penalty_usd: float = 0.0
    """Penalties of the refusals, as the bound counts them."""
    proven: bool = False
    """Whether the bound is that of an exact solver that has finished."""

    @property
    def usd(self) -> float:
        """Total cost of the placements."""
        return sum(placement.usd for placement in self.placements)


def _priced(usd: float, what: str) -> None:
    if not (usd >= 0 and math.isfinite(usd)):
        raise UnknownPriceError(f"no price is known of {what}")
