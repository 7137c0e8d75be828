"""How fast each region makes its rounds, and how one that is faster keeps in step with the others.

A region whose rounds take less time than another's would run ahead until it is held up by what is late: the job would
end no sooner, and what is merged would be rounds old. So it ends its rounds when the slowest does. The job takes as
long, and models are merged that were made side by side.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Cadence", "Tempo"]

_ROUNDS, _LEAST_ROUNDS = 5, 3
"""The median of so many is a region's: one round in which a worker is stopped, or evaluates, is no habit."""
_SLOWER = 1.1
"""Times what our rounds take are those of one that is slower: the rest is what differs between rounds. Regions of one
pace that took each other's bad rounds for a habit would all make rounds as long as the worst of them."""
_LONGEST = 1.25
"""Times what its rounds take may ours: so does one that is rounds behind come up."""


@dataclass
class Tempo:
    """How long the rounds of each region take by themselves: without what it was held up for others."""

    _seconds: dict[str, deque[float]] = field(default_factory=dict)

    def made(self, region: str, seconds: float) -> None:
        """A region has made a round; 0: it does not say how long that took."""
        if seconds > 0:
            self._seconds.setdefault(region, deque(maxlen=_ROUNDS)).append(seconds)

    def slower_than(self, region: str, others: Iterable[str]) -> dict[str, float]:
        """Those of the others whose rounds take longer, and how many seconds."""
        ours = self.usual(region)
        usual = {other: self.usual(other) for other in others}
        return {other: theirs for other, theirs in usual.items() if ours and theirs > _SLOWER * ours}

    def usual(self, region: str) -> float:
        """Seconds that a round of a region takes; 0: not known yet."""
        seconds = self._seconds.get(region, ())
        return statistics.median(seconds) if len(seconds) >= _LEAST_ROUNDS else 0.0


class Cadence:
    """When rounds begin and end, here and elsewhere. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._began: float | None = None
        """Since when our workers have worked on the open round."""
        self._held = 0.0
        self._held_since: float | None = None
        self._came: dict[str, tuple[int, float]] = {}

    def held_up(self, now: float, held: bool) -> None:
        """From now on the workers are held up for other regions, or are not."""
        if held and self._held_since is None:
            self._held_since = now
        elif not held and self._held_since is not None:
            self._held += now - self._held_since
            self._held_since = None

    def next_round(self, now: float, beside_seconds: float = 0.0) -> float:
        """Our workers begin a round; returns how long the one before took by itself, 0 where it is the first.

        ``beside_seconds``: for so long they have trained on while they were held up. That is of the round that begins:
        told of the one before, a hold-up would make a long round and a short one, and the longer one would hold up the
        others in turn.
        """
        self.held_up(now, held=False)
        took = 0.0 if self._began is None else now - self._began - self._held
        self._began, self._held = now - min(self._held, beside_seconds), 0.0
        return max(0.0, took)

    def came(self, region: str, sequence: int, now: float) -> None:
        """Another region's update of a round is here."""
        if sequence > self._came.get(region, (0, 0.0))[0]:
            self._came[region] = sequence, now

    def pause_seconds(self, sequence: int, region: str, round_seconds: float, way_seconds: float, now: float) -> float:
        """How long it is until a slower region ends this round, which our workers have come to.

        ``round_seconds``: what its rounds take. ``way_seconds``: what an update takes from there to here.
        """
        if self._began is None or region not in self._came:
            return 0.0
        made, at = self._came[region]
        in_step = at - way_seconds + (sequence - made) * round_seconds
        return max(0.0, min(in_step, self._began + _LONGEST * round_seconds) - now)
