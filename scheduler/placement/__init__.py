"""Where many jobs run over many regions: least money under deadlines and residency. Pure, as all of the scheduler."""

from scheduler.placement._audit import audit
from scheduler.placement._baselines import cheapest_single_region, greedy, load_power_matching
from scheduler.placement._model import (
    Bill,
    Device,
    Federation,
    Job,
    Outcome,
    Partition,
    Placement,
    Refusal,
    Region,
    Shard,
    UnknownPriceError,
    federation,
)
from scheduler.placement._place import Index, place, place_fastest

__all__ = [
    "Bill",
    "Device",
    "Federation",
    "Index",
    "Job",
    "Outcome",
    "Partition",
    "Placement",
    "Refusal",
    "Region",
    "Shard",
    "UnknownPriceError",
    "audit",
    "cheapest_single_region",
    "federation",
    "greedy",
    "load_power_matching",
    "place",
    "place_fastest",
]
