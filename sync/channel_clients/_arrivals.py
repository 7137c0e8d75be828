"""Waiting for files, by notification where the system supports it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from sync.channel_clients._inotify import Inotify, WatchPool

__all__ = ["Arrivals"]

_MIN_PAUSE_SECONDS = 0.002
"""First pause between two checks without inotify."""
_MAX_PAUSE_SECONDS = 0.25
"""Longest pause between two checks."""
_PAUSE_FACTOR = 1.5
"""Growth of the pause with each check."""
_SAFETY_SECONDS = 0.5
"""Interval of the checks with inotify: on a folder that several machines share, it reports only changes by this
machine."""


class Arrivals:
    """Reports which of some files may have appeared: by inotify, or by checks with growing pauses where that is
    unavailable.

    A file is watched through its folder, or through the nearest existing folder above it.
    """

    def __init__(self, paths: Iterator[Path], spare: WatchPool) -> None:
        self._left = set(paths)
        self._watched: set[Path] = set()
        self._pause = _MIN_PAUSE_SECONDS
        self._spare = spare
        # None: the system has no inotify, or the user's limit of instances is reached.
        self._inotify = spare.take()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop_watching()

    @property
    def watching(self) -> bool:
        """Whether inotify is used; otherwise the files are checked periodically."""
        return self._inotify is not None

    def found(self, path: Path) -> None:
        """Stop waiting for this file."""
        self._left.discard(path)

    def begin(self) -> None:
        """Start watching. Files that exist already are not reported: check for them after this call."""
        if self._inotify is None:
            return
        try:
            for folder in {path.parent for path in self._left}:
                self._watch_nearest(folder, self._inotify)
        except OSError:
            self._stop_watching()

    def next(self, seconds: float) -> set[Path]:
        """Wait for at most so long; return the files that may have appeared: maybe more than did, never fewer."""
        if self._inotify is None:
            time.sleep(min(self._pause, seconds))
            self._pause = min(self._pause * _PAUSE_FACTOR, _MAX_PAUSE_SECONDS)
            return set(self._left)
        # Irrelevant events must not postpone the periodic check.
        end = time.monotonic() + min(seconds, _SAFETY_SECONDS)
        while (left := end - time.monotonic()) > 0:
            came: set[Path] = set()
            for arrival in self._inotify.wait(left):
                if arrival.folder is None:
                    self._watched.clear()
                    self.begin()
                    return set(self._left)
                if arrival.name.startswith("."):
                    # No component of a key begins with a dot: the file is being written, and will be reported under its
                    # final name.
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
            # A folder above these files has appeared, so that files in it can be watched now.
            self.begin()
        return below

    def _watch_nearest(self, folder: Path, inotify: Inotify) -> None:
        """Watch a folder, or the nearest existing one above it, such that no file can appear unnoticed in between."""
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
            # What appears below it from now on is reported. What appeared before it was watched is checked here.
            below = next((f for f in [folder, *folder.parents] if f.parent == nearest), None)
            if nearest == folder or below is None or not below.is_dir():
                return

    def _stop_watching(self) -> None:
        if self._inotify is not None:
            self._spare.give(self._inotify)
            self._inotify = None
