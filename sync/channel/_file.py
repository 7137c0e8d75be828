"""The embedded channel: files in one folder, in shared memory where the machine has it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.channel._contract import Buffer, Usage

__all__ = ["FileChannel"]

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_TRIES = 100
_PIECES_AT_ONCE = 512
"""Below the kernel's limit on buffers for one write."""


class FileChannel:
    """A folder whose files are the values. A value is written beside its place and renamed into it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.usage = Usage()

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise GeofedError("FRAME_INVALID", f"not a channel key: {key!r}")
        return self._folder / key

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        path = self._path(key)
        for tries_left in reversed(range(_TRIES)):
            try:
                written = _write_beside(path, pieces)
                break
            except (FileNotFoundError, FileExistsError):
                # Somebody deletes the tree around it at this moment; the value is put all the same.
                if not tries_left:
                    raise
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise GeofedError("DISK_FULL", f"the channel {self._folder} is full") from None
                raise
        self.usage.puts += 1
        self.usage.bytes_in += written

    def get(self, key: str) -> memoryview | None:
        try:
            with self._path(key).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # The mapping outlives the file's name, so a reader keeps what it read when the value is deleted.
                view = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) if size else memoryview(b"")
        except FileNotFoundError:
            self.usage.misses += 1
            return None
        self.usage.gets += 1
        self.usage.bytes_out += size
        return view

    def has(self, key: str) -> bool:
        return self._path(key).exists()

    def delete(self, key: str) -> None:
        self.usage.deletes += 1
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()

    def delete_tree(self, prefix: str) -> None:
        self.usage.deletes += 1
        shutil.rmtree(self._path(prefix), ignore_errors=True)


def _write_beside(path: Path, pieces: Sequence[Buffer]) -> int:
    """Write a file under a name of its own and rename it into its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            written = _write_all(descriptor, pieces)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return written


def _write_all(descriptor: int, pieces: Sequence[Buffer]) -> int:
    left = [memoryview(piece).cast("B") for piece in pieces]
    total = sum(piece.nbytes for piece in left)
    while left:
        done = os.writev(descriptor, left[:_PIECES_AT_ONCE])
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left:
            left[0] = left[0][done:]
    return total
