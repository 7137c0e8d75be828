"""Time, bytes and money of a plan, as ranges."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from scheduler._link import (
    HANDLED_BYTES_PER_SECOND,
    ROUND_END_BYTES_PER_SECOND,
    LinkTable,
    link_table,
    pace,
    update_bytes,
)
from scheduler._model import Copy, Cost, Estimate, Phase, Plan, PlannedPartition, Prices, Range, Region, Snapshot
from scheduler._overheads import Overheads, overheads, slice_ends
from scheduler.topology import Topology, evaluate_topology
from sync.codec import codec_named

PRIOR_SAMPLES_PER_SECOND = 1000.0
"""Samples/s of one worker where nothing was stated or measured: a small CNN on one core."""
PRIOR_MODEL_BYTES = 1_000_000
"""Bytes of a flat model that nobody has measured: a small CNN of 250,000 float32 parameters, as of
`PRIOR_SAMPLES_PER_SECOND`."""
UNKNOWN_SIZE = (0.001, 1000.0)
"""Range of an unknown model's size, as factors of the prior: from a thousand bytes to a thousand million."""
PRIOR_START_SECONDS = 5.0
"""Seconds from the admission of a job to its first step, where nothing was measured: deploy, fork, load code and
data."""
MERGE_SECONDS = 0.004
"""Seconds that the workers of a partition take to merge one step, for a small model on one machine."""

_START = "start"
_COPYING = "shards on their way"
_INVOCATION_ENDS = "ends of invocations"
_RESULT = "result"
"""Names of the phases that prices depend on."""
_SIZES_KNOWN = (0.9, 1.15)
"""Range of the actual bytes, as factors of the expected ones, where the sizes of what is sent are known."""
_COPY_OVERHEAD = 1.001
"""Bytes that a shard's copy is counted with over its own: frames, offers, and the list of its files."""
_SPREAD = {
    "measured": (0.75, 1.4),
    "other batch": (0.5, 2.0),
    "stated": (0.5, 2.0),
    "probed": (0.5, 2.5),
    "likened": (0.4, 3.0),
    "prior": (0.2, 5.0),
}
"""Range of the actual time, as factors of the expected one, by the basis of the expectation, the most reliable first. A
worker in a probe runs alone: next to all others it is rather slower."""


def worker_speed(region: Region, snapshot: Snapshot) -> float:
    """Samples/s of one worker: measured before probed before stated before the prior."""
    measured = snapshot.speeds.get(region.name) or speed_by_probe(region, snapshot)
    return measured or region.capacity.samples_per_second or PRIOR_SAMPLES_PER_SECOND


def speed_by_probe(region: Region, snapshot: Snapshot) -> float | None:
    """Return the samples/s of one worker by a probe in the region, or by one in another region.

    A probe elsewhere is scaled by the ratio of the speeds that the two operators state, or taken as it is where this
    region states none. None: there was no probe, or this region states a speed and the probed ones state none.
    """
    if region.name in snapshot.probed:
        return snapshot.probed[region.name]
    stated = {one.name: one.capacity.samples_per_second for one in snapshot.regions}
    own = region.capacity.samples_per_second
    for other, probed in sorted(snapshot.probed.items()):
        there = stated.get(other)
        if own and there:
            return probed * own / there
        if not own:
            return probed
    return None


@dataclass(frozen=True)
class Routes:
    """The routes of exchange of a plan's regions: the same for all plans that differ only in workers and steps."""

    topology: Topology
    way: Mapping[str, tuple[float, str]]
    """Arrival of the initial model at each other region: seconds, and the neighbour that sends it."""
    slowest_rtt: float
    """Seconds."""


def routes(plan: Plan, snapshot: Snapshot) -> Routes:
    """Return the routes of a plan. Raises ValueError where two neighbours have no direct path."""
    regions = {region.name: region for region in snapshot.regions}
    table = link_table([regions[part.region] for part in plan.partitions])
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    topology = topology_of(plan, table, update_bytes(model_bytes, plan.codec))
    way = _ways_from(plan.partitions[0].region, topology, table, update_bytes(model_bytes, "fp32"))
    return Routes(topology, way, max((table[link].rtt_seconds for link in _directed(topology)), default=0.0))


