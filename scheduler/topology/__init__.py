"""The neighbours in a region's exchange. Each topology is a module of this package; all are evaluated and compared."""

from scheduler.topology._contract import TopologyKind
from scheduler.topology._evaluate import (
    Topologies,
    Topology,
    choose_topology,
    evaluate_over,
    evaluate_topologies,
    evaluate_topology,
    rechosen,
    topologies_over,
    topology_kind,
    topology_kinds,
)
from scheduler.topology._exchange_time import Links, links_among, links_of
from scheduler.topology._rerouting import Rerouting, Sighting, as_seen, measured_path, rerouted

__all__ = [
    "Links",
    "Rerouting",
    "Sighting",
    "Topologies",
    "Topology",
    "TopologyKind",
    "as_seen",
    "choose_topology",
    "evaluate_over",
    "evaluate_topologies",
    "evaluate_topology",
    "links_among",
    "links_of",
    "measured_path",
    "rechosen",
    "rerouted",
    "topologies_over",
    "topology_kind",
    "topology_kinds",
]
