"""Number of streams of a link: doubled for as long as that raises the goodput, then kept.

One TCP stream is limited by its window, and slowed down by each loss; several fill a link with a large bandwidth-delay
product (WANify, arXiv 2508.12961; Skyplane, NSDI 2023, uses up to 64 over virtual machines).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MIN_MBPS", "StreamState", "first_streams", "next_streams"]

FIRST_STREAMS = 2
"""Streams of a new link, and of one whose path has changed."""
MAX_STREAMS = 16
"""Streams of a link at most: each takes memory and a thread's time on both sides, and the goodput of a link rarely
rises with more. A choice, the same as in `sync.transport`."""
MIN_GAIN = 1.1
"""Factor by which twice the streams must raise the goodput to be kept."""
RTT_FACTOR = 1.5
"""A round-trip time longer or shorter by this factor means that the path has changed ..."""
SHIFT_ROUNDS = 3
"""... if it lasts for so many rounds."""
REPROBE_ROUNDS = 50
"""Fewest rounds between two trials."""
MIN_MBPS = 1e-3
"""Goodput that is assumed of a link that carries nothing."""
UNKNOWN_MBPS = 100.0
"""Goodput that is assumed before the first measurement."""


@dataclass(frozen=True)
class StreamState:
    """The streams of one link."""

    streams: int
    goodput_mbps: float
    """The last measured goodput."""
    rtt_ms: float
    """Round-trip time when the trial began."""
    settled: bool
    """Whether no trial is running."""
    before_mbps: float | None = None
    """Goodput with half the streams; None: not known yet."""
    shifted_rounds: int = 0
    """Rounds in a row with a round-trip time that indicates another path."""
    settled_rounds: int = 0


def first_streams(goodput_mbps: float | None, rtt_ms: float, fixed: int | None) -> StreamState:
    """Return the state of a new link; its first measurement begins the trial in the next round."""
    known = UNKNOWN_MBPS if goodput_mbps is None else max(goodput_mbps, MIN_MBPS)
    return StreamState(fixed or FIRST_STREAMS, known, rtt_ms, settled=fixed is not None)


def next_streams(
    link: StreamState, goodput_mbps: float | None, rtt_ms: float, fixed: int | None
) -> tuple[StreamState, str]:
    """Return the link's state after a round, and why its number of streams changes ("": it does not)."""
    if goodput_mbps is not None:
        link = replace(link, goodput_mbps=max(goodput_mbps, MIN_MBPS))
    if fixed is not None:
        return link, ""
    if link.settled:
        return _watched(link, rtt_ms)
    if goodput_mbps is None:
        return link, ""
    before, now = link.before_mbps, link.goodput_mbps
    if before is not None and now <= MIN_GAIN * before:
        back = replace(link, streams=link.streams // 2, settled=True, before_mbps=None)
        return back, f"{link.streams} brought {now:.3g} Mbit/s instead of {before:.3g}"
    if link.streams >= MAX_STREAMS:
        return replace(link, settled=True, before_mbps=None), ""
    why = f"to see whether they bring more than {now:.3g} Mbit/s"
    return replace(link, streams=link.streams * 2, before_mbps=now), why


def _watched(link: StreamState, rtt_ms: float) -> tuple[StreamState, str]:
    apart = not link.rtt_ms / RTT_FACTOR <= rtt_ms <= link.rtt_ms * RTT_FACTOR
    shifted, rounds = link.shifted_rounds + 1 if apart else 0, link.settled_rounds + 1
    if shifted < SHIFT_ROUNDS or rounds < REPROBE_ROUNDS:
        return replace(link, shifted_rounds=shifted, settled_rounds=rounds), ""
    why = f"the round trip went from {link.rtt_ms:.0f} to {rtt_ms:.0f} ms, so the number is probed again"
    return StreamState(FIRST_STREAMS, link.goodput_mbps, rtt_ms, settled=False), why
