"""The plan of one job by data location: a partition runs where its shard is, or where residency lets the shard move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from scheduler._elastic import Option, Staffing, options
from scheduler._estimate import Routes, estimate, routes, step_seconds, worker_speed
from scheduler._model import Declined, Demand, Estimate, Plan, PlannedPartition, Range, Reason, Region, Snapshot
from scheduler._moves import PlacedShards, best_moves, train_samples
from scheduler._pipelined import Staged, staged, unstaged
from scheduler._tuned import Tuned, merging_of, tuned
from scheduler._wan import choose_wan
from scheduler._ways import Ways
from scheduler.topology import Topologies
from sync.collective import collective_named
from sync.policy import DEFAULT, policy_named
from sync.robust import robust_in, robust_rule_named

DEFAULT_INTERVAL_STEPS = 20
"""Local steps between WAN exchanges where the job file says `auto`: H = 20, as in the measurements of WAN policies."""
DEFAULT_MEMORY_MB = 1024
"""Memory of one worker in MiB where the job file says `auto` and the region's capacity allows it: torch with a small
model fits, and a larger model needs a profile. A choice, not measured."""


def plan(snapshot: Snapshot, demand: Demand) -> Plan | Declined:
    """Choose regions, workers and steps for a demand.

    Every live, allowed region that holds a training shard takes part, or another region processes its shard: where the
    shard's owner and the demand permit that, and staying is impossible or clearly worse (`_moves`).
    """
    return Planner(snapshot).plan(demand)


class Planner:
    """Plans over one snapshot; what depends on neither deadline nor budget is computed once for a demand.

    So other deadlines can be tried at little cost. The results are the same as those of `plan`.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._demand: Demand | None = None
        self._evaluated: dict[tuple[tuple[str, str], ...], Ways | Declined] = {}
        """Results by moved shards and their destinations."""
        self.placements = 0
        """Number of shard layouts that were evaluated; they take most of the time."""

    def plan(self, demand: Demand) -> Plan | Declined:
        """Return a plan, as the function `plan`."""
        unbounded = replace(demand, deadline_seconds=None, budget_usd=None)
        if unbounded != self._demand:
            self._demand, self._evaluated = unbounded, {}
        return best_moves(self._snapshot, demand, self._placed)

    def _placed(self, placed: PlacedShards, demand: Demand) -> Plan | Declined:
        key = tuple((copy.source, copy.destination) for copy in placed.copies)
        if key not in self._evaluated:
            self._evaluated[key] = _ways_for(placed, demand)
            self.placements += 1
        ways = self._evaluated[key]
        return ways if isinstance(ways, Declined) else ways.best(demand)


def _ways_for(placed: PlacedShards, demand: Demand) -> Ways | Declined:
    """Return all ways to staff the regions within what is free (`_elastic`), for shards that lie where they are
    processed.

    Steps per round follow from the workers, so that all regions pass over their data equally often. Deadline and budget
    are not considered.
    """
    snapshot = placed.snapshot
    candidates, reasons = _candidates(snapshot, demand)
    if reasons:
        return Declined(tuple(reasons))
    reasons = [reason for region in candidates if (reason := unstaged(region, snapshot, demand)) is not None]
    if reasons:
        return Declined(tuple(reasons))
    staffing = [_staffing(region, snapshot, demand) for region in candidates]
    if odd := (
        *_misnamed(demand.workers, candidates, snapshot),
        *_unreachable_quorum(demand, candidates),
        *_too_many_wrong(demand, candidates),
    ):
        return Declined(odd)
    ways = _ways(candidates, staffing, snapshot, demand)
    partitions = _partitions(candidates, ways[0], snapshot, demand)
    reasons = [
        reason
        for region, part in zip(candidates, partitions, strict=True)
        for reason in _unfit(region, part, snapshot, demand)
    ]
    if reasons:
        return Declined(tuple(reasons))
    known: dict[str, Topologies] = {}
    first = _planned(candidates, partitions, placed, demand, known)
    if isinstance(first, Declined):
        return first
    over = routes(first, snapshot)
    alike = {way: _alike(way, first, candidates, snapshot, demand, over) for way in ways}

    def by_itself(way: Option) -> Plan | Declined:
        return _planned(candidates, _partitions(candidates, way, snapshot, demand), placed, demand, known)

    return Ways(alike, by_itself)