def estimate(plan: Plan, snapshot: Snapshot, over: Routes | None = None) -> Estimate:
    """Predict a plan; ``over``: its routes, where they are known.

    A round takes as long as its slowest region: compute, then the exchange over the plan's neighbours, where every
    region waits for the updates of all others. In the background it is the longer of both, and one exchange at the end.
    Shards that are processed elsewhere are transferred first, each over a link of its own, while nothing is computed.
    Models that run in stages also take time to be distributed and stored (`overheads`).
    """
    regions = {region.name: region for region in snapshot.regions}
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    basis = _basis(plan, regions, snapshot)
    over = over or routes(plan, snapshot)
    phases = _phases(plan, snapshot, over, model_bytes)
    spent = _Spent.of(phases)
    link_bytes = _link_bytes(plan, snapshot, over, model_bytes)
    sent_by = _by_source(link_bytes)
    items = tuple(
        cost
        for part in plan.partitions
        for cost in _bill(part, plan, regions[part.region], spent, sent_by[part.region])
    )
    low, high = _SPREAD[basis]
    size_low, size_high = _SIZES_KNOWN if snapshot.model_bytes else UNKNOWN_SIZE
    copied, paid = _copies(plan.copies, regions)
    # A region whose first model differs from the first region's, as with another version of torch, is sent that one.
    doubtful = float(len(over.way) * update_bytes(model_bytes, "fp32"))
    sent_bytes, copied_bytes = float(sum(link_bytes.values())), float(sum(copied.values()))
    usd, copied_usd = sum(cost.usd for cost in items), sum(cost.usd for cost in paid)
    return Estimate(
        seconds=Range(spent.seconds * low, spent.seconds, spent.seconds * high),
        wan_bytes=_with(sent_bytes, size_low, size_high, copied_bytes, doubtful),
        usd=_with(usd, min(low, size_low), high, copied_usd),
        items=(*items, *paid),
        link_bytes={link: link_bytes.get(link, 0) + copied.get(link, 0) for link in {**link_bytes, **copied}},
        basis=basis,
        model_bytes=model_bytes,
        model_basis="prior" if not snapshot.model_bytes else "counted" if snapshot.counted else "measured",
        start_basis="prior" if snapshot.start_seconds is None else "probed" if snapshot.start_probed else "measured",
        phases=phases,
    )


def _phases(plan: Plan, snapshot: Snapshot, over: Routes, model_bytes: int) -> tuple[Phase, ...]:
    """All phases of a job that take time, in their order."""
    compute = max(round_compute_seconds(part) for part in plan.partitions)
    exchange = exchange_seconds(over.topology, model_bytes, plan.codec)
    if not plan.background:
        exchange += round_end_seconds(plan.partitions, model_bytes)
    contact = 3 * over.slowest_rtt
    start = snapshot.start_seconds if snapshot.start_seconds is not None else PRIOR_START_SECONDS
    copying = max((copy.seconds for copy in plan.copies), default=0.0)
    besides = {part.region: overheads(part, snapshot.profiles.get(part.region)) for part in plan.partitions}
    phases = (
        Phase(_START, 1, start),
        Phase(_COPYING, len(plan.copies), copying),
        *_training(plan, snapshot, besides, compute, exchange, contact),
        Phase(_RESULT, 1, max(one.result for one in besides.values())),
    )
    return tuple(phase for phase in phases if phase.seconds > 0.0)


def _link_bytes(plan: Plan, snapshot: Snapshot, over: Routes, model_bytes: int) -> dict[str, int]:
    """Bytes by link: the updates of all rounds. The model that all begin with is made, or fetched, by each region."""
    return {link: plan.rounds * amount for link, amount in over.topology.bytes_per_round_by_link.items()}


