"""How many parallel streams a link deserves, and how large a chunk."""

from __future__ import annotations

from dataclasses import dataclass

from sync.transport.sockets import KernelView

__all__ = ["Look", "StreamCount", "chunk_bytes", "largest_chunk_bytes"]

_MOST, _LOSSY = 16, 8
_LONG_RTT_SECONDS = 0.08
_GAIN = 1.1
_SAMPLES = 2
"""A stream finds its speed in its first updates only."""
_HELD_SHARE = 0.5
_RTT_CHANGE, _RTT_FLOOR_SECONDS = 0.25, 0.005
_QUEUE_RTT, _QUEUE_SECONDS = 1.25, 0.005
_LOSSY_LOOKS, _LEAST_LOSS, _MOST_LOSS = 4, 2e-4, 0.02
_LEAST_ROUND_TRIPS = 4
_LEAST_CHUNK_BYTES, _MOST_CHUNK_BYTES, _LAST_CHUNK_BYTES = 1 << 20, 4 << 20, 256 << 10


@dataclass
class Look:
    """What the kernel has seen on all streams for a while."""

    segments: int = 0
    resent: int = 0
    queued: bool = False
    """Packets have waited in front of the link: what is lost then is lost to the streams' own haste."""
    busy_seconds: float = 0.0
    held_seconds: float = 0.0
    """Of these, for want of a larger window or buffer."""

    def add(self, before: KernelView, after: KernelView, buffer_bytes: int) -> None:
        """One stream's part; so large a send buffer was asked for."""
        self.segments += after.segments - before.segments
        self.resent += after.resent - before.resent
        self.queued |= after.rtt_seconds > after.least_rtt_seconds * _QUEUE_RTT + _QUEUE_SECONDS
        self.busy_seconds += after.busy_seconds - before.busy_seconds
        self.held_seconds += after.window_seconds - before.window_seconds
        if after.buffer_bytes < buffer_bytes:
            # A buffer that is large enough is empty at times as well, whenever the sending thread is late.
            self.held_seconds += after.buffer_seconds - before.buffer_seconds


class StreamCount:
    """Two streams, four on a long path; more where the kernel tells why they pay, and never to see whether they might.

    On a path that loses packets though none wait in front of it each loss slows one stream only: there are eight.
    Where windows or buffers hold streams back their number is doubled while that raises the goodput by more than a
    tenth. What was found stays until the path changes.
    """

    def __init__(self) -> None:
        self._fixed: int | None = None
        self._rtt_seconds: float | None = None
        self._begin(2)

    def _begin(self, count: int) -> None:
        self._count = self._before = count
        self._best_mbps, self._growing = 0.0, True
        self._samples: list[float] = []
        self._busy_seconds = self._held_seconds = 0.0
        self._lossy_looks, self._segments, self._resent = 0, 0, 0

    @property
    def count(self) -> int:
        """Streams for the next update."""
        return self._fixed or self._count

    def fix(self, count: int | None) -> None:
        """Use so many from now on; None leaves it to what is measured."""
        self._fixed = None if count is None else min(max(count, 1), _MOST)

    def path(self, rtt_seconds: float) -> None:
        """The round trip of the path, whenever it is known."""
        known = self._rtt_seconds
        if known is not None and abs(rtt_seconds - known) <= max(_RTT_CHANGE * known, _RTT_FLOOR_SECONDS):
            return
        self._rtt_seconds = rtt_seconds
        self._begin(4 if rtt_seconds >= _LONG_RTT_SECONDS else 2)

    def saw(self, look: Look) -> None:
        """What the kernel has seen since the last look."""
        self._busy_seconds += look.busy_seconds
        self._held_seconds += look.held_seconds
        if look.queued or look.resent > _MOST_LOSS * look.segments:
            return
        self._segments += look.segments
        self._resent += look.resent
        self._lossy_looks += look.resent > 0
        if self._lossy_looks >= _LOSSY_LOOKS and self._resent >= _LEAST_LOSS * self._segments:
            self._count = max(self._count, _LOSSY)
            self._growing = False

    def measured(self, mbps: float, seconds: float, streams: int) -> None:
        """Goodput of an update that all its streams were warm for; one that is over too soon says nothing."""
        held = self._held_seconds > _HELD_SHARE * self._busy_seconds
        self._busy_seconds = self._held_seconds = 0.0
        too_soon = seconds < _LEAST_ROUND_TRIPS * (self._rtt_seconds or 0.0)
        if self._fixed or not self._growing or too_soon or streams != self._count:
            return
        self._samples.append(mbps)
        if len(self._samples) < _SAMPLES:
            return
        mbps, self._samples = max(self._samples), []
        if self._best_mbps and mbps <= self._best_mbps * _GAIN:
            self._count, self._growing = self._before, False
            return
        if held and self._count < _MOST:
            self._best_mbps, self._before = mbps, self._count
            self._count = min(self._count * 2, _MOST)


def chunk_bytes(left_bytes: int, streams: int, bandwidth_delay_bytes: float) -> int:
    """Bytes of the next chunk.

    It holds at least what a stream has in flight, so that a cut costs each stream one chunk at most; towards the end
    they become small, so that all streams end together.
    """
    largest = largest_chunk_bytes(streams, bandwidth_delay_bytes)
    return min(left_bytes, largest, max(left_bytes // (2 * streams), _LAST_CHUNK_BYTES))


def largest_chunk_bytes(streams: int, bandwidth_delay_bytes: float) -> int:
    """Bytes of a chunk far from the end of an update."""
    return min(max(int(2 * bandwidth_delay_bytes / streams), _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
