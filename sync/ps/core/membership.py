"""Membership: which regions a merge and the workers wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sync.ps.core.waiting_settings import WaitingSettings

__all__ = ["Membership"]


@dataclass
class Membership:
    """Regions that keep up are waited for; one that was late is not, until it has kept up for a number of rounds.

    The number doubles with each absence, so that an unstable link does not delay the others each time.
    """

    settings: WaitingSettings
    _probation: dict[str, int] = field(default_factory=dict)
    """Rounds in a row that an absent region must still keep up for."""
    _absences: dict[str, int] = field(default_factory=dict)
    _lag: dict[str, int] = field(default_factory=dict)

    @property
    def absent(self) -> tuple[str, ...]:
        """Regions that nobody waits for, sorted."""
        return tuple(sorted(self._probation))

    def remove(self, regions: Iterable[str]) -> None:
        """Stop waiting for regions that are late."""
        for region in regions:
            self._absences[region] = self._absences.get(region, 0) + 1
            self._probation[region] = self._length(region)
            self._lag.pop(region, None)

    def merged(self, region: str, *, came: bool, lag_rounds: int, finished: bool) -> None:
        """Record a merge of our round: whether it held an update of this region, how many rounds the region lacks now,
        and whether its last update is merged."""
        lag = max(0, lag_rounds)
        if region not in self._probation:
            if region in self._lag:
                self._lag[region] = min(self._lag[region], lag)
            return
        near = came and lag_rounds <= self.settings.max_rejoin_lag_rounds
        keeps_up = near or lag_rounds <= 0 or finished
        left = self._probation[region] - 1 if keeps_up else self._length(region)
        if left > 0:
            self._probation[region] = left
        else:
            del self._probation[region]
            self._lag[region] = lag

    def lag_rounds(self, region: str) -> int:
        """Return how many rounds a region that has returned still lacks: the fewest since then."""
        return self._lag.get(region, 0)

    def _length(self, region: str) -> int:
        return int(min(1 << (self._absences[region] - 1), self.settings.max_probation_rounds))
