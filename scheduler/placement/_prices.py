"""Prices of scarce capacity, and the bound that they prove (Lagrangian relaxation of the capacities).

At any prices pi >= 0 of a unit, no placement costs less than

    sum_j min(penalty_j, cheapest_j(pi)) - sum_k pi_k C_k

since every job pays its cheapest at best, and what is paid for capacity comes back. As jobs are priced in whole
placements, with whole units, this is at least the bound of the program's linear relaxation. The prices follow the
subgradient (what is used above capacity) with Polyak's step: M. L. Fisher, Management Science 27(1), 1981.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.placement._cheapest import priced
from scheduler.placement._choice import Choice
from scheduler.placement._sites import Floats, Need, Sites

PATIENCE = 4
"""Steps without a better bound until steps become half as long."""


@dataclass(frozen=True, eq=False)
class Scarcity:
    """What capacity is worth to jobs, beyond its price."""

    usd: Floats
    """[site] Of a unit, for a whole job."""
    bound_usd: float
    """No placement of the jobs costs less, refusals at their penalties."""
    wishes: tuple[Choice | None, ...]
    """What each job would take at these prices, if it were alone."""


def scarcity_of(
    sites: Sites,
    needs: Sequence[Sequence[Need]],
    free: Floats,
    penalties: Sequence[float],
    *,
    steps: int,
) -> Scarcity:
    """Walk towards the prices that prove most, in at most so many steps; each prices all jobs at all their paces."""
    usd = np.zeros_like(free)
    best = Scarcity(usd, -math.inf, ())
    stride, idle = 1.0, 0
    last: list[Choice | None] = [None] * len(needs)
    for _ in range(steps):
        wishes, used, bound = [], np.zeros_like(free), -float(usd @ free)
        for job, (paces, penalty) in enumerate(zip(needs, penalties, strict=True)):
            choice, least = priced(sites, paces, free, usd, known=last[job])
            last[job] = choice
            if choice is not None and choice.priced_usd >= penalty:
                choice = None
            wishes.append(choice)
            bound += min(penalty, least)
            if choice is not None:
                used[choice.sites] += choice.units
        if bound > best.bound_usd:
            best, idle = Scarcity(usd, bound, tuple(wishes)), 0
        else:
            idle += 1
            if idle == PATIENCE:
                stride, idle, usd = stride / 2, 0, best.usd
        over = used - free
        over[(usd <= 0) & (over < 0)] = 0.0
        length = float(over @ over)
        if length == 0:
            break
        # The cost to be reached is not known yet; it is taken to be a twentieth above what is proven.
        target = best.bound_usd + max(abs(best.bound_usd), 1e-9) / 20
        usd = np.maximum(0.0, usd + stride * (target - bound) / length * over)
    return best
