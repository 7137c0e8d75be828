"""Whom a merge waits for, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Attendance", "Punctuality"]

_LONGEST_PROBATION = 32
"""Rounds."""
_FIRST_SECONDS = 10.0
"""Where no region's pace is known yet."""
_GAPS = 2.5
"""An update is late once so many of its region's usual gaps have passed since the last one."""
_WEIGHT = 0.2
"""Of the newest gap in the mean."""
_LONGEST_GAP = 4.0
"""Times the mean: what is longer is an absence, not a habit."""


@dataclass
class Attendance:
    """Regions that keep up are waited for; one that did not come is not, until it has kept up for a while.

    The while doubles with each absence, so that a link that comes and goes does not hold the others up each time.
    """

    _probation: dict[str, int] = field(default_factory=dict)
    """Rounds in a row that a region must still be in time for."""
    _absences: dict[str, int] = field(default_factory=dict)

    @property
    def absent(self) -> tuple[str, ...]:
        """Regions that nobody waits for, sorted."""
        return tuple(sorted(self._probation))

    def gave_up(self, regions: Iterable[str]) -> None:
        """These have let the others wait too long."""
        for region in regions:
            self._absences[region] = self._absences.get(region, 0) + 1
            self._probation[region] = self._length(region)

    def merged(self, region: str, *, keeps_up: bool) -> None:
        """A round was merged; this region's update of it was there or can be waited for, or not."""
        if region not in self._probation:
            return
        left = self._probation[region] - 1 if keeps_up else self._length(region)
        if left > 0:
            self._probation[region] = left
        else:
            del self._probation[region]

    def _length(self, region: str) -> int:
        return int(min(1 << (self._absences[region] - 1), _LONGEST_PROBATION))


class Punctuality:
    """How far apart each region's updates usually come. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._gap: dict[str, float] = {}
        self._began: dict[str, float] = {}
        """When one was waited for of which nothing had come."""
        self._went_on = float("-inf")

    def came(self, region: str, now: float) -> None:
        """An update of a region, this one or another, has become durable here."""
        if (last := self._last.get(region)) is not None:
            gap = now - last
            mean = self._gap.get(region, gap)
            self._gap[region] = (1 - _WEIGHT) * mean + _WEIGHT * min(gap, _LONGEST_GAP * mean)
        self._last[region] = now

    def went_on(self, now: float) -> None:
        """Some are not waited for any more. Those that were waiting for them too get their time from here on."""
        self._went_on = now

    def patience_seconds(self, regions: Iterable[str], now: float) -> float:
        """How long to go on waiting for the next updates of these regions; 0 or less: no longer.

        All keep the same pace while they wait for each other: where a region's is not known yet the slowest other's is.
        """
        slowest = max(self._gap.values(), default=_FIRST_SECONDS / _GAPS)
        ends = []
        for region in regions:
            last = self._last[region] if region in self._last else self._began.setdefault(region, now)
            ends.append(max(last, self._went_on) + _GAPS * self._gap.get(region, slowest))
        return max(ends) - now
