"""Files in shared memory that are written again, instead of new ones whose pages the kernel has to find and clear."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LEAST_BYTES", "SPARE", "BufferPool", "held"]

SPARE = ".spare"
"""Folder of a channel's spare files."""

LEAST_BYTES = 1 << 18
"""Smaller values are cheaper to write than to look after."""
_KEPT_BYTES = 1 << 28
"""Of all spare files together, at most, where there is more than one."""
_KEPT_SHARE = 0.125
"""Of the room that is left in the folder's memory, in any case."""


def held(descriptor: int, path: Path) -> bool:
    """Make sure that a file which was opened as a value is not written again as long as it is open or mapped; False
    where it is no longer that value."""
    # Who deletes it holds its lock for a moment only.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    # It may have been deleted, and written again as another value, between its being opened and now.
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class BufferPool:
    """Deleted files of a folder, kept for the next values. Any number of processes may share them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, path: Path) -> bool:
        """Take a value's file away, to be written again; False where it must be unlinked: somebody reads it still, it
        is small, or there are enough. Raises FileNotFoundError where there is none."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Of the open file: by now another, small one may have its name, which its readers do not lock.
            size = os.fstat(descriptor).st_size
            if size < LEAST_BYTES or not self._room_for(size):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._put_by(path, descriptor, size)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        finally:
            # A process that was forked meanwhile has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        return True

    def _put_by(self, path: Path, descriptor: int, size: int) -> None:
        self._folder.mkdir(exist_ok=True)
        name = f"{size}.{secrets.token_hex(8)}"
        taken = path.replace(path.with_name(f".{name}"))
        try:
            # Else another value has come in its place meanwhile, and is deleted in its stead: who reads it is unknown.
            if os.path.samestat(os.stat(taken), os.fstat(descriptor)):
                # Before anybody can take it: the lock of one that is written again would keep its readers away.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                taken.rename(self._folder / name)
        finally:
            taken.unlink(missing_ok=True)

    def take(self, size: int, path: Path) -> bool:
        """Give the file that is nearest in size, and not far off, the name ``path``; False where there is none."""
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
        """Give their memory back; False where there are none."""
        buffer_pool = [spare for _, spare in self._all()]
        for spare in buffer_pool:
            spare.unlink(missing_ok=True)
        return bool(buffer_pool)

    def _room_for(self, size: int) -> bool:
        kept = sum(held_bytes for held_bytes, _ in self._all())
        system = os.statvfs(self._folder.parent)
        most = _KEPT_SHARE * system.f_bavail * system.f_frsize
        return size <= most and (not kept or kept + size <= min(most, _KEPT_BYTES))

    def _all(self) -> Iterator[tuple[int, Path]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                yield int(entry.name.partition(".")[0]), Path(entry.path)