def _training(
    plan: Plan,
    snapshot: Snapshot,
    besides: Mapping[str, Overheads],
    compute: float,
    exchange: float,
    contact: float,
) -> tuple[Phase, ...]:
    """Return the phases from the start of the workers to the end of the last round; regions wait for the slowest
    one."""

    def slowest(name: str) -> float:
        return max(float(getattr(one, name)) for one in besides.values())

    known = snapshot.start_seconds is not None and snapshot.start_of_run
    first_model = contact + (0.0 if known else slowest("first_model"))
    # With background exchange a round's end overlaps with the next one's steps.
    round_ends = 0 if plan.background else plan.rounds
    steps, ends = plan.rounds * compute, round_ends * slowest("round_end")
    exchanges = plan.rounds * exchange
    if plan.background:
        exchanges = plan.rounds * max(0.0, exchange - compute) + exchange
    work = first_model + slowest("first_step") + steps + exchanges + ends
    invocations, slice_end = 0, 0.0
    for part in plan.partitions:
        own = besides[part.region]
        found = slice_ends(work, plan.slice_seconds, step_seconds(part), own) if own.slice_end > 0.0 else 0
        if found * own.slice_end >= slice_end:
            invocations, slice_end = found, found * own.slice_end
    made = plan.rounds * max(part.steps_per_round for part in plan.partitions)
    return (
        Phase("first model", 1, first_model),
        Phase("memory of the first step and round", 1, slowest("first_step")),
        Phase("steps", made, steps),
        Phase("ends of rounds", round_ends, ends),
        Phase("between regions", plan.rounds, exchanges),
        Phase(_INVOCATION_ENDS, invocations, slice_end),
    )


def waiting_usd_per_second(parts: Sequence[PlannedPartition], regions: Mapping[str, Region]) -> float:
    """Return the cost per second of the regions of a plan while they wait for each other."""
    usd = 0.0
    for part in parts:
        prices = regions[part.region].prices
        if prices is not None:
            usd += part.workers * part.memory_mb / 1024 * prices.function_usd_per_gb_second
            usd += prices.server_usd_per_hour / 3600
    return usd


def speeds_known(names: Iterable[str], snapshot: Snapshot) -> bool:
    """Whether every region's speed was measured, probed or stated."""
    regions = {region.name: region for region in snapshot.regions}
    return all(name in snapshot.speeds or _speed_basis(regions[name], snapshot) != "prior" for name in names)


def _basis(plan: Plan, regions: dict[str, Region], snapshot: Snapshot) -> str:
    """Return the least reliable basis of the regions' speeds."""
    found = {_speed_basis(regions[part.region], snapshot) for part in plan.partitions}
    return max(found, key=list(_SPREAD).index)


def _speed_basis(region: Region, snapshot: Snapshot) -> str:
    # An earlier run of the task also tells the model's size; a speed without a size is another task's.
    if region.name in snapshot.speeds and snapshot.model_bytes:
        return "other batch" if region.name in snapshot.other_batch else "measured"
    if region.name in snapshot.probed:
        return "probed"
    if speed_by_probe(region, snapshot) is not None:
        return "likened"
    return "stated" if region.capacity.samples_per_second else "prior"


def step_seconds(part: PlannedPartition) -> float:
    """Return the seconds of one local step: compute, and the merge among the partition's workers."""
    if part.pipeline is not None:
        return part.pipeline.step_seconds
    usual = MERGE_SECONDS if part.merge_seconds is None else part.merge_seconds
    return part.batch / part.samples_per_second + (usual if part.workers > 1 else 0.0)


def round_compute_seconds(part: PlannedPartition) -> float:
    """Seconds that a partition takes for the local steps of one round, merges among its workers included."""
    return part.steps_per_round * step_seconds(part)


def coding_seconds(model_bytes: int, codec: str) -> float:
    """Return the seconds to encode and decode an update."""
    return model_bytes / codec_named(codec).bytes_per_second


def exchange_seconds(topology: Topology, model_bytes: int, codec: str) -> float:
    """Return the seconds until every region has every update of a round, coding included; 0 for a single region."""
    if not topology.links:
        return 0.0
    return coding_seconds(model_bytes, codec) + _handling_seconds(topology) + topology.seconds


def _handling_seconds(topology: Topology) -> float:
    """Return the seconds per round of the parameter server that sends and receives most, without the links."""
    handled: dict[str, float] = {}
    for link, sent in topology.bytes_per_round_by_link.items():
        for region in link.split(">"):
            handled[region] = handled.get(region, 0.0) + sent
    return max(handled.values(), default=0.0) / HANDLED_BYTES_PER_SECOND


