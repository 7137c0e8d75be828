"""Durations as people write them: `90s`, `10m`, `2h`, `1h30m`, `1d`; from a millisecond to ten years."""

from __future__ import annotations

import re
from datetime import timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = timedelta(days=3650)
"""Counted from now, whatever it leads to is a date that every system knows."""
_SHORTEST_SECONDS = 0.001
"""`format_duration` writes whole ones of these."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str) -> timedelta:
    """Read `1h30m`. Raises ``ValueError`` with a sentence for the user where the text is no duration."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration; write it like 30s, 10m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not _SHORTEST_SECONDS <= seconds <= LONGEST.total_seconds():
        raise ValueError(f"{text!r}: a duration is at least 1ms and at most {LONGEST.days}d")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """Write a duration so that `parse_duration` reads the same one."""
    left_ms = round(duration.total_seconds() * 1000)
    text = ""
    for unit in ("d", "h", "m", "s", "ms"):
        count, left_ms = divmod(left_ms, round(_UNITS[unit] * 1000))
        if count:
            text += f"{count}{unit}"
    return text or "0s"
