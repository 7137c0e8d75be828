"""Keys of a channel, and the error for keys that do not arrive."""

from __future__ import annotations

import re
from collections.abc import Collection

from geofed_pb.errors import GeofedError

__all__ = ["checked_key", "fence_key", "late"]

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_MAX_NAMED = 5
"""Missing keys that an error lists."""


def checked_key(key: str) -> str:
    """Return the key. Raises ``GeofedError("FRAME_INVALID")`` if it is invalid."""
    if not _KEY.fullmatch(key):
        raise GeofedError("FRAME_INVALID", f"not a channel key: {key!r}")
    return key


def late(missing: Collection[str], seconds: float) -> GeofedError:
    """Return the error that ``wait`` raises after its timeout."""
    named = ", ".join(sorted(missing)[:_MAX_NAMED])
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return GeofedError("CHANNEL_TIMEOUT", f"not in the channel after {seconds:g} s: {named}{more}")


def fence_key(attempt: int) -> str:
    """Return the key whose existence means that an attempt of a partition's workers is over."""
    return f"fence/{attempt}"
