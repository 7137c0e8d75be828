"""The links of a job, each from what both of its ends say."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core._state import JobState, Partition, Report

__all__ = ["WanLink", "wan_links"]


@dataclass(frozen=True)
class WanLink:
    """One directed pair of regions: how updates go from one to the other."""

    source: str
    destination: str
    state: str
    """"idle": nothing has been sent; "up"; "down": the last try failed; "relayed": others pass the updates on, from the
    start or by now; "unknown": the source's agent is not heard; "closed": the job has ended."""
    rtt_ms: float
    """0: not measured."""
    goodput_mbps: float
    """Payload rate of the last update; 0: not measured."""
    streams: int
    """That carried the last update; 0: it went through the exchange port."""
    codec: str
    """Of the source's last update."""
    interval: int
    """Steps of the source's open round."""
    sent_bytes: int
    """As the source counts."""
    received_bytes: int
    """As the destination counts."""
    staleness: float
    """Of the source's updates when they were merged, mean, in rounds of the destination."""
    refused: int
    """Updates of the source that did not pass the destination's guard."""


def wan_links(state: JobState) -> tuple[WanLink, ...]:
    """All that updates go over, or are merged from, in the order of the regions' names."""
    pairs = [(a, b) for a in state.partitions for b in state.partitions if a.region != b.region]
    links = [_link(state, source, destination) for source, destination in pairs]
    return tuple(link for link in links if link is not None)


def _link(state: JobState, source: Partition, destination: Partition) -> WanLink | None:
    from_, to = source.region, destination.region
    sender, receiver = source.report or Report(0, ""), destination.report or Report(0, "")
    direct = to in sender.link_rtt_ms or to in sender.links_down or to in sender.sent_bytes
    if not direct and from_ not in receiver.staleness and from_ not in receiver.refused:
        return None
    sent = sender.sent_bytes.get(to, 0)
    return WanLink(
        source=from_,
        destination=to,
        state=_state(state, source, to) if (direct and _in_use(state, from_, to)) or state.terminal else "relayed",
        rtt_ms=sender.link_rtt_ms.get(to, 0.0),
        goodput_mbps=sender.link_mbps.get(to, 0.0),
        streams=sender.link_streams.get(to, 0),
        codec=sender.codec,
        interval=sender.interval,
        sent_bytes=sent,
        received_bytes=receiver.received_bytes.get(from_, 0),
        staleness=receiver.staleness.get(from_, 0.0),
        refused=receiver.refused.get(from_, 0),
    )


def _in_use(state: JobState, source: str, to: str) -> bool:
    """Unless updates take other ways than at first."""
    pair = (min(source, to), max(source, to))
    return not state.routes or pair in state.neighbours or pair in state.former


def _state(state: JobState, source: Partition, to: str) -> str:
    report = source.report
    if state.terminal:
        return "closed"
    if source.link != "live":
        return "unknown"
    if report is None or to in report.links_down:
        return "down" if report else "idle"
    return "up" if report.sent_bytes.get(to) or report.link_rtt_ms.get(to) else "idle"
