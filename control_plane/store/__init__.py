"""Durable state of the control plane, in SQLite or PostgreSQL."""

from control_plane.store._open import open_store
from control_plane.store._records import (
    Change,
    CommandRow,
    Committed,
    Cursors,
    EventRow,
    Invitation,
    JobRow,
    LogRow,
    RegionRow,
    RunRow,
    UserRow,
    WeightRow,
)
from control_plane.store._store import Store

__all__ = [
    "Change",
    "CommandRow",
    "Committed",
    "Cursors",
    "EventRow",
    "Invitation",
    "JobRow",
    "LogRow",
    "RegionRow",
    "RunRow",
    "Store",
    "UserRow",
    "WeightRow",
    "open_store",
]
