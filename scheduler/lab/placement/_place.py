"""Place many jobs at least money, one as fast as a budget allows, or one after another as they come."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

from scheduler._model import Reason
from scheduler.lab.placement._cheapest import Effort, cheapest, priced
from scheduler.lab.placement._choice import PlacementChoice, placement_of
from scheduler.lab.placement._milp import solve_exactly
from scheduler.lab.placement._model import (
    Placement,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementRefusal,
)
from scheduler.lab.placement._refusal import refusal_of, soonest
from scheduler.lab.placement._scarcity import scarcity_of
from scheduler.lab.placement._search import Search, by_weight
from scheduler.lab.placement._sites import Floats, Sites, need_of, paces_of, sites_of

PENALTY = 10.0
"""Factor on a refused job's cost alone: a job is refused only where that saves as much."""
FEW = 500
"""Number of jobs up to which the search makes more moves."""
STEPS, STEPS_OF_MANY = 40, 12
"""Steps towards the prices of scarce capacity, at most: with few jobs, and with many."""
ENOUGH, ENOUGH_OF_MANY = 1e-4, 3e-3
"""Share by which the bound can still rise when the steps end: with few jobs, and with many."""
MOVES, MOVES_OF_MANY = 10, 1
"""Moves of the search for each job: with few jobs, and with many."""
EXCHANGES = 600
"""Attempts to refuse other jobs, where jobs are refused."""
ONLINE = Effort(nodes=6, regions=64)
"""Effort for a job that waits for an answer."""
FINER = 1.01
"""Ratio of the durations that are tried under a budget."""

Held = Mapping[tuple[str, str], int]
"""(region, device) -> units that others hold."""


def place(
    federation: PlacementFederation,
    jobs: Sequence[PlacementJob],
    *,
    held: Held | None = None,
    method: str = "search",
    penalty: float = PENALTY,
    seed: int = 0,
    seconds: float = math.inf,
) -> PlacementOutcome:
    """Place jobs at least money, each within its deadline and where its data may be.

    `method` is "search" (prices of scarce capacity, then a neighbourhood search; the outcome has a bound), or "exact"
    (the mixed-integer program: for some 20 regions and 60 jobs a matter of minutes; `seconds` of wall time end it).
    A job is refused where it cannot be placed, or where placing it would cost others `penalty` times its own cost.
    Raises `ValueError` for job names that are not unique or an unknown method.
    """
    if method not in ("search", "exact"):
        raise ValueError('method is "search" or "exact"')
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError("two jobs have the same name")
    sites = sites_of(federation)
    free = _free(sites, held)
    needs, alone = [], []
    for job in jobs:
        paces = paces_of(sites, job)
        choice, least = priced(sites, paces, free)
        if choice is not None:
            needs.append(paces)
            alone.append((choice, least))
    penalties = [penalty * choice.usd for choice, _ in alone]
    bound, proven = 0.0, True
    choices: list[PlacementChoice | None] = []
    if needs and method == "exact":
        exact = solve_exactly(sites, needs, free, penalties, seconds=seconds)
        choices, bound, proven = list(exact.choices), exact.bound_usd, exact.proven
    elif needs:
        few = len(needs) <= FEW
        steps, enough = (STEPS, ENOUGH) if few else (STEPS_OF_MANY, ENOUGH_OF_MANY)
        scarcity = scarcity_of(sites, needs, free, penalties, alone, steps=steps, enough=enough)
        search = Search(sites, needs, free, penalties)
        search.insert(by_weight(needs), scarcity.usd, scarcity.wishes)
        moves = len(needs) * (MOVES if few else MOVES_OF_MANY)
        draw = random.Random(seed)
        likes = [choice for choice, _ in alone]
        search.improve(moves, scarcity.usd, likes, draw)
        search.exchange(EXCHANGES, scarcity.usd, likes, draw)
        choices, bound, proven = search.choices, scarcity.bound_usd, False
    return _outcome(sites, jobs, [paces[0].job.name for paces in needs], free, choices, penalties, bound, proven)


