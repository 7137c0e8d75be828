"""What the placement benchmarks place: regions with real prices and links, and jobs drawn at random.

Prices are those of AWS, Azure and GCP on demand, links those that Skyplane measured; both are generated where the files
are missing. Drawn, and so no more than plausible: capacities, the samples/s of a machine, and the jobs.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File

import numpy as np

from scheduler import Path
from scheduler.lab.placement import (
    Device,
    PlacementFederation,
    PlacementJob,
    PlacementRegion,
    PlacementShard,
    federation,
)

DATA = File(__file__).resolve().parents[3] / "shared" / "data"
LOCKED = 0.35
"""Share of shards that may not leave their region."""
BYTES_PER_SAMPLE = 100_000
TYPES = {
    "aws": ("c5.4xlarge", "m5.8xlarge", "c5.xlarge"),
    "azure": ("standardf16sv2", "standardd32sv3", "standardf4sv2"),
    "gcp": ("n2-standard-16", "n2-standard-32", "n2-standard-4"),
}
"""Of each cloud: 16 cores, 32 cores, and the 4 cores of a parameter server."""
SPEEDS = (1000.0, 1900.0)
"""Samples/s of the first two."""
MEMORIES = (32 * 10**9, 128 * 10**9)
SCALING = 1.2
"""The list has wrong entries; 16 cores must cost four times what 4 cores do, within this factor."""


@dataclass(frozen=True)
class Kind:
    """What jobs are like; each figure is the median of a lognormal distribution."""

    shard_gb: float
    hours_per_gb: float
    """That a machine of 16 cores takes for a GB, all passes together."""
    model_mb: float
    size_spread: float = 0.8
    """Standard deviation of the logarithm of a shard's GB."""
    work_spread: float = 0.5
    """And of the hours per GB."""


KINDS = {
    "compute-heavy": Kind(20, 0.5, 200),
    "data-heavy": Kind(100, 0.1, 100),
    "mixed": Kind(22, 0.224, 141, size_spread=1.3, work_spread=0.8),
}
"""All need about the same machines: on average 16 hours of 16 cores for a shard, 10 for the median of the first two.

Of the mix, the hours per GB have the two kinds one standard deviation to either side of their median (ln(0.5 / 0.1) / 2
= 0.8), and models are between theirs. Hours and sizes together spread as the GPU time of the jobs of Philly does in
traces/chronus/trace_job_Philly_MIX2.csv: a standard deviation of the logarithm of 1.53 over its 30,746 jobs, which
leaves sqrt(1.53^2 - 0.8^2) = 1.3 for the sizes.
"""


@dataclass(frozen=True)
class Market:
    """Regions with their prices, before anyone says how many machines there are, and all links between them."""

    prices: dict[str, tuple[float, ...]]
    """By "cloud:region": USD/h in the order of `TYPES`."""
    links: dict[tuple[str, str], Path]
    source: str


def market(data: File = DATA) -> Market:
    """Regions that have a price of every type and links with rate and price to all the others."""
    files = data / "prices" / "instance_prices.csv", data / "wan" / "skyplane_wan.csv"
    if not all(file.exists() for file in files):
        return _generated()
    listed: dict[tuple[str, str], float] = {}
    with files[0].open() as lines:
        for row in csv.DictReader(lines):
            if row["purchase"] == "on_demand" and float(row["usd_per_hour"]) > 0:
                listed[f"{row['cloud']}:{row['region']}", row["instance_type"]] = float(row["usd_per_hour"])
    prices = {}
    for name in sorted({region for region, _ in listed}):
        told = tuple(listed.get((name, kind), math.nan) for kind in TYPES[name.partition(":")[0]])
        if not any(math.isnan(usd) for usd in told) and 1 / SCALING < told[0] / (4 * told[2]) < SCALING:
            prices[name] = told
    with files[1].open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["gbps"] and row["egress_usd_per_gb"]]
    links = {
        (row["src"], row["dst"]): Path(
            float(row["rtt_ms"] or 100), float(row["gbps"]) * 1e3, float(row["egress_usd_per_gb"])
        )
        for row in rows
        if row["src"] in prices and row["dst"] in prices
    }
    names = sorted(prices)
    while any(a != b and (a, b) not in links for a in names for b in names):
        names.remove(min(names, key=lambda a: sum((a, b) in links and (b, a) in links for b in names)))
    return Market({name: prices[name] for name in names}, links, "real prices and links")


