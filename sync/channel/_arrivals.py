"""Waits for files, without looking at them again and again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from sync.channel._inotify import Inotify, Spare

__all__ = ["Arrivals"]

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _PAUSE_FACTOR = 0.002, 0.25, 1.5
_SAFETY_SECONDS = 0.5
"""A folder that several machines share tells only of what its own machine does; so it is looked at now and then."""


class Arrivals:
    """Tells which of some files may have come. By inotify, or by looking with growing pauses where it is not to be had.

    A file is watched through its folder, or through the nearest one above it that is there.
    """

    def __init__(self, paths: Iterator[Path], spare: Spare) -> None:
        self._left = set(paths)
        self._watched: set[Path] = set()
        self._pause = _FIRST_PAUSE_SECONDS
        self._spare = spare
        # None: no inotify in this system, or every instance that a user may have is taken.
        self._inotify = spare.take()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_watching()

    @property
    def watching(self) -> bool:
        """Whether the kernel tells; otherwise the files are looked at."""
        return self._inotify is not None

    def found(self, path: Path) -> None:
        """No longer wait for this one."""
        self._left.discard(path)

    def begin(self) -> None:
        """Watch. Files that came before are not told: look at them after this call."""
        if self._inotify is None:
            return
        try:
            for folder in {path.parent for path in self._left}:
                self._watch_nearest(folder, self._inotify)
        except OSError:
            self._stop_watching()

    def next(self, seconds: float) -> set[Path]:
        """Files that may have come, after a wait of at most so long. More may be told than came, never fewer."""
        if self._inotify is None:
            time.sleep(min(self._pause, seconds))
            self._pause = min(self._pause * _PAUSE_FACTOR, _LONGEST_PAUSE_SECONDS)
            return set(self._left)
        # Events that lead nowhere must not put off the time at which all is looked at.
        end = time.monotonic() + min(seconds, _SAFETY_SECONDS)
        while (left := end - time.monotonic()) > 0:
            came: set[Path] = set()
            for arrival in self._inotify.wait(left):
                if arrival.folder is None:
                    self._watched.clear()
                    self.begin()
                    return set(self._left)
                if arrival.name.startswith("."):
                    # No part of a key begins so: it is being written, and will be told again under its own name.
                    continue
                came |= self._concerned(arrival.folder / arrival.name)
            if came:
                return came
        return set(self._left)

    def _concerned(self, path: Path) -> set[Path]:
        if path in self._left:
            return {path}
        below = {left for left in self._left if path in left.parents}
        if below:
            # A folder on the way to them has come: from now on, watch in there.
            self.begin()
        return below

    def _watch_nearest(self, folder: Path, inotify: Inotify) -> None:
        """Watch the folder, or the nearest above it that is there, such that none can come in between unseen."""
        if folder in self._watched:
            return
        while True:
            nearest = folder
            while nearest not in self._watched:
                with contextlib.suppress(FileNotFoundError):
                    inotify.watch(nearest)
                    self._watched.add(nearest)
                    break
                nearest = nearest.parent
            # What comes below it from now on is told. What had come before it was watched is looked for here.
            below = next((f for f in [folder, *folder.parents] if f.parent == nearest), None)
            if nearest == folder or below is None or not below.is_dir():
                return

    def _stop_watching(self) -> None:
        if self._inotify is not None:
            self._spare.give(self._inotify)
            self._inotify = None
