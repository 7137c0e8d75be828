"""From prices to a placement that fits: insert job after job, then remove some and insert them again at less cost.

The second part is a large neighbourhood search (P. Shaw, CP 1998): a job names the sites that it prefers, it and some
of the jobs that are there are removed, all are inserted again one after another, each where it is cheapest then; a move
that is no better is undone. It counts moves, not time, so the same input has the same outcome however fast the machine
is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from scheduler.lab.placement._cheapest import priced
from scheduler.lab.placement._choice import PlacementChoice
from scheduler.lab.placement._sites import Floats, Need, Sites

MOST_LEAVING = 4
"""Jobs that make room for one, at most; twice as many for one that is refused."""


class Search:
    """The choices of all jobs, and the capacity that they leave."""

    def __init__(
        self,
        sites: Sites,
        needs: Sequence[Sequence[Need]],
        free: Floats,
        penalties: Sequence[float],
    ) -> None:
        """`free` [site] is the capacity for these jobs, each with its paces."""
        self.choices: list[PlacementChoice | None] = [None] * len(needs)
        self.left = free.astype(float)
        self._sites, self._needs, self._penalties = sites, needs, penalties
        self._there: list[set[int]] = [set() for _ in range(len(free))]

    @property
    def usd(self) -> float:
        """Cost of all placements, refusals at their penalties."""
        return sum(self._usd(job) for job in range(len(self.choices)))

    def insert(self, order: Sequence[int], scarcity: Floats, wishes: Sequence[PlacementChoice | None] = ()) -> None:
        """Place the jobs that are not placed: as they wish if that fits, otherwise where they are cheapest then."""
        for job in order:
            wish = wishes[job] if wishes else None
            if wish is not None and self._fits(wish):
                self._put(job, wish)
            else:
                self._place(job, scarcity)

    def improve(self, moves: int, scarcity: Floats, alone: Sequence[PlacementChoice], draw: random.Random) -> None:
        """Try a number of moves; the cost never rises."""
        if not self.choices:
            return
        for _ in range(moves):
            refused = [job for job, choice in enumerate(self.choices) if choice is None]
            job = draw.choice(refused) if refused and draw.random() < 0.3 else draw.randrange(len(self.choices))
            self._move(job, alone[job], scarcity, draw)

    def exchange(self, moves: int, scarcity: Floats, alone: Sequence[PlacementChoice], draw: random.Random) -> None:
        """Try a number of times to refuse another job instead: it is removed, refused ones are inserted, it is inserted
        if possible.

        To make room for several jobs, one may have to go that costs more than each of them; no intermediate step pays.
        """
        for _ in range(moves):
            refused = [job for job, choice in enumerate(self.choices) if choice is None]
            if not refused:
                return
            coming = draw.sample(refused, draw.randint(1, min(MOST_LEAVING, len(refused))))
            near = self._near([site for job in coming for site in alone[job].sites])
            out = draw.choice(near) if near and draw.random() < 0.5 else draw.randrange(len(self.choices))
            leaving = self.choices[out]
            if leaving is None:
                continue
            near = sorted({*near, *self._near(leaving.sites)} - {out})
            others = draw.sample(near, min(len(near), draw.randint(0, 2 * MOST_LEAVING)))
            weight = draw.choice((0.0, 0.5, 1.0))
            self._replace([*coming, *others, out], scarcity * weight, slow=draw.random() < 0.7)

    def _move(self, job: int, wish: PlacementChoice, scarcity: Floats, draw: random.Random) -> None:
        current = self.choices[job]
        others = sorted({*self._near(wish.sites + (current.sites if current is not None else []))} - {job})
        most = MOST_LEAVING if current is not None else 2 * MOST_LEAVING
        leaving = [job, *draw.sample(others, min(len(others), draw.randint(1, most)))]
        if draw.random() < 0.5:
            draw.shuffle(leaving)
        weight = draw.choice((0.0, 0.5, 1.0))
        # Who is slow takes less room, which a job that found none may need.
        self._replace(leaving, scarcity * weight, slow=current is None and draw.random() < 0.7)

    def _near(self, sites: Sequence[int]) -> list[int]:
        """Return the jobs that use some of these sites, ascending."""
        return sorted(set().union(*(self._there[site] for site in sites)))

    def _replace(self, jobs: Sequence[int], scarcity: Floats, slow: bool) -> None:
        """Remove jobs and insert them in this order; undo it if the cost is higher in the end."""
        before = {job: self.choices[job] for job in jobs}
        usd = sum(self._usd(job) for job in jobs)
        for job in jobs:
            self._take(job)
        for job in jobs:
            self._place(job, scarcity, slow=slow, known=before[job])
        if sum(self._usd(job) for job in jobs) > usd * (1 + 1e-12):
            for job in jobs:
                self._take(job)
            for job, choice in before.items():
                if choice is not None:
                    self._put(job, choice)

    def _place(self, job: int, scarcity: Floats, slow: bool = False, known: PlacementChoice | None = None) -> None:
        paces = self._needs[job][:1] if slow else self._needs[job]
        if known is not None and not (known.need in paces and self._fits(known)):
            known = None
        choice = priced(self._sites, paces, self.left, scarcity, known=known)[0]
        if choice is not None and choice.usd <= self._penalties[job]:
            self._put(job, choice)

    def _fits(self, choice: PlacementChoice) -> bool:
        return all(units <= self.left[site] for site, units, _ in choice.parts)

    def _put(self, job: int, choice: PlacementChoice) -> None:
        self.choices[job] = choice
        self.left[choice.sites] -= choice.units
        for site in choice.sites:
            self._there[site].add(job)

    def _take(self, job: int) -> None:
        choice = self.choices[job]
        if choice is not None:
            self.choices[job] = None
            self.left[choice.sites] += choice.units
            for site in choice.sites:
                self._there[site].remove(job)

    def _usd(self, job: int) -> float:
        choice = self.choices[job]
        if choice is not None:
            return choice.usd
        return self._penalties[job] if math.isfinite(self._penalties[job]) else 1e15


def by_weight(needs: Sequence[Sequence[Need]]) -> list[int]:
    """Jobs that need most power first; few places are left for them later."""
    return sorted(range(len(needs)), key=lambda job: -float(np.sum(needs[job][0].powers)))
