"""Parses and formats Kubernetes quantities and Go durations, the notations of OpenFaaS for sizes and times."""

from __future__ import annotations

import re
from datetime import timedelta

__all__ = ["format_bytes", "format_duration", "parse_cpu", "parse_duration", "parse_memory_bytes"]

_MEMORY_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_DURATION_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")


def parse_memory_bytes(quantity: str) -> int:
    """Bytes of a quantity such as ``128Mi`` or ``1.5G``; raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?|[KMGT]i)", quantity.strip())
    if not found:
        raise ValueError(f"{quantity!r} is not an amount of memory; write it like 512Mi or 2Gi")
    return int(float(found[1]) * _MEMORY_UNITS[found[2]])


def parse_cpu(quantity: str) -> float:
    """Cores of a quantity such as ``100m`` or ``2``; raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", quantity.strip())
    if not found:
        raise ValueError(f"{quantity!r} is not an amount of CPU; write it like 500m or 2")
    return float(found[1]) / (1000.0 if found[2] else 1.0)


def parse_duration(text: str) -> timedelta:
    """A Go duration (``1m30s``, ``500ms``) or bare seconds (``30``); raises ``ValueError``."""
    stripped = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        return timedelta(seconds=float(stripped))
    parts = _DURATION_PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"{text!r} is not a duration; write it like 30s, 1m30s or 500ms")
    return timedelta(seconds=sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts))


def format_duration(duration: timedelta) -> str:
    """The duration in Go notation, whole milliseconds, rounded up so that a positive one never becomes zero."""
    milliseconds = -(-duration // timedelta(milliseconds=1))
    if milliseconds % 1000 == 0:
        return f"{milliseconds // 1000}s"
    return f"{milliseconds}ms"


def format_bytes(size_bytes: int) -> str:
    """Format a size for messages: ``312 MiB``."""
    return f"{size_bytes / 2**20:.0f} MiB" if size_bytes >= 2**20 else f"{size_bytes} bytes"
