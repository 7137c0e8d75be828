"""WAN links of a job, each combined from the reports of both ends."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core._state import JobState, LinkReport, Partition, Report

__all__ = ["WanLink", "wan_links"]


@dataclass(frozen=True)
class WanLink:
    """A directed pair of regions, and how updates are sent from one to the other."""

    source: str
    destination: str
    state: str
    """"idle": nothing has been sent; "up"; "down": the last attempt failed; "relayed": other regions pass the updates
    on; "unknown": the source is not reachable; "closed": the job has ended."""
    rtt_ms: float
    """Round-trip time; 0: not measured."""
    goodput_mbps: float
    """Payload rate of the last update, in Mbit/s; 0: not measured."""
    streams: int
    """Number of parallel streams of the last update; 0: it was sent through the exchange port."""
    codec: str
    """Codec of the source's last update."""
    interval: int
    """Number of steps of the source's current round."""
    sent_bytes: int
    """Counted by the source."""
    received_bytes: int
    """Counted by the destination."""
    staleness: float
    """Mean age of the source's updates when they were merged, in rounds of the destination."""
    refused: int
    """Number of the source's updates that the destination's guard refused."""


def wan_links(state: JobState) -> tuple[WanLink, ...]:
    """Return the links that carry updates, directly or relayed, sorted by the regions' names."""
    pairs = [(a, b) for a in state.partitions for b in state.partitions if a.region != b.region]
    links = [_link(state, source, destination) for source, destination in pairs]
    return tuple(link for link in links if link is not None)


def _link(state: JobState, source: Partition, destination: Partition) -> WanLink | None:
    from_, to = source.region, destination.region
    sender, receiver = source.report or Report(0, ""), destination.report or Report(0, "")
    link, direct = sender.links.get(to, LinkReport()), to in sender.links or to in sender.totals.sent_bytes
    if not direct and from_ not in receiver.exchange.staleness and from_ not in receiver.exchange.refused:
        return None
    sent = sender.totals.sent_bytes.get(to, 0)
    return WanLink(
        source=from_,
        destination=to,
        state=_state(state, source, to) if (direct and _in_use(state, from_, to)) or state.terminal else "relayed",
        rtt_ms=link.rtt_ms,
        goodput_mbps=link.mbps,
        streams=link.streams,
        codec=sender.exchange.codec,
        interval=sender.exchange.interval,
        sent_bytes=sent,
        received_bytes=receiver.totals.received_bytes.get(from_, 0),
        staleness=receiver.exchange.staleness.get(from_, 0.0),
        refused=receiver.exchange.refused.get(from_, 0),
    )


def _in_use(state: JobState, source: str, to: str) -> bool:
    """Whether the present or the former routes use the link directly; always true before a first rerouting."""
    pair = (min(source, to), max(source, to))
    return not state.routes or pair in state.neighbours or pair in state.former


def _state(state: JobState, source: Partition, to: str) -> str:
    report = source.report
    if state.terminal:
        return "closed"
    if source.link != "live":
        return "unknown"
    if report is None:
        return "idle"
    link = report.links.get(to, LinkReport())
    if link.down:
        return "down"
    return "up" if report.totals.sent_bytes.get(to) or link.rtt_ms else "idle"
