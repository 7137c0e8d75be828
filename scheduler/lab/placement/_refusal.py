"""The reasons for which a job is not placed, and what would make it admissible."""

from __future__ import annotations

import math

from scheduler._model import Reason
from scheduler._moves import rule_text
from scheduler.lab.placement._cheapest import cheapest
from scheduler.lab.placement._model import PlacementJob, PlacementRefusal
from scheduler.lab.placement._sites import Floats, Need, Sites, need_of

LONGEST_SECONDS = 366 * 86_400.0
"""No deadline beyond this is proposed."""
NEAR = 1.01
"""Factor on the least possible deadline for the one that is proposed."""


def refusal_of(sites: Sites, job: PlacementJob, left: Floats) -> PlacementRefusal:
    """The reasons, most telling first. `left` [site] is what other jobs leave free."""
    unknown = sorted({shard.region for shard in job.shards} - set(sites.federation.index))
    if unknown:
        names = ", ".join(unknown)
        return _refused(job, f"region {names} is not part of the federation", "invite it", "REGION_NOT_FOUND")
    need = need_of(sites, job)
    if need is None:
        text = f"it starts after {job.start_seconds:.0f} s, the deadline is after {job.deadline_seconds:.0f} s"
        least = soonest(sites, job, left)
        return _refused(job, text, _later(job, least) if least is not None else "set a later deadline")
    if need.nowhere:
        return PlacementRefusal(job.name, tuple(_homeless(sites, need, shard) for shard in need.nowhere))
    alone = cheapest(sites, [need], sites.units)
    now = soonest(sites, job, left)
    if alone is None:
        ever = soonest(sites, job, sites.units)
        text = f"no machines that its data may use finish it within {job.deadline_seconds:.0f} s"
        if ever is None:
            text, remedy = text + ", nor within a year", "let its data go to more regions, or ask for less memory"
        else:
            remedy = _later(job, ever)
        return _refused(job, text, remedy)
    short = [
        f"{sites.federation.regions[int(sites.region[site])].name} has {left[site]:.0f} units of"
        f" {_device(sites, site)} free, {units} are needed"
        for site, units, _ in alone.parts
        if units > left[site]
    ]
    remedy = _later(job, now) if now is not None else "wait for a job to end"
    return _refused(job, "; ".join(short) or "other jobs hold what it needs", remedy)


def soonest(sites: Sites, job: PlacementJob, left: Floats) -> float | None:
    """The least deadline, to 1 %, that some placement within `left` meets; None: none within a year."""

    def fits(seconds: float) -> bool:
        need = need_of(sites, job, seconds)
        return need is not None and cheapest(sites, [need], left) is not None

    high = max(1.0, job.deadline_seconds - job.start_seconds)
    while not fits(high):
        high *= 2
        if high > LONGEST_SECONDS:
            return None
    low = high
    while low > 1e-3 and fits(low / 2):
        low /= 2
    low, high = low / 2, low
    while high > low * NEAR:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return job.start_seconds + high


def _homeless(sites: Sites, need: Need, place: int) -> Reason:
    shard = need.job.shards[place]
    if not need.fits.any():
        text = f"no device gives a worker {need.job.memory_bytes / 1e9:.3g} GB"
        return Reason("INADMISSIBLE", text, f"ask for {sites.memory[sites.units > 0].max(initial=0) / 1e9:.3g} GB")
    text = f"shard {shard.name} may be in no region that has devices with {need.job.memory_bytes / 1e9:.3g} GB"
    return Reason(
        "INADMISSIBLE",
        f"{text} and a link that brings it there in time",
        f"ask for less memory, widen its residency ({rule_text(shard.residency)}), or set a later deadline",
    )


def _device(sites: Sites, site: int) -> str:
    region = int(sites.region[site])
    name: str = sites.federation.regions[region].devices[site - sites.own(region).start].name
    return name


def _later(job: PlacementJob, deadline: float) -> str:
    if deadline <= job.deadline_seconds:
        return "ask again: it would fit now"
    return f"a deadline of {math.ceil(deadline)} s from now could be promised"


def _refused(job: PlacementJob, text: str, remedy: str, code: str = "INADMISSIBLE") -> PlacementRefusal:
    return PlacementRefusal(job.name, (Reason(code, text, remedy),))
