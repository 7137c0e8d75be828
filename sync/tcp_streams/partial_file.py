"""A file that is being received: written in any order, by several threads, and resumable after a restart."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error
from geofed_pb.linux import write_range
from sync.tcp_streams.ranges import Ranges

__all__ = ["PartialFile"]

_FLUSH_BYTES = 4 << 20
"""Bytes after which the kernel begins to write to disk what has been hashed, without a wait for it."""
_READ_BYTES = 1 << 20
"""Bytes that are read at a time to be hashed."""
_LINE_BYTES = 33
"""Bytes of a line of the record: "+" for written or "-" for dropped, then begin and end as hexadecimal numbers."""


class PartialFile:
    """A file of known size, and a record of the ranges that are written.

    The record is stored next to the file and survives the process: a line for each range that was written, or dropped,
    after its bytes. After a power failure it may list bytes that never reached the disk, which the digest of the whole
    file reveals. Hashing and
    writing to disk proceed while the file is received (`hash_and_flush`), so that little is left to do at the end.
    """

    def __init__(self, path: Path, total_bytes: int, *, reserve: bool = True) -> None:
        """``reserve``: the first write takes disk space for the whole file, so that a full disk is found at once."""
        self.total_bytes, self._reserve = total_bytes, reserve
        self._path, self._record = path, path.with_suffix(".have")
        self._have = Ranges()
        self._writing = Ranges()
        """Ranges that threads are writing now."""
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._writers, self._sealed = 0, False
        self._file: int | None = None
        self._hash, self._hashed, self._flushed = hashlib.sha256(), 0, 0
        self._buffer = memoryview(bytearray(min(_READ_BYTES, total_bytes)))
        self._unrecorded = Ranges()
        """Ranges that were written since `write_record`."""
        self._lines: int | None = None
        """File descriptor of the record; None: it is not open."""
        with contextlib.suppress(OSError):
            if path.stat().st_size == total_bytes:
                self._have = _recorded(self._record)

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

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Write bytes at their offset, except those that are written already; return whether all were new.

        What is written stays as it is: it may be hashed, and a sender must not change it afterwards. Raises
        ``GeofedError("DISK_FULL")``, or ``GeofedError("FENCED")`` if the file is complete already.
        """
        with disk_full_as_error(self._path):
            descriptor = self._open(writing=True)
        view, end = memoryview(data), offset + len(data)
        missing = self._reserved(offset, end)
        try:
            for begin, stop in missing:
                self._write(descriptor, view[begin - offset : stop - offset], begin)
        finally:
            with self._lock:
                for part in missing:
                    self._writing.remove(*part)
                self._writers -= 1
                self._idle.notify_all()
        return missing == [(offset, end)]

    def _reserved(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return what is missing of a range, and keep other threads from writing there."""
        with self._lock:
            # A stream that ends within a piece may write nothing.
            self._idle.wait_for(lambda: begin == end or self._writing.missing(begin, end) == [(begin, end)])
            missing = self._have.missing(begin, end)
            for part in missing:
                self._writing.add(*part)
            return missing

    def _write(self, descriptor: int, view: memoryview, begin: int) -> None:
        at = begin
        try:
            with disk_full_as_error(self._path):
                while len(view):
                    written = os.pwrite(descriptor, view, at)
                    view, at = view[written:], at + written
        finally:
            with self._lock:
                self._have.add(begin, at)
                self._unrecorded.add(begin, at)

    def drop(self, offset: int, length: int) -> None:
        """Mark bytes as missing because they are damaged. They are hashed once they have been written again."""
        with self._settling, self._lock:
            self._have.remove(offset, offset + length)
            self._unrecorded.remove(offset, offset + length)
            self._append([_line(offset, offset + length, kind=b"-")])
            if self._hashed > offset:
                self._hash, self._hashed = hashlib.sha256(), 0

    def write_record(self) -> None:
        """Add what was written since the last call to the record, for a restart."""
        with self._lock:
            self._append([_line(begin, end) for begin, end in self._unrecorded])
            self._unrecorded = Ranges()

    def _append(self, lines: list[bytes]) -> None:
        with disk_full_as_error(self._path):
            if self._lines is None:
                self._lines = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            for line in lines:
                os.write(self._lines, line)

    def hash_and_flush(self, offset: int = 0, data: bytes | memoryview = b"") -> None:
        """Hash what has been written and have the kernel begin to write it to disk, unless another thread does so.

        ``data`` was written last, at ``offset``, all of it; it is not read again if it is next to be hashed.
        """
        if self._settling.acquire(blocking=False):
            try:
                if data and offset == self._hashed and self.prefix >= offset + len(data):
                    self._hash.update(data)
                    self._hashed += len(data)
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
            self._have, self._unrecorded = Ranges(), Ranges()
            self._hash, self._hashed, self._flushed = hashlib.sha256(), 0, 0
            for path in (self._record, self._path):
                path.unlink(missing_ok=True)
            self._sealed = not restart

    def delete_record(self) -> None:
        """Delete the stored record."""
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        with self._settling, self._lock:
            self._close_both()

    def __del__(self) -> None:
        self._close_both()

    def _close_both(self) -> None:
        for descriptor in (self._file, self._lines):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lines = None

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


def _line(begin: int, end: int, kind: bytes = b"+") -> bytes:
    # The newline before it ends a line that a full disk has cut short.
    return b"\n%b%016x%016x\n" % (kind, begin, end)


def _recorded(path: Path) -> Ranges:
    """Return the ranges that a record lists. A line that was cut short counts as not written. Raises OSError."""
    have = Ranges()
    for line in path.read_bytes().split(b"\n"):
        if len(line) != _LINE_BYTES:
            continue
        try:
            begin, end = int(line[1:17], 16), int(line[17:], 16)
        except ValueError:
            continue
        if line[:1] == b"+":
            have.add(begin, end)
        else:
            have.remove(begin, end)
    return have
