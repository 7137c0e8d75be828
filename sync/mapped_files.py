"""Files that are mapped into memory and read once, from begin to end, so that few of their pages count as memory of the
process at a time."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sync.framing import Array

__all__ = ["locked", "map_file", "release", "windows"]

_WINDOW_BYTES = 4 << 20
"""Bytes of float32 that are read before their pages are released: few enough for a bound of memory, and enough for the
call to cost nothing beside them. A choice."""


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


def release(*arrays: Array) -> None:
    """Give back the pages of files that these arrays are views of; they are read again when they are needed. Does
    nothing for arrays in memory of their own."""
    for array in arrays:
        base: object = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap):
            base.obj.madvise(mmap.MADV_DONTNEED)


def windows(size: int, *arrays: Array) -> Iterator[slice]:
    """Yield ranges that cover ``size`` coordinates, and release the pages of the arrays after each."""
    step = _WINDOW_BYTES // 4
    for at in range(0, size, step):
        yield slice(at, min(at + step, size))
        release(*arrays)
