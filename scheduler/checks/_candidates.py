"""The regions that may take part in a job, and why a demand cannot be planned with them."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler._model import Demand, Reason, Region, Snapshot
from scheduler._shard_moves import train_samples

__all__ = ["candidates"]


def candidates(snapshot: Snapshot, demand: Demand) -> tuple[list[Region], list[Reason]]:
    """The regions that hold a shard and are wanted; the reasons why the demand cannot be planned with them."""
    known = snapshot.by_name
    names = sorted(known.keys() & demand.use if demand.use else known)
    wanted = [known[name] for name in names if name not in demand.avoid]
    holders = [region for region in wanted if train_samples(region, demand.dataset) > 0]
    reasons = [*_unknown_use(snapshot, demand), *_unknown_avoid(snapshot, demand)]
    if demand.use and (without := _without_shard(wanted, holders, demand)):
        reasons += without
    elif not holders and not reasons:
        reasons.append(_no_holder(snapshot, demand))
    reasons += [
        Reason("PRICE_UNKNOWN", f"region {region.name} states no prices", "add `prices` to its configuration")
        for region in holders
        if region.prices is None
    ]
    return holders, [*reasons, *_other_schemas(holders, demand.dataset)]


def _other_schemas(holders: list[Region], dataset: str) -> list[Reason]:
    """Regions whose samples differ from the first one's, with which no task can work."""
    held = [(region.name, one.schema) for region in holders for one in region.datasets if one.name == dataset]
    return [
        Reason(
            "INADMISSIBLE",
            f"the samples of {dataset} in {name} differ from those in {held[0][0]}: other columns, types or classes",
            f"`geofed agent doctor` there shows them; correct `format` in a region's file, or leave {name} out",
        )
        for name, schema in held
        if schema != held[0][1]
    ]


def _unknown_use(snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Regions of `regions.use` that are not connected or unknown; what is avoided too need not be there."""
    known = {region.name for region in snapshot.regions}
    reasons = []
    for name in demand.use:
        if name in demand.avoid:
            continue
        if name in snapshot.absent:
            hint = f"start its agent, or take {name} out of regions.use"
            reasons.append(Reason("INADMISSIBLE", f"region {name} is not connected", hint))
        elif name not in known:
            hint = f"invite it with `geofed region invite {name}`"
            reasons.append(Reason("REGION_NOT_FOUND", f"region {name} is not part of the federation", hint))
    return reasons


def _unknown_avoid(snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Unknown regions of `regions.avoid`: a misspelt one would have data used where their owner does not want it."""
    known = {*snapshot.absent, *(region.name for region in snapshot.regions)}
    here = ", ".join(sorted(known)) or "none yet"
    return [
        Reason(
            "REGION_NOT_FOUND",
            f"region {name} of regions.avoid is not part of the federation",
            f"correct it or take it out; the regions are {here}",
        )
        for name in demand.avoid
        if name not in known
    ]


def _without_shard(wanted: list[Region], holders: list[Region], demand: Demand) -> list[Reason]:
    """Wanted regions that hold no shard and cannot take one."""
    without = sorted(
        region.name
        for region in wanted
        if region not in holders and (demand.residency == "region" or not region.takes_shards)
    )
    return [
        Reason(
            "DATASET_UNKNOWN",
            f"region {name} holds no shard of dataset {demand.dataset}",
            f"take {name} out of regions.use, or add the shard to its configuration",
        )
        for name in without
    ]


def _no_holder(snapshot: Snapshot, demand: Demand) -> Reason:
    """Why no wanted region holds the dataset: `regions.avoid` leaves all holders out, or there are none."""
    known = {region.name: region for region in snapshot.regions}
    if kept_out := _kept_out(known, demand):
        return Reason(
            "INADMISSIBLE",
            f"regions.avoid leaves out every live region that holds dataset {demand.dataset}",
            f"take one of them out of it: {', '.join(kept_out)}",
        )
    away = f"; not connected: {', '.join(snapshot.absent)}" if snapshot.absent else ""
    elsewhere = ", ".join(sorted({d.name for region in snapshot.regions for d in region.datasets})) or "none"
    return Reason(
        "DATASET_UNKNOWN",
        f"no live region holds dataset {demand.dataset}",
        f"datasets that are there: {elsewhere}{away}",
    )


def _kept_out(known: Mapping[str, Region], demand: Demand) -> list[str]:
    return [name for name in sorted(demand.avoid) if name in known and train_samples(known[name], demand.dataset)]
