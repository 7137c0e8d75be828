"""Whom a merge waits for, and for how long."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Membership", "Pace", "Punctuality", "Spared"]

_LONGEST_PROBATION = 32
"""Rounds."""
_FIRST_SECONDS = 10.0
"""Where no region's pace is known yet."""
_GAPS = 2.5
"""An update is late once so many of its region's usual gaps have passed since the last one."""
_HOLD_UP_GAPS = 1.25
"""Of usual gaps is the longest that workers are held up at once. A region that is a little slow needs a part of one to
come up; one whose updates come by fits and starts would need many, and is heard without being waited for."""
_WEIGHT = 0.2
"""Of the newest gap in the mean."""
_DUE_GAPS, _GAPS_KEPT, _SLOWER = 1.5, 5, 1.1
"""Of a region's usual gaps, the median of so many, after the last update the next one is due. Who is slow but steady,
by so much slower than our own rounds, is waited for until then at no charge: the end of the job waits for it as well.
Who keeps our pace and is late has been away, and the others would lose for good what they wait."""
_SPARED = 0.005
"""Of the time may pass in waiting for regions that are late, so that they catch up in the long run."""
_SPARED_MOST = 0.25
"""Of a round is what can be saved up of that, and is there at first."""
_MOMENT_MOST = 0.06
"""Of a round is what can be saved up for those that are a little late: the rest is for who would else be left out."""
_HURRY = 0.9
"""Of the usual gap is how far apart a region's rounds are at least while it is alone: what differs between rounds shall
cost no time."""
_LONGEST_GAP = 4.0
"""Times the mean: what is longer is an absence, not a habit."""


@dataclass
class Membership:
    """Regions that keep up are waited for; one that did not come is not, until it has kept up for a while.

    The while doubles with each absence, so that a link that comes and goes does not hold the others up each time.
    """

    _probation: dict[str, int] = field(default_factory=dict)
    """Rounds in a row that a region must still be in time for."""
    _absences: dict[str, int] = field(default_factory=dict)
    _behind: dict[str, int] = field(default_factory=dict)

    @property
    def absent(self) -> tuple[str, ...]:
        """Regions that nobody waits for, sorted."""
        return tuple(sorted(self._probation))

    def gave_up(self, regions: Iterable[str]) -> None:
        """These have let the others wait too long."""
        for region in regions:
            self._absences[region] = self._absences.get(region, 0) + 1
            self._probation[region] = self._length(region)
            self._behind.pop(region, None)

    def merged(self, region: str, *, keeps_up: bool, behind: int = 0) -> None:
        """A round was merged; this region's update of it was there or can be waited for, or not. It is ``behind`` by so
        many rounds."""
        if region not in self._probation:
            if region in self._behind:
                self._behind[region] = min(self._behind[region], behind)
            return
        left = self._probation[region] - 1 if keeps_up else self._length(region)
        if left > 0:
            self._probation[region] = left
        else:
            del self._probation[region]
            self._behind[region] = behind

    def behind(self, region: str) -> int:
        """Rounds that a region which was away and is back lacks still; it has never lacked fewer since."""
        return self._behind.get(region, 0)

    def _length(self, region: str) -> int:
        return int(min(1 << (self._absences[region] - 1), _LONGEST_PROBATION))


