"""Time, bytes and money of a plan, as ranges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

import numpy as np

from scheduler._cost_model import (
    Assignments,
    Exchanges,
    JobConstants,
    JobTimeline,
    course,
    standing_seconds,
    step_seconds,
)
from scheduler._link import (
    BACKGROUND_END_BYTES_PER_SECOND,
    HANDLED_BYTES_PER_SECOND,
    ROUND_END_BYTES_PER_SECOND,
    LinkTable,
    update_bytes,
)
from scheduler._model import (
    Cost,
    Phase,
    Plan,
    PlanEstimate,
    PlannedCopy,
    PlannedPartition,
    Prices,
    Range,
    Region,
    Snapshot,
    StartBilled,
)
from scheduler._overheads import Overheads, overheads
from scheduler.topology import Links, Topology, evaluate_over, links_among, links_of
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
_SIZES_KNOWN = (0.9, 1.15)
"""Range of the actual bytes, as factors of the expected ones, where the sizes of what is sent are known."""
_SIZES_FILTERED = (0.5, 2.0)
"""The same where a filter decides what is sent, and an earlier run has told what it let pass. That depends on the
gradients, and in the background on the order in which updates arrive: of the same job it was 42 to 77 MB."""
_SIZES_UNFILTERED = (0.01, 2.3)
"""The same where no run has told it: nearly nothing to every coordinate, which is sent with its number. A choice."""
_COPY_OVERHEAD = 1.001
"""Bytes that a shard's copy is counted with over its own: frames, offers, and the list of its files."""
BETWEEN_REGIONS = "between regions"
"""Name of the phase in which workers stand still for exchanges."""
SLICE_ENDS = "ends of invocations"
"""Name of the phase of the ends of time slices."""
MOST_ON_BILL = 50
"""Destinations whose egress has an item each on a bill."""
_SPREAD = {
    "measured": (0.75, 1.4),
    "profiled": (0.5, 2.0),
    "other batch": (0.5, 2.0),
    "stated": (0.5, 2.0),
    "probed": (0.5, 2.5),
    "likened": (0.4, 3.0),
    "prior": (0.2, 5.0),
}
"""Range of the actual time, as factors of the expected one, by the basis of the expectation, the most reliable first. A
worker in a probe runs alone: next to all others it is rather slower."""


class _LinkBytes(Mapping[str, int]):
    """Bytes by link, as "source>destination": of the updates of all rounds, and of copies.

    The model that all begin with is made, or fetched, by each region. The texts are made when they are read: a plan of
    a thousand regions has a million of them.
    """

    def __init__(self, sent: Mapping[str, Mapping[str, int]], rounds: int, copied: Mapping[str, int]) -> None:
        """``sent``: bytes of a round by source and destination. ``copied``: those of copies by link."""
        self._sent, self._rounds, self._copied = sent, rounds, copied

    @cached_property
    def _by_link(self) -> dict[str, int]:
        found = dict[str, int]()
        for source, own in self._sent.items():
            begin = source + ">"
            found.update(zip([begin + to for to in own], [self._rounds * sent for sent in own.values()], strict=True))
        for link, sent in self._copied.items():
            found[link] = found.get(link, 0) + sent
        return found

    def __getitem__(self, link: str) -> int:
        return self._by_link[link]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_link)

    def __len__(self) -> int:
        return len(self._by_link)

    def items(self) -> ItemsView[str, int]:
        """Return links with their bytes, without looking up each."""
        return self._by_link.items()

    def __deepcopy__(self, memo: object) -> Mapping[str, int]:
        # Nothing changes it: what is made of a plan's fields may hold the same one.
        return self


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
    own = region.capacity.samples_per_second
    for other, probed in sorted(snapshot.probed.items()):
        prober = snapshot.by_name.get(other)
        there = prober.capacity.samples_per_second if prober is not None else None
        if own and there:
            return probed * own / there
        if not own:
            return probed
    return None


