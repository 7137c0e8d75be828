"""Check of an outcome by its own data alone, without anything of how it was found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from scheduler._moves import may_be
from scheduler.lab.placement._model import (
    GB,
    Device,
    Placement,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementShard,
)

NEAR = 1e-6
"""Relative difference that rounding may make."""


def audit(federation: PlacementFederation, jobs: Sequence[PlacementJob], outcome: PlacementOutcome) -> tuple[str, ...]:
    """Return what is wrong: residency, a shard not trained on once, capacity, memory, pace, deadline, links, or the
    bill."""
    wrong = []
    known = {job.name: job for job in jobs}
    answers = Counter([p.job for p in outcome.placements] + [r.job for r in outcome.refusals])
    wrong += [f"{name} has {answers[name]} answers" for name in known if answers[name] != 1]
    used: Counter[tuple[str, str]] = Counter()
    for placement in outcome.placements:
        wrong += [f"{placement.job}: {text}" for text in _faults(federation, known[placement.job], placement)]
        for part in placement.partitions:
            used[part.region, part.device] += part.units
    for (region, device), units in used.items():
        have = _device(federation, region, device).units
        if units > have:
            wrong.append(f"{units} units of {device} in {region} are held, there are {have}")
    return tuple(wrong)


def _faults(federation: PlacementFederation, job: PlacementJob, placement: Placement) -> list[str]:
    wrong = []
    shards = {shard.name: shard for shard in job.shards}
    trained = Counter(name for part in placement.partitions for name in part.shards)
    wrong += [f"shard {name} is trained on {trained[name]} times" for name in shards if trained[name] != 1]
    regions = [part.region for part in placement.partitions]
    if len(set(regions)) < len(regions) or placement.hub not in regions:
        wrong.append("each region has one partition, and one of them is the hub")
    if placement.seconds > job.deadline_seconds * (1 + NEAR):
        wrong.append(f"it ends after {placement.seconds:.0f} s, the deadline is after {job.deadline_seconds:.0f} s")
    window = placement.seconds - job.start_seconds
    usd = 0.0
    for part in placement.partitions:
        device = _device(federation, part.region, part.device)
        if device.memory_bytes < job.memory_bytes:
            wrong.append(f"{part.device} has less memory than {job.memory_bytes} bytes")
        work = sum(shards[name].samples for name in part.shards) * job.passes * job.work_per_sample
        if work > device.samples_per_second * part.units * window * (1 + NEAR):
            wrong.append(f"{part.units} {part.device} in {part.region} are too slow")
        place = federation.index[part.region]
        hourly = part.units * device.usd_per_unit_hour + federation.regions[place].server_usd_per_hour
        usd += hourly * placement.seconds / 3600
        for shard in (shards[name] for name in part.shards):
            if not _may(federation, shard, part.region):
                wrong.append(f"shard {shard.name} may not be in {part.region}")
            usd += _sent(federation, shard.region, part.region, shard.bytes, window / max(1.0, job.passes), wrong)
        for way in ((part.region, placement.hub), (placement.hub, part.region)):
            usd += _sent(federation, *way, job.rounds * job.model_bytes, window, wrong)
    if not math.isclose(usd, placement.usd, rel_tol=NEAR, abs_tol=1e-9):
        wrong.append(f"it is billed ${placement.usd:.4f} and costs ${usd:.4f}")
    return wrong


def _sent(
    federation: PlacementFederation, source: str, destination: str, size: int, seconds: float, wrong: list[str]
) -> float:
    """USD of bytes on a link that is to carry them in some seconds."""
    if source == destination or size == 0:
        return 0.0
    way = federation.index[source], federation.index[destination]
    if size * 8 / 1e6 > float(federation.mbps[way]) * seconds * (1 + NEAR):
        wrong.append(f"the link from {source} to {destination} is too slow")
        return 0.0
    return size / GB * float(federation.egress_usd_per_gb[way])


def _may(federation: PlacementFederation, shard: PlacementShard, region: str) -> bool:
    clouds = [federation.regions[federation.index[name]].cloud for name in (region, shard.region)]
    return may_be(shard.residency, shard.region, region, same_cloud=clouds[0] == clouds[1])


def _device(federation: PlacementFederation, region: str, name: str) -> Device:
    return next(device for device in federation.regions[federation.index[region]].devices if device.name == name)
