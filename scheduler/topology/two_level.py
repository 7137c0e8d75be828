"""The topology ``two-level``: a star of stars; regions exchange with their cluster's hub, hubs with one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.topology._contract import Candidate, Network, TopologyKind, components, spanning_edges
from scheduler.topology._exchange_time import MANY, MISSING_SECONDS, Floats, Hops, Ints, Links, trees_seconds

__all__ = ["KIND"]

_MOST_CLUSTERS = 4
"""Largest number of clusters by round trip; more hardly ever pay off, and each takes a search."""
_RIVAL_HUBS = 2
"""Number of regions that are tried as the hub of a cluster; one, and one cluster's hub in the middle,
where there are more than `MANY` regions."""


def _find(network: Network) -> Candidate | str:
    """Return the fastest graph of a small search: a hub for each cluster, one of the hubs in the middle."""
    net, found = network.hops, []
    for clusters in _clusterings(network.links):
        rivals = [_central(net, cluster) for cluster in clusters]
        hubs = [own[0] for own in rivals]
        middles = net.weights[np.ix_(hubs, hubs)].sum(axis=1).argsort(kind="stable")
        most = len(clusters) if network.size <= MANY else 1
        found += [_Attempt(clusters, rivals, hubs, int(middle)) for middle in sorted(middles[:most])]
    if not found:
        return "no clusters with a hub each were found" if network.size > 3 else "needs four regions or more"
    seconds = _seconds(net, found)
    for place in range(max(len(attempt.hubs) for attempt in found) if network.size <= MANY else 0):
        for rank in range(1, _RIVAL_HUBS):
            some = [n for n, one in enumerate(found) if place < len(one.hubs) and rank < len(one.rivals[place])]
            if not some:
                continue
            tried = [found[n].with_hub(place, found[n].rivals[place][rank]) for n in some]
            for n, other, after in zip(some, tried, _seconds(net, tried), strict=True):
                if after < seconds[n]:
                    found[n], seconds[n] = other, after
    best = int(seconds.argmin())
    if seconds[best] >= MISSING_SECONDS:
        return "no clusters with a hub each were found"
    return found[best].candidate()


@dataclass(frozen=True)
class _Attempt:
    clusters: Sequence[Sequence[int]]
    rivals: Sequence[Sequence[int]]
    """Regions that may be hubs, by cluster."""
    hubs: Sequence[int]
    middle: int
    """Number of the cluster whose hub is in the middle."""

    def with_hub(self, place: int, hub: int) -> _Attempt:
        """Return it with another hub of one cluster."""
        return replace(self, hubs=[*self.hubs[:place], hub, *self.hubs[place + 1 :]])

    def parents(self) -> Ints:
        """Return the hub of each region, -1 of the one in the middle."""
        found = np.full(sum(map(len, self.clusters)), -1)
        for hub, cluster in zip(self.hubs, self.clusters, strict=True):
            found[list(cluster)] = hub
        top = self.hubs[self.middle]
        found[list(self.hubs)] = top
        found[top] = -1
        return found

    def candidate(self) -> Candidate:
        """Return the graph."""
        top = self.hubs[self.middle]
        links = tuple((int(hub), region) for region, hub in enumerate(self.parents()) if hub >= 0)
        return Candidate((top, *(hub for hub in self.hubs if hub != top)), links)


def _seconds(net: Hops, attempts: Sequence[_Attempt]) -> Floats:
    return trees_seconds(net, np.array([attempt.parents() for attempt in attempts]))


def _central(net: Hops, cluster: Sequence[int]) -> list[int]:
    """Return members by their distance: to the others of the cluster, then to all regions."""
    inside, outside = net.weights[np.ix_(cluster, cluster)].max(axis=1), net.weights[cluster].sum(axis=1)
    return [cluster[place] for place in np.lexsort((outside, inside))[:_RIVAL_HUBS]]


def _clusterings(links: Links) -> Iterator[list[list[int]]]:
    """Yield clusterings of the regions: by cloud, and by round-trip time in two to four clusters (single linkage).

    Single linkage is the minimum spanning tree by round trip without its longest edges (Gower and Ross 1969).
    """
    n = len(links.names)
    if n < 4:
        return
    seen = set()
    by_cloud: dict[str, list[int]] = {}
    for i, name in enumerate(links.names):
        by_cloud.setdefault(links.clouds.get(name, ""), []).append(i)
    trips = np.triu(links.rtt)
    edges = sorted(spanning_edges(trips + trips.T, links.there))
    found = [sorted(by_cloud.values())]
    for count in range(2, _MOST_CLUSTERS + 1):
        kept = np.zeros((n, n), np.bool_)
        for _, p, q in edges[: n - count]:
            kept[p, q] = kept[q, p] = True
        found.append(components(kept))
    for clusters in found:
        key = tuple(map(tuple, clusters))
        if 2 <= len(clusters) < n and len(clusters) <= 2 * _MOST_CLUSTERS and key not in seen:
            seen.add(key)
            yield clusters


KIND = TopologyKind("two-level", _find)
