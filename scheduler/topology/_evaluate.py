"""The topology: mesh, star, tree, ring or star of stars, by predicted time and egress.

No fixed choice is best over real grids (Skyplane's, NSDI 2023): the model's size, the number of regions and the
asymmetry of the links decide, so all kinds are evaluated (`_flood`) and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations
from typing import TypeVar

import numpy as np

from scheduler._link import LinkTable, line_bytes
from scheduler.topology import mesh, partial_mesh, ring, star, tree, two_level
from scheduler.topology._contract import Candidate, Network, TopologyKind, components
from scheduler.topology._exchange_time import MANY, Links, carried_updates, links_among, mesh_seconds

__all__ = [
    "Topologies",
    "Topology",
    "choose_again",
    "choose_topology",
    "evaluate_over",
    "evaluate_topologies",
    "evaluate_topology",
    "topologies_over",
    "topology_kind",
    "topology_kinds",
]

Name = TypeVar("Name", str, int)

_KINDS: dict[str, TopologyKind] = {one.KIND.name: one.KIND for one in (mesh, partial_mesh, star, tree, ring, two_level)}
"""Kinds by name, in the order in which they are preferred where they are equally good."""
MUCH_THE_SAME = 1.05
"""Ratio to the fastest up to which a cheaper topology is preferred."""
RECHOICE_GAIN = 0.2
"""Share of the exchange's time that another topology must save."""
RECHOICE_MEASUREMENTS = 3
"""Number of successive measurements that must agree before the topology changes."""


