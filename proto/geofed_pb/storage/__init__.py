"""What a daemon keeps on its disk: how much that is, and what is removed when. Both daemons sweep by it."""

from geofed_pb.storage.files import Found, found, is_nearly_full, left_after, remove, reserved_bytes, used_bytes
from geofed_pb.storage.retention import Keep, Stored, Total, due, due_at, totals

__all__ = [
    "Found",
    "Keep",
    "Stored",
    "Total",
    "due",
    "due_at",
    "found",
    "is_nearly_full",
    "left_after",
    "remove",
    "reserved_bytes",
    "totals",
    "used_bytes",
]