def contact_seconds(topology: Topology) -> float:
    """Return the seconds until all regions have contact; 0 without links."""
    return 3 * topology.longest_rtt_seconds


def estimate(
    plan: Plan, snapshot: Snapshot, links: Links | None = None, topology: Topology | None = None
) -> PlanEstimate:
    """Predict a plan by the cost model (`course`), with bounds by what its figures rest on.

    ``links``: those of the snapshot between the plan's regions, if they are known. ``topology``: the plan's over them,
    for updates of about the plan's size, if it is known.

    Shards that are processed elsewhere are transferred first, each over a link of its own, while nothing is computed.
    """
    regions = snapshot.by_name
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    basis = basis_of([regions[part.region] for part in plan.partitions], snapshot)
    size = update_bytes(model_bytes, plan.codec, plan.rounds, plan.sent_share)
    if topology is None or topology.update_bytes != size:
        topology = topology_of(plan, links or links_of([regions[part.region] for part in plan.partitions]), size)
    late = [not part.shards for part in plan.partitions]
    constants = constants_of(plan.partitions, late, plan.copies, plan.slice_seconds, snapshot)
    figures = [[figures_of([part], regions[part.region], snapshot)[0] for part in plan.partitions]]
    took = course(
        Assignments.of(np.array(figures)),
        constants,
        np.array([[float(plan.rounds)]]),
        np.array([[[float(part.steps_per_round) for part in plan.partitions]]]),
        _exchanges(plan, topology, model_bytes, stands_beyond(snapshot, model_bytes, background=plan.background)),
    )
    sent_bytes = float(plan.rounds * sum(sum(own.values()) for own in topology.sent.values()))
    items = tuple(
        cost
        for place, part in enumerate(plan.partitions)
        for cost in _bill(place, plan, regions[part.region], constants, took, topology.sent.get(part.region, {}))
    )
    low, high = spread_of(basis)
    size_low, size_high = _sizes(plan, snapshot)
    copied, paid = _copies(plan.copies, regions)
    # A region whose first model differs from the first region's, as with another version of torch, is sent that one.
    doubtful = float(max(0, len(plan.partitions) - 1) * update_bytes(model_bytes, "fp32"))
    copied_bytes = float(sum(copied.values()))
    usd, copied_usd = sum(cost.usd for cost in items), sum(cost.usd for cost in paid)
    seconds = float(took.seconds[0, 0, 0])
    return PlanEstimate(
        seconds=Range(seconds * low, seconds, seconds * high),
        wan_bytes=_with(sent_bytes, size_low, size_high, copied_bytes, doubtful),
        usd=_with(usd, min(low, size_low), high, copied_usd),
        items=(*items, *paid),
        link_bytes=_LinkBytes(topology.sent, plan.rounds, copied),
        basis=basis,
        model_bytes=model_bytes,
        model_basis="prior" if not snapshot.model_bytes else "counted" if snapshot.counted else "measured",
        start_basis="prior" if snapshot.start_seconds is None else "probed" if snapshot.start_probed else "measured",
        phases=_phases(plan, constants, took),
    )


def _sizes(plan: Plan, snapshot: Snapshot) -> tuple[float, float]:
    """Return the range of the bytes that are sent, as factors of the expected ones."""
    if not snapshot.model_bytes:
        return UNKNOWN_SIZE
    if not plan.wan_settings.get("significance"):
        return _SIZES_KNOWN
    return _SIZES_FILTERED if snapshot.sent_share else _SIZES_UNFILTERED


def stands_beyond(snapshot: Snapshot, model_bytes: int, *, background: bool) -> float:
    """Return the seconds of a round for which workers stand still beyond what the cost model has, as a run has told.

    Without one, in the background: for as long as models of that size take; where regions wait for each other: as in
    the background, if a run has told that, so that what is not known does not seem cheaper than what is.
    """
    told = snapshot.background_end_seconds
    if not background:
        return snapshot.round_end_seconds if snapshot.round_end_seconds is not None else told or 0.0
    return model_bytes / BACKGROUND_END_BYTES_PER_SECOND if told is None else told


