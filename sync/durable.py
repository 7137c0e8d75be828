"""Files that are there whole after a crash, the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from geofed_pb.errors import GeofedError
from sync import framing

__all__ = ["begin_write", "disk_full_is_told", "flush_folder", "put_in_place", "write_durably"]

_WINDOW = 4 << 20
"""Bytes of a checkpoint that the disk is given at once."""
_WRITE_AND_WAIT = 1 | 2 | 4
"""Flags of sync_file_range: wait for what is being written, write what is to be, and wait for that."""
_NOT_TO_BE_HAD = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE)
"""Errors of sync_file_range where the kernel or the file system has no such thing."""


def write_durably(path: Path, pieces: Sequence[framing.Buffer]) -> None:
    """Replace a file so that after a crash either the old or the new content is there, whole."""
    put_in_place(path, begin_write(path, pieces))


def begin_write(path: Path, pieces: Sequence[framing.Buffer], spare: Path | None = None) -> BinaryIO:
    """Write a file beside its place, for `put_in_place`. It stays open: only its own descriptor is sure to be told of
    what could not be written.

    ``spare``: a file that is written again, if it is there.
    """
    if spare is not None:
        with contextlib.suppress(FileNotFoundError):
            spare.replace(_partial(path))
    with disk_full_is_told(path):
        file = os.fdopen(os.open(_partial(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb")
    try:
        with disk_full_is_told(path):
            for piece in pieces:
                file.write(piece)
            file.truncate()
    except BaseException:
        # It would be written again, and what that fails of must not hide why it is not there.
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def _write_back(file: BinaryIO) -> None:
    """Have the kernel write a file's bytes, one window after the other; only fsync makes them durable.

    A disk does what it is given in turn: behind a whole checkpoint, a line of the log would wait for all of it. So it
    is given a little, and then left to others for as long as that took.
    """
    file.flush()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "sync_file_range"):
        return
    for at in range(0, os.fstat(file.fileno()).st_size, _WINDOW):
        begun = time.monotonic()
        if library.sync_file_range(file.fileno(), ctypes.c_int64(at), ctypes.c_int64(_WINDOW), _WRITE_AND_WAIT):
            number = ctypes.get_errno()
            if number in _NOT_TO_BE_HAD:
                return
            # What it was told of a disk that fails, fsync would not be told again.
            raise OSError(number, os.strerror(number))
        time.sleep(time.monotonic() - begun)


def put_in_place(path: Path, file: BinaryIO, *, beside: bool = False) -> None:
    """Make durable what `begin_write` has written; ``beside`` other work, which then waits for little of it."""
    with disk_full_is_told(path):
        with file:
            if beside:
                _write_back(file)
            os.fsync(file.fileno())
        os.replace(_partial(path), path)
        flush_folder(path.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def flush_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def disk_full_is_told(path: Path) -> Iterator[None]:
    """Turn a full disk into its error of the catalogue."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GeofedError("DISK_FULL", f"no space left for {path}") from None
        raise
