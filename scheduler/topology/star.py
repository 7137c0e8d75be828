"""The topology ``star``: every region exchanges with one hub, the best of all or, of many, of the nearest to the
others."""

from __future__ import annotations

from scheduler.topology._contract import Candidate, Network, TopologyKind, links_seconds

__all__ = ["KIND"]

_MOST_HUBS = 32
"""Number of hubs whose stars are compared in full; of more regions these are the ones with the least sum of times to
all others."""


def _find(network: Network) -> Candidate | str:
    net, n = network.hops, network.size
    best: tuple[float, Candidate] | None = None
    hubs = [hub for hub in range(n) if sum(net.there[hub]) >= n - 1]
    if len(hubs) > _MOST_HUBS:
        near = {hub: sum(net.weight(hub, other) for other in range(n) if other != hub) for hub in hubs}
        hubs = sorted(hubs, key=lambda hub: (near[hub], hub))[:_MOST_HUBS]
    for hub in hubs:
        links = tuple((hub, other) for other in range(n) if other != hub)
        seconds = links_seconds(net, links)
        if best is None or seconds < best[0]:
            best = seconds, Candidate((hub,), links)
    return best[1] if best else "no region has a direct path to all others"


KIND = TopologyKind("star", _find)
