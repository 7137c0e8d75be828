"""What is a key, and what is told of keys that do not come."""

from __future__ import annotations

import re
from collections.abc import Collection

from geofed_pb.errors import GeofedError

__all__ = ["checked_key", "fence_key", "late"]

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_NAMED = 5


def checked_key(key: str) -> str:
    """The key; raises ``GeofedError("FRAME_INVALID")`` for what is none."""
    if not _KEY.fullmatch(key):
        raise GeofedError("FRAME_INVALID", f"not a channel key: {key!r}")
    return key


def late(missing: Collection[str], seconds: float) -> GeofedError:
    """What ``wait`` raises when its time is over."""
    named = ", ".join(sorted(missing)[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return GeofedError("CHANNEL_TIMEOUT", f"not in the channel after {seconds:g} s: {named}{more}")


def fence_key(attempt: int) -> str:
    """Key of the sign that an attempt of a partition's workers is over."""
    return f"fence/{attempt}"
