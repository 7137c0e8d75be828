"""What the waiting policy remembers of time: gaps between updates, durations of rounds, and time spent waiting.

All times are seconds of one monotonic clock, which the caller reads.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from sync.ps.core.waiting_settings import WaitingSettings

__all__ = ["RoundClock", "RoundDurations", "SoloPacing", "UpdateGaps", "WaitBudget"]

_NEWEST_WEIGHT = 0.2
"""Weight of the newest gap in the moving average: about five updates tell a region's pace."""
_MAX_GAP_RATIO = 4.0
"""Multiple of the average that a gap counts as at most: a longer one is an absence, not a pace."""
_GAPS_KEPT = 5
"""Number of gaps whose median is used: one absence among them does not change it."""
_ROUNDS_KEPT = 5
"""Number of rounds whose median is a region's duration: a worker that is stopped in one of them does not change it."""
_MIN_ROUNDS = 3
"""Number of rounds before a region's duration counts as known; the median of fewer would be one exceptional round."""


@dataclass
class UpdateGaps:
    """Gaps between the updates of each region, as they become durable here."""

    settings: WaitingSettings
    _last: dict[str, float] = field(default_factory=dict)
    _average: dict[str, float] = field(default_factory=dict)
    _recent: dict[str, deque[float]] = field(default_factory=dict)
    _waiting_since: dict[str, float] = field(default_factory=dict)
    """When waiting began for a region from which nothing had come."""

    def came(self, region: str, now: float) -> None:
        """Record that an update of a region, this one or another, has become durable here."""
        if (last := self._last.get(region)) is not None:
            gap = now - last
            self._recent.setdefault(region, deque(maxlen=_GAPS_KEPT)).append(gap)
            average = self._average.get(region, gap)
            counted = min(gap, _MAX_GAP_RATIO * average)
            self._average[region] = (1 - _NEWEST_WEIGHT) * average + _NEWEST_WEIGHT * counted
        self._last[region] = now

    def usual_seconds(self, region: str) -> float:
        """Return a region's usual gap; 0: not known yet."""
        return self._average.get(region, 0.0)

    def late_at(self, regions: Iterable[str], now: float, round_seconds: float = 0.0) -> float:
        """Return when the last of these regions is late, which may be in the past.

        A region whose gap isn't known has that of the slowest other, since all keep the same pace while they wait
        for each other; if none is known, ``round_seconds``, that of this region's own work.
        """
        factor, shortest = self.settings.late_after_gaps, self.settings.min_late_seconds
        unknown = max(self.settings.first_update_seconds / factor, round_seconds)
        slowest = max(self._average.values(), default=unknown)
        ends = []
        for region in regions:
            last = self._last[region] if region in self._last else self._waiting_since.setdefault(region, now)
            gap = self._average.get(region, slowest)
            ends.append(last + max(shortest, factor * gap))
        return max(ends)

    def due_at(self, regions: Iterable[str], now: float, round_seconds: float = 0.0) -> float:
        """Return when the next updates of those of these regions that are slower than us are due; at least ``now``.

        ``round_seconds`` is the duration of our own rounds; 0: not known, and all regions count as slower.
        """
        factor, slower_factor = self.settings.due_after_gaps, self.settings.slower_factor
        usual = {region: statistics.median(self._recent[region]) for region in regions if region in self._recent}
        slower = {one: gap for one, gap in usual.items() if gap > slower_factor * round_seconds}
        return max((now, *(self._last[one] + factor * gap for one, gap in slower.items())))

    def longest_hold_seconds(self, region: str, late: Iterable[str]) -> float:
        """Return how long a region's workers may wait at once for late ones; infinity if a gap isn't known."""
        gaps = [self._average.get(one) for one in (region, *late)]
        known = [gap for gap in gaps if gap is not None]
        if len(known) < len(gaps):
            return math.inf
        return max(self.settings.min_late_seconds, self.settings.max_hold_gaps * max(known))


