"""The best graph of each kind over some links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations, permutations
from typing import TYPE_CHECKING

from scheduler._flood import Hops, ring_times, tree_seconds
from scheduler._link import LinkTable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Candidate", "candidates"]

EXACT_RING = 9
"""Up to so many regions all orders of a ring are compared: 20,160."""
MOST_CLUSTERS = 4
RIVAL_HUBS = 2
"""Regions that are tried as the hub of a cluster."""
MOST_SWEEPS = 20


@dataclass(frozen=True)
class Candidate:
    """A graph over numbered regions."""

    kind: str
    hubs: tuple[int, ...]
    links: tuple[tuple[int, int], ...]


def candidates(
    names: Sequence[str], table: LinkTable, net: Hops, clouds: Mapping[str, str]
) -> tuple[list[Candidate], dict[str, str]]:
    """The fastest graph of each kind that the links allow, and why there is none of the other kinds.

    For two and more regions; where the links do not connect them, all kinds are impossible.
    """
    n = len(names)
    apart = _apart(names, net)
    if apart:
        return [], dict.fromkeys(("mesh", "star", "tree", "ring", "two-level"), apart)
    found, impossible = [], {}
    missing = [(p, q) for p, q in combinations(range(n), 2) if not net.there[p][q]]
    if missing:
        p, q = missing[0]
        more = f", nor have {len(missing) - 1} more pairs" if len(missing) > 1 else ""
        impossible["mesh"] = f"{names[p]} and {names[q]} have no direct path{more}"
        if all(any(net.there[p][r] and net.there[r][q] for r in range(n)) for p, q in missing):
            there = tuple((p, q) for p, q in combinations(range(n), 2) if net.there[p][q])
            found.append(Candidate("partial-mesh", (), there))
    else:
        found.append(Candidate("mesh", (), tuple(combinations(range(n), 2))))
    star = _best_star(net)
    if star is None:
        impossible["star"] = "no region has a direct path to all others"
    else:
        found.append(star)
    found.append(Candidate("tree", (), _spanning_tree(net)))
    ring = _best_ring(net)
    if ring is None:
        impossible["ring"] = "no way around with direct paths was found" if n > 2 else "two regions make no ring"
    else:
        found.append(ring)
    two_level = _best_two_level(names, table, net, clouds)
    if two_level is None:
        impossible["two-level"] = "no clusters with a hub each were found" if n > 3 else "needs four regions or more"
    else:
        found.append(two_level)
    return found, impossible


def _graph(net: Hops) -> object:
    import networkx as nx

    graph = nx.Graph()
    n = len(net)
    graph.add_nodes_from(range(n))
    graph.add_weighted_edges_from((p, q, net.weight(p, q)) for p, q in combinations(range(n), 2) if net.there[p][q])
    return graph


def _apart(names: Sequence[str], net: Hops) -> str:
    """Why the regions are not connected; empty where they are."""
    import networkx as nx

    parts = sorted(sorted(part) for part in nx.connected_components(_graph(net)))
    if len(parts) == 1:
        return ""
    one, other = (", ".join(names[i] for i in part) for part in (parts[0], sorted(chain(*parts[1:]))))
    return f"no path joins {one} with {other}"


def _spanning_tree(net: Hops) -> tuple[tuple[int, int], ...]:
    """Minimum spanning tree by the time of one update (Kruskal)."""
    import networkx as nx

    edges = nx.minimum_spanning_edges(_graph(net), algorithm="kruskal", data=False)
    return tuple(sorted((min(p, q), max(p, q)) for p, q in edges))


def _best_star(net: Hops) -> Candidate | None:
    n = len(net)
    best: tuple[float, Candidate] | None = None
    for hub in range(n):
        if sum(net.there[hub]) < n - 1:
            continue
        links = tuple((hub, other) for other in range(n) if other != hub)
        seconds = _links_seconds(net, links)
        if best is None or seconds < best[0]:
            best = seconds, Candidate("star", (hub,), links)
    return best[1] if best else None


def _links_seconds(net: Hops, links: Sequence[tuple[int, int]]) -> float:
    neighbours: list[list[int]] = [[] for _ in range(len(net))]
    for p, q in links:
        neighbours[p].append(q)
        neighbours[q].append(p)
    return tree_seconds(net, neighbours)


# --- rings


def _best_ring(net: Hops) -> Candidate | None:
    n = len(net)
    if n < 3:
        return None
    orders = _all_orders(n) if n <= EXACT_RING else _improved(net, _greedy_orders(net))
    times = ring_times(net, orders)
    order = [int(place) for place in orders[times.argmin()]]
    links = tuple((order[i], order[(i + 1) % n]) for i in range(n))
    if not all(net.there[p][q] for p, q in links):
        return None
    return Candidate("ring", (), links)


@lru_cache(maxsize=EXACT_RING)
def _all_orders(n: int) -> npt.NDArray[np.intp]:
    """Every ring once: from region 0, in one of the two directions."""
    import numpy as np

    rings = [(0, *rest) for rest in permutations(range(1, n)) if n < 3 or rest[0] < rest[-1]]
    return np.asarray(rings)


def _greedy_orders(net: Hops) -> npt.NDArray[np.intp]:
    """From each region always on to the nearest that is left."""
    import numpy as np

    n = len(net)
    orders = []
    for first in range(n):
        order, left = [first], set(range(n)) - {first}
        while left:
            nearest = min(left, key=lambda other: (net.weight(order[-1], other), other))
            order.append(nearest)
            left.remove(nearest)
        orders.append(order)
    return np.asarray(orders)


def _improved(net: Hops, orders: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """2-opt from the best two: the reversal of a stretch that helps most, until none does (Croes 1958)."""
    import numpy as np

    n = orders.shape[1]
    places = np.arange(n)
    # Row (i, j) lists the places of a ring after the stretch i..j is reversed.
    moves = np.asarray(
        [np.where((places < i) | (places > j), places, i + j - places) for i, j in combinations(range(1, n), 2)]
    )
    times = ring_times(net, orders)
    improved = []
    for start in np.argsort(times)[:2]:
        order, seconds = orders[start], float(times[start])
        for _ in range(MOST_SWEEPS):
            tried = order[moves]
            after = ring_times(net, tried)
            if after.min() >= seconds:
                break
            order, seconds = tried[after.argmin()], float(after.min())
        improved.append(order)
    return np.asarray(improved, np.intp)


# --- two levels


def _best_two_level(names: Sequence[str], table: LinkTable, net: Hops, clouds: Mapping[str, str]) -> Candidate | None:
    """A hub for each cluster, one of the hubs in the middle: the fastest of a small search."""
    best: tuple[float, Candidate] | None = None
    for clusters in _clusterings(names, table, net, clouds):
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
    return best[1] if best else None


def _two_level(
    net: Hops, clusters: Sequence[Sequence[int]], hubs: Sequence[int], middle: int
) -> tuple[float, Candidate] | None:
    top = hubs[middle]
    links = [(top, hub) for hub in hubs if hub != top]
    links += [(hub, member) for hub, cluster in zip(hubs, clusters, strict=True) for member in cluster if member != hub]
    if not all(net.there[p][q] for p, q in links):
        return None
    others = tuple(hub for hub in hubs if hub != top)
    return _links_seconds(net, links), Candidate("two-level", (top, *others), tuple(links))


def _central(net: Hops, cluster: Sequence[int]) -> list[int]:
    """Members by their reach: to the others of the cluster, then to all regions."""

    def reach(member: int) -> tuple[float, float]:
        inside = max((net.weight(member, other) for other in cluster if other != member), default=0.0)
        outside = sum(net.weight(member, other) for other in range(len(net)))
        return inside, outside

    return sorted(cluster, key=reach)[:RIVAL_HUBS]


def _clusterings(
    names: Sequence[str], table: LinkTable, net: Hops, clouds: Mapping[str, str]
) -> Iterator[list[list[int]]]:
    """By cloud, and by round trip: single linkage in two to four clusters.

    Single linkage is the minimum spanning tree by round trip without its longest edges (Gower and Ross 1969).
    """
    import networkx as nx

    n = len(names)
    if n < 4:
        return
    seen = set()
    by_cloud: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        by_cloud.setdefault(clouds.get(name, ""), []).append(i)
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    for p, q in combinations(range(n), 2):
        if net.there[p][q]:
            graph.add_edge(p, q, weight=table[names[p], names[q]].rtt_ms)
    spanning = nx.minimum_spanning_edges(graph, data=True)
    edges = sorted((link["weight"], p, q) for p, q, link in spanning)
    found = [sorted(by_cloud.values())]
    for count in range(2, MOST_CLUSTERS + 1):
        forest = nx.Graph()
        forest.add_nodes_from(range(n))
        forest.add_edges_from((p, q) for _, p, q in edges[: n - count])
        found.append(sorted(sorted(part) for part in nx.connected_components(forest)))
    for clusters in found:
        key = tuple(map(tuple, clusters))
        if 2 <= len(clusters) < n and len(clusters) <= 2 * MOST_CLUSTERS and key not in seen:
            seen.add(key)
            yield clusters
