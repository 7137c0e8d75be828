"""Folders with short paths for sockets: the path of a unix socket has at most 107 bytes, a state directory's may be
longer."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from geofed_pb.errors import GeofedError

__all__ = ["remove_short_folder", "short_folder"]

_PREFIX = "geofed-gw-"
"""Prefix of the folders' names."""
_MAX_BASE_BYTES = 40
"""Longest path of the parent folder; names that libraries append (``/pymp-abcdefgh/listener-abcdefgh``) must fit,
too."""
_FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")
"""Parent folders that are tried after the default one."""


def short_folder(record: Path) -> Path:
    """Create a folder with a short path that only this user can enter.

    ``record``: a file for its path, with which the next process deletes the folder if this one is killed.

    Raises ``GeofedError("CONFIG_INVALID")`` if no parent folder can be used.
    """
    remove_short_folder(record)
    tried = []
    for base in dict.fromkeys((tempfile.gettempdir(), *_FALLBACKS)):
        if len(os.fsencode(base)) > _MAX_BASE_BYTES:
            tried.append(f"{base}: longer than {_MAX_BASE_BYTES} bytes")
            continue
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        except OSError as error:
            tried.append(f"{base}: {error.strerror}")
            continue
        record.write_text(folder)
        return Path(folder)
    text = f"cannot create a folder with a short path for sockets ({'; '.join(tried)})"
    raise GeofedError("CONFIG_INVALID", text, hint="set TMPDIR to a short path that can be written to, like /tmp")


def remove_short_folder(record: Path) -> None:
    """Delete the folder whose path is in the record file, and the file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        folder = Path(record.read_text())
        # Only folders of this kind are deleted, whatever the record contains.
        if folder.name.startswith(_PREFIX) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        record.unlink()
