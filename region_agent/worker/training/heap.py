"""Tuning of the C heap for a worker: memory that one step frees is used again by the next."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["keep_pages"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt``, from glibc's malloc.h."""
_KEPT_BYTES = 1 << 30
"""Largest block, and largest free end of the heap, that is not returned to the kernel."""


def keep_pages() -> None:
    """Keep freed memory in the process, up to a gigabyte at the end of the heap.

    By default glibc returns large blocks to the kernel, and every gradient and activation of the next micro-batch needs
    new pages, which the kernel has to clear. With large layers and small micro-batches that is a third of a step's
    time. The peak memory of the worker does not change. With another C library this has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
