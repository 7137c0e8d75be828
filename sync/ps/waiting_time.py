"""Why a partition stands still at the end of a round: updates move, or other regions are not ready."""

from __future__ import annotations

from collections.abc import Iterable

from sync.ps.core.machine import Machine

__all__ = ["WaitTimes", "waits_only"]


class WaitTimes:
    """Divides the time in which workers stand still: they *wait* for other regions that are not ready, and the rest is
    *exchange*: sending, receiving and merging."""

    def __init__(self) -> None:
        self.exchange_seconds, self.wait_seconds = 0.0, 0.0
        self._since: float | None = None
        """Since when things stand as they do; None: the workers do not stand still."""
        self._waits = False

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.exchange_seconds + self.wait_seconds

    def seen(self, now: float, stands_still: bool, *, waits: bool) -> None:
        """Note how things stand from ``now`` (monotonic seconds) on. ``waits``: for others that are not ready."""
        if self._since is not None:
            if self._waits:
                self.wait_seconds += now - self._since
            else:
                self.exchange_seconds += now - self._since
        self._since, self._waits = now if stands_still else None, waits


def waits_only(machine: Machine, arriving: Iterable[tuple[str, int]]) -> bool:
    """Return whether workers that stand still do so only because other regions are not ready: to keep step with slower
    ones, or since our update is where it is to be and one that is awaited has not begun to arrive.

    Args:
        arriving: updates that are being received, by region and sequence, also passed on ones.
    """
    if machine.paused:
        return True
    awaited, lacks_quorum = machine.awaited, machine.lacks_quorum
    if not (awaited or lacks_quorum) or machine.sends:
        return False
    begun = {region for region, sequence in arriving if sequence > machine.ledger.newest(region)}
    return not begun.issuperset(awaited) or (lacks_quorum and not begun)
