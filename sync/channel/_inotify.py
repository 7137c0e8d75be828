"""The kernel's word that a name has come into a folder (inotify(7)), through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Arrival", "Inotify", "Spare"]

_CREATE, _MOVED_TO = 0x100, 0x80
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_IGNORED, _OVERFLOW, _UNMOUNT = 0x8000, 0x4000, 0x2000
_ONLY_FOLDERS = 0x01000000
_MASK = _CREATE | _MOVED_TO | _DELETE_SELF | _MOVE_SELF | _ONLY_FOLDERS
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Arrival:
    """A name that has come into a watched folder."""

    folder: Path | None
    """None: something has happened to the watching itself, and all that was watched must be looked at anew."""
    name: str


class Inotify:
    """A watch over folders. Raises ``OSError`` from the start where the kernel has none, or none to spare."""

    _descriptor = -1

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            start, self._add = library.inotify_init1, library.inotify_add_watch
            self._remove = library.inotify_rm_watch
        except (AttributeError, TypeError) as error:
            raise OSError(f"this system has no inotify: {error}") from None
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._descriptor = self._checked(start(os.O_CLOEXEC | os.O_NONBLOCK))
        self._folders: dict[int, Path] = {}

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def watch(self, folder: Path) -> None:
        """Have the names told that come into the folder; it must be there (``FileNotFoundError``)."""
        watch = self._checked(self._add(self._descriptor, os.fsencode(folder), _MASK))
        self._folders[watch] = folder

    def wait(self, seconds: float) -> list[Arrival]:
        """What has come since the last call; blocks until something comes, or for so long."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return []
        try:
            return list(self._arrivals(os.read(self._descriptor, _READ_BYTES)))
        except BlockingIOError:
            return []

    def _arrivals(self, data: bytes) -> Iterator[Arrival]:
        at = 0
        while at < len(data):
            watch, mask, _, length = _HEAD.unpack_from(data, at)
            name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
            at += _HEAD.size + length
            if mask & (_CREATE | _MOVED_TO):
                yield Arrival(self._folders.get(watch), os.fsdecode(name))
            elif mask & (_DELETE_SELF | _MOVE_SELF | _IGNORED | _OVERFLOW | _UNMOUNT):
                if mask & _IGNORED:
                    self._folders.pop(watch, None)
                yield Arrival(None, "")

    def forget(self) -> None:
        """Watch nothing, and know of nothing that has come."""
        for watch in self._folders:
            # Fails where the folder has gone, and the watch with it.
            self._remove(self._descriptor, watch)
        self._folders.clear()
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(self._descriptor, _READ_BYTES)

    def close(self) -> None:
        """Let go of it; the kernel takes some 15 ms for the last."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Spare:
    """Watches that are not in use, kept because to close one takes long. Thread-safe."""

    def __init__(self) -> None:
        self._spare: list[Inotify] = []
        self._process = os.getpid()

    def take(self) -> Inotify | None:
        """One that watches nothing; None where none is to be had."""
        if self._process != os.getpid():
            # A forked process shares the events of its parent's watches, and would take them away.
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
