"""Prices of scarce capacity, and the bound that they prove (Lagrangian relaxation of the capacities).

At any prices pi >= 0 of a unit, no placement costs less than

    sum_j min(penalty_j, cheapest_j(pi)) - sum_k pi_k C_k

since every job pays its cheapest at best, and what is paid for capacity comes back. As jobs are priced in whole
placements, with whole units, this is at least the bound of the program's linear relaxation.

To price all jobs is what takes time, so that each time should teach much: column generation (G. B. Dantzig and
P. Wolfe, Operations Research 8(1), 1960) keeps all placements that were once a job's cheapest. The next prices are
those that are best for these, not too far from the best that are proven (the boxes of R. E. Marsten, W. W. Hogan and
J. W. Blankenship, Operations Research 23(3), 1975), found by the subgradient with Polyak's step (M. L. Fisher,
Management Science 27(1), 1981), where a step costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.lab.placement._cheapest import priced
from scheduler.lab.placement._choice import PlacementChoice, elsewhere
from scheduler.lab.placement._pool import Pool
from scheduler.lab.placement._sites import Floats, Need, Sites

ELSEWHERE = 12
"""Other regions that are considered for each partition of a job's cheapest placement."""
WIDTH = 0.5
"""Distance of prices from the best at first, at most, as a factor of a unit's average cost."""
WIDER, NARROWER = 1.5, 0.5
"""Factors on that distance after a better bound, and after one that is not better."""


@dataclass(frozen=True, eq=False)
class Scarcity:
    """The value of capacity to jobs, beyond its price."""

    usd: Floats
    """[site] Of a unit, for a whole job."""
    bound_usd: float
    """No placement of the jobs costs less, refusals at their penalties."""
    wishes: tuple[PlacementChoice | None, ...]
    """Choice of each job at these prices, if it were alone."""


def scarcity_of(
    sites: Sites,
    needs: Sequence[Sequence[Need]],
    free: Floats,
    penalties: Sequence[float],
    alone: Sequence[tuple[PlacementChoice, float]],
    *,
    steps: int,
    enough: float,
) -> Scarcity:
    """Return the prices with the best bound after a number of steps; each step prices all jobs at all their paces.

    `alone` is what `priced` returns for the jobs without scarcity. It ends once no prices can prove more than `enough`
    (a share) above what the jobs' choices cost there, as far as is known. Where the effort for each job did not suffice
    to prove its choice the cheapest, the bound stays below that, and no step would raise it.
    """
    pool = Pool(free, penalties)
    usd = np.zeros_like(free)
    best = Scarcity(usd, -math.inf, ())
    units = sum(sum(choice.units) for choice, _ in alone)
    widest = width = WIDTH * sum(choice.usd for choice, _ in alone) / units
    answers: list[tuple[PlacementChoice | None, float]] = list(alone)
    enough_usd = math.inf
    for step in range(steps):
        if step > 0:
            known = pool.cheapest(usd)
            answers = [priced(sites, paces, free, usd, known=last) for paces, last in zip(needs, known, strict=True)]
        paid = float(usd @ free)
        bound = sum(min(penalty, least) for penalty, (_, least) in zip(penalties, answers, strict=True)) - paid
        for job, (choice, _) in enumerate(answers):
            if choice is not None:
                pool.add(job, choice)
                for other in elsewhere(sites, choice, free, usd, ELSEWHERE):
                    pool.add(job, other)
        if step > 0:
            width *= WIDER if bound > best.bound_usd else NARROWER
        if bound > best.bound_usd:
            best = Scarcity(usd, bound, _wishes(answers, penalties))
            enough_usd = _value(best.wishes, penalties) - paid + enough * abs(bound)
        usd, hoped = pool.climb(best.usd, width)
        if hoped <= enough_usd and width < widest:  # nothing near; what of farther away?
            width = widest
            usd, hoped = pool.climb(best.usd, width)
        if hoped <= enough_usd:
            break
    return best


def _wishes(
    answers: Sequence[tuple[PlacementChoice | None, float]], penalties: Sequence[float]
) -> tuple[PlacementChoice | None, ...]:
    return tuple(
        choice if choice is not None and choice.priced_usd < penalty else None
        for (choice, _), penalty in zip(answers, penalties, strict=True)
    )


def _value(wishes: Sequence[PlacementChoice | None], penalties: Sequence[float]) -> float:
    return sum(
        wish.priced_usd if wish is not None else penalty for wish, penalty in zip(wishes, penalties, strict=True)
    )
