"""The size of an update, the time that a directed link takes to carry it, and the table of all links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler._model import Region
from sync.codec import codec_named

__all__ = [
    "BACKGROUND_END_BYTES_PER_SECOND",
    "HANDLED_BYTES_PER_SECOND",
    "PRIOR_MBPS",
    "PRIOR_RTT_MS",
    "ROUND_END_BYTES_PER_SECOND",
    "LinkPace",
    "LinkTable",
    "Path",
    "line_bytes",
    "link_table",
    "pace",
    "paces",
    "update_bytes",
]

Floats = npt.NDArray[np.float64]
Figure = TypeVar("Figure", float, Floats)

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
"""Bytes that TCP sends before the first acknowledgement: ten segments (RFC 6928)."""
MIN_IDLE_SECONDS = 0.2
"""Minimum retransmission timeout of Linux, in seconds."""
UNASKED_BYTES = 1 << 20
"""Size in bytes up to which an update is sent without an offer before it."""
_MOST_AT_ONCE = 20_000
"""Links whose times are computed at once: 160 kB an array, so that they stay in a processor's cache."""


@dataclass(frozen=True)
class Path:
    """A directed path between two regions that reach each other without a relay."""

    rtt_ms: float
    mbps: float
    """Above 0."""
    usd_per_gb: float
    """Price of egress, which the sending region pays."""

    @property
    def rtt_seconds(self) -> float:
        """Round-trip time."""
        return self.rtt_ms / 1e3

    @property
    def bytes_per_second(self) -> float:
        """Rate."""
        return self.mbps * 1e6 / 8


LinkTable = Mapping[tuple[str, str], Path]
"""Paths by (source, destination); a missing pair has no direct path."""


def link_table(regions: Iterable[Region]) -> dict[tuple[str, str], Path]:
    """Return the links between regions, as stated or measured.

    A link that was neither stated nor measured is assumed to exist, with the prior: regions that join do not know all
    others. A stated rate of 0 means that there is no direct path.
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
    """Return an update's bytes on the line."""
    return update_bytes * PROTOCOL_OVERHEAD


@dataclass(frozen=True)
class LinkPace(Generic[Figure]):
    """The times of a link that carries updates of one size, one after another; or of many links, as arrays."""

    offer_seconds: Figure
    """Seconds before the link can begin with an update; they overlap with the update before."""
    first_seconds: Figure
    """Seconds for which the first update occupies the link; its congestion window has shrunk since the round before."""
    second_seconds: Figure
    """Seconds for which the second update occupies the link: the window may still have to grow."""
    next_seconds: Figure
    """Seconds for which each later update occupies the link."""
    way_seconds: Figure
    """Seconds from the last byte sent to its arrival."""
    idle_seconds: Figure
    """Seconds without traffic after which an update counts as the first one again (RFC 5681, 4.1)."""

    @property
    def total_seconds(self) -> Figure:
        """Seconds from the begin of a first update until the other side has it."""
        return self.offer_seconds + self.first_seconds + self.way_seconds

    @property
    def figures(self) -> tuple[Figure, ...]:
        """All of them in their order."""
        return tuple(getattr(self, field.name) for field in fields(self))


def pace(path: Path, update_bytes: int) -> LinkPace[float]:
    """Return the times of one link (`paces`)."""
    found = paces(np.array(path.rtt_seconds), np.array(path.bytes_per_second), update_bytes)
    return LinkPace(*(float(figure) for figure in found.figures))


def paces(rtt: Floats, rate: Floats, update_bytes: int) -> LinkPace[Floats]:
    """Return the times of TCP with slow start, over links of their own with given round trips, in s, and bytes/s.

    The congestion window w doubles with each of k round trips, until it fills the link (rate x RTT) or the rest of the
    update fits in it. k round trips carry w (2^k - 1) bytes; the rest is sent at the link's rate. A large update is
    offered first, and sent after the answer.
    """
    line, trip, speed = line_bytes(update_bytes), rtt.reshape(-1), rate.reshape(-1)
    busy = np.empty((3, len(trip)))
    for begin in range(0, len(trip), _MOST_AT_ONCE):
        some = slice(begin, begin + _MOST_AT_ONCE)
        busy[:, some] = _busy_seconds(trip[some], speed[some], line)
    first, second, later = busy.reshape(3, *rtt.shape)
    return LinkPace(
        offer_seconds=rtt if update_bytes > UNASKED_BYTES else np.zeros_like(rtt),
        first_seconds=first,
        second_seconds=second,
        next_seconds=later,
        way_seconds=rtt / 2,
        idle_seconds=np.maximum(MIN_IDLE_SECONDS, 2 * rtt),
    )


def _busy_seconds(rtt: Floats, rate: Floats, line: float) -> Floats:
    """Return the seconds for which the first, the second and each later update of ``line`` bytes occupy links; shape
    (3, links)."""
    busy, window, filled = np.empty((3, len(rtt))), np.array([float(FIRST_WINDOW_BYTES)]), rate * rtt
    for turn in range(3):
        full, fits = np.log2(np.maximum(1.0, filled / window)), np.log2(1 + line / window) - 1
        trips = np.maximum(0.0, np.ceil(np.minimum(full, fits)))
        grown = np.exp2(trips)
        busy[turn:] = trips * rtt + np.maximum(0.0, line - window * (grown - 1)) / rate
        if not trips.any():
            # The window stays, so that later updates take as long.
            break
        window = window * grown
    return busy


HANDLED_BYTES_PER_SECOND = 300e6
"""Bytes of updates that a parameter server encrypts and sends, or receives, checks and makes durable, in a second,
where links are as fast as memory. Measured, as the next one, with three regions on two cores: on the low side."""
ROUND_END_BYTES_PER_SECOND = 80e6
"""float32 bytes of a model per second that are collected from the workers, merged, made durable and returned, while the
workers wait."""
BACKGROUND_END_BYTES_PER_SECOND = 800e6
"""float32 bytes of a model per second that workers hand in and correct at the end of a round in the background, where
no run has told it. Measured with 90 MB, three regions and two cores: 0.11 s a round."""
FRAME_BYTES = 200
"""Prefix, table and alignment of an update's frame; 145 to 260 were metered of a small model."""


def update_bytes(model_bytes: int, codec: str, rounds: int = 0, share: float = 1.0) -> int:
    """Return the size of one region's update in bytes.

    ``rounds``: instead, the mean of so many; the first one may be larger. ``share``: the part of it that passes the
    policy's filter.
    """
    found = codec_named(codec)
    larger = found.first_size_factor - found.size_factor if rounds and found.first_size_factor else 0.0
    return int(model_bytes * share * (found.size_factor + larger / max(rounds, 1))) + FRAME_BYTES
