"""Time, bytes and money of a plan, as ranges."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from scheduler._codec import CODEC_BYTES_PER_SECOND, update_bytes
from scheduler._link import LinkTable, line_bytes, link_table, pace
from scheduler._model import Cost, Estimate, Partition, Plan, Range, Region, Snapshot
from scheduler._topology import Topology, evaluate_topology

PRIOR_SAMPLES_PER_SECOND = 1000.0
"""One worker, when nobody has stated or measured anything: a small CNN on one core."""
PRIOR_MODEL_BYTES = 1_000_000
PRIOR_START_SECONDS = 5.0
"""From the answer to the first step: deploy, fork, load code and data."""
MERGE_SECONDS = 0.004
"""One step's merge among the workers of a partition, for a small model on one machine."""

_SPREAD = {"measured": (0.75, 1.4), "stated": (0.5, 2.0), "prior": (0.2, 5.0)}
"""How far time may stray from what is expected, by what the expectation rests on."""


def worker_speed(region: Region, snapshot: Snapshot) -> float:
    """Samples/s of one worker: measured before stated before the prior."""
    return snapshot.speeds.get(region.name) or region.capacity.samples_per_second or PRIOR_SAMPLES_PER_SECOND


def estimate(plan: Plan, snapshot: Snapshot) -> Estimate:
    """Predict a plan.

    A round takes as long as its slowest region: compute, then the exchange over the plan's neighbours, where every
    region waits for the updates of all others; in the background the longer of both, and one exchange at the end.
    """
    regions = {region.name: region for region in snapshot.regions}
    taking_part = [regions[part.region] for part in plan.partitions]
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    first = update_bytes(model_bytes, "fp32")
    basis = _basis(plan, regions, snapshot)
    compute = max(round_compute_seconds(part) for part in plan.partitions)
    table = link_table(taking_part)
    topology = topology_of(plan, table, update_bytes(model_bytes, plan.codec))
    exchange = exchange_seconds(topology, model_bytes, plan.codec)
    # The model that all begin with travels once, whole, before the first round.
    begun_by = plan.partitions[0].region
    way = _ways_from(begun_by, topology, table, first)
    contact = 3 * max((table[link].rtt_seconds for link in _directed(topology)), default=0.0)
    if len(taking_part) > 1:
        contact += coding_seconds(model_bytes, "fp32") + max(at for at, _ in way.values())
    start = snapshot.start_seconds if snapshot.start_seconds is not None else PRIOR_START_SECONDS
    rounds = plan.rounds * (compute + exchange)
    if plan.background:
        rounds = plan.rounds * max(compute, exchange) + exchange
    seconds = start + contact + rounds
    link_bytes = {link: plan.rounds * sent for link, sent in topology.bytes_per_round_by_link.items()}
    for to, (_, source) in way.items():
        link_bytes[f"{source}>{to}"] += int(line_bytes(first))
    items = tuple(
        cost for part in plan.partitions for cost in _bill(part, plan, regions[part.region], seconds, start, link_bytes)
    )
    usd = sum(cost.usd for cost in items)
    low, high = _SPREAD[basis]
    total_bytes = float(sum(link_bytes.values()))
    size_low, size_high = (0.9, 1.15) if snapshot.model_bytes else (0.01, 100.0)
    return Estimate(
        seconds=Range(seconds * low, seconds, seconds * high),
        wan_bytes=Range(total_bytes * size_low, total_bytes, total_bytes * size_high),
        usd=Range(usd * min(low, size_low), usd, usd * high),
        items=items,
        link_bytes=link_bytes,
        basis=basis,
    )


def waiting_usd_per_second(parts: Sequence[Partition], regions: Mapping[str, Region]) -> float:
    """What the regions of a plan cost while they wait for each other."""
    usd = 0.0
    for part in parts:
        prices = regions[part.region].prices
        if prices is not None:
            usd += part.workers * part.memory_mb / 1024 * prices.function_usd_per_gb_second
            usd += prices.server_usd_per_hour / 3600
    return usd


