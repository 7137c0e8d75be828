"""Why a job cannot run in the regions of its demand."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler._configurations import RegionConfigurations
from scheduler._model import Demand, Reason, Region, Snapshot
from scheduler._published_rules import METHODS
from scheduler._shard_moves import train_clients
from sync.codec import MaskedIntegers, codec_named
from sync.robust import robust_in, robust_rule_named

__all__ = ["refusals", "unfit"]

_MORE_MEMORY = "raise function.memoryMb, or the region's capacity.memoryMb"
_OTHER_STEPS = (
    "use a smaller train.batch, raise the region's capacity.memoryMb, or keep the region out with regions.avoid; with "
    "`function.memoryMb` or `parallelism: data` it is tried all the same"
)
_SMALLER_STEPS = (
    "let a step need less (train.accumulate, train.precision: bf16, a smaller train.batch), or keep the region out "
    "with regions.avoid"
)
_ONLY_HOLDS_DATA = "it only holds data: keep it out with regions.avoid"


def refusals(demand: Demand, candidates: list[Region], snapshot: Snapshot) -> list[Reason]:
    """Return why a demand cannot be planned with the regions that may take part."""
    return [
        *_misnamed(demand.workers, candidates, snapshot),
        *_unreachable_quorum(demand, candidates),
        *_too_many_wrong(demand, candidates),
        *_readable(demand, candidates),
        *_without_clients(demand, candidates),
        *_unprofiled(demand, candidates, snapshot),
    ]


def _misnamed(workers: int | Mapping[str, int] | None, candidates: list[Region], snapshot: Snapshot) -> list[Reason]:
    """Return why stated workers do not match: regions without a number, and names that no region has."""
    if not isinstance(workers, Mapping):
        return []
    names = [region.name for region in candidates]
    known = {*snapshot.absent, *(region.name for region in snapshot.regions)}
    unnamed = [
        Reason(
            "INADMISSIBLE",
            f"train.workers has no number for region {name}, which holds a shard",
            f"add {name} to train.workers, or keep it out with regions.avoid",
        )
        for name in names
        if name not in workers
    ]
    return unnamed + [
        Reason(
            "REGION_NOT_FOUND",
            f"region {name} of train.workers is not part of the federation",
            f"correct it or take it out; the regions are {', '.join(sorted(known))}",
        )
        for name in sorted(workers)
        if name not in known
    ]


def _unreachable_quorum(demand: Demand, candidates: list[Region]) -> list[Reason]:
    quorum = int(demand.wan_settings.get("quorum", 0))
    if quorum <= len(candidates):
        return []
    text = f"advanced.wan.quorum is {quorum}, and {len(candidates)} region{'s' * (len(candidates) > 1)} take part"
    return [Reason("INADMISSIBLE", text, f"set advanced.wan.quorum to {len(candidates)} at most, or leave it out")]


def _too_many_wrong(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return why a robust rule cannot withstand the wrong updates that it has to."""
    name, wrong = robust_in(demand.wan_settings)
    if not name:
        return []
    wrong = max(1, int(wrong))
    fewest = robust_rule_named(name).fewest(wrong)
    if fewest <= len(candidates):
        return []
    those = f"{wrong} region{'s' * (wrong > 1)} that may be wrong"
    text = f"advanced.wan.robust: {name} with {those} needs {fewest} regions, and {len(candidates)} take part"
    return [Reason("INADMISSIBLE", text, "use another rule, a lower advanced.wan.byzantine, or more regions")]


