"""Shards that are processed in other regions: where they may move, what that costs, and whether it is worth it.

Data move only where their owner and the job allow it, and only where they must or where that saves clearly more than
the error of predictions. A plan with moved shards is evaluated by the planner itself, with the copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from scheduler._estimate import speed_by_probe
from scheduler._link import link_table, pace
from scheduler._model import (
    Alternative,
    Capacity,
    Dataset,
    Declined,
    Demand,
    Plan,
    PlannedCopy,
    Reason,
    Region,
    Snapshot,
    Split,
)

__all__ = ["IMPOSSIBLE", "PlacedShards", "best_moves", "may_be", "rule_text", "train_clients", "train_samples"]

WORTH = 0.1
"""Share of the money, or of the time, that moving data must save: raw data are not sent around for less."""
CONVERSATION_ROUND_TRIPS = 9
"""Round trips before the bytes of a shard: two connections with TLS and a call on each, the list of files offered and
sent, one more file offered, a bulk stream opened with TLS. Reading the files for their digests is not counted, since a
processor does that faster than links are."""
MOST_PLACES = 3
"""Regions that are tried for one shard: the best by a rough estimate of cost, and by one of time."""
WORTH_EACH = 0.02
"""Share by which the plan must get worse when a single shard stays at home, for that shard to move."""
MOST_LAYOUTS, LEAST_LAYOUTS, PLANNED_REGIONS = 60, 12, 500
"""Layouts that are evaluated roughly at most; over many regions, where each takes longer, the number of layouts times
regions is limited instead, but to no fewer than the least number."""
MOST_COMBINED = 256
"""Combinations of a place for each shard up to which all layouts are evaluated: that of four shards."""
MOST_PLANS = 3
"""Layouts for which a plan is searched, the best by the rough evaluation."""
MOST_TRIED = 12
"""The same where none of them keeps the limits."""
_MOST_UNUSED = 20
"""Shards that are not used and have a verdict each: a plan does not grow with the federation."""


@dataclass(frozen=True)
class PlacedShards:
    """A federation in which every shard lies where it is processed."""

    snapshot: Snapshot
    copies: tuple[PlannedCopy, ...] = ()
    shards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By region that processes shards of others: the regions whose shards it processes, its own included."""


_Moves = Mapping[str, str]
"""The region in which a shard is processed, by the region that holds it; those that stay are left out."""
_Answer = Callable[[PlacedShards, Demand], Plan | Declined]
_Value = tuple[float, ...]
"""What of two layouts decides, the smaller is better: 0 and the objective, or by how much the limits are exceeded."""
_Rough = Callable[[PlacedShards, Demand], _Value]
_Valued = Callable[[_Moves], _Value]
_Key = tuple[tuple[str, str], ...]
_Tried = Mapping[_Key, Plan | Declined]
IMPOSSIBLE: _Value = (2.0,)
"""Of a layout that no plan can have."""


def train_samples(region: Region, dataset: str) -> int:
    """Return the samples of the training split that a region holds."""
    held = _held(region, dataset)
    return held.splits["train"].samples if held is not None and "train" in held.splits else 0


def train_clients(region: Region, dataset: str) -> int:
    """Return the clients whose samples the training split of a region has; 0: not known."""
    held = _held(region, dataset)
    return (held.splits["train"].clients or 0) if held is not None and "train" in held.splits else 0


