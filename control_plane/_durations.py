"""Durations like `90s`, `10m`, `2h`, `1h30m` and `1d`, from a millisecond to ten years."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = timedelta(days=3650)
"""Longest duration; from now, it leads to a date that every system can represent."""
_SHORTEST_SECONDS = 0.001
"""Shortest duration, and the resolution of `format_duration`."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str) -> timedelta:
    """Parse a duration like `1h30m`. Raises ``ValueError`` with a message for the user."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a valid duration; write it like 30s, 10m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not _SHORTEST_SECONDS <= seconds <= LONGEST.total_seconds():
        raise ValueError(f"{text!r}: a duration is at least 1ms and at most {LONGEST.days}d")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """Format a duration so that `parse_duration` returns the same one."""
    left_ms = round(duration.total_seconds() * 1000)
    text = ""
    for unit in ("d", "h", "m", "s", "ms"):
        count, left_ms = divmod(left_ms, round(_UNITS[unit] * 1000))
        if count:
            text += f"{count}{unit}"
    return text or "0s"


def parse_since(text: str, now: float) -> float:
    """Return the time, in Unix seconds, that is meant by a duration before ``now`` or by a time with its zone.

    Raises ``ValueError`` with a message for the user.
    """
    with suppress(ValueError):
        return now - parse_duration(text).total_seconds()
    return parse_moment(text, "10m", "2026-11-27T18:00:00Z").timestamp()


def parse_moment(text: str, duration: str, moment: str) -> datetime:
    """Parse a time with its zone, where a duration is possible, too.

    Args:
        duration: example of one, for the message.
        moment: example of a time.

    Raises ``ValueError`` with a message for the user.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a duration like {duration} nor a time like {moment}") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; append Z or an offset")
    return found