def round_end_seconds(parts: Sequence[PlannedPartition], model_bytes: int) -> float:
    """Return the seconds of a round's end besides the exchange, where workers wait for it.

    0 for stages, whose round ends a profile has measured (`overheads`), and for a single region, whose rounds nothing
    waits for.
    """
    staged = any(part.pipeline is not None for part in parts)
    return 0.0 if staged or len(parts) < 2 else model_bytes / ROUND_END_BYTES_PER_SECOND


def topology_of(plan: Plan, table: LinkTable, update_bytes: int) -> Topology:
    """Return the plan's topology over the links as they are; a plan that names no neighbours has a mesh.

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
    """Return by region when a message from `source` arrives, and from which neighbour (Dijkstra)."""
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


def _with(amount: float, low: float, high: float, copied: float, doubtful: float = 0.0) -> Range:
    """Return a sum with bounds; its part ``copied`` is as certain as file sizes, and ``doubtful`` is unexpected but
    possible."""
    sure_low, sure_high = _SIZES_KNOWN
    most = (amount + doubtful) * high + copied * sure_high
    return Range(amount * low + copied * sure_low, amount + copied, most)


def _copies(copies: Sequence[Copy], regions: Mapping[str, Region]) -> tuple[dict[str, int], list[Cost]]:
    """Bytes by link, and what they cost their sources."""
    sent, paid = dict[str, int](), list[Cost]()
    for copy in copies:
        size = int(copy.bytes * _COPY_OVERHEAD)
        sent[f"{copy.source}>{copy.destination}"] = size
        prices = _prices(regions[copy.source])
        usd = size / 1e9 * prices.egress(copy.destination)
        paid.append(Cost(copy.source, f"egress to {copy.destination}", size / 1e9, "GB", usd, prices.source))
    return sent, paid


def _prices(region: Region) -> Prices:
    if region.prices is None:
        raise ValueError(f"region {region.name} has no prices")
    return region.prices


@dataclass(frozen=True)
class _Spent:
    """Seconds that are billed."""

    seconds: float
    """Seconds of the whole job."""
    start: float
    copying: float
    """The part of these seconds until the last shard has arrived."""
    result: float = 0.0
    """The part of these seconds after all functions have ended."""
    ends: int | None = None
    """Number of invocation ends, without each worker's last one; None: it follows from the seconds."""

    @classmethod
    def of(cls, phases: Sequence[Phase]) -> _Spent:
        """What the phases of a job say; one that takes no time is not among them."""
        by_name = {phase.name: phase for phase in phases}
        start, copying, result = (
            by_name[name].seconds if name in by_name else 0.0 for name in (_START, _COPYING, _RESULT)
        )
        ends = by_name[_INVOCATION_ENDS].times if _INVOCATION_ENDS in by_name else None
        return cls(sum(phase.seconds for phase in phases), start, copying, result, ends)

    def server(self, part: PlannedPartition) -> float:
        """Return the seconds of the parameter server; partitions that wait for no shard begin once all have arrived."""
        return self.seconds - (0.0 if part.shards else self.copying)

    @property
    def busy(self) -> float:
        return max(0.0, self.seconds - self.start - self.copying - self.result)


def _bill(part: PlannedPartition, plan: Plan, region: Region, spent: _Spent, sent_to: Mapping[str, int]) -> list[Cost]:
    prices, busy = _prices(region), spent.busy
    gb_seconds = part.workers * part.memory_mb / 1024 * busy
    chain = max(1, -int(-busy // plan.slice_seconds)) if spent.ends is None else 1 + spent.ends
    calls = part.workers * chain
    costs = [
        ("function-seconds", gb_seconds, "GB-s", prices.function_usd_per_gb_second),
        ("function-calls", float(calls), "1", prices.function_usd_per_request),
        ("parameter-server", spent.server(part) / 3600, "h", prices.server_usd_per_hour),
    ]
    bill = [
        Cost(region.name, item, quantity, unit, quantity * price, prices.source)
        for item, quantity, unit, price in costs
    ]
    for to, sent in sent_to.items():
        gb = sent / 1e9
        bill.append(Cost(region.name, f"egress to {to}", gb, "GB", gb * prices.egress(to), prices.source))
    return bill


def _by_source(link_bytes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Bytes by the region that sends them, and by destination."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for link, sent in link_bytes.items():
        source, _, to = link.partition(">")
        found[source][to] = sent
    return found
