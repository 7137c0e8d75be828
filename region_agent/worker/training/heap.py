"""The process's heap, as a worker needs it: what one step frees, the next one takes again."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["keep_pages"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT_BYTES = 1 << 30


def keep_pages() -> None:
    """Have freed memory stay with the process, up to a gigabyte at the heap's end.

    By default glibc gives large blocks back to the kernel, and every gradient and activation of the next micro-batch
    comes as new pages, which the kernel has to clear: a third of a step's time where layers are large and micro-batches
    small. What a worker holds at the most, which its function's memory must be enough for, stays what it was. With
    another C library nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
