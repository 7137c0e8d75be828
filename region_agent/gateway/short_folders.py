"""Folders for sockets: a Unix socket's path has 107 bytes at most, and a state directory may be deeper than that."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from geofed_pb.errors import GeofedError

__all__ = ["remove_short_folder", "short_folder"]

_PREFIX = "geofed-gw-"
_LONGEST_BASE = 40
"""Bytes. What libraries put behind it (``/pymp-abcdefgh/listener-abcdefgh``) must fit, too."""
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


def short_folder(record: Path) -> Path:
    """A new folder with a short path that only this user can enter. ``record`` is a file that tells the next process
    of its path: what one that was killed has left goes then.

    Raises ``GeofedError("CONFIG_INVALID")`` where there is no place for one.
    """
    remove_short_folder(record)
    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), *_OTHERS)):
        if len(os.fsencode(base)) > _LONGEST_BASE:
            tried.append(f"{base}: longer than {_LONGEST_BASE} bytes")
            continue
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
            continue
        record.write_text(folder)
        return Path(folder)
    text = f"there is no folder for sockets, whose paths must be short ({'; '.join(tried)})"
    raise GeofedError("CONFIG_INVALID", text, hint="set TMPDIR to a short path that can be written to, like /tmp")


def remove_short_folder(record: Path) -> None:
    """Remove the folder that a record tells of, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        folder = Path(record.read_text())
        # Whatever has been written into the record, nothing else is removed.
        if folder.name.startswith(_PREFIX) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        record.unlink()