def _ways(candidates: list[Region], staffing: list[Staffing], snapshot: Snapshot, demand: Demand) -> list[Option]:
    """Return the staffing that the demand states, or all possible ones. In a region with a pipeline, replicas are
    counted."""
    if demand.workers is None:
        return list(options(staffing))
    asked = demand.workers
    counts = [asked if isinstance(asked, int) else asked[region.name] for region in candidates]
    cuts = [staged(region, snapshot, demand) for region in candidates]
    return [
        Option(
            "",
            tuple(min(n // cut.stages, cut.most_replicas) if cut else n for n, cut in zip(counts, cuts, strict=True)),
        )
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
    text = f"wan.quorum is {quorum}, and {len(candidates)} region{'s' * (len(candidates) > 1)} take part"
    return [Reason("INADMISSIBLE", text, f"set wan.quorum to {len(candidates)} at most, or leave it out")]


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
    text = f"wan.robust: {name} with {those} needs {fewest} regions, and {len(candidates)} take part"
    return [Reason("INADMISSIBLE", text, "use another rule, a lower wan.byzantine, or more regions")]


def _planned(
    candidates: list[Region],
    partitions: list[PlannedPartition],
    placed: PlacedShards,
    demand: Demand,
    known: dict[str, Topologies],
) -> Plan | Declined:
    """Return the whole plan for regions with given workers."""
    snapshot = placed.snapshot
    partitions, rounds, interval = _steps(partitions, demand)
    wan = choose_wan(candidates, partitions, snapshot, demand, rounds, known)
    if isinstance(wan, Declined):
        return wan
    taken_by_all = merging_of(partitions, candidates, snapshot, demand)
    isolation = {region.name: region.isolation for region in snapshot.regions}
    chosen = Plan(
        partitions=tuple(replace(part, shards=placed.shards.get(part.region, ())) for part in partitions),
        copies=placed.copies,
        rounds=rounds,
        interval=interval,
        collective=demand.collective or (taken_by_all.collective if taken_by_all else "auto"),
        channel=demand.channel or "auto",
        merging=_merging(demand, taken_by_all),
        merging_codec=demand.merging_codec,
        wan_policy=demand.wan_policy or DEFAULT,
        wan_settings=wan.settings,
        codec=wan.codec,
        topology=wan.topology.name,
        neighbours=wan.topology.links,
        exchange_seconds=wan.exchange_seconds,
        slice_seconds=demand.slice_seconds,
        seed=demand.seed,
        evaluate_every=demand.evaluate_every,
        evaluation_batch=demand.evaluation_batch,
        estimate=_NOTHING,
        residency={},
        isolation={part.region: isolation[part.region] for part in partitions},
        alternatives=wan.alternatives,
    )
    return replace(chosen, estimate=estimate(chosen, snapshot), warnings=_warnings_of(chosen, demand, snapshot))


def _warnings_of(chosen: Plan, demand: Demand, snapshot: Snapshot) -> tuple[str, ...]:
    """Return warnings where functions cannot hold PyTorch or the model, or where steps larger than a shard change
    the number of epochs."""
    told = []
    held_mb = (snapshot.held_bytes or _COPIES * (snapshot.model_bytes or 0)) / 2**20
    for part in chosen.partitions:
        if part.memory_mb < _TORCH_MB:
            told.append(
                f"functions of {part.memory_mb} MB in {part.region} are smaller than PyTorch, which takes about "
                f"{_TORCH_MB} MB: only workers that share it, as those of the agent's own gateway do, can run; ask for "
                "more (function.memoryMb)"
            )
        if chosen.isolation.get(part.region) == "none":
            told.append(
                f"{part.region} runs job code without a sandbox: it can read and change what the agent can there"
            )
        if part.pipeline is None and held_mb > part.memory_mb:
            told.append(
                f"functions of {part.memory_mb} MB in {part.region} cannot hold the model: its tensors and gradients "
                f"take {held_mb:.0f} MB; ask for more (function.memoryMb), or measure the task with "
                "`geofed profile`, so that it can be cut into stages"
            )
        step, epochs = part.batch * part.replicas, demand.epochs
        made = chosen.rounds * part.steps_per_round * step / part.samples
        if demand.balance == "data" and epochs is not None and step > part.samples and abs(made / epochs - 1) > 0.05:
            told.append(
                f"{part.region} makes {made:.3g} passes over its data, where {epochs:.3g} are asked for: a step takes "
                f"{step} samples, and its shard has {part.samples}"
            )
    return tuple(told)


def _alike(way: Option, like: Plan, candidates: list[Region], snapshot: Snapshot, demand: Demand, over: Routes) -> Plan:
    """Return the plan with the exchange of another one, and with other workers."""
    partitions, rounds, interval = _steps(_partitions(candidates, way, snapshot, demand), demand)
    taken_by_all = merging_of(partitions, candidates, snapshot, demand)
    shards = {part.region: part.shards for part in like.partitions}
    other = replace(
        like,
        partitions=tuple(replace(part, shards=shards[part.region]) for part in partitions),
        rounds=rounds,
        interval=interval,
        collective=demand.collective or (taken_by_all.collective if taken_by_all else "auto"),
        merging=_merging(demand, taken_by_all),
    )
    return replace(other, estimate=estimate(other, snapshot, over), warnings=_warnings_of(other, demand, snapshot))


def _merging(demand: Demand, taken_by_all: Tuned | None) -> dict[str, float]:
    """Settings of the collective; K, where profiles say it and the demand does not."""
    if taken_by_all is None or "k" in demand.merging or not collective_named(taken_by_all.collective).takes_k:
        return demand.merging
    return {**demand.merging, "k": float(taken_by_all.chunks)}


def _candidates(snapshot: Snapshot, demand: Demand) -> tuple[list[Region], list[Reason]]:
    """The regions that hold a shard and are wanted; the reasons why the demand cannot be planned with them."""
    known = {region.name: region for region in snapshot.regions}
    wanted = [
        region
        for name, region in sorted(known.items())
        if name not in demand.avoid and (not demand.use or name in demand.use)
    ]
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
    return holders, reasons


def _unknown_use(snapshot: Snapshot, demand: Demand) -> list[Reason]:
    """Regions of `regions.use` that are not connected or unknown."""
    known = {region.name for region in snapshot.regions}
    reasons = []
    for name in demand.use:
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


def _staffing(region: Region, snapshot: Snapshot, demand: Demand) -> Staffing:
    samples = train_samples(region, demand.dataset)
    free = region.capacity.workers - snapshot.busy_workers.get(region.name, 0)
    enough = max(1, samples // demand.batch)
    speed, cut = worker_speed(region, snapshot), staged(region, snapshot, demand)
    if cut is not None:
        speed, free = demand.batch / cut.shape(1).step_seconds, min(free // cut.stages, cut.most_replicas)
    return Staffing(samples / speed, max(1, min(free, enough)))


def _partitions(regions: list[Region], way: Option, snapshot: Snapshot, demand: Demand) -> list[PlannedPartition]:
    found = []
    for region, workers in zip(regions, way.workers, strict=True):
        samples, cut = train_samples(region, demand.dataset), staged(region, snapshot, demand)
        if cut is not None:
            found.append(_in_stages(region, samples, cut, workers, demand))
            continue
        best = tuned(region, workers, snapshot, demand)
        usual = best.memory_mb if best is not None else min(DEFAULT_MEMORY_MB, region.capacity.memory_mb)
        part = PlannedPartition(
            region=region.name,
            samples=samples,
            workers=workers,
            batch=demand.batch,
            memory_mb=demand.memory_mb or usual,
            steps_per_round=1,
            samples_per_second=worker_speed(region, snapshot),
            merge_seconds=best.merge_seconds if best is not None else None,
        )
        found.append(part)
    return found


def _in_stages(region: Region, samples: int, cut: Staged, replicas: int, demand: Demand) -> PlannedPartition:
    """Return a partition that runs a pipeline."""
    shape = cut.shape(replicas)
    return PlannedPartition(
        region=region.name,
        samples=samples,
        workers=replicas * cut.stages,
        batch=demand.batch,
        memory_mb=cut.memory_mb,
        steps_per_round=1,
        samples_per_second=demand.batch / shape.step_seconds / cut.stages,
        pipeline=shape,
    )


def _more_workers_than_there_are(needed: int, most: int) -> str:
    if not most:
        return _ONLY_HOLDS_DATA
    if needed > most:
        return f"lower train.workers to {most} at most"
    return "wait for a job to end, or lower train.workers"


def _unfit(region: Region, part: PlannedPartition, snapshot: Snapshot, demand: Demand) -> list[Reason]:
    reasons = []
    name, capacity = region.name, region.capacity
    free = max(0, capacity.workers - snapshot.busy_workers.get(name, 0))
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
    if demand.channel not in (None, region.channel):
        text = f"region {name} has the channel {region.channel}, {demand.channel} is asked for"
        reasons.append(Reason("INADMISSIBLE", text, "leave `channel` out, or keep the region out with regions.avoid"))
    return reasons


def _steps(partitions: list[PlannedPartition], demand: Demand) -> tuple[list[PlannedPartition], int, int]:
    """Return rounds and steps per round, such that the demanded epochs are met to within one step a round."""
    total, shares = _by_speed(partitions, demand) if demand.balance == "speed" else _by_data(partitions, demand)
    usual = policy_named(demand.wan_policy or DEFAULT).interval_steps or DEFAULT_INTERVAL_STEPS
    interval = min(demand.interval or usual, total)
    rounds = math.ceil(total / interval)
    interval = math.ceil(total / rounds)
    stepped = [
        replace(part, steps_per_round=max(1, round(interval * share)))
        for part, share in zip(partitions, shares, strict=True)
    ]
    return stepped, rounds, interval


def _by_data(partitions: list[PlannedPartition], demand: Demand) -> tuple[int, list[float]]:
    """Return the steps of the region that makes the most, and each region's as a part of them: all make the same
    epochs."""
    per_epoch = [max(1, math.ceil(part.samples / (part.batch * part.replicas))) for part in partitions]
    longest = max(per_epoch)
    total = demand.steps if demand.steps is not None else max(1, round((demand.epochs or 1.0) * longest))
    return total, [own / longest for own in per_epoch]


def _by_speed(partitions: list[PlannedPartition], demand: Demand) -> tuple[int, list[float]]:
    """Return the same where all rounds take equally long; together the regions make the demanded epochs."""
    rates = [1.0 / step_seconds(part) for part in partitions]
    fastest = max(rates)
    if demand.steps is not None:
        total = demand.steps
    else:
        each_second = sum(rate * part.batch * part.replicas for rate, part in zip(rates, partitions, strict=True))
        seconds = (demand.epochs or 1.0) * sum(part.samples for part in partitions) / each_second
        total = max(1, round(seconds * fastest))
    return total, [rate / fastest for rate in rates]


_COPIES = 2
"""Copies of the model in a worker's memory, at least: parameters and gradients."""
_TORCH_MB = 320
"""Memory of a worker that has imported PyTorch and done nothing else, in MB, as measured with torch 2 for CPUs."""
_ONLY_HOLDS_DATA = "it only holds data: keep it out with regions.avoid"
_NOTHING = Estimate(Range(0, 0, 0), Range(0, 0, 0), Range(0, 0, 0), (), {}, "prior")
