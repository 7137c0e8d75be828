"""Keeps the files of replicas from taking the last space of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from geofed_pb.storage import reserved_bytes, used_bytes
from region_agent.gateway.quantities import format_bytes

__all__ = ["full_disk_text", "largest"]


def largest(folders: Mapping[str, Path]) -> tuple[str, int] | None:
    """Return which replica's folder takes the most space, and the bytes; None if none takes a notable part.

    Blocks: it looks at all files.
    """
    used = {name: used_bytes(folder) for name, folder in folders.items()}
    name = max(used, key=used.__getitem__, default="")
    return (name, used[name]) if name and used[name] > reserved_bytes(folders[name]) else None


def full_disk_text(replica: str, used_bytes: int) -> str:
    """Return the message about a replica that was killed over its files."""
    return f"replica {replica} was killed: its files take {format_bytes(used_bytes)}, and the disk is nearly full"
