"""Reroute the updates of running jobs around slow or cut links.

The scheduler decides (`scheduler.rerouted`); this module collects the measurements of each job's links and applies the
decision to the job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

from control_plane.core import JobState, LinkReport, Pairs, Report, Rerouted
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from scheduler import (
    LinkMeasurement,
    LinkTable,
    Path,
    Region,
    Rerouting,
    Topology,
    link_table,
    rerouted,
    round_compute_seconds,
    with_measurements,
)

__all__ = ["FIRST_REST_SECONDS", "REVIEW_SECONDS", "JobLinks", "Routing"]

REVIEW_SECONDS = 5.0
"""Time between two reviews of a job's links."""
_TABLES = 3
"""Number of consecutive link tables that `rerouted` decides by, so that a short disturbance causes no change."""
FIRST_REST_SECONDS = 60.0
"""Least time between two changes; it doubles with each change, so that a job does not oscillate."""
_MAX_REST_SECONDS = 3600.0
"""Limit of that time."""
_MEMORY_SECONDS = 600.0
"""Time for which the measurements of an unused link count; then its stated figures do. It doubles each time that the
link is left again."""

_Pair = tuple[str, str]


@dataclass
class _Memory:
    """Last measurements of a directed link."""

    seen: LinkMeasurement
    at: float
    lasts_seconds: float = _MEMORY_SECONDS


@dataclass
class JobLinks:
    """Measurements of one job's links, kept in memory only."""

    _memories: dict[_Pair, _Memory] = field(default_factory=dict)
    _given_up: dict[_Pair, float] = field(default_factory=dict)
    """Links that a rerouting has left, with the time for which their measurements count the next time."""
    _tables: deque[LinkTable] = field(default_factory=lambda: deque(maxlen=_TABLES))
    _answered: tuple[LinkTable, ...] = ()
    """Tables that were last found to require no change."""
    _reviewed_at: float = -math.inf
    _changed: float = -math.inf
    _changes: int = 0

    def due(self, at: float) -> bool:
        """Whether it is time for a review; it then counts as done."""
        if at < self._reviewed_at + REVIEW_SECONDS:
            return False
        self._reviewed_at = at
        return True

    def rested(self, at: float) -> bool:
        """Whether the last change is long enough ago for another one."""
        rest = FIRST_REST_SECONDS * 2 ** (self._changes - 1) if self._changes else 0.0
        return at >= self._changed + min(rest, _MAX_REST_SECONDS)

    def seen(self, used: Iterable[_Pair], reports: dict[str, Report], at: float) -> dict[_Pair, LinkMeasurement]:
        """Record the regions' measurements of the links in use; return all measurements that still count."""
        for source, to in used:
            seen = _link_measurement(reports[source], to)
            if seen is not None:
                lasts = self._given_up.get((source, to), _MEMORY_SECONDS)
                self._memories[source, to] = _Memory(seen, at, lasts)
        self._memories = {pair: held for pair, held in self._memories.items() if at < held.at + held.lasts_seconds}
        return {pair: held.seen for pair, held in self._memories.items()}

    def add_table(self, table: LinkTable) -> tuple[LinkTable, ...] | None:
        """Add a review's link table; return the last ones, or None if they are known to require no change."""
        self._tables.append(table)
        tables = tuple(self._tables)
        return None if tables == self._answered else tables

    def stays(self, tables: tuple[LinkTable, ...]) -> None:
        """Record that these tables require no change."""
        self._answered = tables

    def leaves(self, left: Iterable[_Pair], at: float) -> None:
        """Record a rerouting; ``left``: links that are not used any more."""
        for pair in left:
            self._given_up[pair] = 2 * self._given_up.get(pair, _MEMORY_SECONDS / 2)
            if pair in self._memories:
                self._memories[pair].lasts_seconds = self._given_up[pair]
        self._tables.clear()
        self._answered = ()
        self._changed, self._changes = at, self._changes + 1


