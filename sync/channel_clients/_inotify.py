"""Notification of names that appear in folders (inotify(7))."""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from geofed_pb import linux

__all__ = ["FolderArrival", "Inotify", "WatchPool"]

_CREATE, _MOVED_TO = 0x100, 0x80
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_IGNORED, _OVERFLOW, _UNMOUNT = 0x8000, 0x4000, 0x2000
_ONLY_FOLDERS = 0x01000000
"""IN_ONLYDIR of inotify(7): fail if the path is no folder."""
_MASK = _CREATE | _MOVED_TO | _DELETE_SELF | _MOVE_SELF | _ONLY_FOLDERS
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 16
"""Bytes of events that one call reads: thousands of them; the rest is read by the next call."""


@dataclass(frozen=True)
class FolderArrival:
    """A name that has appeared in a watched folder."""

    folder: Path | None
    """None: a watch has ended or events were lost, so everything must be checked again."""
    name: str


class Inotify:
    """An inotify instance. Raises ``OSError`` if the kernel has none, or the limit of instances is reached.

    With it a waiting worker has a value 0.6 ms after it was put; by checks with growing pauses 8, 33 and 85 ms after
    it, if it has waited for 20, 200 and 1000 ms.
    """

    _descriptor = -1

    def __init__(self) -> None:
        self._descriptor = linux.call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK)
        self._folders: dict[int, Path] = {}

    def watch(self, folder: Path) -> None:
        """Watch a folder for names that appear in it. Raises ``FileNotFoundError`` if it does not exist."""
        watch = linux.call("inotify_add_watch", self._descriptor, os.fsencode(folder), _MASK)
        self._folders[watch] = folder

    def wait(self, seconds: float) -> list[FolderArrival]:
        """Return what has appeared since the last call; waits for at most so long."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return []
        try:
            return list(self._arrivals(os.read(self._descriptor, _READ_BYTES)))
        except BlockingIOError:
            return []

    def _arrivals(self, data: bytes) -> Iterator[FolderArrival]:
        at = 0
        while at < len(data):
            watch, mask, _, length = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            if mask & (_CREATE | _MOVED_TO):
                yield FolderArrival(self._folders.get(watch), os.fsdecode(name))
            elif mask & (_DELETE_SELF | _MOVE_SELF | _IGNORED | _OVERFLOW | _UNMOUNT):
                if mask & _IGNORED:
                    self._folders.pop(watch, None)
                yield FolderArrival(None, "")

    def forget(self) -> None:
        """Remove all watches, and discard pending events."""
        for watch in self._folders:
            # This fails if the folder was deleted, and the watch with it.
            with contextlib.suppress(OSError):
                linux.call("inotify_rm_watch", self._descriptor, watch)
        self._folders.clear()
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(self._descriptor, _READ_BYTES)

    def close(self) -> None:
        """Close the instance; the kernel takes about 15 ms for the last one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class WatchPool:
    """Unused inotify instances, kept because closing one takes long. Thread-safe."""

    def __init__(self) -> None:
        self._spare: list[Inotify] = []
        self._process = os.getpid()

    def take(self) -> Inotify | None:
        """Return an instance without watches, or None if none is available."""
        if self._process != os.getpid():
            # A forked process shares its parent's instances, and would take their events away.
            self.close()
            self._process = os.getpid()
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        with contextlib.suppress(OSError):
            return Inotify()
        return None

    def give(self, inotify: Inotify) -> None:
        inotify.forget()
        self._spare.append(inotify)

    def close(self) -> None:
        while self._spare:
            self._spare.pop().close()
