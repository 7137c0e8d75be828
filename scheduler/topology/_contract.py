"""The interface of a topology: how its best graph over some links is found, and what an exchange over it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from scheduler.topology._exchange_time import Bools, Floats, Hops, Links, tree_seconds

__all__ = ["Candidate", "Network", "TopologyKind", "components", "spanning_edges"]


@dataclass(frozen=True)
class Candidate:
    """A graph over numbered regions."""

    hubs: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """Empty: all pairs."""


@dataclass(frozen=True)
class Network:
    """Regions and the links between them; two regions at least, all connected."""

    links: Links
    hops: Hops

    @property
    def names(self) -> Sequence[str]:
        """Names of the regions."""
        return self.links.names

    @property
    def size(self) -> int:
        """Number of regions."""
        return len(self.names)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Pairs of regions without a direct path."""
        if self.links.there.sum() == self.size * (self.size - 1):
            return []
        return [(p, q) for p, q in combinations(range(self.size), 2) if not self.links.there[p, q]]


@dataclass(frozen=True)
class TopologyKind:
    """A topology as a job file names it."""

    name: str
    find: Callable[[Network], Candidate | str]
    """Finds the fastest graph of this kind that the links allow, or returns why there is none."""
    seconds: Callable[[Hops, Sequence[Sequence[int]]], float] = tree_seconds
    """Seconds of a round's exchange between these neighbours, without coding."""
    offered: bool = True
    """Whether job files may name it, and get a reason if it is impossible."""


def components(there: Bools) -> list[list[int]]:
    """Return the connected parts of a symmetric graph, each in order."""
    parts, left = [], np.ones(len(there), np.bool_)
    while left.any():
        part, new = np.zeros(len(there), np.bool_), np.arange(len(there)) == left.argmax()
        while new.any():
            part |= new
            new = there[new].any(axis=0) & ~part
        parts.append([int(place) for place in np.nonzero(part)[0]])
        left &= ~part
    return parts


def spanning_edges(weights: Floats, there: Bools) -> list[tuple[float, int, int]]:
    """Return the edges of the minimum spanning tree of a connected graph, with their weights (Prim)."""
    weights = np.where(there, weights, np.inf)
    nearest, via, outside = weights[0].copy(), np.zeros(len(weights), np.intp), np.ones(len(weights), np.bool_)
    outside[0] = False
    found = []
    for _ in range(len(weights) - 1):
        new = int(np.where(outside, nearest, np.inf).argmin())
        outside[new] = False
        found.append((float(nearest[new]), min(new, int(via[new])), max(new, int(via[new]))))
        nearer = weights[new] < nearest
        nearest, via = np.where(nearer, weights[new], nearest), np.where(nearer, new, via)
    return found