def stood_still_seconds(plan: Plan, table: LinkTable, model_bytes: int) -> float:
    """Return the seconds of a round for which, by the cost model, the slowest region's workers stand still.

    Args:
        table: the links between all regions of the plan, as they were.

    Raises ValueError where two neighbours have no direct path.
    """
    links = links_among(sorted(part.region for part in plan.partitions), table)
    topology = topology_of(plan, links, update_bytes(model_bytes, plan.codec, plan.rounds, plan.sent_share))
    each = np.array([round_compute_seconds(part) for part in plan.partitions])
    return float(standing_seconds(each, _exchanges(plan, topology, model_bytes, 0.0))[0])


def _exchanges(plan: Plan, topology: Topology, model_bytes: int, beyond: float) -> Exchanges:
    seconds = exchange_seconds(topology, model_bytes, plan.codec)
    if not plan.background:
        seconds += round_end_seconds(plan.partitions, model_bytes)
    return Exchanges.one(
        seconds,
        background=plan.background,
        apart=seconds_apart(topology, model_bytes, plan.codec, plan.wan_settings),
        contact=contact_seconds(topology),
        links=topology.seconds if topology.links else 0.0,
        beyond=beyond,
    )


def figures_of(parts: Sequence[PlannedPartition], region: Region, snapshot: Snapshot) -> list[tuple[float, ...]]:
    """Return what the cost model must know about partitions of one region, as `Assignments.of` takes it."""
    profile, prices, whole = snapshot.profiles.get(region.name), prices_of(region), None
    found: list[tuple[float, ...]] = []
    for part in parts:
        if part.pipeline is not None:
            besides = overheads(part.pipeline, profile)
        else:
            # Of whole models they depend on nothing else of the partition.
            besides = whole = whole or overheads_of_whole_models(region, snapshot)
        found.append(Assignments.figures(part, prices, besides))
    return found


def overheads_of_whole_models(region: Region, snapshot: Snapshot) -> Overheads:
    """Return the overheads of partitions of a region whose workers hold the whole model."""
    again_seconds = overheads(None, snapshot.profiles.get(region.name)).again
    return Overheads(round_work=snapshot.round_work_seconds, again=again_seconds)


def constants_of(
    parts: Sequence[PlannedPartition],
    served_late: Sequence[bool],
    copies: Sequence[PlannedCopy],
    slice_seconds: float,
    snapshot: Snapshot,
) -> JobConstants:
    """Return what all plans over the same shards have in common; ``served_late``: of each part, whether it waits for
    shards of other regions."""
    start = snapshot.start_seconds if snapshot.start_seconds is not None else PRIOR_START_SECONDS
    # A probe's start is that of one function, most of which is billed.
    untold = start if snapshot.start_probed and snapshot.start_seconds is not None else 0.0
    billed = [snapshot.started.get(part.region, StartBilled(untold, untold)) for part in parts]
    return JobConstants(
        slice_seconds=slice_seconds,
        start=start,
        copying=max((copy.seconds for copy in copies), default=0.0),
        rest=0.0 if any(part.pipeline is not None for part in parts) else snapshot.rest_seconds,
        first_model_known=snapshot.start_seconds is not None and snapshot.start_of_run,
        served_late=np.array(served_late),
        started=np.array([one.function for one in billed]),
        served=np.array([one.server for one in billed]),
    )


def spread_of(basis: str) -> tuple[float, float]:
    """Return the range of the actual time, as factors of the expected one."""
    return _SPREAD[basis]