def _without_clients(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return which regions do not know their clients, for a job with clients."""
    if demand.clients is None:
        return []
    return [
        Reason(
            "INADMISSIBLE",
            f"region {region.name} does not tell how many clients its shard of {demand.dataset} has",
            f"state `clients` in the dataset's format or its split in the region's file, or leave {region.name} out",
        )
        for region in candidates
        if not train_clients(region, demand.dataset)
    ]


def _unprofiled(demand: Demand, candidates: list[Region], snapshot: Snapshot) -> list[Reason]:
    """Return the regions without a profile by which a published rule could choose."""
    if demand.method is None or not METHODS[demand.method].by_region:
        return []
    return [
        Reason(
            "INADMISSIBLE",
            f"method {demand.method} chooses by a profile of the task, and region {region.name} has none",
            "profile the task first: geofed profile JOB.yaml",
        )
        for region in candidates
        if region.name not in snapshot.profiles
    ]


def _readable(demand: Demand, candidates: list[Region]) -> list[Reason]:
    """Return why secure aggregation cannot hide the updates of these regions."""
    fewest, count = int(demand.wan_settings.get("secure", 0)), len(candidates)
    if not fewest:
        return []
    if count < fewest:
        text = f"privacy.minRegions is {fewest}, and {count} region{'s' * (count > 1)} take part"
        return [Reason("INADMISSIBLE", text, "use more regions: the sum of fewer would tell too much")]
    masked = codec_named(demand.codec) if demand.codec else None
    if isinstance(masked, MaskedIntegers) and count > masked.most_regions:
        text = f"advanced.wan.codec holds sums of at most {masked.most_regions} regions with secure aggregation"
        return [
            Reason(
                "INADMISSIBLE", f"{text}, and {count} take part", "set advanced.wan.codec to bf16 or fp32, or to auto"
            )
        ]
    return []


def _more_workers_than_there_are(needed: int, most: int) -> str:
    if not most:
        return _ONLY_HOLDS_DATA
    if needed > most:
        return f"lower train.workers to {most} at most"
    return "wait for a job to end, or lower train.workers"


def unfit(region: Region, configured: RegionConfigurations, snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Return why a region cannot have its first configuration."""
    reasons, part = [], configured[0].part
    name, capacity = region.name, region.capacity
    devices, wanted = capacity.function_devices, demand.gpus or 1
    if devices is not None and devices < wanted:
        text = f"functions in {name} have {devices} devices, {wanted} are asked for"
        return [Reason("INADMISSIBLE", text, "lower function.gpus, or keep the region out with regions.avoid")]
    if text := _gpu_memory(region, snapshot, demand):
        reasons.append(Reason("GPU_MEMORY", text, _SMALLER_STEPS))
    insists = demand.memory_mb is not None or demand.parallelism == "data"
    if not configured.holds_step and (demand.chooses_batch or not insists):
        most = demand.memory_mb or capacity.memory_mb
        text = f"a step of {demand.batch} samples does not fit into a function of {most} MB in {name}, as profiled"
        reasons.append(Reason("INADMISSIBLE", text, _MORE_MEMORY if demand.chooses_batch else _OTHER_STEPS))
    free = max(0, snapshot.free_workers(region, demand.gpus))
    if part.workers > free:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} has {free} of {capacity.workers} workers free, {part.workers} are needed",
                _more_workers_than_there_are(part.workers, capacity.workers),
            )
        )
    if part.memory_mb > capacity.memory_mb:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} gives a function at most {capacity.memory_mb} MB, {part.memory_mb} MB are asked for",
                "lower function.memoryMb",
            )
        )
    asked = demand.slice_seconds
    if capacity.slice_seconds is not None and asked is not None and asked > capacity.slice_seconds:
        text = f"the platform of region {name} ends functions, so that a slice has at most {capacity.slice_seconds:g} s"
        reasons.append(
            Reason(
                "LIMIT_EXCEEDED",
                f"{text}, {asked:g} s are asked for",
                f"lower function.slice to {capacity.slice_seconds:g}s, or keep the region out with regions.avoid",
            )
        )
    if demand.channel not in (None, region.channel):
        text = f"region {name} has the channel {region.channel}, {demand.channel} is asked for"
        reasons.append(
            Reason("INADMISSIBLE", text, "leave `advanced.channel` out, or keep the region out with regions.avoid")
        )
    return reasons


def _gpu_memory(region: Region, snapshot: Snapshot, demand: Demand) -> str:
    """Return why a step does not fit into a GPU of a region, as a probe there or elsewhere tells; else empty."""
    batch, told = snapshot.gpu_lacks.get(region.name, (0, ""))
    if told and demand.batch >= batch:
        return f"a step of {batch} samples does not fit into a GPU of region {region.name}: {told}"
    ranks = max(1, region.worker_devices(demand.gpus)) if demand.sharded else 1
    devices, needed = region.capacity.devices, snapshot.gpu_mb(demand.batch, ranks)
    if devices is None or devices.memory_mb is None or needed <= devices.memory_mb:
        return ""
    step = f"a step of {demand.batch} samples takes {needed:.0f} MB of a GPU's memory, as a probe tells"
    return f"{step}, and one in region {region.name} has {devices.memory_mb} MB"
