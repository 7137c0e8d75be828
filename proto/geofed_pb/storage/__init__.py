"""What a daemon keeps on its disk: how much that is, and what is removed when. Both daemons sweep by it."""

from geofed_pb.storage.files import Found, found, left_after, remove, used_bytes
from geofed_pb.storage.retention import Keep, Stored, Total, due, due_at, totals

__all__ = [
    "Found",
    "Keep",
    "Stored",
    "Total",
    "due",
    "due_at",
    "found",
    "left_after",
    "remove",
    "totals",
    "used_bytes",
]