class Routing:
    """Reroutes the updates of running jobs around links that have become slow or are cut."""

    def __init__(self) -> None:
        self._links: dict[str, JobLinks] = {}

    def review(self, draft: Draft) -> None:
        """Review the links of each job whose file leaves the topology to the plan; called every second."""
        for gone in set(self._links) - set(draft.jobs):
            del self._links[gone]
        for job in draft.may_be_rerouted():
            entry = draft.job(job)
            if entry is not None and _can_change(entry.state):
                links = self._links.setdefault(job, JobLinks())
                if links.due(draft.at):
                    self._review_job(draft, entry, links)

    def _review_job(self, draft: Draft, entry: JobEntry, links: JobLinks) -> None:
        regions = [held.planned for part in entry.state.partitions if (held := draft.region(part.region))]
        catalogues = [catalogue for catalogue in regions if catalogue is not None]
        reports = {part.region: part.report for part in entry.state.partitions if part.report is not None}
        update_bytes = max((report.exchange.update_bytes for report in reports.values()), default=0)
        if len(catalogues) < len(entry.state.partitions) or not update_bytes:
            return
        present = _present(entry)
        used = _both_ways(present)
        stated = link_table(catalogues)
        for pair in used:
            # The plan may use a link that its region does not state any more.
            stated.setdefault(pair, Path(0.0, 1e-3, 0.0))
        known = {*used, *_stated(catalogues)}
        table = with_measurements(stated, links.seen(used, reports, draft.at), update_bytes, known)
        tables = links.add_table(table)
        if tables is None or not links.rested(draft.at):
            return
        kind, _, hubs = (entry.state.topology or entry.plan.topology).partition(" via ")
        current = Topology(kind, tuple(hubs.split(", ")) if hubs else (), present, 0.0, 0.0)
        answer = rerouted(
            current,
            tables,
            stated,
            update_bytes,
            compute_seconds=max(_compute_seconds(entry, region, report) for region, report in reports.items()),
            background=entry.plan.background,
        )
        if answer is None:
            links.stays(tables)
            return
        draft.apply_to_job(entry.row.id, _event_of(answer, present, draft.at))
        links.leaves(set(used) - set(_both_ways(answer.topology.links)), draft.at)


def _can_change(state: JobState) -> bool:
    """Whether all regions are reachable, train, and know the present routes."""
    well = all(part.link == "live" and part.state == "training" and part.report for part in state.partitions)
    return well and state.phase == "running" and not state.former


def _present(entry: JobEntry) -> Pairs:
    names = sorted(part.region for part in entry.plan.partitions)
    return entry.state.neighbours or entry.plan.neighbours or tuple(combinations(names, 2))


def _both_ways(pairs: Pairs) -> list[_Pair]:
    return [way for a, b in pairs for way in ((a, b), (b, a))]


def _stated(regions: Iterable[Region]) -> list[_Pair]:
    return [(region.name, link.destination) for region in regions for link in region.links]


def _link_measurement(report: Report, to: str) -> LinkMeasurement | None:
    link = report.links.get(to, LinkReport())
    seen = LinkMeasurement(link.mbps, link.rtt_ms, link.down)
    return seen if seen != LinkMeasurement() else None


def _compute_seconds(entry: JobEntry, region: str, report: Report) -> float:
    """Return the compute time of a region's round, as measured lately, else as planned."""
    part = next(part for part in entry.plan.partitions if part.region == region)
    speed = report.speed.round_samples_per_second
    if speed > 0 and part.pipeline is None:
        part = replace(part, samples_per_second=speed, merge_seconds=report.speed.merge_seconds)
    return round_compute_seconds(replace(part, steps_per_round=report.exchange.interval or part.steps_per_round))


def _event_of(answer: Rerouting, present: Pairs, at: float) -> Rerouted:
    new = answer.topology
    before = f"{answer.before_seconds:.2f} s" if math.isfinite(answer.before_seconds) else "forever"
    text = (
        f"updates are rerouted: {new.name} ({_named(new.links)}) instead of {_named(present)}, since {answer.why}; "
        f"expected time of a round: {answer.after_seconds:.2f} s instead of {before}"
    )
    data = {
        "topology": new.name,
        "before": [list(pair) for pair in present],
        "after": [list(pair) for pair in new.links],
        "why": answer.why,
        "round_seconds_before": answer.before_seconds,
        "round_seconds_after": answer.after_seconds,
    }
    return Rerouted(at, new.name, new.links, present, text, data)


def _named(pairs: Pairs) -> str:
    return ", ".join(f"{a}-{b}" for a, b in pairs)
