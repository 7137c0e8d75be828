"""Files that are mapped into memory and read once, from begin to end, so that few of their pages count as memory of the
process at a time; and large buffers that are mapped, so that their memory does not stay with the process."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sync.framing import Array

__all__ = ["Releasable", "buffer_of", "chunks_of", "locked", "map_file", "pieces_of", "release", "windows"]

_WINDOW_BYTES = 4 << 20
"""Bytes of float32, of all that is read together, after which their pages are released: few enough for a bound of
memory, and enough for the call to cost nothing beside them. A choice."""
_LARGE_BYTES = 4 << 20
"""Buffers from this size are mapped: two pages of 2 MB, which the kernel has on most machines."""


def map_file(path: Path) -> memoryview:
    """Map a file for reading. Raises FileNotFoundError. The mapping outlives the file's name, and the file is not
    reused before the mapping ends."""
    with path.open("rb") as file:
        if not locked(file.fileno(), path):
            raise FileNotFoundError(path)
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def locked(descriptor: int, path: Path) -> bool:
    """Lock a file that was opened by its name, so that it is not reused while it is open or mapped.

    Returns False if it is no longer the file of that name.
    """
    # A process that deletes the file holds its lock for a moment only.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    # The file may have been deleted and reused for another content since it was opened.
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class _Buffer(mmap.mmap):
    """Memory of this process, whose content no file has."""


def buffer_of(size: int) -> memoryview:
    """Return a new buffer of so many bytes. A large one goes back to the system as soon as nothing uses it, also where
    freed memory is kept (`keep_freed_memory`): there the free parts of the heap rarely fit the next large buffer."""
    if size < _LARGE_BYTES:
        return memoryview(bytearray(size))
    large = _Buffer(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        # With small pages it takes the kernel several times as long to provide the memory.
        large.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(large)


class Releasable(Protocol):
    """Values that are computed from files when they are read."""

    def release(self) -> None:
        """Give back the pages of these files."""


def release(*read: Array | memoryview | Releasable) -> None:
    """Give back the pages of files that these arrays are views of; they are read again when they are needed. Does
    nothing for arrays in memory of their own."""
    for one in read:
        if not isinstance(one, np.ndarray | memoryview):
            one.release()
            continue
        base: object = one
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        if isinstance(base, mmap.mmap) and not isinstance(base, _Buffer):
            base.madvise(mmap.MADV_DONTNEED)


def pieces_of(*buffers: Array | memoryview) -> Iterator[memoryview]:
    """Yield the bytes of buffers in pieces, one after the other, and release the pages of each after it was used."""
    for buffer in buffers:
        view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
        for at in range(0, len(view), _WINDOW_BYTES):
            yield view[at : at + _WINDOW_BYTES]
            release(view)


def chunks_of(buffers: Sequence[Array | memoryview], size: int) -> Iterator[bytes]:
    """Yield the bytes of consecutive buffers in chunks of ``size``, of which the last one may be smaller."""
    chunk = bytearray()
    for piece in pieces_of(*buffers):
        chunk += piece
        while len(chunk) >= size:
            yield bytes(chunk[:size])
            del chunk[:size]
    if chunk:
        yield bytes(chunk)


def windows(size: int, *arrays: Array | Releasable) -> Iterator[slice]:
    """Yield ranges that cover ``size`` coordinates, and release the pages of the arrays after each. They begin at
    multiples of 2 ** 16."""
    step = max(1, (_WINDOW_BYTES // 4 // max(1, len(arrays))) >> 16) << 16
    for at in range(0, size, step):
        yield slice(at, min(at + step, size))
        release(*arrays)
