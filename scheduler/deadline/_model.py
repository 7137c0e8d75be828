"""Input and output of the deadline core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.deadline._curve import SpeedCurve


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


@dataclass(frozen=True, slots=True)
class DeadlineJob:
    """One job, or the part of one that runs in one region at a time, in its present state."""

    name: str
    curves: Mapping[str, SpeedCurve]
    """Curves by admissible region: where the data may be read, and how fast the job runs there."""
    work: float
    """Steps left."""
    deadline_s: float
    """Instant; infinite for best effort."""
    region: str = ""
    """Region where it runs or has its promise; empty: none yet."""
    share: int = 0
    """Devices that it has now."""
    ready_s: float = -math.inf
    """Instant until which it is paused by an earlier change."""
    value: float = 1.0
    """Value of keeping the deadline."""
    later: tuple[tuple[float, float], ...] = ()
    """A soft deadline's further steps: (instant, value), ascending in time, falling in value. Tried in turn."""
    user: str = ""
    served_s: float = 0.0
    """Device seconds that its user's best-effort work has had; the least served goes first."""


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
    """Seconds of a window that need no margin: for so short a time changes can be postponed, see ``fixed_until``."""
    change_pause_s: float = 0.0
    """Seconds that any change now costs every running job."""
    usual_device_s: float = math.inf
    """Usual device seconds of a job for each unit of its value. Where a region is nearly full up to a job's deadline,
    only jobs up to that size are promised, and the more is free, the larger ones: a large job must not take the place
    of ten small ones. Infinite: any job that fits."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """By user: most devices that the promises of one user may hold at once; other users have no limit."""
