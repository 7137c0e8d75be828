"""How many streams a link is given: doubled as long as that brings more, then left alone.

One TCP stream is held back by its window and by each loss; several fill a long fat link (WANify, arXiv 2508.12961;
Skyplane, NSDI 2023, uses up to 64 over virtual machines).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MIN_MBPS", "StreamState", "first_streams", "next_streams"]

FIRST_STREAMS, MOST_STREAMS = 2, 16
WORTH_DOUBLING = 1.1
RTT_SHIFT = 1.5
"""A round trip this many times longer or shorter is of another path."""
SHIFT_ROUNDS, REPROBE_ROUNDS = 3, 50
"""Rounds for which it must be so, and rounds between two trials."""
MIN_MBPS = 1e-3
"""Stands for a link that carries nothing."""
UNKNOWN_MBPS = 100.0
"""Until the first measurement."""


@dataclass(frozen=True)
class StreamState:
    """One link's streams."""

    streams: int
    goodput_mbps: float
    """The last that was measured."""
    rtt_ms: float
    """When the trial began."""
    settled: bool
    """No trial is running."""
    before_mbps: float | None = None
    """Goodput with half the streams; None: not known yet."""
    shifted_rounds: int = 0
    """Rounds in a row with quite another round trip."""
    settled_rounds: int = 0


def first_streams(goodput_mbps: float | None, rtt_ms: float, fixed: int | None) -> StreamState:
    """A link that is new; its first measurement begins the trial in the next round."""
    known = UNKNOWN_MBPS if goodput_mbps is None else max(goodput_mbps, MIN_MBPS)
    return StreamState(fixed or FIRST_STREAMS, known, rtt_ms, settled=fixed is not None)


def next_streams(
    link: StreamState, goodput_mbps: float | None, rtt_ms: float, fixed: int | None
) -> tuple[StreamState, str]:
    """The link after a round, and why its number of streams changes; empty where it does not."""
    if goodput_mbps is not None:
        link = replace(link, goodput_mbps=max(goodput_mbps, MIN_MBPS))
    if fixed is not None:
        return link, ""
    if link.settled:
        return _watched(link, rtt_ms)
    if goodput_mbps is None:
        return link, ""
    before, now = link.before_mbps, link.goodput_mbps
    if before is not None and now <= WORTH_DOUBLING * before:
        back = replace(link, streams=link.streams // 2, settled=True, before_mbps=None)
        return back, f"{link.streams} brought {now:.3g} Mbit/s instead of {before:.3g}"
    if link.streams >= MOST_STREAMS:
        return replace(link, settled=True, before_mbps=None), ""
    why = f"to see whether they bring more than {now:.3g} Mbit/s"
    return replace(link, streams=link.streams * 2, before_mbps=now), why


def _watched(link: StreamState, rtt_ms: float) -> tuple[StreamState, str]:
    apart = not link.rtt_ms / RTT_SHIFT <= rtt_ms <= link.rtt_ms * RTT_SHIFT
    shifted, rounds = link.shifted_rounds + 1 if apart else 0, link.settled_rounds + 1
    if shifted < SHIFT_ROUNDS or rounds < REPROBE_ROUNDS:
        return replace(link, shifted_rounds=shifted, settled_rounds=rounds), ""
    why = f"the round trip went from {link.rtt_ms:.0f} to {rtt_ms:.0f} ms, so the number is tried out anew"
    return StreamState(FIRST_STREAMS, link.goodput_mbps, rtt_ms, settled=False), why