def speeds_known(names: Iterable[str], snapshot: Snapshot) -> bool:
    """Whether every region's speed was measured or stated."""
    stated = {region.name for region in snapshot.regions if region.capacity.samples_per_second}
    return all(name in snapshot.speeds or name in stated for name in names)


def _basis(plan: Plan, regions: dict[str, Region], snapshot: Snapshot) -> str:
    names = [part.region for part in plan.partitions]
    if all(name in snapshot.speeds for name in names) and snapshot.model_bytes:
        return "measured"
    if all(regions[name].capacity.samples_per_second for name in names):
        return "stated"
    return "prior"


def step_seconds(part: Partition) -> float:
    """Of one local step: compute, and the merge among the partition's workers."""
    if part.pipeline is not None:
        return part.pipeline.step_seconds
    usual = MERGE_SECONDS if part.merge_seconds is None else part.merge_seconds
    return part.batch / part.samples_per_second + (usual if part.workers > 1 else 0.0)


def round_compute_seconds(part: Partition) -> float:
    return part.steps_per_round * step_seconds(part)


def coding_seconds(model_bytes: int, codec: str) -> float:
    """An update coded and decoded."""
    return model_bytes / CODEC_BYTES_PER_SECOND[codec]


def exchange_seconds(topology: Topology, model_bytes: int, codec: str) -> float:
    """Until every region has every update of a round, coded and decoded; 0 for a single region."""
    return coding_seconds(model_bytes, codec) + topology.seconds if topology.links else 0.0


def topology_of(plan: Plan, table: LinkTable, update_bytes: int) -> Topology:
    """The plan's topology over the links as they are; a plan that names no neighbours is of a mesh.

    Raises ValueError where two neighbours have no direct path.
    """
    names = [part.region for part in plan.partitions]
    kind, _, hubs = plan.topology.partition(" via ")
    links = plan.neighbours or tuple(combinations(sorted(names), 2))
    planned = Topology(kind, tuple(hubs.split(", ")) if hubs else (), links, 0.0, 0.0)
    found = evaluate_topology(planned, table, update_bytes)
    if found is None:
        raise ValueError(f"the plan's neighbours have no direct path: {plan.neighbours}")
    return found


def _directed(topology: Topology) -> list[tuple[str, str]]:
    return [way for a, b in topology.links for way in ((a, b), (b, a))]


def _ways_from(source: str, topology: Topology, table: LinkTable, update_bytes: int) -> dict[str, tuple[float, str]]:
    """When one message from `source` is at each other region, and from which neighbour it comes (Dijkstra)."""
    took = {link: pace(table[link], update_bytes).total_seconds for link in _directed(topology)}
    queue, reached = [(0.0, source, "")], dict[str, tuple[float, str]]()
    while queue:
        at, region, before = heapq.heappop(queue)
        if region in reached:
            continue
        reached[region] = at, before
        for (a, b), seconds in took.items():
            if a == region and b not in reached:
                heapq.heappush(queue, (at + seconds, b, a))
    del reached[source]
    return reached


def _bill(
    part: Partition, plan: Plan, region: Region, seconds: float, start: float, link_bytes: dict[str, int]
) -> list[Cost]:
    prices = region.prices
    if prices is None:
        raise ValueError(f"region {region.name} has no prices")
    busy = max(0.0, seconds - start)
    gb_seconds = part.workers * part.memory_mb / 1024 * busy
    calls = part.workers * max(1, -int(-busy // plan.slice_seconds))
    costs = [
        ("function-seconds", gb_seconds, "GB-s", prices.function_usd_per_gb_second),
        ("function-calls", float(calls), "1", prices.function_usd_per_request),
        ("parameter-server", seconds / 3600, "h", prices.server_usd_per_hour),
    ]
    bill = [
        Cost(region.name, item, quantity, unit, quantity * price, prices.source)
        for item, quantity, unit, price in costs
    ]
    for link, sent in link_bytes.items():
        source, _, to = link.partition(">")
        if source == region.name:
            gb = sent / 1e9
            bill.append(Cost(region.name, f"egress to {to}", gb, "GB", gb * prices.egress(to), prices.source))
    return bill
