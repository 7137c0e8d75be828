"""Time, bytes and money of a plan, as ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler._codec import CODEC_BYTES_PER_SECOND, update_bytes
from scheduler._model import Cost, Estimate, Partition, Plan, Range, Region, Snapshot

PRIOR_SAMPLES_PER_SECOND = 1000.0
"""One worker, when nobody has stated or measured anything: a small CNN on one core."""
PRIOR_MODEL_BYTES = 1_000_000
PRIOR_RTT_MS = 150.0
PRIOR_MBPS = 100.0
PRIOR_START_SECONDS = 5.0
"""From the answer to the first step: deploy, fork, load code and data."""
PROTOCOL_OVERHEAD = 1.05
"""Bytes on the line over bytes of the message: framing, TLS, HTTP/2, acknowledgements."""
FIRST_WINDOW_BYTES = 14_600
"""What TCP sends before the first acknowledgement: ten segments (RFC 6928)."""
UNASKED_BYTES = 1 << 20
"""Up to this size an update is sent without an offer before it."""
MERGE_SECONDS = 0.004
"""One step's merge among the workers of a partition, for a small model on one machine."""
CONTROL_BYTES_PER_ROUND = 4_000
"""Of one parameter server to each peer: offers, answers, keep-alives."""

_SPREAD = {"measured": (0.75, 1.4), "stated": (0.5, 2.0), "prior": (0.2, 5.0)}
"""How far time may stray from what is expected, by what the expectation rests on."""


def worker_speed(region: Region, snapshot: Snapshot) -> float:
    """Samples/s of one worker: measured before stated before the prior."""
    return snapshot.speeds.get(region.name) or region.capacity.samples_per_second or PRIOR_SAMPLES_PER_SECOND


def estimate(plan: Plan, snapshot: Snapshot) -> Estimate:
    """Predict a plan.

    A round takes as long as its slowest region: compute, then the exchange over its slowest link (synchronous
    model averaging over a full mesh: every region sends its update to every other one).
    """
    regions = {region.name: region for region in snapshot.regions}
    names = [part.region for part in plan.partitions]
    model_bytes = snapshot.model_bytes or PRIOR_MODEL_BYTES
    first, later = update_bytes(model_bytes, "fp32"), update_bytes(model_bytes, plan.codec)
    basis = _basis(plan, regions, snapshot)
    compute = max(_round_compute_seconds(part) for part in plan.partitions)
    pairs = [(regions[a], b) for a in names for b in names if a != b]
    exchange = exchange_seconds(pairs, model_bytes, plan.codec)
    # The model that all begin with travels once, whole, before the first round.
    contact = max((_first_contact_seconds(source, to) for source, to in pairs), default=0.0)
    contact += exchange_seconds(pairs, model_bytes, "fp32")
    start = snapshot.start_seconds if snapshot.start_seconds is not None else PRIOR_START_SECONDS
    seconds = start + contact + plan.rounds * (compute + exchange)
    per_round = later * PROTOCOL_OVERHEAD + CONTROL_BYTES_PER_ROUND
    link_bytes = {
        f"{a}>{b}": int(plan.rounds * per_round + (first * PROTOCOL_OVERHEAD if a == names[0] else 0))
        for a in names
        for b in names
        if a != b
    }
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


def _basis(plan: Plan, regions: dict[str, Region], snapshot: Snapshot) -> str:
    names = [part.region for part in plan.partitions]
    if all(name in snapshot.speeds for name in names) and snapshot.model_bytes:
        return "measured"
    if all(regions[name].capacity.samples_per_second for name in names):
        return "stated"
    return "prior"


def _round_compute_seconds(part: Partition) -> float:
    merging = MERGE_SECONDS if part.workers > 1 else 0.0
    return part.steps_per_round * (part.batch / part.samples_per_second + merging)


def exchange_seconds(pairs: Sequence[tuple[Region, str]], model_bytes: int, codec: str) -> float:
    """Until every region has every update of a round, coded and decoded; 0 for a single region."""
    if not pairs:
        return 0.0
    coding = model_bytes / CODEC_BYTES_PER_SECOND[codec]
    size = update_bytes(model_bytes, codec)
    return coding + max(_exchange_seconds(source, to, size) for source, to in pairs)


def _exchange_seconds(source: Region, destination: str, update_bytes: int) -> float:
    """One update over one link, until the other side has it; links are taken to be independent.

    The congestion window, which has shrunk since the round before, doubles with each round trip until the update is
    through or the line is full; the last flight needs one way only. A large update is offered first and sent when the
    answer is there.
    """
    rtt, rate = _link(source, destination)
    line_bytes = update_bytes * PROTOCOL_OVERHEAD
    flights = max(1.0, math.log2(1 + min(line_bytes, rate * rtt) / FIRST_WINDOW_BYTES))
    offer = 1.0 if update_bytes > UNASKED_BYTES else 0.0
    return rtt * (offer + flights - 0.5) + line_bytes / rate


def _first_contact_seconds(source: Region, destination: str) -> float:
    """TCP and TLS with certificates of both sides, before the first update."""
    return 3 * _link(source, destination)[0]


def _link(source: Region, destination: str) -> tuple[float, float]:
    """Round trip in seconds and rate in bytes/s."""
    link = next((known for known in source.links if known.destination == destination), None)
    rtt_ms, mbps = (link.rtt_ms, link.mbps) if link else (PRIOR_RTT_MS, PRIOR_MBPS)
    return rtt_ms / 1e3, mbps * 1e6 / 8


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
