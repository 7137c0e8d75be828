"""What jobs measure of links: for those that no operator states, plans take it for the next job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from control_plane.core import JobState, LinkReport, MeasuredLink, RegionState
from control_plane.service.state._catalogue import MOST_MBPS, MOST_RTT_MS
from scheduler import Link, LinkMeasurement, LinkTable, Path, Plan, Region, link_table, measured_path

__all__ = ["links_measured", "links_of_plan", "with_measured"]

_MOST_REGIONS = 32
"""Regions of a job up to which its links are looked at as a whole; their number grows with the square."""


def links_measured(state: JobState, known: Mapping[str, RegionState]) -> dict[str, tuple[MeasuredLink, ...]]:
    """Return the links that a job has measured, by the region that sends.

    Args:
        known: states of the regions, with what earlier jobs have measured.
    """
    found: dict[str, tuple[MeasuredLink, ...]] = {}
    for part in state.partitions:
        if part.report is None or part.region not in known:
            continue
        before = {link.destination: link for link in known[part.region].measured}
        links = []
        for to, link in part.report.links.items():
            if to not in known or not _is_possible(link):
                continue
            seen, size = LinkMeasurement(link.mbps, link.rtt_ms), part.report.exchange.update_bytes
            path = measured_path(seen, size, Path(before[to].rtt_ms, before[to].mbps, 0.0) if to in before else None)
            links.append(MeasuredLink(to, path.rtt_ms, path.mbps))
        if links:
            found[part.region] = tuple(links)
    return found


def _is_possible(link: LinkReport) -> bool:
    """Whether a link has been measured, within the bounds of what an operator may state."""
    return 0 < link.rtt_ms <= MOST_RTT_MS and 0 <= link.mbps <= MOST_MBPS


def with_measured(region: Region, state: RegionState) -> Region:
    """Return a region with its measured links beside the stated ones; what an operator states counts."""
    if not state.measured:
        return region
    stated = {link.destination for link in region.links}
    more = [Link(region.name, one.destination, one.rtt_ms, one.mbps) for one in state.measured]
    more = [link for link in more if link.destination not in stated]
    return replace(region, links=(*region.links, *more)) if more else region


def links_of_plan(plan: Plan, regions: Mapping[str, Region | None]) -> LinkTable:
    """Return the links between a plan's regions as the next plan takes them; empty where there are too many."""
    held = [region for part in plan.partitions if (region := regions.get(part.region)) is not None]
    return link_table(held) if len(held) == len(plan.partitions) <= _MOST_REGIONS else {}
