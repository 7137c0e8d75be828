"""Keeps the files of replicas from taking the last space of the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from geofed_pb.storage import used_bytes
from region_agent.gateway.quantities import format_bytes

__all__ = ["full_disk_text", "is_nearly_full", "largest"]

_RESERVED_BYTES = 1 << 30
"""Space that functions leave to the agent and to the parameter servers; less on a small disk."""
_RESERVED_SHARE = 0.05
"""Largest share of the disk that is reserved."""


def _reserved_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return min(_RESERVED_BYTES, int(system.f_blocks * system.f_frsize * _RESERVED_SHARE))


def is_nearly_full(folder: Path) -> bool:
    """Whether the disk of a folder has less space left than functions must leave."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize < _reserved_bytes(folder)


def largest(folders: Mapping[str, Path]) -> tuple[str, int] | None:
    """Return which replica's folder takes the most space, and the bytes; None if none takes a notable part.

    Blocks: it looks at all files.
    """
    used = {name: used_bytes(folder) for name, folder in folders.items()}
    name = max(used, key=used.__getitem__, default="")
    return (name, used[name]) if name and used[name] > _reserved_bytes(folders[name]) else None


def full_disk_text(replica: str, used_bytes: int) -> str:
    """Return the message about a replica that was killed over its files."""
    return f"replica {replica} was killed: its files take {format_bytes(used_bytes)}, and the disk is nearly full"
