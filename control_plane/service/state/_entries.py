"""Jobs and regions in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from control_plane.core import JobState, RegionState
from control_plane.service.measuring._links import with_measured
from control_plane.spec import JobSpec
from control_plane.store import JobRow, RegionRow
from scheduler import Plan
from scheduler import Region as Catalogue

__all__ = ["JobEntry", "RegionEntry", "newest", "reported_workers"]


@dataclass(frozen=True)
class JobEntry:
    """A job in memory."""

    row: JobRow
    state: JobState
    spec: JobSpec
    plan: Plan


def newest(jobs: dict[str, JobEntry], most: int) -> list[JobEntry]:
    """Return up to `most` jobs, those that came last first. ``jobs``: in the order in which they came."""
    # Visits no others: each of 10,000 that is visited is read from memory.
    return list(islice(reversed(jobs.values()), most))


def reported_workers(entries: Iterable[JobEntry]) -> dict[str, int]:
    """Return how many workers the regions of some jobs have reported, by region."""
    found: dict[str, int] = {}
    for part in (part for entry in entries for part in entry.state.partitions):
        if part.report and part.report.workers:
            found[part.region] = found.get(part.region, 0) + part.report.workers
    return found


@dataclass(frozen=True)
class RegionEntry:
    """A region in memory."""

    row: RegionRow
    state: RegionState
    catalogue: Catalogue | None
    """Catalogue that its agent has sent; None: the agent has never connected."""

    @cached_property
    def planned(self) -> Catalogue | None:
        """What plans take for the region: the catalogue, with the links that jobs have measured."""
        return with_measured(self.catalogue, self.state) if self.catalogue is not None else None
