"""Durable state of the control plane, in SQLite or PostgreSQL."""

from control_plane.store._copying import Line, copy_rows, from_line, replace_rows, to_line
from control_plane.store._database import OutcomeUnknown
from control_plane.store._open import open_store, sqlite_file, upgrade_store
from control_plane.store._queries import COMMANDS_AT_ONCE, HISTORIES
from control_plane.store._records import (
    AuditRow,
    Change,
    CommandRow,
    Committed,
    Cursors,
    Deletion,
    EventRow,
    InvitationRow,
    JobProgress,
    JobRow,
    JobUse,
    Leadership,
    LogRow,
    RegionRow,
    Revocation,
    RowUse,
    RunRow,
    UserRow,
    WeightRow,
)
from control_plane.store._store import Store

__all__ = [
    "COMMANDS_AT_ONCE",
    "HISTORIES",
    "AuditRow",
    "Change",
    "CommandRow",
    "Committed",
    "Cursors",
    "Deletion",
    "EventRow",
    "InvitationRow",
    "JobProgress",
    "JobRow",
    "JobUse",
    "Leadership",
    "Line",
    "LogRow",
    "OutcomeUnknown",
    "RegionRow",
    "Revocation",
    "RowUse",
    "RunRow",
    "Store",
    "UserRow",
    "WeightRow",
    "copy_rows",
    "from_line",
    "open_store",
    "replace_rows",
    "sqlite_file",
    "to_line",
    "upgrade_store",
]
