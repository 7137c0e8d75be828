"""Reuse of large files: for a new one the kernel would have to allocate pages, and clear them or find blocks."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from sync.mapped_files import locked

__all__ = ["MIN_BYTES", "SPARE_FOLDER", "BufferPool", "locked"]

SPARE_FOLDER = ".spare"
"""Folder of a channel's spare files."""

MIN_BYTES = 1 << 18
"""Files of smaller values are not reused: writing them again is cheaper."""
_MAX_BYTES = 1 << 30
"""Total size of a channel's spare files, at most, if there is more than one: two models of 500 MB. A choice."""
_MAX_FRACTION = 0.125
"""Fraction of the folder's free memory that spare files may take, in any case."""


class BufferPool:
    """The deleted files of a folder, kept for the next values. Many processes may share them."""

    def __init__(self, folder: Path, *, max_bytes: float = _MAX_BYTES, max_files: float = math.inf) -> None:
        """``max_bytes``, ``max_files``: of the spare files, at most, if there is more than one."""
        self._folder, self._max_bytes, self._max_files = folder, max_bytes, max_files

    def keep(self, path: Path) -> bool:
        """Take a value's file out of the channel for reuse.

        Returns False if it must be unlinked instead: it is still being read, it is too small, or there are enough spare
        files. Raises FileNotFoundError if it does not exist.
        """
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # This is the size of the open file: by now another, small file may have its name, which is not locked by
            # its readers.
            size = os.fstat(descriptor).st_size
            if size < MIN_BYTES or not self._fits(size):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._add(path, descriptor, size)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        finally:
            # Unlocked explicitly, because a process that was forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        return True

    def _add(self, path: Path, descriptor: int, size: int) -> None:
        self._folder.mkdir(exist_ok=True)
        name = f"{size}.{secrets.token_hex(8)}"
        taken = path.replace(path.with_name(f".{name}"))
        try:
            # Otherwise another value has replaced it meanwhile and is deleted in its place, since its readers are
            # unknown.
            if os.path.samestat(os.stat(taken), os.fstat(descriptor)):
                # Unlocked before another process can take the file: the lock would keep out the readers of its next
                # value.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                taken.rename(self._folder / name)
        finally:
            taken.unlink(missing_ok=True)

    def take(self, size: int, path: Path) -> bool:
        """Rename a spare file of about this size to ``path``; return False if there is none."""
        near = [(abs(held_bytes - size), spare) for held_bytes, spare in self._all() if held_bytes <= 2 * size]
        for _, spare in sorted(near):
            try:
                spare.rename(path)
            except FileNotFoundError:
                # Another process has taken it.
                continue
            os.truncate(path, size)
            return True
        return False

    def clear(self) -> bool:
        """Delete all spare files; return False if there are none."""
        buffer_pool = [spare for _, spare in self._all()]
        for spare in buffer_pool:
            spare.unlink(missing_ok=True)
        return bool(buffer_pool)

    def _fits(self, size: int) -> bool:
        sizes = [held_bytes for held_bytes, _ in self._all()]
        kept = sum(sizes)
        system = os.statvfs(self._folder.parent)
        most = _MAX_FRACTION * system.f_bavail * system.f_frsize
        few = len(sizes) < self._max_files and kept + size <= min(most, self._max_bytes)
        return size <= most and (not kept or few)

    def _all(self) -> Iterator[tuple[int, Path]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                yield int(entry.name.partition(".")[0]), Path(entry.path)
