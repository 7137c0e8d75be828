"""All placements seen so far of all jobs, as arrays, and the prices that are best if these are the only ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.lab.placement._choice import PlacementChoice
from scheduler.lab.placement._sites import Floats, Ints

CLIMB = 600
"""Steps of a climb, at most; each costs no more than a few passes over the arrays."""
PATIENCE = 8
"""Steps without a better value until steps become shorter."""
SHORTER = 1.6
"""Divisor of the step length after `PATIENCE` steps without a better value.

A choice: a larger one stops before the optimum, a smaller one spends steps.
"""
SHORTEST = 1e-4
"""Step length, as a share of the full step, at which a climb ends: shorter steps no longer change the value
noticeably."""
AHEAD = 0.02
"""Share by which the target of a step exceeds the best value."""
MOMENTUM = 0.5
"""Share of the last direction that is added to the subgradient, which damps the zigzag of subgradient steps.

A choice.
"""


class Pool:
    """Choices of each job, any number of them, at least one."""

    def __init__(self, free: Floats, penalties: Sequence[float]) -> None:
        self._free = free
        self._penalties = np.array(penalties, dtype=float)
        self._choices: list[list[PlacementChoice]] = [[] for _ in penalties]
        self._known: set[tuple[object, ...]] = set()
        self._columns: _Columns | None = None

    def add(self, job: int, choice: PlacementChoice) -> None:
        """Add one more choice of a job, unless it is a duplicate."""
        key = (job, choice.need.seconds, choice.hub, choice.parts)
        if key not in self._known:
            self._known.add(key)
            self._choices[job].append(choice)
            self._columns = None

    def cheapest(self, prices: Floats) -> list[PlacementChoice]:
        """Return each job's cheapest choice."""
        columns = self._arranged()
        return [columns.choices[at] for at in columns.cheapest(prices)[0]]

    def climb(self, prices: Floats, width: float) -> tuple[Floats, float]:
        """The best prices that differ from the given ones by `width` at most, or nearly, and their value.

        The value is the Lagrangian of the pool's choices alone: at least that of all choices.
        """
        columns = self._arranged()
        low, high = np.maximum(0.0, prices - width), prices + width
        best, value = prices, -math.inf
        at, direction, stride, idle = prices, np.zeros_like(prices), 1.0, 0
        for _ in range(CLIMB):
            here, over = columns.value(at)
            if here > value:
                best, value, idle = at, here, 0
            else:
                idle += 1
                if idle == PATIENCE:
                    at, stride, idle = best, stride / SHORTER, 0
            over[((at <= low) & (over < 0)) | ((at >= high) & (over > 0))] = 0.0
            direction = over + MOMENTUM * direction
            length = float(direction @ direction)
            if length == 0 or stride < SHORTEST:
                break
            missing = value - here + AHEAD * max(abs(value), 1e-9)
            at = np.clip(at + stride * missing / length * direction, low, high)
        return best, value

    def _arranged(self) -> _Columns:
        if self._columns is None:
            self._columns = _Columns(self._choices, self._free, self._penalties)
        return self._columns


class _Columns:
    """The choices of a pool, job by job; what they use, choice by choice."""

    def __init__(self, choices: Sequence[Sequence[PlacementChoice]], free: Floats, penalties: Floats) -> None:
        self._free, self._penalties = free, penalties
        self.choices = [choice for own in choices for choice in own]
        parts = [part for choice in self.choices for part in choice.parts]
        self._usd = np.array([choice.usd for choice in self.choices])
        self._first = _starts([len(own) for own in choices])
        self._job = np.repeat(np.arange(len(choices)), [len(own) for own in choices])
        lengths = [len(choice.parts) for choice in self.choices]
        self._first_part = _starts(lengths)
        self._column = np.repeat(np.arange(len(self.choices)), lengths)
        self._site = np.array([site for site, _, _ in parts], dtype=np.intp)
        self._units = np.array([float(units) for _, units, _ in parts])

    def cheapest(self, prices: Floats) -> tuple[Ints, Floats]:
        """[job] The cheapest choice at some prices, the first of several, and its USD."""
        usd = self._usd + np.add.reduceat(prices[self._site] * self._units, self._first_part)
        least = np.minimum.reduceat(usd, self._first)
        ties = np.flatnonzero(usd <= least[self._job])
        return ties[np.unique(self._job[ties], return_index=True)[1]], least

    def value(self, prices: Floats) -> tuple[float, Floats]:
        """The Lagrangian at some prices, and by how much its choices exceed each site's capacity."""
        columns, least = self.cheapest(prices)
        chosen = np.zeros(len(self.choices), dtype=bool)
        chosen[columns[least < self._penalties]] = True
        part = chosen[self._column]
        used = np.bincount(self._site[part], self._units[part], minlength=len(prices))
        total = float(np.minimum(least, self._penalties).sum()) - float(prices @ self._free)
        return total, used - self._free


def _starts(lengths: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
