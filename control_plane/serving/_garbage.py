"""Collection of cyclic garbage in short pauses, however many objects the state has.

Full collections of Python look at all objects: a second with 10,000 active jobs, during which nobody is served. Here
what survives a full collection is not looked at by the next ones, which are frequent and short.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collected_later", "short_collections"]

_THRESHOLDS = (700, 10, 1)
"""Of Python's generations: a full collection after about 14,000 new objects that live, which takes 5 to 10 ms. Each
leaves some 60 objects behind that become garbage later: some 160 MB until everything is collected."""
_ALL_SECONDS = 6 * 3600.0
"""Time between two collections of everything, since what is not looked at becomes garbage as well: calls and
connections that have ended after long. Such a collection takes as long as any of Python's own."""


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect nothing within the block, for work that makes many objects that stay. Collections while it runs would
    take more time than the work itself, and so would the one that follows: what is there at the end is left out of
    collections, until `short_collections` ends."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep collections of this process short within the block."""
    before, all_at = gc.get_threshold(), time.monotonic() + _ALL_SECONDS

    def leave_survivors(phase: str, info: dict[str, int]) -> None:
        nonlocal all_at
        if info["generation"] < 2:
            return
        if phase == "stop":
            gc.freeze()
        elif time.monotonic() >= all_at:
            gc.unfreeze()
            all_at = time.monotonic() + _ALL_SECONDS

    gc.callbacks.append(leave_survivors)
    gc.set_threshold(*_THRESHOLDS)
    gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(leave_survivors)
        gc.unfreeze()