@dataclass(frozen=True)
class Topology:
    """The pairs of regions that exchange directly, and the predicted time of a round's exchange."""

    kind: str
    """Name of its kind."""
    hubs: tuple[str, ...]
    """Hub of a star; of two levels the hub of the hubs, then those of the other clusters; else empty."""
    links: tuple[tuple[str, str], ...]
    """Neighbours: pairs in order, sorted."""
    seconds: float
    """Seconds from the last encoded update until every region has received every update; without coding."""
    usd_per_round: float
    """Cost of egress."""
    update_bytes: int = 0
    """Size of one region's encoded update."""
    busiest_updates: int = 0
    """Updates that the region which handles most sends and receives in a round."""
    longest_rtt_seconds: float = 0.0
    """Round-trip time of the link on which it is longest."""
    least_bytes_per_second: float = math.inf
    """Rate of the slowest link."""
    busy_seconds: float = 0.0
    """Seconds for which a round's updates occupy the link that they occupy longest."""

    @cached_property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes of a round by source and destination, as they are metered."""
        names = sorted(set(chain.from_iterable(self.links)))
        if 2 * len(self.links) == len(names) * (len(names) - 1):
            found = {name: dict.fromkeys(names, self.update_bytes) for name in names}
            for name, own in found.items():
                del own[name]
            return found
        found = {name: {} for name in names}
        for (p, q), updates in sorted(carried_updates(_neighbours(names, self.links)).items()):
            found[names[p]][names[q]] = updates * self.update_bytes
        return found

    @property
    def name(self) -> str:
        """Name in plans: "mesh", "star via eu-west", "two-level via eu-west, tokyo"."""
        return f"{self.kind} via {', '.join(self.hubs)}" if self.hubs else self.kind


def topology_kinds() -> tuple[str, ...]:
    """Return the names of the topologies that a job file may give."""
    return tuple(kind.name for kind in _KINDS.values() if kind.offered)


def topology_kind(name: str) -> TopologyKind:
    """Return the kind of that name. Raises ``KeyError`` if it is unknown."""
    return _KINDS[name]


@dataclass(frozen=True)
class Topologies:
    """The best topology of every kind, and the kinds that are impossible."""

    possible: tuple[Topology, ...]
    """In the order of preference; empty where the regions are not connected."""
    impossible: dict[str, str]
    """Reasons by kind."""
    graphs: Mapping[str, Candidate | str] = field(default_factory=dict)
    """What was found by kind: a graph, or why there is none."""
    loads: Mapping[str, _Load] = field(default_factory=dict)
    """What the links of each graph carry."""


@dataclass(frozen=True)
class _Load:
    """What the links of a graph carry, whatever the size of an update."""

    pairs: tuple[tuple[str, str], ...]
    """Neighbours by name."""
    neighbours: Sequence[Sequence[int]]
    """Of each region; empty: all others."""
    usd_per_gb: float
    """Sum over the updates that all links carry."""
    busiest: int
    """As `Topology.busiest_updates`."""
    longest_rtt_seconds: float
    least_bytes_per_second: float
    busiest_per_rate: float
    """Updates that a link carries in a round over its rate, where that is most."""


def evaluate_topologies(
    regions: Sequence[str], table: LinkTable, update_bytes: int, clouds: Mapping[str, str] | None = None
) -> Topologies:
    """Return the fastest topology of each kind (`topologies_over`). Raises ValueError for no regions."""
    if not regions:
        raise ValueError("a topology needs a region")
    return topologies_over(links_among(sorted(regions), table, clouds), update_bytes)


def topologies_over(links: Links, update_bytes: int, before: Topologies | None = None) -> Topologies:
    """Return the fastest topology of each kind, or, if there are more than `MANY` regions, the same graphs as those
    found ``before`` for another size.

    `update_bytes` is the size of one region's encoded update. Regions are neighbours only where the table has both
    directions; where pairs are missing, all existing ones make a partial mesh, if it reaches every region in two hops.
    The best star is found among all hubs, the best ring of up to nine regions among all orders, beyond that by search.
    The tree is the minimum spanning tree by the time of one update. Two levels are searched over a few clusterings
    (that by cloud is one of them) and their hubs.
    """
    if len(links.names) == 1:
        return Topologies((Topology("mesh", (), (), 0.0, 0.0),), {})
    network = Network(links, links.hops(update_bytes))
    if apart := _why_apart(links):
        return Topologies((), dict.fromkeys(topology_kinds(), apart))
    if before is None or network.size <= MANY:
        graphs = {name: kind.find(network) for name, kind in _KINDS.items()}
    else:
        graphs = dict(before.graphs)
    possible, impossible, loads = list[Topology](), dict[str, str](), dict[str, _Load]()
    for name, found in graphs.items():
        if isinstance(found, Candidate):
            same = before is not None and found == before.graphs[name]
            loads[name] = before.loads[name] if before is not None and same else _load(found, links)
            possible.append(_topology(name, found, loads[name], network, update_bytes))
        elif _KINDS[name].offered:
            impossible[name] = found
    return Topologies(tuple(possible), impossible, graphs, loads)


def choose_topology(evaluated: Topologies) -> Topology | None:
    """Return the fastest, for a job that runs; if one at most 5 % slower is cheaper, that one. None if there is none.

    A plan's topology is chosen by its time and money as a whole (`scheduler.plan`).
    """
    order = list(_KINDS)

    def price(topology: Topology) -> tuple[float, float, int]:
        # Rounded, so that equal sums of prices in another order are equal.
        return round(topology.usd_per_round, 12), topology.seconds, order.index(topology.kind)

    fastest = min((topology.seconds for topology in evaluated.possible), default=0.0)
    return min((one for one in evaluated.possible if one.seconds <= fastest * MUCH_THE_SAME), key=price, default=None)


def evaluate_topology(current: Topology, table: LinkTable, update_bytes: int) -> Topology | None:
    """Return the same neighbours over other links, or with another size; None where a link no longer exists."""
    return evaluate_over(
        current, links_among(sorted({name for link in current.links for name in link}), table), update_bytes
    )


def evaluate_over(current: Topology, links: Links, update_bytes: int) -> Topology | None:
    """Return the same, over links among the topology's regions."""
    number = {name: place for place, name in enumerate(links.names)}
    complete = 2 * len(current.links) == len(number) * (len(number) - 1)
    pairs = () if complete else tuple((number[a], number[b]) for a, b in current.links)
    if not (_all_there(links) if complete else links.there[tuple(np.array(pairs).T)].all()):
        return None
    candidate = Candidate(tuple([number[hub] for hub in current.hubs]), pairs)
    network = Network(links, links.hops(update_bytes))
    return _topology(current.kind, candidate, _load(candidate, links, current.links), network, update_bytes)


