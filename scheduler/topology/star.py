"""The topology ``star``: every region exchanges with one hub, the best of all."""

from __future__ import annotations

from scheduler.topology._contract import Candidate, Network, TopologyKind, links_seconds

__all__ = ["KIND"]


def _find(network: Network) -> Candidate | str:
    net, n = network.hops, network.size
    best: tuple[float, Candidate] | None = None
    for hub in range(n):
        if sum(net.there[hub]) < n - 1:
            continue
        links = tuple((hub, other) for other in range(n) if other != hub)
        seconds = links_seconds(net, links)
        if best is None or seconds < best[0]:
            best = seconds, Candidate((hub,), links)
    return best[1] if best else "no region has a direct path to all others"


KIND = TopologyKind("star", _find)