def best_moves(snapshot: Snapshot, demand: Demand, answer: _Answer, rough: _Rough) -> Plan | Declined:
    """Return the plan with all data at home, or one that is clearly better with some shards elsewhere.

    All layouts are evaluated if they are few. Else from the best of several starts one shard after the other is moved
    where it is best, until that no longer helps. Chains are not allowed: a region that gets shards keeps its own.
    Layouts are evaluated by ``rough``, and only the best of them are searched for a plan.
    """
    at_home = answer(PlacedShards(snapshot), demand)
    places = _places(snapshot, demand)
    if not places:
        return _told(at_home, {}, snapshot, demand) if isinstance(at_home, Plan) else _hinted(at_home, snapshot, demand)
    tried: dict[_Key, Plan | Declined] = {(): at_home}
    values: dict[_Key, _Value] = {}
    most = min(MOST_LAYOUTS, max(LEAST_LAYOUTS, PLANNED_REGIONS // len(snapshot.regions)))

    def asked(moves: _Moves) -> Plan | Declined:
        key = tuple(sorted(moves.items()))
        if key not in tried:
            tried[key] = answer(_placed(snapshot, demand, moves), demand)
        return tried[key]

    def valued(moves: _Moves, *, at_most: int = most) -> _Value:
        key = tuple(sorted(moves.items()))
        if key not in values:
            if len(values) >= at_most:
                return IMPOSSIBLE
            values[key] = rough(_placed(snapshot, demand, moves), demand)
        return values[key]

    every = _all(places)
    if 0 < len(every) <= most:
        for moves in every:
            valued(moves)
    else:
        _climb(_first(snapshot, demand, places), places, valued)
    found = _best_of(values, asked, demand)
    if found is not None:
        thinned = _thinned(found[0], lambda moves: valued(moves, at_most=most + len(places)))
        other = asked(thinned)
        if isinstance(other, Plan) and _worth(other, demand) <= (
            1 + WORTH_EACH * (len(found[0]) - len(thinned))
        ) * _worth(found[1], demand):
            found = thinned, other
    if found is None or not found[0]:
        return _told(at_home, tried, snapshot, demand) if isinstance(at_home, Plan) else at_home
    if isinstance(at_home, Plan) and _worth(found[1], demand) > (1 - WORTH) * _worth(at_home, demand):
        return _told(at_home, tried, snapshot, demand)
    why = _compared(at_home, found[1]) if isinstance(at_home, Plan) else "; ".join(r.text for r in at_home.reasons)
    took = _took(at_home) if isinstance(at_home, Plan) else "not possible"
    stayed = Alternative(f"all data stay where they are: {took}", why)
    told = _told(found[1], {}, snapshot, demand)
    return replace(told, alternatives=(stayed, *told.alternatives))


# The search


def _all(places: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return all layouts in which something moves; none if they are many."""
    if math.prod(1 + len(regions) for regions in places.values()) > MOST_COMBINED:
        return []
    found = []
    for chosen in product(*((shard, *regions) for shard, regions in places.items())):
        moves = {shard: region for shard, region in zip(places, chosen, strict=True) if shard != region}
        if moves and not set(moves.values()) & set(moves):
            found.append(moves)
    return found


def _climb(first: Sequence[_Moves], places: Mapping[str, Sequence[str]], valued: _Valued) -> None:
    """Evaluate layouts: the first ones, and from the best of them single changes as long as they help."""
    best = min(first, key=valued)
    helped = True
    while helped:
        helped = False
        for shard, regions in places.items():
            for region in (shard, *regions):
                moves = {**best, shard: region}
                if region == shard:
                    del moves[shard]
                if not set(moves.values()) & set(moves) and valued(moves) < valued(best):
                    best, helped = moves, True


def _best_of(
    values: Mapping[_Key, _Value], asked: Callable[[_Moves], Plan | Declined], demand: Demand
) -> tuple[dict[str, str], Plan] | None:
    """Return the best plan of the layouts that are roughly best; None: none of those that were tried has one."""
    found: list[tuple[dict[str, str], Plan]] = []
    order = sorted((key for key, value in values.items() if value < IMPOSSIBLE), key=lambda key: (values[key], key))
    for number, key in enumerate(order[:MOST_TRIED]):
        if number >= MOST_PLANS and found:
            break
        answer = asked(dict(key))
        if isinstance(answer, Plan):
            found.append((dict(key), answer))
    return min(found, key=lambda one: _value(one[1], demand), default=None)


def _thinned(moves: dict[str, str], valued: _Valued) -> dict[str, str]:
    """Return the moves without those that hardly help by themselves."""
    for shard in sorted(moves):
        rest = {source: region for source, region in moves.items() if source != shard}
        present, without = valued(moves), valued(rest)
        if present[0] == without[0] == 0.0 and without[1] <= (1 + WORTH_EACH) * present[1]:
            moves = rest
    return moves


def _first(snapshot: Snapshot, demand: Demand, places: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return the moves to try first: those that must be, to their best places, then for each place those and all that
    may move there. Places that are the first choice of most shards come first."""
    must: dict[str, str] = {}
    for region in snapshot.regions:
        free = snapshot.free_workers(region, demand.gpus)
        if free < 1 and region.name in places:
            must[region.name] = places[region.name][0]
    must = {shard: region for shard, region in must.items() if region not in must}
    gathered = []
    votes = Counter(regions[0] for regions in places.values())
    for place in sorted({region for regions in places.values() for region in regions}, key=lambda r: (-votes[r], r)):
        to_it = {shard: place for shard, regions in places.items() if place in regions and shard != place}
        rest = {shard: region for shard, region in must.items() if shard not in to_it and shard != place}
        moves = {**rest, **to_it}
        if not set(moves.values()) & set(moves):
            gathered.append(moves)
    return [must, *gathered]


def _value(plan: Plan, demand: Demand) -> tuple[float, ...]:
    usd, seconds = plan.estimate.usd.expected, plan.estimate.seconds.expected
    return (seconds, usd) if demand.minimise == "time" else (usd, seconds)


def _worth(plan: Plan, demand: Demand) -> float:
    return _value(plan, demand)[0]


# Where shards may go


def may_be(rule: str | Collection[str], home: str, other: str, *, same_cloud: bool) -> bool:
    """Return whether a region may process a shard. ``rule``: "region", "cloud", "anywhere", or the names of regions;
    its own always may."""
    if home == other or rule == "anywhere":
        return True
    if isinstance(rule, str):
        return rule == "cloud" and same_cloud
    return other in rule


def rule_text(rule: str | Collection[str]) -> str:
    """Return a residency rule as text for users."""
    return rule if isinstance(rule, str) else ", ".join(sorted(rule))


def _held(region: Region, dataset: str) -> Dataset | None:
    for held in region.datasets:  # of all regions for each plan, which an iterator would double the time of
        if held.name == dataset:
            return held
    return None


def _left_out(region: str, demand: Demand) -> bool:
    return region in demand.avoid or bool(demand.use and region not in demand.use)


def _places(snapshot: Snapshot, demand: Demand) -> dict[str, tuple[str, ...]]:
    """Return the regions to try for each shard that may move, the most promising first."""
    if demand.residency == "region":
        return {}
    found = {}
    for region in sorted(snapshot.regions, key=lambda region: region.name):
        if _left_out(region.name, demand) or not train_samples(region, demand.dataset):
            continue
        able = [other for other in snapshot.regions if _may_take(region, other, snapshot, demand)]
        if able:
            found[region.name] = _promising(region, able, snapshot, demand)
    return found


def _may_take(home: Region, other: Region, snapshot: Snapshot, demand: Demand) -> bool:
    """Whether another region may process a region's shard, by all rules, and has what it takes."""
    held = _held(home, demand.dataset)
    if held is None or home.name == other.name or home.prices is None or other.prices is None:
        return False
    same_cloud = home.cloud == other.cloud
    allowed = all(
        may_be(rule, home.name, other.name, same_cloud=same_cloud) for rule in (held.residency, demand.residency)
    )
    able = other.takes_shards and snapshot.free_workers(other, demand.gpus) > 0
    fits = demand.channel in (None, other.channel) and not _left_out(other.name, demand)
    return allowed and able and fits and _shard_bytes(held) is not None and bool(_way(home, other))


def _way(home: Region, other: Region) -> bool:
    return (home.name, other.name) in link_table((home, other))


def _shard_bytes(held: Dataset) -> int | None:
    sizes = [split.bytes for split in held.splits.values()]
    return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)


def _promising(home: Region, able: Sequence[Region], snapshot: Snapshot, demand: Demand) -> tuple[str, ...]:
    """Return the places of a shard in the order of a rough estimate of its money and of its time alone."""

    def rough(other: Region) -> tuple[float, float]:
        copy = _copy(home, other, demand)
        speed = _speed(other, [home], snapshot) or 1.0
        work = train_samples(home, demand.dataset) * (demand.epochs or 1.0) / speed
        assert other.prices is not None
        free = snapshot.free_workers(other, demand.gpus)
        return copy.usd + work * other.prices.worker_usd_per_second(
            1024, other.worker_devices(demand.gpus)
        ), copy.seconds + work / free

    sums = {other.name: rough(other) for other in able}
    cheapest = sorted(sums, key=lambda name: (sums[name][0], name))[:MOST_PLACES]
    fastest = sorted(sums, key=lambda name: (sums[name][1], name))[:MOST_PLACES]
    first, then = (fastest, cheapest) if demand.minimise == "time" else (cheapest, fastest)
    return tuple(dict.fromkeys([*first, *then]))


def _copy(home: Region, other: Region, demand: Demand) -> PlannedCopy:
    held = _held(home, demand.dataset)
    size = (_shard_bytes(held) if held is not None else None) or 0
    path = link_table((home, other))[home.name, other.name]
    seconds = pace(path, size).total_seconds + CONVERSATION_ROUND_TRIPS * path.rtt_seconds
    return PlannedCopy(home.name, other.name, size, seconds, size / 1e9 * path.usd_per_gb)


# Shards where they are processed


def _placed(snapshot: Snapshot, demand: Demand, moves: _Moves) -> PlacedShards:
    """Return the snapshot as if the shards had been in their new places from the start."""
    known = {region.name: region for region in snapshot.regions}
    copies = tuple(_copy(known[source], known[to], demand) for source, to in sorted(moves.items()))
    shards, regions = {}, []
    for region in snapshot.regions:
        coming = [known[copy.source] for copy in copies if copy.destination == region.name]
        own = train_samples(region, demand.dataset)
        others = tuple(held for held in region.datasets if held.name != demand.dataset)
        if coming:
            shards[region.name] = tuple(sorted([*(one.name for one in coming), *([region.name] if own else [])]))
            samples = own + sum(train_samples(one, demand.dataset) for one in coming)
            shares = [one for one in (region, *coming) if train_samples(one, demand.dataset)]
            clients = [train_clients(one, demand.dataset) for one in shares]
            there = Dataset(demand.dataset, {"train": Split(samples, clients=None if 0 in clients else sum(clients))})
            capacity = _capacity(region, coming, snapshot)
            regions.append(replace(region, datasets=(*others, there), capacity=capacity))
        elif region.name in moves:
            regions.append(replace(region, datasets=others))
        else:
            regions.append(region)
    return PlacedShards(replace(snapshot, regions=tuple(regions)), copies, shards)


def _capacity(region: Region, coming: Sequence[Region], snapshot: Snapshot) -> Capacity:
    if region.name in snapshot.speeds or speed_by_probe(region, snapshot) is not None:
        return region.capacity
    return replace(region.capacity, samples_per_second=_speed(region, coming, snapshot))


def _speed(region: Region, coming: Sequence[Region], snapshot: Snapshot) -> float | None:
    """Return the samples/s of a worker in the region that a shard moves to.

    An unknown speed is taken from the shard's home region: a guess must not make another region look faster.
    """
    if region.name in snapshot.speeds:
        return snapshot.speeds[region.name]
    stated = region.capacity.samples_per_second
    for home in coming:
        measured = snapshot.speeds.get(home.name) or snapshot.probed.get(home.name)
        at_home = home.capacity.samples_per_second
        if measured is not None:
            return measured * stated / at_home if stated and at_home else min(measured, stated or measured)
        if at_home is not None and stated is None:
            return at_home
    return stated


# Texts for users


def _told(plan: Plan, tried: _Tried, snapshot: Snapshot, demand: Demand) -> Plan:
    """Return the plan with a verdict for each shard, and the best of the alternatives."""
    others = [(key, found) for key, found in tried.items() if key and isinstance(found, Plan)]
    if others:
        key, found = min(others, key=lambda other: _value(other[1], demand))
        where = ", ".join(f"the shard of {source} in {to}" for source, to in key)
        less = Alternative(
            f"{where}: {_took(found)}", f"{_compared(found, plan)}; data move for {WORTH:.0%} less, or more"
        )
        plan = replace(plan, alternatives=(*plan.alternatives, less))
    return replace(plan, residency=_verdicts(plan, snapshot, demand))


def _took(plan: Plan) -> str:
    return f"{plan.estimate.seconds.expected:.0f} s and ${plan.estimate.usd.expected:.4f}"


def _compared(one: Plan, other: Plan) -> str:
    """Return how an alternative compares with the chosen plan, as text."""
    figures = [("usd", "dearer", "cheaper"), ("seconds", "slower", "faster")]
    words = []
    for name, more, less in figures:
        mine, taken = (getattr(plan.estimate, name).expected for plan in (one, other))
        if taken and abs(mine / taken - 1) > 0.0005:
            words.append(f"{abs(mine / taken - 1):.1%} {more if mine > taken else less}")
    return " and ".join(words) or "takes the same"


def _verdicts(plan: Plan, snapshot: Snapshot, demand: Demand) -> dict[str, str]:
    """Return what happens to each shard, by region; of those that are not used, to the first `_MOST_UNUSED`."""
    copies = {copy.source: copy for copy in plan.copies}
    verdicts, unused = {}, {}
    for region in snapshot.regions:
        held = _held(region, demand.dataset)
        if held is None:
            continue
        if _left_out(region.name, demand):
            unused[region.name] = "not used: the job file leaves the region out"
        elif not train_samples(region, demand.dataset):
            unused[region.name] = "not used: it has no training split"
        elif region.name in copies:
            copy = copies[region.name]
            verdicts[region.name] = (
                f"is processed in {copy.destination} (rule: {rule_text(held.residency)}): {copy.bytes:,} bytes are "
                f"copied there first, about {copy.seconds:.1f} s and ${copy.usd:.2g}"
            )
        else:
            verdicts[region.name] = f"stays in {region.name} (rule: {_rule(region, held, snapshot, demand)})"
    told = sorted(unused)[:_MOST_UNUSED]
    verdicts |= {name: unused[name] for name in told}
    if (more := len(unused) - len(told)) > 0:
        verdicts[told[-1]] += f"; {more} more shards are not used"
    return dict(sorted(verdicts.items()))


def _rule(region: Region, held: Dataset, snapshot: Snapshot, demand: Demand) -> str:
    """Return the rule that keeps a shard at home, or why it stays although it might move."""
    told = rule_text(held.residency)
    if held.residency == "region":
        return told
    if demand.residency == "region":
        return f"{told}; of the job: region"
    if _shard_bytes(held) is None:
        return f"{told}; its size is not known"
    if not any(_may_take(region, other, snapshot, demand) for other in snapshot.regions):
        return f"{told}; no other region may and can process it"
    return f"{told}; elsewhere it would not save {WORTH:.0%}"


def _hinted(declined: Declined, snapshot: Snapshot, demand: Demand) -> Declined:
    """Add the hint that a wider residency of the job would help, where the data's owners allow it."""
    if demand.residency != "region" or not (places := _places(snapshot, replace(demand, residency="anywhere"))):
        return declined
    where = "; ".join(f"that of {shard} in {', '.join(regions)}" for shard, regions in places.items())
    hint = f", or set data.residency: anywhere: by their owners' rules shards may be processed elsewhere ({where})"
    return Declined(
        tuple(Reason(r.code, r.text, r.remedy + hint) if r.code == "INADMISSIBLE" else r for r in declined.reasons)
    )
