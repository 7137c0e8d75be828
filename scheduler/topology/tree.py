"""The topology ``tree``: the minimum spanning tree by the time of one update (Kruskal)."""

from __future__ import annotations

from scheduler.topology._contract import Candidate, Network, TopologyKind

__all__ = ["KIND"]


def _find(network: Network) -> Candidate | str:
    import networkx as nx

    edges = nx.minimum_spanning_edges(network.graph(), algorithm="kruskal", data=False)
    return Candidate((), tuple(sorted((min(p, q), max(p, q)) for p, q in edges)))


KIND = TopologyKind("tree", _find)