class Punctuality:
    """How far apart each region's updates usually come. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._gap: dict[str, float] = {}
        self._gaps: dict[str, deque[float]] = {}
        self._began: dict[str, float] = {}
        """When one was waited for of which nothing had come."""
        self._went_on = float("-inf")

    def came(self, region: str, now: float) -> None:
        """An update of a region, this one or another, has become durable here."""
        if (last := self._last.get(region)) is not None:
            gap = now - last
            self._gaps.setdefault(region, deque(maxlen=_GAPS_KEPT)).append(gap)
            mean = self._gap.get(region, gap)
            self._gap[region] = (1 - _WEIGHT) * mean + _WEIGHT * min(gap, _LONGEST_GAP * mean)
        self._last[region] = now

    def gap_seconds(self, region: str) -> float:
        """How far apart a region's updates usually come; 0 where that is not known yet."""
        return self._gap.get(region, 0.0)

    def went_on(self, now: float) -> None:
        """Some are not waited for any more. Those that were waiting for them too get their time from here on."""
        self._went_on = now

    def patience_seconds(
        self, regions: Iterable[str], now: float, least_seconds: float = 0.0, round_seconds: float = 0.0
    ) -> float:
        """How long to continue waiting for the next updates of these regions; 0 or less: no longer. So many seconds
        since the last one are never late.

        All keep the same pace while they wait for each other: where a region's is not known yet the slowest other's is,
        and where none is, that of this region's own work, ``round_seconds`` a round.
        """
        slowest = max(self._gap.values(), default=max(_FIRST_SECONDS / _GAPS, round_seconds))
        ends = []
        for region in regions:
            last = self._last[region] if region in self._last else self._began.setdefault(region, now)
            ends.append(max(last, self._went_on) + max(least_seconds, _GAPS * self._gap.get(region, slowest)))
        return max(ends) - now

    def due_at(self, regions: Iterable[str], now: float, round_seconds: float = 0.0) -> float:
        """When the next updates of those of these regions that are slow are due at the latest by the pace that they
        come at; now, where that is past. Slow is whose updates are farther apart than our rounds of ``round_seconds``
        would be if nothing held them up; where that is 0 it is not known, and all count as slow."""
        usual = {one: statistics.median(self._gaps[one]) for one in regions if one in self._gaps}
        dues = (self._last[one] + _DUE_GAPS * gap for one, gap in usual.items() if gap > _SLOWER * round_seconds)
        return max((now, *dues))

    def hold_up_seconds(self, region: str, late: Iterable[str], least_seconds: float = 0.0) -> float:
        """How long this region's workers may be held up at once for others that are late, whatever comes of them
        meanwhile; infinity where the pace of one is not known yet."""
        gaps = [self._gap.get(one) for one in (region, *late)]
        known = [gap for gap in gaps if gap is not None]
        return max(least_seconds, _HOLD_UP_GAPS * max(known)) if len(known) == len(gaps) else math.inf


class Spared:
    """How long workers may be held up for regions that are late: a small share of the time, of which some can be saved
    up, ``least_seconds`` even where rounds are short. Times are seconds of any one clock."""

    def __init__(self, least_seconds: float = 0.0) -> None:
        self._least_seconds = least_seconds
        self._most = least_seconds
        """That can be saved up."""
        self._spent = self._at = 0.0
        """What is not made up for yet, and as of when."""
        self._since: float | None = None

    def hold_up_seconds(self, now: float, round_seconds: float, since: float) -> float:
        """They are held up from now on, and it counts ``since`` a later time; returns for how long it may from then."""
        self.end(now)
        self._spent, self._at = max(0.0, self._spent - _SPARED * (now - self._at)), now
        self._most = max(self._least_seconds, _SPARED_MOST * round_seconds)
        self._since = since
        return max(0.0, self._most - self._spent)

    def moment_seconds(self, now: float, round_seconds: float) -> float:
        """They are held up from now on, for regions that are a little late; returns for how long they may be."""
        left = self.hold_up_seconds(now, round_seconds, now)
        return max(0.0, min(left, _MOMENT_MOST * round_seconds - self._spent))

    def end(self, now: float) -> None:
        """They continue. What took longer than it might is made up for as well, but no more of it than can be saved up:
        they may have gone meanwhile. Rounds that have become shorter do not give back what was taken of long ones."""
        if self._since is not None:
            spent = min(self._spent + max(0.0, now - self._since), 2 * self._most)
            self._spent = max(self._spent, spent)
            self._since = None


class Pace:
    """When a region that is alone may end its rounds. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._first, self._next = 0, -1
        self._since = self._gap = 0.0

    def pause_seconds(self, sequence: int, now: float, gap_seconds: float) -> float:
        """How long it is until it may end this round, which it has come to, and whose gap to the one before usually is
        so long (0: it is not known). Rounds one after the other are made at the pace that was usual at the first of
        which it was known; lost time is made up."""
        if sequence != self._next or not self._gap:
            self._first, self._since, self._gap = sequence, now, _HURRY * gap_seconds
        self._next = sequence + 1
        return max(0.0, self._since + (sequence - self._first) * self._gap - now)
