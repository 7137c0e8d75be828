"""The topology ``two-level``: a star of stars; regions exchange with their cluster's hub, hubs with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from scheduler.topology._contract import Candidate, Network, TopologyKind, links_seconds
from scheduler.topology._flood import Hops

__all__ = ["KIND"]

_MOST_CLUSTERS = 4
"""Largest number of clusters by round trip; more hardly ever pay off, and each takes a search."""
_RIVAL_HUBS = 2
"""Number of regions that are tried as the hub of a cluster."""


def _find(network: Network) -> Candidate | str:
    """Return the fastest graph of a small search: a hub for each cluster, one of the hubs in the middle."""
    best: tuple[float, Candidate] | None = None
    net = network.hops
    for clusters in _clusterings(network):
        rivals = [_central(net, cluster) for cluster in clusters]
        hubs = [choice[0] for choice in rivals]
        for middle in range(len(clusters)):
            chosen = list(hubs)
            found = _two_level(net, clusters, chosen, middle)
            for place, others in enumerate(rivals):
                for other in others[1:]:
                    tried = [*chosen[:place], other, *chosen[place + 1 :]]
                    again = _two_level(net, clusters, tried, middle)
                    if again is not None and (found is None or again[0] < found[0]):
                        found, chosen = again, tried
            if found is not None and (best is None or found[0] < best[0]):
                best = found
    if best is None:
        return "no clusters with a hub each were found" if network.size > 3 else "needs four regions or more"
    return best[1]


def _two_level(
    net: Hops, clusters: Sequence[Sequence[int]], hubs: Sequence[int], middle: int
) -> tuple[float, Candidate] | None:
    top = hubs[middle]
    links = [(top, hub) for hub in hubs if hub != top]
    links += [(hub, member) for hub, cluster in zip(hubs, clusters, strict=True) for member in cluster if member != hub]
    if not all(net.there[p][q] for p, q in links):
        return None
    others = tuple(hub for hub in hubs if hub != top)
    return links_seconds(net, links), Candidate((top, *others), tuple(links))


def _central(net: Hops, cluster: Sequence[int]) -> list[int]:
    """Return members by their distance: to the others of the cluster, then to all regions."""

    def reach(member: int) -> tuple[float, float]:
        inside = max((net.weight(member, other) for other in cluster if other != member), default=0.0)
        outside = sum(net.weight(member, other) for other in range(len(net)))
        return inside, outside

    return sorted(cluster, key=reach)[:_RIVAL_HUBS]


def _clusterings(network: Network) -> Iterator[list[list[int]]]:
    """Yield clusterings of the regions: by cloud, and by round-trip time in two to four clusters (single linkage).

    Single linkage is the minimum spanning tree by round trip without its longest edges (Gower and Ross 1969).
    """
    import networkx as nx

    names, net, n = network.names, network.hops, network.size
    if n < 4:
        return
    seen = set()
    by_cloud: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_cloud.setdefault(network.clouds.get(name, ""), []).append(i)
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    for p, q in combinations(range(n), 2):
        if net.there[p][q]:
            graph.add_edge(p, q, weight=network.table[names[p], names[q]].rtt_ms)
    spanning = nx.minimum_spanning_edges(graph, data=True)
    edges = sorted((link["weight"], p, q) for p, q, link in spanning)
    found = [sorted(by_cloud.values())]
    for count in range(2, _MOST_CLUSTERS + 1):
        forest = nx.Graph()
        forest.add_nodes_from(range(n))
        forest.add_edges_from((p, q) for _, p, q in edges[: n - count])
        found.append(sorted(sorted(part) for part in nx.connected_components(forest)))
    for clusters in found:
        key = tuple(map(tuple, clusters))
        if 2 <= len(clusters) < n and len(clusters) <= 2 * _MOST_CLUSTERS and key not in seen:
            seen.add(key)
            yield clusters


KIND = TopologyKind("two-level", _find)