def choose_again(current: Topology, measured: Sequence[LinkTable], update_bytes: int) -> Topology | None:
    """Return another topology if the links have changed for long enough; None: keep the current one.

    `measured` holds the link tables of successive measurements, the newest last. The fastest topology of the newest
    replaces the current one only if it would save more than a fifth of the exchange's time in each of the last three,
    so that neither a short disturbance nor two similar topologies cause a change. A topology that has lost a link takes
    infinitely long.
    """
    recent = measured[-RECHOICE_MEASUREMENTS:]
    if len(recent) < RECHOICE_MEASUREMENTS or not current.links:
        return None
    names = sorted({name for link in current.links for name in link})
    best = choose_topology(evaluate_topologies(names, recent[-1], update_bytes))
    if best is None or best.links == current.links:
        return None
    for table in recent:
        now, then = (evaluate_topology(topology, table, update_bytes) for topology in (current, best))
        if then is None or (now is not None and then.seconds >= (1 - RECHOICE_GAIN) * now.seconds):
            return None
    return best


def _load(candidate: Candidate, links: Links, pairs: tuple[tuple[str, str], ...] = ()) -> _Load:
    """Return what a graph's links carry; ``pairs``: its neighbours by name, where they are known."""
    names, size = links.names, len(links.names)
    if not candidate.links or 2 * len(candidate.links) == size * (size - 1):
        # Each link carries one update: nothing needs to be counted.
        longest, slowest = float((links.rtt * links.there).max()), float(links.rate[links.there].min(initial=math.inf))
        usd = float(links.usd_per_gb.sum())
        return _Load(pairs or tuple(combinations(names, 2)), (), usd, 2 * (size - 1), longest, slowest, 1 / slowest)
    neighbours = _neighbours(range(size), candidate.links)
    carried = carried_updates(neighbours)
    source, target = np.array(list(carried)).T
    updates, paid = np.array(list(carried.values())), np.zeros((size, size))
    paid[source, target] = updates * links.usd_per_gb[source, target]
    handled = np.bincount(source, updates, size) + np.bincount(target, updates, size)
    used = source[updates > 0], target[updates > 0]
    return _Load(
        pairs=pairs or tuple(sorted((names[min(link)], names[max(link)]) for link in candidate.links)),
        neighbours=neighbours,
        usd_per_gb=float(paid.sum()),
        busiest=int(handled.max()),
        longest_rtt_seconds=float(links.rtt[used].max(initial=0.0)),
        least_bytes_per_second=float(links.rate[used].min(initial=math.inf)),
        busiest_per_rate=float((updates / links.rate[source, target]).max(initial=0.0)),
    )


def _topology(kind: str, candidate: Candidate, load: _Load, network: Network, update_bytes: int) -> Topology:
    """Return a graph's figures for updates of a size."""
    hops, neighbours = network.hops, load.neighbours
    return Topology(
        kind=kind,
        hubs=tuple(network.names[hub] for hub in candidate.hubs),
        links=load.pairs,
        seconds=topology_kind(kind).seconds(hops, neighbours) if neighbours else mesh_seconds(hops),
        # As it is metered: what the line adds below that, no meter of ours sees.
        usd_per_round=load.usd_per_gb * update_bytes / 1e9,
        update_bytes=update_bytes,
        busiest_updates=load.busiest,
        longest_rtt_seconds=load.longest_rtt_seconds,
        least_bytes_per_second=load.least_bytes_per_second,
        busy_seconds=load.busiest_per_rate * line_bytes(update_bytes),
    )


def _all_there(links: Links) -> bool:
    return int(links.there.sum()) == len(links.names) * (len(links.names) - 1)


def _neighbours(names: Sequence[Name], links: Iterable[tuple[Name, Name]]) -> list[list[int]]:
    """Return the neighbours of each region, by the regions' numbers."""
    number = {name: place for place, name in enumerate(names)}
    found: list[list[int]] = [[] for _ in names]
    for a, b in links:
        found[number[a]].append(number[b])
        found[number[b]].append(number[a])
    return found


def _why_apart(links: Links) -> str:
    """Return why the regions are not connected; empty if they are."""
    parts = components(links.there)
    if len(parts) == 1:
        return ""
    one, other = (", ".join(links.names[i] for i in part) for part in (parts[0], sorted(chain(*parts[1:]))))
    return f"no path joins {one} with {other}"