def _outcome(
    sites: Sites,
    jobs: Sequence[PlacementJob],
    names: Sequence[str],
    free: Floats,
    choices: Sequence[PlacementChoice | None],
    penalties: Sequence[float],
    bound: float,
    proven: bool,
) -> PlacementOutcome:
    left, placed, refused_usd = free.copy(), {}, 0.0
    for name, choice, penalty in zip(names, choices, penalties, strict=True):
        if choice is None:
            refused_usd += penalty
        else:
            left[choice.sites] -= choice.units
            placed[name] = placement_of(sites, choice)
    return PlacementOutcome(
        placements=tuple(placed[job.name] for job in jobs if job.name in placed),
        refusals=tuple(refusal_of(sites, job, left) for job in jobs if job.name not in placed),
        bound_usd=bound,
        penalty_usd=refused_usd,
        proven=proven,
    )


def place_fastest(
    federation: PlacementFederation, job: PlacementJob, budget_usd: float, *, held: Held | None = None
) -> Placement | PlacementRefusal:
    """Place one job so that it ends soonest, within 1 %, at no more than a budget, and within its deadline."""
    sites = sites_of(federation)
    free = _free(sites, held)
    need = need_of(sites, job)
    first = soonest(sites, job, free) if need is not None else None
    if need is None or need.nowhere or first is None or first > job.deadline_seconds:
        return refusal_of(sites, job, free)
    seconds, longest = first - job.start_seconds, job.deadline_seconds - job.start_seconds
    least: tuple[float, float] | None = None
    while True:
        paced = need_of(sites, job, seconds)
        choice = cheapest(sites, [paced], free) if paced is not None else None
        # Whole units are often faster than asked for; then the job ends sooner, and pays for less.
        sharper = need_of(sites, job, _seconds(sites, choice)) if choice is not None else None
        choice = (cheapest(sites, [sharper], free) if sharper is not None else None) or choice
        if choice is not None:
            if choice.usd <= budget_usd:
                return placement_of(sites, choice)
            least = min(least or (math.inf, 0.0), (choice.usd, seconds))
        if seconds >= longest:
            break
        seconds = min(longest, seconds * FINER)
    usd, seconds = least or (math.inf, longest)
    text = f"within {job.deadline_seconds:.0f} s it costs ${usd:.4f} or more, the budget is ${budget_usd:.4f}"
    return PlacementRefusal(job.name, (Reason("INADMISSIBLE", text, f"a budget of ${usd:.4f} would do"),))


class Index:
    """The cheapest placement of a job that arrives now, given all present jobs: for online admission.

    It keeps the free capacity of every site in arrays; an offer prices all regions at once, and examines the few that
    can be part of the cheapest placement.
    """

    def __init__(self, federation: PlacementFederation, *, held: Held | None = None) -> None:
        self._sites = sites_of(federation)
        self._left = _free(self._sites, held)
        self._active: dict[str, Placement] = {}

    def __len__(self) -> int:
        """Active jobs."""
        return len(self._active)

    def offer(self, job: PlacementJob) -> Placement | None:
        """Return the cheapest placement within what is free now, without holding it. None: see `refusal`.

        Its pace just meets the deadline, since the needs of future jobs are unknown.
        """
        choice = cheapest(self._sites, paces_of(self._sites, job)[:1], self._left, effort=ONLINE)
        return placement_of(self._sites, choice) if choice is not None else None

    def refusal(self, job: PlacementJob) -> PlacementRefusal:
        """Return why there is no offer, and what would make one possible; takes the time of some tens of offers."""
        return refusal_of(self._sites, job, self._left)

    def hold(self, placement: Placement) -> None:
        """Hold the machines of an offer. Raises `ValueError` where they are no longer free, or the job has some."""
        if placement.job in self._active:
            raise ValueError(f"job {placement.job} is placed already")
        sites = [self._sites.index[part.region, part.device] for part in placement.partitions]
        units = np.array([part.units for part in placement.partitions], dtype=float)
        if (self._left[sites] < units).any():
            raise ValueError(f"what job {placement.job} was offered is no longer free")
        self._left[sites] -= units
        self._active[placement.job] = placement

    def release(self, job: str) -> None:
        """Release the machines of a job. Raises `KeyError` where it has none."""
        for part in self._active.pop(job).partitions:
            self._left[self._sites.index[part.region, part.device]] += part.units


def _seconds(sites: Sites, choice: PlacementChoice) -> float:
    """Return when the slowest partition is done, from the first step."""
    return choice.need.seconds * max(
        choice.need.power(shards) / (units * float(sites.power[site])) for site, units, shards in choice.parts
    )


def _free(sites: Sites, held: Held | None) -> Floats:
    free = sites.units.copy()
    for pair, units in (held or {}).items():
        free[sites.index[pair]] = max(0.0, free[sites.index[pair]] - units)
    return free