def _phases(plan: Plan, constants: JobConstants, took: JobTimeline) -> tuple[Phase, ...]:
    """Return all phases of a job that take time, in their order."""
    steps = plan.rounds * max(part.steps_per_round for part in plan.partitions)
    ends = 0 if plan.background else plan.rounds
    found = (
        Phase("start", 1, constants.start),
        Phase("shards on their way", len(plan.copies), constants.copying),
        Phase("first model", 1, float(took.first_model[0, 0, 0])),
        Phase("memory of the first step and round", 1, float(took.first_step[0, 0, 0])),
        Phase("besides steps", plan.rounds, float(took.round_work[0, 0, 0])),
        Phase("steps", steps, float(took.steps[0, 0, 0])),
        Phase("ends of rounds", ends, float(took.round_ends[0, 0, 0])),
        Phase(BETWEEN_REGIONS, plan.rounds, float(took.between[0, 0, 0])),
        Phase("handing the model in", 1, constants.rest),
        Phase(SLICE_ENDS, int(took.ends.max()), float(took.slice_ends[0, 0, 0])),
        Phase("result", 1, float(took.result[0, 0, 0])),
    )
    return tuple(phase for phase in found if phase.seconds > 0.0)


def basis_of(regions: Iterable[Region], snapshot: Snapshot) -> str:
    """Return the least reliable basis of the regions' speeds."""
    return max({_speed_basis(region, snapshot) for region in regions}, key=list(_SPREAD).index)


def _speed_basis(region: Region, snapshot: Snapshot) -> str:
    # An earlier run of the task also tells the model's size; a speed without a size is another task's.
    if region.name in snapshot.speeds and snapshot.model_bytes:
        if region.name in snapshot.other_batch:
            return "other batch"
        return "profiled" if region.name in snapshot.profiled else "measured"
    if region.name in snapshot.probed:
        return "probed"
    if speed_by_probe(region, snapshot) is not None:
        return "likened"
    return "stated" if region.capacity.samples_per_second else "prior"


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


def seconds_apart(topology: Topology, model_bytes: int, codec: str, settings: Mapping[str, float]) -> float:
    """Return the seconds between two exchanges in the background at least.

    With a quorum, workers wait for updates of ``lead`` rounds ago (stale synchronous parallel, Ho et al. 2013), or for
    none: then that many exchanges are under way at once, and only what carries them all bounds how often one begins.
    """
    whole = exchange_seconds(topology, model_bytes, codec)
    if "lead" not in settings or not topology.links:
        return whole
    busy = max(coding_seconds(model_bytes, codec) + _handling_seconds(topology), topology.busy_seconds)
    return max(busy, whole / (settings["lead"] + 1)) if settings["lead"] else busy


def _handling_seconds(topology: Topology) -> float:
    """Return the seconds per round of the parameter server that sends and receives most, without the links."""
    return topology.busiest_updates * topology.update_bytes / HANDLED_BYTES_PER_SECOND


def round_end_seconds(parts: Sequence[PlannedPartition], model_bytes: int) -> float:
    """Return the seconds of a round's end besides the exchange, where workers wait for it.

    0 for stages, whose round ends a profile has measured (`overheads`), and for a single region, whose rounds nothing
    waits for.
    """
    staged = any(part.pipeline is not None for part in parts)
    return 0.0 if staged or len(parts) < 2 else model_bytes / ROUND_END_BYTES_PER_SECOND


def topology_of(plan: Plan, links: Links, update_bytes: int) -> Topology:
    """Return the plan's topology over the links as they are; a plan that names no neighbours has a mesh.

    Raises ValueError where two neighbours have no direct path.
    """
    names = [part.region for part in plan.partitions]
    kind, _, hubs = plan.topology.partition(" via ")
    pairs = plan.neighbours or tuple(combinations(sorted(names), 2))
    planned = Topology(kind, tuple(hubs.split(", ")) if hubs else (), pairs, 0.0, 0.0)
    found = evaluate_over(planned, links, update_bytes)
    if found is None:
        raise ValueError(f"the plan's neighbours have no direct path: {plan.neighbours}")
    return found


