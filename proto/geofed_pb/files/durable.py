"""Atomic, durable file writes: after a crash, a file has either its old or its new content."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from geofed_pb.errors import GeofedError
from geofed_pb.linux import write_range

__all__ = [
    "Reuse",
    "begin_write",
    "commit_write",
    "disk_full_as_error",
    "flush_folder",
    "write_blocks_durably",
    "write_durably",
    "write_unflushed",
]

Buffer = bytes | bytearray | memoryview
"""Pieces of a file's content."""
Reuse = Callable[[int, Path], object]
"""Gives a path to an old file of about so many bytes, if there is one, whose blocks and page cache are used again: they
are most of what a new file costs."""
_WINDOW_BYTES = 4 << 20
"""Bytes that a throttled write passes to the disk in one piece."""
_DIRECT_BYTES = 4 << 20
"""Bytes that are written to the disk at a time past the page cache: enough for the disk's full rate."""


def write_durably(path: Path, pieces: Sequence[Buffer], *, mode: int | None = None, reuse: Reuse | None = None) -> None:
    """Replace a file so that after a crash it has either its old or its new content.

    ``mode``: the file's mode, set before there is any content in it; None: as the umask has it. ``reuse``: see
    `begin_write`.

    Raises ``GeofedError("DISK_FULL")`` if the disk is full.
    """
    commit_write(path, begin_write(path, pieces, reuse, mode=mode))


def write_unflushed(path: Path, pieces: Sequence[Buffer], reuse: Reuse | None = None) -> None:
    """Replace a file so that other processes see its old or its new content, also if this one is killed. After a
    failure of the machine it may hold anything.

    Raises ``GeofedError("DISK_FULL")`` if the disk is full.
    """
    with disk_full_as_error(path):
        begin_write(path, pieces, reuse).close()
        os.replace(_partial(path), path)


def begin_write(
    path: Path,
    pieces: Iterable[Buffer],
    reuse: Reuse | None = None,
    *,
    mode: int | None = None,
    direct: bool = False,
    total_bytes: int | None = None,
) -> BinaryIO:
    """Write a file under a temporary name, for `commit_write`, and return it open.

    It stays open because the kernel is sure to report a failed write only to the descriptor that wrote. ``reuse``
    gives an old file to overwrite. ``mode``: as for `write_durably`. ``direct``: past the page cache, where the file
    system can, for a file that is flushed at once and hardly ever read. ``total_bytes``: of pieces that can be read
    only once; None: they are counted.
    """
    if total_bytes is None:
        pieces = list(pieces)
        total_bytes = sum(memoryview(piece).nbytes for piece in pieces)
    file = _opened(path, total_bytes, reuse, 0o666 if mode is None else mode)
    with contextlib.ExitStack() as undo, disk_full_as_error(path):
        undo.callback(_close_failed, file)
        if mode is not None:
            # Also a file that a crash has left behind, and whatever the umask.
            os.fchmod(file.fileno(), mode)
        if direct:
            at, rest = _write_direct(file.fileno(), pieces)
            file.seek(at)
            pieces = [rest]
        for piece in pieces:
            file.write(piece)
        file.truncate()
        undo.pop_all()
    return file


def write_blocks_durably(path: Path, blocks: Iterable[Buffer], total_bytes: int, reuse: Reuse | None = None) -> None:
    """Replace a file as `write_durably` does, by content that is made block by block, of ``total_bytes`` together.

    The kernel begins to write blocks to the disk while later ones are made. Raises what the iteration raises, and
    ``GeofedError("DISK_FULL")`` if the disk is full.
    """
    file = _opened(path, total_bytes, reuse)
    with contextlib.ExitStack() as undo, disk_full_as_error(path):
        undo.callback(_close_failed, file)
        written = begun = 0
        for block in blocks:
            file.write(block)
            written += memoryview(block).nbytes
            if written - begun >= _WINDOW_BYTES:
                file.flush()
                write_range(file.fileno(), begun, written - begun, wait=False)
                begun = written
        file.truncate()
        undo.pop_all()
    commit_write(path, file)


def _opened(path: Path, total_bytes: int, reuse: Reuse | None, mode: int = 0o666) -> BinaryIO:
    """Open a file under its temporary name, over an old one if there is one."""
    if reuse is not None:
        reuse(total_bytes, _partial(path))
    with disk_full_as_error(path):
        return os.fdopen(os.open(_partial(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode), "wb")


def _write_direct(descriptor: int, pieces: Iterable[Buffer]) -> tuple[int, bytes]:
    """Write the content past the page cache as far as it fills whole blocks; return how far that is, and the rest.

    The kernel takes memory that begins at a page alone, so the content is copied into such memory block by block, where
    it stays in the CPU's cache.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    block = memoryview(mmap.mmap(-1, _DIRECT_BYTES))
    filled = at = 0
    for piece in pieces:
        left = memoryview(piece).cast("B")
        while left:
            count = min(_DIRECT_BYTES - filled, len(left))
            block[filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
            if filled == _DIRECT_BYTES:
                _write_block(descriptor, block, at, flags)
                filled, at = 0, at + _DIRECT_BYTES
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return at, bytes(block[:filled])


def _write_block(descriptor: int, block: memoryview, at: int, flags: int) -> None:
    done = 0
    while done < len(block):
        try:
            done += os.pwrite(descriptor, block[done:], at + done)
        except OSError as error:
            if error.errno != errno.EINVAL or fcntl.fcntl(descriptor, fcntl.F_GETFL) == flags:
                raise
            # The file system takes blocks of another size, or what is left of one after a short write.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _close_failed(file: BinaryIO) -> None:
    """Close a file after a failed write. close() flushes, and may fail as well; that must not hide the first error."""
    with contextlib.suppress(OSError):
        file.close()


def _write_back(file: BinaryIO) -> None:
    """Have the kernel write a file to disk, one window after the other; it still needs fsync to be durable.

    A disk serves requests in turn, so that a line of the log would wait until a whole checkpoint is written. After each
    window this therefore sleeps for as long as the window took, and other writes get half of the disk's time.
    """
    file.flush()
    for at in range(0, os.fstat(file.fileno()).st_size, _WINDOW_BYTES):
        begun = time.monotonic()
        if not write_range(file.fileno(), at, _WINDOW_BYTES):
            return
        time.sleep(time.monotonic() - begun)


def commit_write(path: Path, file: BinaryIO, *, throttled: bool = False, final: Path | None = None) -> None:
    """Make a file of `begin_write` durable under its name, or under another one in the same folder, ``final``.

    ``throttled``: in small pieces, for the sake of others.
    """
    with disk_full_as_error(path):
        with file:
            if throttled:
                _write_back(file)
            os.fsync(file.fileno())
        os.replace(_partial(path), final or path)
        flush_folder(path.parent)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def flush_folder(path: Path) -> None:
    """Flush a folder, so that the names in it are durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def disk_full_as_error(path: Path) -> Iterator[None]:
    """Raise ``GeofedError("DISK_FULL")`` instead of the OSError of a full disk or an exceeded quota."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GeofedError("DISK_FULL", f"no space left for {path}") from None
        raise
