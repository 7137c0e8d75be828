"""Placement by data location: a partition runs where its shard is, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler._estimate import estimate, worker_speed
from scheduler._model import Declined, Demand, Estimate, Partition, Plan, Range, Reason, Region, Snapshot
from scheduler._wan import choose_wan

DEFAULT_INTERVAL_STEPS = 20
"""Local steps between WAN exchanges where the job file says `auto` (the H = 20 of wan-sync measurements)."""
POLICY_INTERVAL_STEPS = {"bsp": 1, "asgd": 1, "asp": 1, "asgd-ga": 4}
"""Of policies that have one of their own; 4 is the smaller of the accumulation frequencies of Cloudless-Training."""
DEFAULT_MEMORY_MB = 1024


def plan(snapshot: Snapshot, demand: Demand) -> Plan | Declined:
    """Choose regions, workers and steps for a demand.

    Every region that is live, allowed and holds a training shard takes part, since its data may be used nowhere
    else. Workers are given in proportion to the data, within what is free; steps per round follow from them, so
    that all regions pass over their data equally often.
    """
    candidates, reasons = _candidates(snapshot, demand)
    if reasons:
        return Declined(tuple(reasons))
    partitions = _shares(candidates, snapshot, demand)
    reasons = [
        reason
        for region, part in zip(candidates, partitions, strict=True)
        for reason in _unfit(region, part, snapshot, demand)
    ]
    if reasons:
        return Declined(tuple(reasons))
    partitions, rounds, interval = _steps(partitions, demand)
    wan = choose_wan(candidates, partitions, snapshot, demand, rounds)
    if isinstance(wan, Declined):
        return wan
    chosen = Plan(
        partitions=tuple(partitions),
        rounds=rounds,
        interval=interval,
        collective=demand.collective or "auto",
        channel=demand.channel or "auto",
        merging=demand.merging,
        merging_codec=demand.merging_codec,
        wan_policy=demand.wan_policy or "ma",
        wan_settings=wan.settings,
        codec=wan.codec,
        topology=wan.topology.name,
        neighbours=wan.topology.links,
        exchange_seconds=wan.exchange_seconds,
        slice_seconds=demand.slice_seconds,
        seed=demand.seed,
        evaluate_every=demand.evaluate_every,
        estimate=_NOTHING,
        residency={region.name: _verdict(region, demand) for region in candidates},
        alternatives=wan.alternatives,
    )
    chosen = replace(chosen, estimate=estimate(chosen, snapshot))
    too_much = _beyond_limits(chosen, demand)
    return Declined(too_much) if too_much else chosen


def _candidates(snapshot: Snapshot, demand: Demand) -> tuple[list[Region], list[Reason]]:
    known = {region.name: region for region in snapshot.regions}
    reasons = []
    for name in demand.use:
        if name in snapshot.absent:
            reasons.append(
                Reason(
                    "INADMISSIBLE",
                    f"region {name} is not connected",
                    f"start its agent, or take {name} out of regions.use",
                )
            )
        elif name not in known:
            reasons.append(
                Reason(
                    "REGION_NOT_FOUND",
                    f"region {name} is not part of the federation",
                    f"invite it with `control-plane region invite {name}`",
                )
            )
    wanted = [
        region
        for name, region in sorted(known.items())
        if name not in demand.avoid and (not demand.use or name in demand.use)
    ]
    holders = [region for region in wanted if _shard_samples(region, demand.dataset) > 0]
    without = sorted({region.name for region in wanted} - {region.name for region in holders})
    if demand.use and without:
        reasons += [
            Reason(
                "DATASET_UNKNOWN",
                f"region {name} holds no shard of dataset {demand.dataset}",
                f"take {name} out of regions.use, or add the shard to its configuration",
            )
            for name in without
        ]
    elif not holders and not reasons:
        elsewhere = ", ".join(sorted({d.name for region in snapshot.regions for d in region.datasets})) or "none"
        reasons.append(
            Reason(
                "DATASET_UNKNOWN",
                f"no live region holds dataset {demand.dataset}",
                f"datasets that are there: {elsewhere}",
            )
        )
    for region in holders:
        if region.prices is None:
            reasons.append(
                Reason(
                    "PRICE_UNKNOWN",
                    f"region {region.name} states no prices",
                    "add `prices` to its configuration",
                )
            )
    return holders, reasons


def _shard_samples(region: Region, dataset: str) -> int:
    for held in region.datasets:
        if held.name == dataset and "train" in held.splits:
            return held.splits["train"].samples
    return 0


def _verdict(region: Region, demand: Demand) -> str:
    rule = next(held.residency for held in region.datasets if held.name == demand.dataset)
    return f"stays in {region.name} (rule: {rule})"


def _shares(regions: list[Region], snapshot: Snapshot, demand: Demand) -> list[Partition]:
    """Workers in proportion to data over speed, scaled so that no region exceeds what it has free."""
    samples = [_shard_samples(region, demand.dataset) for region in regions]
    speeds = [worker_speed(region, snapshot) for region in regions]
    free = [max(0, region.capacity.workers - snapshot.busy_workers.get(region.name, 0)) for region in regions]
    load = [n / speed for n, speed in zip(samples, speeds, strict=True)]
    pace = min((have / need for have, need in zip(free, load, strict=True) if have), default=0.0)
    parts = []
    for region, n, speed, need, have in zip(regions, samples, speeds, load, free, strict=True):
        fitting = max(1, n // demand.batch)
        workers = demand.workers or max(1, min(have, fitting, math.floor(pace * need + 1e-9)))
        parts.append(
            Partition(
                region=region.name,
                samples=n,
                workers=workers,
                batch=demand.batch,
                memory_mb=demand.memory_mb or min(DEFAULT_MEMORY_MB, region.capacity.memory_mb),
                steps_per_round=1,
                samples_per_second=speed,
            )
        )
    return parts


def _unfit(region: Region, part: Partition, snapshot: Snapshot, demand: Demand) -> list[Reason]:
    reasons = []
    name, capacity = region.name, region.capacity
    free = max(0, capacity.workers - snapshot.busy_workers.get(name, 0))
    if part.workers > free:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} has {free} of {capacity.workers} workers free, {part.workers} are needed",
                "wait for a job to end, or lower train.workers",
            )
        )
    if part.memory_mb > capacity.memory_mb:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"region {name} gives a function at most {capacity.memory_mb} MB, {part.memory_mb} MB are asked for",
                "lower function.memory_mb",
            )
        )
    if demand.channel not in (None, region.channel):
        text = f"region {name} has the channel {region.channel}, {demand.channel} is asked for"
        reasons.append(Reason("INADMISSIBLE", text, "leave `channel` out, or keep the region out with regions.avoid"))
    return reasons


def _steps(partitions: list[Partition], demand: Demand) -> tuple[list[Partition], int, int]:
    """Rounds and steps per round, such that every region makes the demanded epochs to within one step a round."""
    per_epoch = [max(1, math.ceil(part.samples / (part.batch * part.workers))) for part in partitions]
    longest = max(per_epoch)
    total = demand.steps if demand.steps is not None else max(1, round((demand.epochs or 1.0) * longest))
    usual = POLICY_INTERVAL_STEPS.get(demand.wan_policy or "", DEFAULT_INTERVAL_STEPS)
    interval = min(demand.interval or usual, total)
    rounds = math.ceil(total / interval)
    interval = math.ceil(total / rounds)
    stepped = [
        replace(part, steps_per_round=max(1, round(interval * own / longest)))
        for part, own in zip(partitions, per_epoch, strict=True)
    ]
    return stepped, rounds, interval


def _beyond_limits(chosen: Plan, demand: Demand) -> tuple[Reason, ...]:
    reasons = []
    expected = chosen.estimate
    if demand.deadline_seconds is not None and expected.seconds.high > demand.deadline_seconds:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"needs up to {expected.seconds.high:.0f} s, the deadline leaves {demand.deadline_seconds:.0f} s",
                f"a deadline of {expected.seconds.high:.0f} s from now could be promised",
            )
        )
    if demand.budget_usd is not None and expected.usd.high > demand.budget_usd:
        reasons.append(
            Reason(
                "INADMISSIBLE",
                f"may cost up to ${expected.usd.high:.4f}, the budget is ${demand.budget_usd:.4f}",
                f"a budget of ${expected.usd.high:.4f} would do",
            )
        )
    return tuple(reasons)


_NOTHING = Estimate(Range(0, 0, 0), Range(0, 0, 0), Range(0, 0, 0), (), {}, "prior")
