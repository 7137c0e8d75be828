"""The topology ``tree``: the minimum spanning tree by the time of one update."""

from __future__ import annotations

from scheduler.topology._contract import Candidate, Network, TopologyKind, spanning_edges

__all__ = ["KIND"]


def _find(network: Network) -> Candidate | str:
    edges = spanning_edges(network.hops.weights, network.hops.there)
    return Candidate((), tuple(sorted((p, q) for _, p, q in edges)))


KIND = TopologyKind("tree", _find)
