"""Durable state of the control plane, in SQLite or PostgreSQL."""

from control_plane.store._open import open_store, sqlite_file, upgrade_store
from control_plane.store._records import (
    Change,
    CommandRow,
    Committed,
    Cursors,
    EventRow,
    Invitation,
    JobRow,
    Leadership,
    LogRow,
    RegionRow,
    Revocation,
    RunRow,
    UserRow,
    WeightRow,
)
from control_plane.store._store import OutcomeUnknown, Store

__all__ = [
    "Change",
    "CommandRow",
    "Committed",
    "Cursors",
    "EventRow",
    "Invitation",
    "JobRow",
    "Leadership",
    "LogRow",
    "OutcomeUnknown",
    "RegionRow",
    "Revocation",
    "RunRow",
    "Store",
    "UserRow",
    "WeightRow",
    "open_store",
    "sqlite_file",
    "upgrade_store",
]
