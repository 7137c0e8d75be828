"""The neighbours in a region's exchange. Each topology is a module of this package; all are evaluated and compared."""

from scheduler.topology._contract import TopologyKind
from scheduler.topology._evaluate import (
    Topologies,
    Topology,
    choose_again,
    choose_topology,
    evaluate_over,
    evaluate_topologies,
    evaluate_topology,
    topologies_over,
    topology_kind,
    topology_kinds,
)
from scheduler.topology._exchange_time import Links, links_among, links_of
from scheduler.topology._rerouting import LinkMeasurement, Rerouting, measured_path, rerouted, with_measurements

__all__ = [
    "LinkMeasurement",
    "Links",
    "Rerouting",
    "Topologies",
    "Topology",
    "TopologyKind",
    "choose_again",
    "choose_topology",
    "evaluate_over",
    "evaluate_topologies",
    "evaluate_topology",
    "links_among",
    "links_of",
    "measured_path",
    "rerouted",
    "topologies_over",
    "topology_kind",
    "topology_kinds",
    "with_measurements",
]
