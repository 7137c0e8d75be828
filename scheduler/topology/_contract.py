"""The interface of a topology: how its best graph over some links is found, and what an exchange over it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from scheduler._link import LinkTable
from scheduler.topology._flood import Hops, tree_seconds

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Candidate", "Network", "TopologyKind", "links_seconds"]


@dataclass(frozen=True)
class Candidate:
    """A graph over numbered regions."""

    hubs: tuple[int, ...]
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Network:
    """Regions and the links between them; two regions at least, all connected."""

    names: Sequence[str]
    table: LinkTable
    hops: Hops
    clouds: Mapping[str, str]
    """Cloud of each region, by name; may lack regions."""

    @property
    def size(self) -> int:
        """Number of regions."""
        return len(self.names)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Pairs of regions without a direct path."""
        return [(p, q) for p, q in combinations(range(self.size), 2) if not self.hops.there[p][q]]

    def graph(self) -> nx.Graph:
        """Return all direct paths, weighted by the time of one update."""
        import networkx as nx

        net, graph = self.hops, nx.Graph()
        graph.add_nodes_from(range(self.size))
        graph.add_weighted_edges_from(
            (p, q, net.weight(p, q)) for p, q in combinations(range(self.size), 2) if net.there[p][q]
        )
        return graph


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


def links_seconds(net: Hops, links: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of an exchange over a tree of links."""
    neighbours: list[list[int]] = [[] for _ in range(len(net))]
    for p, q in links:
        neighbours[p].append(q)
        neighbours[q].append(p)
    return tree_seconds(net, neighbours)
