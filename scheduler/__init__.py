"""Every decision of geofed, as pure functions over dataclasses: no I/O, no clock, nothing of the other rooms."""

from scheduler._estimate import estimate
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

__all__ = [
    "Alternative",
    "Capacity",
    "Cost",
    "Dataset",
    "Declined",
    "Demand",
    "Estimate",
    "Link",
    "Partition",
    "Plan",
    "Prices",
    "Range",
    "Reason",
    "Region",
    "Snapshot",
    "Split",
    "estimate",
    "plan",
]