@dataclass
class WaitBudget:
    """Time that workers may wait for late regions: a small fraction of the time, of which some can be saved up."""

    settings: WaitingSettings
    _cap: float = field(init=False)
    """Seconds that can be saved up."""
    _spent: float = 0.0
    """Seconds that are not earned back yet, as of ``_spent_at``."""
    _spent_at: float = 0.0
    _since: float | None = None
    """When the present waiting began, or will begin, to be charged."""

    def __post_init__(self) -> None:
        self._cap = self.settings.min_budget_seconds

    def hold_seconds(self, now: float, round_seconds: float, since: float) -> float:
        """Begin to wait ``now``, charged from ``since`` on; return for how many seconds from then it may last."""
        self.end(now)
        earned = self.settings.budget_fraction * (now - self._spent_at)
        self._spent, self._spent_at = max(0.0, self._spent - earned), now
        self._cap = max(self.settings.min_budget_seconds, self.settings.max_budget_rounds * round_seconds)
        self._since = since
        return max(0.0, self._cap - self._spent)

    def grace_seconds(self, now: float, round_seconds: float) -> float:
        """Begin a grace time ``now``; return how many seconds it may last."""
        left = self.hold_seconds(now, round_seconds, now)
        return max(0.0, min(left, self.settings.grace_rounds * round_seconds - self._spent))

    def end(self, now: float) -> None:
        """End the waiting. More than was allowed is charged too, but no more than twice what can be saved up: the
        workers may have been gone. A shorter round does not give back what was spent in longer ones."""
        if self._since is not None:
            spent = min(self._spent + max(0.0, now - self._since), 2 * self._cap)
            self._spent = max(self._spent, spent)
            self._since = None


@dataclass
class RoundDurations:
    """How long each region's rounds take by themselves, without the time that its workers waited for others."""

    settings: WaitingSettings
    _seconds: dict[str, deque[float]] = field(default_factory=dict)

    def ended(self, region: str, seconds: float) -> None:
        """Record a round of a region; 0: it does not state the duration."""
        if seconds > 0:
            self._seconds.setdefault(region, deque(maxlen=_ROUNDS_KEPT)).append(seconds)

    def usual(self, region: str) -> float:
        """Return the usual duration of a region's rounds in seconds; 0: not known yet."""
        seconds = self._seconds.get(region, ())
        return statistics.median(seconds) if len(seconds) >= _MIN_ROUNDS else 0.0

    def slower_than(self, region: str, others: Iterable[str]) -> dict[str, float]:
        """Return the others whose rounds take longer, with their durations in seconds."""
        if not (ours := self.usual(region)):
            return {}
        usual = {other: self.usual(other) for other in others}
        return {other: theirs for other, theirs in usual.items() if theirs > self.settings.slower_factor * ours}


@dataclass
class RoundClock:
    """When our rounds begin and other regions' rounds end."""

    settings: WaitingSettings
    _began: float | None = None
    """When our workers began the open round."""
    _held_seconds: float = 0.0
    _held_since: float | None = None
    _came: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The newest round of each region, and when its update came."""

    def held(self, now: float, held: bool) -> None:
        """Record whether the workers wait for other regions from now on."""
        if held and self._held_since is None:
            self._held_since = now
        elif not held and self._held_since is not None:
            self._held_seconds += now - self._held_since
            self._held_since = None

    def next_round(self, now: float, overlap_seconds: float = 0.0) -> float:
        """Begin a round; return how long the last one took by itself, 0 if it is the first.

        ``overlap_seconds``: how long workers train on while they wait. That belongs to the round that begins: counted
        in the last one, waiting would make a long round and a short one, and the long one would delay the others.
        """
        self.held(now, held=False)
        took = 0.0 if self._began is None else now - self._began - self._held_seconds
        self._began, self._held_seconds = now - min(self._held_seconds, overlap_seconds), 0.0
        return max(0.0, took)

    def came(self, region: str, sequence: int, now: float) -> None:
        """Record that another region's update of a round is here."""
        if sequence > self._came.get(region, (0, 0.0))[0]:
            self._came[region] = sequence, now

    def in_step_at(self, sequence: int, region: str, round_seconds: float, way_seconds: float) -> float:
        """Return when a slower region ends a round, bounded by how long ours may take; -infinity: not known.

        ``round_seconds``: duration of its rounds. ``way_seconds``: time that an update takes from there to here.
        """
        if self._began is None or region not in self._came:
            return -math.inf
        made, at = self._came[region]
        in_step = at - way_seconds + (sequence - made) * round_seconds
        return min(in_step, self._began + self.settings.max_in_step_rounds * round_seconds)


@dataclass
class SoloPacing:
    """When a region that is alone may end its rounds."""

    settings: WaitingSettings
    _first: int = 0
    _next: int = -1
    _since: float = 0.0
    _gap: float = 0.0

    def round_at(self, sequence: int, now: float, gap_seconds: float) -> float:
        """Return when it may end this round, which its workers have completed.

        ``gap_seconds``: the usual gap; 0: not known. Consecutive rounds keep the gap that was known at
        the first of them; lost time is made up.
        """
        if sequence != self._next or not self._gap:
            fraction = self.settings.alone_gap_fraction
            self._first, self._since, self._gap = sequence, now, fraction * gap_seconds
        self._next = sequence + 1
        return self._since + (sequence - self._first) * self._gap
