"""A file that is being received: written in any order, by several threads, and resumable after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path

from geofed_pb.durable import disk_full_as_error
from geofed_pb.errors import GeofedError
from geofed_pb.linux import write_range
from sync.transport.ranges import Ranges

__all__ = ["PartialFile"]

_FLUSH_BYTES = 4 << 20
"""Bytes after which the kernel begins to write to disk what has been hashed, without a wait for it."""
_READ_BYTES = 1 << 20
"""Bytes that are read at a time to be hashed."""


class PartialFile:
    """A file of known size, and a record of the ranges that are written.

    The record is stored next to the file and survives the process; it is written after the bytes that it lists. After a
    power failure it may list bytes that never reached the disk, which the digest of the whole file reveals. Hashing and
    writing to disk proceed while the file is received (`hash_and_flush`), so that little is left to do at the end.
    """

    def __init__(self, path: Path, total_bytes: int, *, reserve: bool = True) -> None:
        """``reserve``: the first write takes disk space for the whole file, so that a full disk is found at once."""
        self.total_bytes, self._reserve = total_bytes, reserve
        self._path, self._record = path, path.with_suffix(".have")
        self._have = Ranges()
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._writers, self._sealed = 0, False
        self._file: int | None = None
        self._hash, self._hashed, self._flushed = hashlib.sha256(), 0, 0
        self._buffer = memoryview(bytearray(min(_READ_BYTES, total_bytes)))
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size == total_bytes:
                self._have = Ranges((int(begin), int(end)) for begin, end in json.loads(self._record.read_bytes()))

    @property
    def have(self) -> list[tuple[int, int]]:
        """The (begin, end) ranges that are written."""
        with self._lock:
            return list(self._have)

    @property
    def prefix(self) -> int:
        """Number of bytes written from the start without a gap."""
        with self._lock:
            return self._have.prefix

    @property
    def whole(self) -> bool:
        """Whether all bytes are written."""
        with self._lock:
            return self._have.prefix == self.total_bytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at their offset.

        Raises ``GeofedError("DISK_FULL")``, or ``GeofedError("FENCED")`` if the file is complete already.
        """
        with disk_full_as_error(self._path):
            descriptor = self._open(writing=True)
        view, at = memoryview(data), offset
        try:
            with disk_full_as_error(self._path):
                while len(view):
                    written = os.pwrite(descriptor, view, at)
                    view, at = view[written:], at + written
        finally:
            with self._lock:
                self._have.add(offset, at)
                self._writers -= 1
                self._idle.notify_all()

    def drop(self, offset: int, length: int) -> None:
        """Mark bytes as missing because they are damaged. They are hashed once they have been written again."""
        with self._settling, self._lock:
            self._have.remove(offset, offset + length)
            if self._hashed > offset:
                self._hash, self._hashed = hashlib.sha256(), 0

    def write_record(self) -> None:
        """Store the record of written ranges, for a restart."""
        with self._lock, disk_full_as_error(self._path):
            partial = self._record.with_name(f".{self._record.name}.partial")
            partial.write_text(json.dumps(list(self._have)))
            os.replace(partial, self._record)

    def hash_and_flush(self) -> None:
        """Hash what has been written and have the kernel begin to write it to disk, unless another thread does so."""
        if self._settling.acquire(blocking=False):
            try:
                self._advance()
                if self._hashed - self._flushed >= _FLUSH_BYTES:
                    write_range(self._open(), self._flushed, self._hashed - self._flushed, wait=False)
                    self._flushed = self._hashed
            finally:
                self._settling.release()

    def digest(self) -> str:
        """Return the digest of the file, which must be complete."""
        with self._settling:
            self._advance()
            return "sha256:" + self._hash.hexdigest()

    def flush(self) -> None:
        """Make the file's bytes durable."""
        os.fsync(self._open())

    def seal(self) -> None:
        """Refuse further writes, and wait for those under way. The file is about to be verified or discarded."""
        with self._lock:
            self._sealed = True
            self._idle.wait_for(lambda: self._writers == 0)

    def discard(self, *, restart: bool = True) -> None:
        """Delete the file, and start again or else stay sealed. The file must be sealed."""
        self.close()
        with self._settling, self._lock:
            self._have, self._hash, self._hashed, self._flushed = Ranges(), hashlib.sha256(), 0, 0
            for path in (self._record, self._path):
                path.unlink(missing_ok=True)
            self._sealed = not restart

    def delete_record(self) -> None:
        """Delete the stored record."""
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        with self._settling, self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _open(self, *, writing: bool = False) -> int:
        with self._lock:
            if self._sealed and writing:
                raise GeofedError("FENCED", "this update is complete")
            if self._file is None:
                if not self._have.total:
                    # The record may remain from a process that had renamed the complete file and then ended.
                    self._record.unlink(missing_ok=True)
                opened = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    if self._reserve:
                        os.posix_fallocate(opened, 0, self.total_bytes)
                    os.ftruncate(opened, self.total_bytes)
                except OSError:
                    os.close(opened)
                    if not self._have.total:
                        self._path.unlink(missing_ok=True)
                    raise
                self._file = opened
            self._writers += writing
            return self._file

    def _advance(self) -> None:
        descriptor, buffer = self._open(), self._buffer
        while (left := self.prefix - self._hashed) > 0:
            count = os.preadv(descriptor, [buffer[: min(left, _READ_BYTES)]], self._hashed)
            if count == 0:
                raise OSError(f"{self._path} has become shorter")
            self._hash.update(buffer[:count])
            self._hashed += count
