"""Input and output of the deadline core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Overhead:
    """The cost of a change of shares."""

    base_s: float = 2.0
    """Seconds of pause of a job that continues elsewhere or with another share."""
    doubling_s: float = 2.0
    """Additional seconds for each doubling of the share, from one device on."""
    everyone: bool = False
    """True: any change pauses every running job by ``base_s``; false: it only pauses those that it changes."""

    def seconds(self, share: int) -> float:
        """Pause of a job that starts, or changes to, a share."""
        return self.base_s + self.doubling_s * (math.log2(share) + 1) if share else 0.0


@dataclass(frozen=True)
class DeviceCapacity:
    """Devices of one region over time, as steps."""

    devices: int
    """Devices from now on."""
    changes: tuple[tuple[float, int], ...] = ()
    """(instant, devices from then on), ascending: maintenance, reservations that begin or end."""


@dataclass(frozen=True)
class Rules:
    """How cautious promises are."""

    overhead: Overhead = field(default_factory=Overhead)
    margin: float = 0.08
    """Share of a new job's window that is kept free for unforeseen changes."""
    kept_margin: float = 0.05
    """The same for jobs that have their promise: less, so that what was reserved can be used."""
    reserve_s: float = 0.0
    """Additional seconds before the deadline that are kept free."""
    kept_reserve_s: float = 0.0
    """The same for jobs that have their promise."""
    grace_s: float = 60.0
    """Seconds of a window that need no margin: for so short a time changes can be postponed."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """By user: most devices that the promises of one user may hold at once; other users have no limit."""
    by_price: bool = False
    """Whether a job is refused that takes far more than the promises of others, where little is free (`offer`).
    More deadlines are met so, but not each that fits is promised."""