def _with(amount: float, low: float, high: float, copied: float, doubtful: float = 0.0) -> Range:
    """Return a sum with bounds; its part ``copied`` is as certain as file sizes, and ``doubtful`` is unexpected but
    possible."""
    sure_low, sure_high = _SIZES_KNOWN
    most = (amount + doubtful) * high + copied * sure_high
    return Range(amount * low + copied * sure_low, amount + copied, most)


def _copies(copies: Sequence[PlannedCopy], regions: Mapping[str, Region]) -> tuple[dict[str, int], list[Cost]]:
    """Bytes by link, and what they cost their sources."""
    sent, paid = dict[str, int](), list[Cost]()
    for copy in copies:
        size = int(copy.bytes * _COPY_OVERHEAD)
        sent[f"{copy.source}>{copy.destination}"] = size
        prices = prices_of(regions[copy.source])
        usd = size / 1e9 * prices.egress(copy.destination)
        paid.append(Cost(copy.source, f"egress to {copy.destination}", size / 1e9, "GB", usd, prices.source))
    return sent, paid


def copied_of(copies: Sequence[PlannedCopy], regions: Mapping[str, Region]) -> tuple[float, float]:
    """Return the USD of copies, and the factor of their upper bound."""
    return sum(cost.usd for cost in _copies(copies, regions)[1]), _SIZES_KNOWN[1]


def prices_of(region: Region) -> Prices:
    """Return a region's prices. Raises ValueError where it has none."""
    if region.prices is None:
        raise ValueError(f"region {region.name} has no prices")
    return region.prices


def _bill(
    place: int, plan: Plan, region: Region, constants: JobConstants, took: JobTimeline, sent_to: Mapping[str, int]
) -> list[Cost]:
    """Return the bill of the plan's partition at a place."""
    part, prices, busy = plan.partitions[place], prices_of(region), float(took.busy[0, 0, 0])
    calls = part.workers * (1 + float(took.ends[0, 0, 0, min(place, took.ends.shape[-1] - 1)]))
    busy = max(0.0, busy + float(constants.started[place]))
    served = float(took.seconds[0, 0, 0]) - constants.start - (0.0 if part.shards else constants.copying)
    served = max(0.0, served + float(constants.served[place]))
    costs = [
        ("function-seconds", part.workers * part.memory_mb / 1024 * busy, "GB-s", prices.function_usd_per_gb_second),
        ("function-calls", calls, "1", prices.function_usd_per_request),
        ("parameter-server", served / 3600, "h", prices.server_usd_per_hour),
    ]
    if part.devices:
        costs.insert(1, ("device-seconds", part.workers * part.devices * busy, "s", prices.device_usd_per_second))
    if part.merge_usd > 0.0:
        costs.append(("channel-requests", float(plan.rounds * part.steps_per_round), "merges", part.merge_usd))
    bill = [
        Cost(region.name, item, quantity, unit, quantity * price, prices.source)
        for item, quantity, unit, price in costs
    ]
    return bill + _egress(region, plan.rounds, sent_to)


def _egress(region: Region, rounds: int, sent_to: Mapping[str, int]) -> list[Cost]:
    """Return a region's egress, by destination; if these are many, by price."""
    prices = prices_of(region)
    if len(sent_to) <= MOST_ON_BILL:
        named = [(to, sent, prices.egress(to)) for to, sent in sent_to.items()]
    else:
        at_price: dict[float, list[int]] = defaultdict(list)
        for to in prices.egress_to.keys() & sent_to.keys():
            at_price[prices.egress(to)].append(sent_to[to])
        usual, others = sum(sent_to.values()), len(sent_to)
        named = [(f"{len(sent)} regions", sum(sent), usd) for usd, sent in sorted(at_price.items())]
        usual, others = usual - sum(sent for _, sent, _ in named), others - sum(map(len, at_price.values()))
        named += [(f"{others} regions", usual, prices.egress_usd_per_gb)] if others else []
    return [
        Cost(region.name, f"egress to {to}", rounds * sent / 1e9, "GB", rounds * sent / 1e9 * usd, prices.source)
        for to, sent, usd in named
    ]
