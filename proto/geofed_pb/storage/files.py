"""Measures and removes files. A file that vanishes meanwhile is not an error."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.storage.retention import Stored, totals

__all__ = ["Found", "found", "is_nearly_full", "left_after", "remove", "reserved_bytes", "used_bytes"]

_log = logging.getLogger("geofed.storage")
_RESERVED_BYTES = 1 << 30
"""Space of a disk that uploads and functions leave to the daemon; less on a small disk."""
_RESERVED_SHARE = 0.05
"""Largest share of the disk that is reserved."""


@dataclass(frozen=True)
class Found:
    """A file, or a folder with all that is in it."""

    path: Path
    bytes: int
    """Space that it takes on the disk."""
    changed_at: float
    """Unix time of the latest change in it."""


def found(folder: Path, pattern: str = "*") -> list[Found]:
    """Return the files and folders in a folder whose names match. Blocks: it looks at everything in them."""
    return [held for path in sorted(folder.glob(pattern)) if (held := _measured(path)) is not None]


def used_bytes(path: Path) -> int:
    """Return the space that a file or folder takes on the disk. Blocks: it looks at everything in it."""
    held = _measured(path)
    return held.bytes if held is not None else 0


def reserved_bytes(folder: Path) -> int:
    """Return the space on a folder's disk that is left to the daemon. Raises ``OSError``."""
    system = os.statvfs(folder)
    return min(_RESERVED_BYTES, int(system.f_blocks * system.f_frsize * _RESERVED_SHARE))


def is_nearly_full(folder: Path, more_bytes: int = 0) -> bool:
    """Whether the disk of a folder would have less space left than is reserved, with so many bytes more on it.

    Raises ``OSError``.
    """
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize - more_bytes < reserved_bytes(folder)


def _measured(path: Path) -> Found | None:
    """None: it is not there any more."""
    stats = [stat for one in _below(path) if (stat := _stat(one)) is not None]
    if not stats:
        return None
    # st_blocks counts units of 512 bytes.
    return Found(path, sum(stat.st_blocks for stat in stats) * 512, max(stat.st_mtime for stat in stats))


def _below(path: Path) -> Iterator[str]:
    """Yield a path and, if it is a folder, all files in it."""
    yield str(path)
    for place, _, names in os.walk(path) if not path.is_symlink() else ():
        yield from (os.path.join(place, name) for name in names)


def _stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.lstat(path)
    return None


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; one that is not there is removed already.

    Raises ``OSError``.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        if os.path.lexists(path):
            # Something in the folder was removed by another process meanwhile.
            shutil.rmtree(path, ignore_errors=True)


def left_after(items: Iterable[Stored], removal: Callable[[Stored], None]) -> list[Stored]:
    """Remove items and log what that has freed; return those that could not be removed, which are logged, too."""
    left, gone = [], []
    for item in items:
        try:
            removal(item)
        except OSError as error:
            _log.warning("%s %s cannot be removed yet: %s", item.kind, item.name, error)
            left.append(item)
        else:
            gone.append(item)
    for total in totals(gone, {}, 0.0):
        _log.info("removed: %d %s, %d bytes", total.count, total.kind, total.bytes)
    return left
