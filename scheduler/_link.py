"""What one directed link takes to carry an update, and the table of the links that there are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler._model import Region

__all__ = [
    "PRIOR_MBPS",
    "PRIOR_RTT_MS",
    "LinkPace",
    "LinkTable",
    "Path",
    "line_bytes",
    "link_table",
    "pace",
]

PRIOR_RTT_MS = 150.0
"""Round-trip time, in ms, of a link that nobody has stated or measured: about that of two continents.

A choice: too long rather than too short, so that no plan relies on a fast link that may not exist.
"""
PRIOR_MBPS = 100.0
"""Rate, in Mbit/s, of a link that nobody has stated or measured.

A choice: what a cheap virtual machine gets over the Internet.
"""
PROTOCOL_OVERHEAD = 1.05
"""Bytes on the line over bytes of the message: framing, TLS, HTTP/2, acknowledgements."""
FIRST_WINDOW_BYTES = 14_600
"""What TCP sends before the first acknowledgement: ten segments (RFC 6928)."""
MIN_IDLE_SECONDS = 0.2
"""Least retransmission timeout of Linux."""
UNASKED_BYTES = 1 << 20
"""Up to this size an update is sent without an offer before it."""


@dataclass(frozen=True)
class Path:
    """One directed way between two regions that reach each other without a relay."""

    rtt_ms: float
    mbps: float
    """Above 0."""
    usd_per_gb: float
    """Egress, which the sending region pays."""

    @property
    def rtt_seconds(self) -> float:
        """Round trip."""
        return self.rtt_ms / 1e3

    @property
    def bytes_per_second(self) -> float:
        """Rate."""
        return self.mbps * 1e6 / 8


LinkTable = Mapping[tuple[str, str], Path]
"""By (source, destination); a pair that is missing has no direct path."""


def link_table(regions: Iterable[Region]) -> dict[tuple[str, str], Path]:
    """The links between some regions, as stated or measured.

    A link that nobody has stated is taken to be there, at the prior: regions that join do not know all others. A
    stated rate of 0 says that there is no direct path.
    """
    held = list(regions)
    table = {}
    for source in held:
        stated = {link.destination: link for link in source.links}
        for other in held:
            if other.name == source.name:
                continue
            link = stated.get(other.name)
            rtt_ms, mbps = (link.rtt_ms, link.mbps) if link else (PRIOR_RTT_MS, PRIOR_MBPS)
            if mbps > 0:
                price = source.prices.egress(other.name) if source.prices else 0.0
                table[source.name, other.name] = Path(rtt_ms, mbps, price)
    return table


def line_bytes(update_bytes: int) -> float:
    """An update's bytes on the line."""
    return update_bytes * PROTOCOL_OVERHEAD


@dataclass(frozen=True)
class LinkPace:
    """How one link carries updates of one size, one after another."""

    offer_seconds: float
    """Before the link can begin with an update; passes while it may still be busy with the one before."""
    first_seconds: float
    """How long the first one keeps the link busy, whose congestion window has shrunk in the round before."""
    second_seconds: float
    """How long one that follows on a first one: the window may have to open a little more."""
    next_seconds: float
    """How long one that follows on those."""
    way_seconds: float
    """From the last byte sent to the last byte there."""
    idle_seconds: float
    """After this long without traffic an update is a first one again (RFC 5681, 4.1)."""

    @property
    def total_seconds(self) -> float:
        """Of a first update, until the other side has it."""
        return self.offer_seconds + self.first_seconds + self.way_seconds


def pace(path: Path, update_bytes: int) -> LinkPace:
    """TCP with slow start, over a link of its own.

    The congestion window w doubles with each of k round trips, until it fills the link (rate x RTT) or what is left of
    the update fits in it. k round trips bring w (2^k - 1) bytes; the rest goes at the link's rate. A large update is
    offered first and sent when the answer is there.
    """
    rtt, rate, line = path.rtt_seconds, path.bytes_per_second, line_bytes(update_bytes)
    busy, window = [], float(FIRST_WINDOW_BYTES)
    for _ in range(3):
        full, fits = math.log2(max(1.0, rate * rtt / window)), math.log2(1 + line / window) - 1
        trips = max(0, math.ceil(min(full, fits)))
        busy.append(trips * rtt + max(0.0, line - window * (2**trips - 1)) / rate)
        window *= 2**trips
    return LinkPace(
        offer_seconds=rtt if update_bytes > UNASKED_BYTES else 0.0,
        first_seconds=busy[0],
        second_seconds=busy[1],
        next_seconds=busy[2],
        way_seconds=rtt / 2,
        idle_seconds=max(MIN_IDLE_SECONDS, 2 * rtt),
    )
