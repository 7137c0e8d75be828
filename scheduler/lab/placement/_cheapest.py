"""The cheapest placement of one job at given prices and limits: exact, as far as the effort allows.

The best split of its shards lets two unions be in one region, where they would be one partition; then the search
branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.lab.placement import _narrow
from scheduler.lab.placement._choice import PlacementChoice
from scheduler.lab.placement._narrow import narrowed
from scheduler.lab.placement._sites import SLACK, Floats, Need, Sites
from scheduler.lab.placement._split import assembled, barring, best_split, meeting_of, table_of


@dataclass(frozen=True)
class Effort:
    """Limits of the search for one job at one pace."""

    nodes: int = 64
    """Splits that are tried at most; more than one only where unions are in one region."""
    regions: int = 200
    """Number of regions, about, that are searched together at most; others are omitted only where they cannot be of
    use."""


THOROUGH = Effort()


def cheapest(
    sites: Sites, paces: Sequence[Need], limit: Floats, scarcity: Floats | None = None, effort: Effort = THOROUGH
) -> PlacementChoice | None:
    """The cheapest placement with at most `limit` units of each site; None: none was found."""
    return priced(sites, paces, limit, scarcity, effort)[0]


def priced(
    sites: Sites,
    paces: Sequence[Need],
    limit: Floats,
    scarcity: Floats | None = None,
    effort: Effort = THOROUGH,
    known: PlacementChoice | None = None,
) -> tuple[PlacementChoice | None, float]:
    """Return the cheapest placement at any pace, and a lower bound of the cost of all (infinite: there is none).

    `scarcity` [site] is added to the price of a unit, in USD for the whole job: the price of a capacity that other jobs
    want. The two figures differ only where the effort did not suffice. A choice that is `known`, within the same
    limits, saves much of the effort where it is nearly the best.
    """
    best = replace(known, priced_usd=at_prices(known, scarcity)) if known is not None else None
    bound = best.priced_usd if best is not None else math.inf
    for need in paces:
        ceiling = best.priced_usd if best is not None else math.inf
        choice, least = _paced(sites, need, limit, scarcity, effort, ceiling)
        bound = min(bound, least)
        if choice is not None and choice.priced_usd < ceiling:
            best = choice
    return best, bound


def at_prices(choice: PlacementChoice, scarcity: Floats | None) -> float:
    """USD of a choice with what its units are worth to others."""
    if scarcity is None:
        return choice.usd
    return choice.usd + sum(float(scarcity[site]) * units for site, units, _ in choice.parts)


def _paced(
    sites: Sites, need: Need, limit: Floats, scarcity: Floats | None, effort: Effort, ceiling: float
) -> tuple[PlacementChoice | None, float]:
    """Return the same at one pace; what costs `ceiling` or more need not be found."""
    if need.nowhere:
        return None, math.inf
    unit_usd = sites.usd_per_hour * need.hours
    if scarcity is not None:
        unit_usd = unit_usd + scarcity
    limit = np.where(need.fits, limit, 0.0)
    table = table_of(sites, need, limit, unit_usd)
    if table is None:
        return None, math.inf
    best: PlacementChoice | None = None
    bound = math.inf
    if len(table.regions) > _narrow.WIDE and need.free:
        table, best, bound = narrowed(sites, need, table, limit, unit_usd, ceiling, effort.regions)
    forbidden: list[tuple[float, tuple[tuple[int, int], ...]]] = [(-math.inf, ())]
    for _ in range(effort.nodes):
        if not forbidden:
            break
        barred = forbidden.pop()[1]
        found = best_split(sites, need, barring(table, barred))
        if found is not None:
            bound = min(bound, ceiling)  # of what is not looked at further
        if found is None or found.usd >= (ceiling if best is None else min(ceiling, best.priced_usd)):
            continue
        choice = assembled(sites, need, limit, unit_usd, found)
        if choice is not None and (best is None or choice.priced_usd < best.priced_usd):
            best = choice
        # The model has one partition in a region: of two unions that met there, one must go elsewhere.
        meeting = meeting_of(found)
        if meeting is not None and (choice is None or choice.priced_usd > found.usd * (1 + SLACK)):
            column = int(np.searchsorted(table.regions, meeting[1]))
            forbidden += [(found.usd, (*barred, (union, column))) for union in meeting[0]]
    if best is not None:
        bound = min(bound, best.priced_usd)
    return best, min([bound, *(usd for usd, _ in forbidden)])
