"""Whom a merge waits for, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Attendance", "Punctuality"]

_LONGEST_PROBATION = 32
"""Rounds."""
_FIRST_SECONDS = 10.0
"""For a region of which nothing has come yet."""
_GAPS = 2.5
"""An update is late once so many of its region's usual gaps have passed since the last one."""
_LEAST_SECONDS = 0.1
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

    def merged(self, region: str, *, in_time: bool) -> None:
        """A round was merged, with or without this region's update of it."""
        if region not in self._probation:
            return
        left = self._probation[region] - 1 if in_time else self._length(region)
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

    def came(self, region: str, now: float) -> None:
        """An update has become durable here."""
        if (last := self._last.get(region)) is not None:
            gap = now - last
            mean = self._gap.get(region, gap)
            self._gap[region] = (1 - _WEIGHT) * mean + _WEIGHT * min(gap, _LONGEST_GAP * mean)
        self._last[region] = now

    def patience_seconds(self, regions: Iterable[str], now: float) -> float:
        """How long to go on waiting for the next updates of these regions."""
        late = [
            self._last[region] + _GAPS * self._gap[region] - now if region in self._gap else _FIRST_SECONDS
            for region in regions
        ]
        return max([_LEAST_SECONDS, *late])
