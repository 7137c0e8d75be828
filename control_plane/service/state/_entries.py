"""Jobs and regions in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from control_plane.core import JobState, RegionState
from control_plane.service.measuring._links import with_measured
from control_plane.spec import JobSpec
from control_plane.store import JobRow, RegionRow
from scheduler import Plan
from scheduler import Region as Catalogue

__all__ = ["JobEntry", "RegionEntry", "reported_workers"]


@dataclass(frozen=True)
class JobEntry:
    """A job in memory."""

    row: JobRow
    state: JobState
    spec: JobSpec
    plan: Plan

    @cached_property
    def usd(self) -> float:
        """US dollars that the job has cost so far; kept, since those of all jobs are summed again and again."""
        return self.state.usd

    @cached_property
    def reported_workers(self) -> tuple[tuple[str, int], ...]:
        """Regions, and how many workers each has reported, where there are any; kept for the same reason."""
        parts = self.state.partitions
        return tuple((part.region, part.report.workers) for part in parts if part.report and part.report.workers)

    @cached_property
    def sent_bytes(self) -> tuple[tuple[tuple[str, str], int], ...]:
        """Links as (source, destination), and the bytes that each source has sent; kept for the same reason."""
        sources = [(part.region, part.report) for part in self.state.partitions]
        sources += [(copy.source, copy.report) for copy in self.state.copies]
        return tuple(
            ((source, other), count)
            for source, report in sources
            if report is not None
            for other, count in report.totals.sent_bytes.items()
        )


def reported_workers(entries: Iterable[JobEntry]) -> dict[str, int]:
    """Return how many workers the regions of some jobs have reported, by region."""
    found: dict[str, int] = {}
    for entry in entries:
        for region, workers in entry.reported_workers:
            found[region] = found.get(region, 0) + workers
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
