"""Placement of many jobs over many regions: least cost under deadlines and residency. Pure, as all of the scheduler."""

from scheduler.lab.placement._audit import audit
from scheduler.lab.placement._model import (
    Bill,
    Device,
    PlacedPart,
    Placement,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementRefusal,
    PlacementRegion,
    PlacementShard,
    UnknownPriceError,
    federation,
)
from scheduler.lab.placement._place import Index, place, place_fastest

__all__ = [
    "Bill",
    "Device",
    "Index",
    "PlacedPart",
    "Placement",
    "PlacementFederation",
    "PlacementJob",
    "PlacementOutcome",
    "PlacementRefusal",
    "PlacementRegion",
    "PlacementShard",
    "UnknownPriceError",
    "audit",
    "federation",
    "place",
    "place_fastest",
]
