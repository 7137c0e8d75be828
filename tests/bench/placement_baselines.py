"""Baselines of placement: published and plausible rules, in the same model, with the same pace and prices.

Each takes the jobs in their order, gives each what is still free, and never breaks residency. All use the best of their
regions as the hub of the WAN star, which is more than their authors say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from scheduler._model import Reason
from scheduler.lab.placement._choice import PlacementChoice, bill_of, placement_of
from scheduler.lab.placement._model import (
    Placement,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementRefusal,
)
from scheduler.lab.placement._sites import SLACK, Floats, Need, Sites, need_of, paces_of, sites_of

Part = tuple[int, int, tuple[int, ...]]
"""(site, units, shards)."""
Rule = Callable[[Sites, Need, Floats], tuple[Need, list[Part]] | None]


def load_power_matching(
    federation: PlacementFederation, jobs: Sequence[PlacementJob], *, pace: str = "deadline"
) -> PlacementOutcome:
    """Place jobs by load-power matching of Cloudless-Training (arXiv 2303.05330): data stays, all regions end an epoch
    together.

    The load power of a region is LP = P / D, what its machines process over the data in it. With the pace "fastest", as
    published, the region that is slowest with all its machines sets the pace, and the others take the cheapest machines
    that reach the same LP. With "deadline" the pace is the one that just meets the deadline, which leaves more to other
    jobs; with "cheapest" it is the cheapest of the paces that `place` chooses from.
    """
    if pace not in ("deadline", "cheapest", "fastest"):
        raise ValueError('pace is "deadline", "cheapest" or "fastest"')
    rule = _matched_to_slowest if pace == "fastest" else _matched
    return _in_order(federation, jobs, rule, any_pace=pace == "cheapest")


def greedy(federation: PlacementFederation, jobs: Sequence[PlacementJob]) -> PlacementOutcome:
    """Place jobs where their data are; each region gives everything it has (of its fastest type), and all wait for the
    slowest."""
    return _in_order(federation, jobs, _everything, any_pace=False)


def cheapest_single_region(federation: PlacementFederation, jobs: Sequence[PlacementJob]) -> PlacementOutcome:
    """Move all data of a job to the region where it is cheapest, at its cheapest pace; jobs tied to two regions are
    refused."""
    return _in_order(federation, jobs, _single, any_pace=True)


def _in_order(
    federation: PlacementFederation, jobs: Sequence[PlacementJob], rule: Rule, *, any_pace: bool
) -> PlacementOutcome:
    sites = sites_of(federation)
    left = sites.units.copy()
    placements: list[Placement] = []
    refusals = []
    for job in jobs:
        paces = paces_of(sites, job)
        offers = (rule(sites, need, left) for need in (paces if any_pace else paces[:1]))
        answers = [(_priced(sites, *offer), offer[1]) for offer in offers if offer is not None]
        placement, parts = min(
            answers, key=lambda answer: answer[0].usd if answer[0] is not None else math.inf, default=(None, [])
        )
        if placement is None:
            reason = Reason("INADMISSIBLE", f"the rule finds no place for {job.name}", "use `place`")
            refusals.append(PlacementRefusal(job.name, (reason,)))
            continue
        placements.append(placement)
        for site, units, _ in parts:
            left[site] -= units
    return PlacementOutcome(tuple(placements), tuple(refusals))


def _priced(sites: Sites, need: Need, parts: list[Part]) -> Placement | None:
    regions = [int(sites.region[site]) for site, _, _ in parts]
    hub = min(regions, key=lambda region: bill_of(sites, need, region, parts).rounds)
    usd = bill_of(sites, need, hub, parts).usd
    return placement_of(sites, PlacementChoice(need, usd, usd, hub, tuple(parts))) if math.isfinite(usd) else None


def _at_home(sites: Sites, need: Need) -> dict[int, tuple[int, ...]]:
    """Return by region the shards that lie there."""
    homes: dict[int, tuple[int, ...]] = {}
    for place, shard in enumerate(need.job.shards):
        region = sites.federation.index[shard.region]
        homes[region] = (*homes.get(region, ()), place)
    return dict(sorted(homes.items()))


def _matched(sites: Sites, need: Need, left: Floats) -> tuple[Need, list[Part]] | None:
    parts = []
    for region, shards in _at_home(sites, need).items():
        part = _cheapest_part(sites, need, left, region, shards)
        if part is None:
            return None
        parts.append(part)
    return need, parts


def _cheapest_part(
    sites: Sites, need: Need, left: Floats, region: int, shards: tuple[int, ...]
) -> tuple[int, int, tuple[int, ...]] | None:
    own = sites.own(region)
    units = np.ceil(need.power(shards) / sites.power[own] * (1 - SLACK))
    usd = np.where((units <= left[own]) & need.fits[own], units * sites.usd_per_hour[own], math.inf)
    best = int(usd.argmin())
    return (own.start + best, int(units[best]), shards) if math.isfinite(usd[best]) else None


def _strongest(sites: Sites, need: Need, left: Floats) -> tuple[float, list[Part]] | None:
    """Seconds until the slowest region is through with all its machines, and those machines."""
    seconds, parts = 0.0, []
    for region, shards in _at_home(sites, need).items():
        own = sites.own(region)
        power = np.where(need.fits[own], sites.power[own] * left[own], 0.0)
        best = int(power.argmax())
        if power[best] <= 0:
            return None
        seconds = max(seconds, need.power(shards) * need.seconds / float(power[best]))
        parts.append((own.start + best, int(left[own][best]), shards))
    return (seconds, parts) if seconds <= need.seconds else None


def _matched_to_slowest(sites: Sites, need: Need, left: Floats) -> tuple[Need, list[Part]] | None:
    fastest = _strongest(sites, need, left)
    paced = need_of(sites, need.job, fastest[0]) if fastest is not None else None
    return _matched(sites, paced, left) if paced is not None else None


def _everything(sites: Sites, need: Need, left: Floats) -> tuple[Need, list[Part]] | None:
    fastest = _strongest(sites, need, left)
    paced = need_of(sites, need.job, fastest[0]) if fastest is not None else None
    return (paced, fastest[1]) if fastest is not None and paced is not None else None


def _single(sites: Sites, need: Need, left: Floats) -> tuple[Need, list[Part]] | None:
    everything = tuple(range(len(need.job.shards)))
    allowed = np.ones(len(sites.egress), dtype=bool)
    for group in need.allowed:
        allowed &= group
    for region in need.pinned:
        allowed &= np.arange(len(allowed)) == region
    best, least = None, math.inf
    for region in (int(place) for place in np.flatnonzero(allowed)):
        part = _cheapest_part(sites, need, left, region, everything)
        usd = bill_of(sites, need, region, [part]).usd if part is not None else math.inf
        if usd < least:
            best, least = part, usd
    return (need, [best]) if best is not None else None
