"""Which ways the updates of running jobs take, as the links turn out to be.

What is decided is the scheduler's (`scheduler.rerouted`); here each job's links are looked at, and the job is told.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

from control_plane.core import JobState, Pairs, Report, Rerouted
from control_plane.service.state._draft import Draft, JobEntry
from scheduler import (
    LinkTable,
    Path,
    Region,
    Rerouting,
    Sighting,
    Topology,
    as_seen,
    link_table,
    rerouted,
    round_compute_seconds,
)

__all__ = ["FIRST_REST_SECONDS", "LOOK_SECONDS", "JobLinks", "Routing"]

LOOK_SECONDS = 5.0
_LOOKS = 3
"""Tables that `rerouted` is asked about: the links must have been so for two looks and one more."""
FIRST_REST_SECONDS = 60.0
"""After a change; twice as long after each further one, so that a job does not go to and fro."""
_LONGEST_REST_SECONDS = 3600.0
_FIRST_MEMORY_SECONDS = 600.0
"""What was seen of a link that carries nothing any more counts for so long, and after that what is stated of it; twice
as long each time that it turned out as bad again."""

_Pair = tuple[str, str]


@dataclass
class _Memory:
    """What is remembered of a directed link."""

    seen: Sighting
    at: float
    lasts_seconds: float = _FIRST_MEMORY_SECONDS


@dataclass
class JobLinks:
    """The links of one job. What was seen of them is not kept over a restart of the control plane."""

    _memories: dict[_Pair, _Memory] = field(default_factory=dict)
    _given_up: dict[_Pair, float] = field(default_factory=dict)
    """Links of ways that were left: how long what was seen of them lasts the next time."""
    _tables: deque[LinkTable] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    _answered: tuple[LinkTable, ...] = ()
    """The tables that were last found to need no change."""
    _looked: float = -math.inf
    _changed: float = -math.inf
    _changes: int = 0

    def due(self, at: float) -> bool:
        """Whether it is time for a look; it then counts as made."""
        if at < self._looked + LOOK_SECONDS:
            return False
        self._looked = at
        return True

    def rested(self, at: float) -> bool:
        """Whether the last change is long enough ago."""
        rest = FIRST_REST_SECONDS * 2 ** (self._changes - 1) if self._changes else 0.0
        return at >= self._changed + min(rest, _LONGEST_REST_SECONDS)

    def seen(self, used: Iterable[_Pair], reports: dict[str, Report], at: float) -> dict[_Pair, Sighting]:
        """Take what the regions tell of the links in use; what is known then, of these and of others."""
        for source, to in used:
            seen = _sighting(reports[source], to)
            if seen is not None:
                lasts = self._given_up.get((source, to), _FIRST_MEMORY_SECONDS)
                self._memories[source, to] = _Memory(seen, at, lasts)
        self._memories = {pair: held for pair, held in self._memories.items() if at < held.at + held.lasts_seconds}
        return {pair: held.seen for pair, held in self._memories.items()}

    def look(self, table: LinkTable) -> tuple[LinkTable, ...] | None:
        """Take a look's table; the last ones where they may call for a change, None where they are known not to."""
        self._tables.append(table)
        tables = tuple(self._tables)
        return None if tables == self._answered else tables

    def stays(self, tables: tuple[LinkTable, ...]) -> None:
        """These tables call for no change."""
        self._answered = tables

    def leaves(self, left: Iterable[_Pair], at: float) -> None:
        """Other ways are taken from now on; ``left``: links that were in use and are not any more."""
        for pair in left:
            self._given_up[pair] = 2 * self._given_up.get(pair, _FIRST_MEMORY_SECONDS / 2)
            if pair in self._memories:
                self._memories[pair].lasts_seconds = self._given_up[pair]
        self._tables.clear()
        self._answered = ()
        self._changed, self._changes = at, self._changes + 1


class Routing:
    """Leads the updates of running jobs around links that have become slow or are cut."""

    def __init__(self) -> None:
        self._roads: dict[str, JobLinks] = {}

    def review(self, draft: Draft) -> None:
        """Look at the links of every job whose file leaves the topology to the plan; called every second."""
        for gone in set(self._roads) - set(draft.jobs):
            del self._roads[gone]
        for job in list(draft.jobs):
            entry = draft.job(job)
            if entry is not None and entry.plan.wan_settings.get("choose_topology") and _can_change(entry.state):
                roads = self._roads.setdefault(job, JobLinks())
                if roads.due(draft.at):
                    self._look(draft, entry, roads)

    def _look(self, draft: Draft, entry: JobEntry, roads: JobLinks) -> None:
        regions = [held.catalogue for part in entry.state.partitions if (held := draft.region(part.region))]
        catalogues = [catalogue for catalogue in regions if catalogue is not None]
        reports = {part.region: part.report for part in entry.state.partitions if part.report is not None}
        update_bytes = max((report.update_bytes for report in reports.values()), default=0)
        if len(catalogues) < len(entry.state.partitions) or not update_bytes:
            return
        present = _present(entry)
        used = _both_ways(present)
        stated = link_table(catalogues)
        for pair in used:
            # A plan that stands uses a link also where its region has meanwhile stated that there is none.
            stated.setdefault(pair, Path(0.0, 1e-3, 0.0))
        known = {*used, *_stated(catalogues)}
        table = as_seen(stated, roads.seen(used, reports, draft.at), update_bytes, known)
        tables = roads.look(table)
        if tables is None or not roads.rested(draft.at):
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
            roads.stays(tables)
            return
        draft.apply_to_job(entry.row.id, _told(answer, present, draft.at))
        roads.leaves(set(used) - set(_both_ways(answer.topology.links)), draft.at)


def _can_change(state: JobState) -> bool:
    """All regions train and can be reached, and all know the present ways."""
    well = all(part.link == "live" and part.state == "training" and part.report for part in state.partitions)
    return well and state.phase == "running" and not state.former


def _present(entry: JobEntry) -> Pairs:
    names = sorted(part.region for part in entry.plan.partitions)
    return entry.state.neighbours or entry.plan.neighbours or tuple(combinations(names, 2))


def _both_ways(pairs: Pairs) -> list[_Pair]:
    return [way for a, b in pairs for way in ((a, b), (b, a))]


def _stated(regions: Iterable[Region]) -> list[_Pair]:
    return [(region.name, link.destination) for region in regions for link in region.links]


def _sighting(report: Report, to: str) -> Sighting | None:
    seen = Sighting(report.link_mbps.get(to, 0.0), report.link_rtt_ms.get(to, 0.0), to in report.links_down)
    return seen if seen != Sighting() else None


def _compute_seconds(entry: JobEntry, region: str, report: Report) -> float:
    """Of a round, as lately measured, else as planned."""
    part = next(part for part in entry.plan.partitions if part.region == region)
    speed = report.round_samples_per_second
    if speed > 0 and part.pipeline is None:
        part = replace(part, samples_per_second=speed, merge_seconds=report.merge_seconds)
    return round_compute_seconds(replace(part, steps_per_round=report.interval or part.steps_per_round))


def _told(answer: Rerouting, present: Pairs, at: float) -> Rerouted:
    new = answer.topology
    before = f"{answer.before_seconds:.2f} s" if math.isfinite(answer.before_seconds) else "for ever"
    text = (
        f"updates take other ways: {new.name} ({_named(new.links)}) in place of {_named(present)}, since {answer.why}; "
        f"a round is expected to take {answer.after_seconds:.2f} s, not {before}"
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
