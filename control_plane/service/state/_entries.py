"""Jobs and regions in memory."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core import JobState, RegionState
from control_plane.spec import JobSpec
from control_plane.store import JobRow, RegionRow
from scheduler import Plan
from scheduler import Region as Catalogue

__all__ = ["JobEntry", "RegionEntry"]


@dataclass(frozen=True)
class JobEntry:
    """A job in memory."""

    row: JobRow
    state: JobState
    spec: JobSpec
    plan: Plan


@dataclass(frozen=True)
class RegionEntry:
    """A region in memory."""

    row: RegionRow
    state: RegionState
    catalogue: Catalogue | None
    """Catalogue that its agent has sent; None: the agent has never connected."""