def _generated() -> Market:
    draw = random.Random(7)
    names = [f"{cloud}:r{place}" for cloud in TYPES for place in range(14)]
    prices = {}
    for name in names:
        level = draw.uniform(0.9, 1.6)
        prices[name] = (0.7 * level, 1.6 * level * draw.uniform(0.9, 1.1), 0.175 * level)
    links = {
        (a, b): Path(draw.uniform(5, 300), draw.lognormvariate(8.2, 0.7), draw.choice([0.02, 0.05, 0.09, 0.12]))
        for a in names
        for b in names
        if a != b
    }
    return Market(prices, links, "generated prices and links")


def drawn_federation(market: Market, count: int, units: int, draw: random.Random) -> PlacementFederation:
    """Some of the market's regions; a region has about `units` machines of each type, from half to twice as many."""
    names = sorted(draw.sample(sorted(market.prices), count))
    regions = tuple(_region(name, market.prices[name], units, draw) for name in names)
    chosen = set(names)
    return federation(regions, {link: path for link, path in market.links.items() if chosen.issuperset(link)})


def _region(name: str, prices: tuple[float, ...], units: int, draw: random.Random) -> PlacementRegion:
    cloud = name.partition(":")[0]
    devices = tuple(
        Device(kind, max(1, round(units * 2 ** draw.uniform(-1, 1))), speed, usd, memory)
        for kind, speed, usd, memory in zip(TYPES[cloud], SPEEDS, prices, MEMORIES, strict=False)
    )
    return PlacementRegion(name, cloud, devices, prices[2])


def multiplied_federation(market: Market, count: int, units: int, draw: random.Random) -> PlacementFederation:
    """More regions than the market has: copies of each, prices off by up to a tenth, 0.01 USD/GB between copies."""
    originals = sorted(market.prices)
    parents = [originals[place % len(originals)] for place in range(count)]
    regions = []
    for place, parent in enumerate(parents):
        level = draw.uniform(0.9, 1.1)
        prices = tuple(usd * level for usd in market.prices[parent])
        regions.append(replace(_region(parent, prices, units, draw), name=f"{parent}.{place}"))
    rates = np.full((len(originals), len(originals)), 20_000.0)
    egress = np.full_like(rates, 0.01)
    for a, source in enumerate(originals):
        for b, destination in enumerate(originals):
            if a != b:
                path = market.links[source, destination]
                rates[a, b], egress[a, b] = path.mbps, path.usd_per_gb
    row = np.array([place % len(originals) for place in range(count)])
    return PlacementFederation(tuple(regions), rates[np.ix_(row, row)], egress[np.ix_(row, row)])


def drawn_jobs(
    names: Sequence[str], count: int, draw: random.Random, kind: Kind = KINDS["compute-heavy"]
) -> tuple[PlacementJob, ...]:
    """Jobs over data in 1 to 4 regions; 35 % of the shards may not leave theirs, the others may go anywhere."""
    return tuple(_job(f"job-{number}", names, draw, kind) for number in range(count))


def _job(name: str, names: Sequence[str], draw: random.Random, kind: Kind) -> PlacementJob:
    shards = []
    for region in draw.sample(list(names), draw.randint(1, min(4, len(names)))):
        size = int(draw.lognormvariate(math.log(kind.shard_gb * 1e9), kind.size_spread))
        rule = "region" if draw.random() < LOCKED else "anywhere"
        shards.append(PlacementShard(f"{name}/{region}", region, size // BYTES_PER_SAMPLE + 1, size, rule))
    hours = draw.lognormvariate(math.log(kind.hours_per_gb), kind.work_spread)
    return PlacementJob(
        name=name,
        shards=tuple(shards),
        deadline_seconds=3600 * draw.uniform(2, 12),
        model_bytes=int(draw.lognormvariate(math.log(kind.model_mb * 1e6), 0.8)),
        rounds=draw.randint(50, 300),
        work_per_sample=hours * 3600 * SPEEDS[0] * BYTES_PER_SAMPLE / 1e9,
        memory_bytes=draw.choice([8, 16, 64]) * 10**9,
        start_seconds=60.0,
    )
