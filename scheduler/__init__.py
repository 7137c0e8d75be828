"""Every decision of geofed, as pure functions over dataclasses: no I/O, no clock, nothing of the other rooms."""

from scheduler._estimate import estimate, step_seconds
from scheduler._link import LinkTable, Path, link_table
from scheduler._model import (
    Alternative,
    Capacity,
    Cost,
    Dataset,
    Declined,
    Demand,
    Estimate,
    Link,
    Partition,
    Plan,
    Prices,
    Range,
    Reason,
    Region,
    Snapshot,
    Split,
)
from scheduler._plan import plan
from scheduler._restaff import Restaffing, Staffed, pace, paces, restaff
from scheduler._topology import (
    Topologies,
    Topology,
    choose_topology,
    evaluate_topology,
    rechosen,
    weigh_topologies,
)

__all__ = [
    "Alternative",
    "Capacity",
    "Cost",
    "Dataset",
    "Declined",
    "Demand",
    "Estimate",
    "Link",
    "LinkTable",
    "Partition",
    "Path",
    "Plan",
    "Prices",
    "Range",
    "Reason",
    "Region",
    "Restaffing",
    "Snapshot",
    "Split",
    "Staffed",
    "Topologies",
    "Topology",
    "choose_topology",
    "estimate",
    "evaluate_topology",
    "link_table",
    "pace",
    "paces",
    "plan",
    "rechosen",
    "restaff",
    "step_seconds",
    "weigh_topologies",
]
