"""Number of parallel streams of a link, and size of the chunks that they send."""

from __future__ import annotations

from dataclasses import dataclass

from sync.tcp_streams.sockets import TcpInfo

__all__ = ["KernelStatistics", "StreamCount", "chunk_bytes", "largest_chunk_bytes"]

_MAX_STREAMS = 16
"""Streams of a link at most: each takes memory on both sides, and the goodput of a link rarely rises with more.

A choice, not measured.
"""
_LOSSY_STREAMS = 8
"""Streams on a path that loses packets without a queue."""
_LONG_RTT_SECONDS = 0.08
"""Round-trip time from which a path begins with four streams instead of two."""
_MIN_GAIN = 1.1
"""Factor by which twice the streams must raise the goodput to be kept."""
_SAMPLES = 2
"""Updates whose best goodput counts for a number of streams, because new streams are slower at first."""
_LIMITED_FRACTION = 0.5
"""Windows or buffers limit the streams if they do so in more than this fraction of the time with data to send."""
_RTT_CHANGE = 0.25
"""Relative change of the round-trip time that is taken for a change of the path ..."""
_MIN_RTT_CHANGE_SECONDS = 0.005
"""... if it is also larger than this."""
_QUEUE_RTT_FACTOR = 1.25
"""There is a queue if the round-trip time exceeds this multiple of the shortest one ..."""
_QUEUE_SECONDS = 0.005
"""... plus this time."""
_LOSSY_PERIODS = 4
"""Periods with losses but without a queue after which a path counts as lossy, ..."""
_MIN_LOSS = 2e-4
"""... if at least this fraction of the segments was lost in them."""
_MAX_LOSS = 0.02
"""Periods in which a larger fraction was lost don't count: the path is overloaded then."""
_MIN_ROUND_TRIPS = 4
"""The goodput of an update that takes fewer round trips is ignored."""
_MIN_CHUNK_BYTES = 1 << 20
"""Bytes of a chunk, far from the end of an update, at least: smaller chunks cost more headers and acknowledgements
than they save when a stream breaks. A choice."""
_MAX_CHUNK_BYTES = 4 << 20
"""Bytes of a chunk at most: what is lost when a stream breaks, and what the receiver checks at a time. A choice."""
_LAST_CHUNK_BYTES = 256 << 10
"""Smallest chunk towards the end of an update."""


@dataclass
class KernelStatistics:
    """TCP statistics of all streams of a link, over a period."""

    segments: int = 0
    resent: int = 0
    queued: bool = False
    """Whether packets queued in front of the link. Losses are then caused by the streams themselves."""
    busy_seconds: float = 0.0
    limited_seconds: float = 0.0
    """Time in which the receive window or the send buffer limited the streams."""

    def add(self, before: TcpInfo, after: TcpInfo, buffer_bytes: int) -> None:
        """Add one stream's statistics. ``buffer_bytes`` is the send buffer that was requested for it."""
        self.segments += after.segments - before.segments
        self.resent += after.resent - before.resent
        self.queued |= after.rtt_seconds > after.min_rtt_seconds * _QUEUE_RTT_FACTOR + _QUEUE_SECONDS
        self.busy_seconds += after.busy_seconds - before.busy_seconds
        self.limited_seconds += after.window_seconds - before.window_seconds
        if after.buffer_bytes < buffer_bytes:
            # A buffer that is as large as requested also runs empty at times, when the sending thread is late; that is
            # no limit of the stream.
            self.limited_seconds += after.buffer_seconds - before.buffer_seconds


class StreamCount:
    """Chooses the number of streams of a link: two, or four on a path with a long round trip.

    It is raised only if the kernel's statistics show why more would help. On a path that loses packets without a queue
    in front of it there are eight, since each loss slows down only one stream. If windows or buffers limit the streams,
    their number is doubled for as long as that raises the goodput by more than a tenth. The result is kept until the
    path's round-trip time changes.
    """

    def __init__(self) -> None:
        self._rtt_seconds: float | None = None
        self._begin(2)

    def _begin(self, count: int) -> None:
        self._count = self._before = count
        self._best_mbps, self._growing = 0.0, True
        self._samples: list[float] = []
        self._busy_seconds = self._limited_seconds = 0.0
        self._lossy_periods, self._segments, self._resent = 0, 0, 0

    @property
    def count(self) -> int:
        """Number of streams for the next update."""
        return self._count

    def set_rtt(self, rtt_seconds: float) -> None:
        """Set the path's round-trip time, whenever it is known. A changed time starts the choice again."""
        known = self._rtt_seconds
        if known is not None and abs(rtt_seconds - known) <= max(_RTT_CHANGE * known, _MIN_RTT_CHANGE_SECONDS):
            return
        self._rtt_seconds = rtt_seconds
        self._begin(4 if rtt_seconds >= _LONG_RTT_SECONDS else 2)

    def observe(self, period: KernelStatistics) -> None:
        """Add the statistics since the last call."""
        self._busy_seconds += period.busy_seconds
        self._limited_seconds += period.limited_seconds
        if period.queued or period.resent > _MAX_LOSS * period.segments:
            return
        self._segments += period.segments
        self._resent += period.resent
        self._lossy_periods += period.resent > 0
        if self._lossy_periods >= _LOSSY_PERIODS and self._resent >= _MIN_LOSS * self._segments:
            self._count = max(self._count, _LOSSY_STREAMS)
            self._growing = False

    def add_goodput(self, mbps: float, seconds: float, streams: int) -> None:
        """Add the goodput of an update that no stream had to be opened for. Updates of only a few round trips are
        ignored."""
        limited = self._limited_seconds > _LIMITED_FRACTION * self._busy_seconds
        self._busy_seconds = self._limited_seconds = 0.0
        too_soon = seconds < _MIN_ROUND_TRIPS * (self._rtt_seconds or 0.0)
        if not self._growing or too_soon or streams != self._count:
            return
        self._samples.append(mbps)
        if len(self._samples) < _SAMPLES:
            return
        mbps, self._samples = max(self._samples), []
        if self._best_mbps and mbps <= self._best_mbps * _MIN_GAIN:
            self._count, self._growing = self._before, False
            return
        if limited and self._count < _MAX_STREAMS:
            self._best_mbps, self._before = mbps, self._count
            self._count = min(self._count * 2, _MAX_STREAMS)


def chunk_bytes(left_bytes: int, streams: int, bandwidth_delay_bytes: float) -> int:
    """Return the size of the next chunk in bytes.

    It is at least what a stream has in flight, so that an interruption costs each stream one chunk at most. Towards the
    end of an update chunks become small, so that all streams end at the same time.
    """
    largest = largest_chunk_bytes(streams, bandwidth_delay_bytes)
    return min(left_bytes, largest, max(left_bytes // (2 * streams), _LAST_CHUNK_BYTES))


def largest_chunk_bytes(streams: int, bandwidth_delay_bytes: float) -> int:
    """Return the size in bytes of a chunk far from the end of an update."""
    return min(max(int(2 * bandwidth_delay_bytes / streams), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
