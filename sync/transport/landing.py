"""The file that an update lands in: written in any order, by several threads, and resumable in another life."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.transport.ranges import Ranges

__all__ = ["Landing"]

_FLUSH_BYTES = 4 << 20
_READ_BYTES = 1 << 20


class Landing:
    """A file of known size and the record of what is in it.

    The record survives the process: it is written after the bytes that it tells of. After a loss of power it may tell
    of bytes that never reached the disk; the digest of the whole finds that out. Hashing and flushing go along with
    the arrival (`settle`), so that little is left to do at its end.
    """

    def __init__(self, path: Path, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._path, self._record = path, path.with_suffix(".have")
        self._have = Ranges()
        self._lock, self._settling = threading.Lock(), threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._writers, self._sealed = 0, False
        self._file: int | None = None
        self._hash, self._hashed, self._flushed = hashlib.sha256(), 0, 0
        with contextlib.suppress(OSError, ValueError, TypeError):
            if path.stat().st_size == total_bytes:
                self._have = Ranges((int(begin), int(end)) for begin, end in json.loads(self._record.read_bytes()))

    @property
    def have(self) -> list[tuple[int, int]]:
        """Ranges that are written."""
        with self._lock:
            return list(self._have)

    @property
    def prefix(self) -> int:
        """Bytes written from 0 on without a hole."""
        with self._lock:
            return self._have.prefix

    @property
    def whole(self) -> bool:
        with self._lock:
            return self._have.prefix == self.total_bytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes in their place. The room for the whole update is taken by the first call.

        Raises ``GeofedError``: ``DISK_FULL``, or ``FENCED`` where the update is complete already.
        """
        with self._disk_full_is_told():
            file = self._open(writing=True)
        view, at = memoryview(data), offset
        try:
            with self._disk_full_is_told():
                while len(view):
                    written = os.pwrite(file, view, at)
                    view, at = view[written:], at + written
        finally:
            with self._lock:
                self._have.add(offset, at)
                self._writers -= 1
                self._idle.notify_all()

    def drop(self, offset: int, length: int) -> None:
        """Forget bytes that turned out to be damaged; they are hashed anew once they are here again."""
        with self._settling, self._lock:
            self._have.remove(offset, offset + length)
            if self._hashed > offset:
                self._hash, self._hashed = hashlib.sha256(), 0

    def keep_record(self) -> None:
        """Let a later life of the process know what is here."""
        with self._lock, self._disk_full_is_told():
            partial = self._record.with_name(f".{self._record.name}.partial")
            partial.write_text(json.dumps(list(self._have)))
            os.replace(partial, self._record)

    def settle(self) -> None:
        """Hash and flush what has come, unless another thread is at it."""
        if self._settling.acquire(blocking=False):
            try:
                self._advance()
                if self._hashed - self._flushed >= _FLUSH_BYTES:
                    os.fdatasync(self._open())
                    self._flushed = self._hashed
            finally:
                self._settling.release()

    def digest(self) -> str:
        """The digest of what is here, which must be whole."""
        with self._settling:
            self._advance()
            return "sha256:" + self._hash.hexdigest()

    def flush(self) -> None:
        os.fsync(self._open())

    def seal(self) -> None:
        """Let nobody write any more: what is here is about to be verified, or given up."""
        with self._lock:
            self._sealed = True
            self._idle.wait_for(lambda: self._writers == 0)

    def discard(self) -> None:
        """Begin anew; the landing is sealed."""
        self.close()
        with self._settling, self._lock:
            self._have, self._hash, self._hashed, self._flushed = Ranges(), hashlib.sha256(), 0, 0
            for path in (self._record, self._path):
                path.unlink(missing_ok=True)
            self._sealed = False

    def forget_record(self) -> None:
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
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
                    # It may have been left by a life that came as far as giving the file its last name.
                    self._record.unlink(missing_ok=True)
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(file, 0, self.total_bytes)
                    os.ftruncate(file, self.total_bytes)
                except OSError:
                    os.close(file)
                    if not self._have.total:
                        self._path.unlink(missing_ok=True)
                    raise
                self._file = file
            self._writers += writing
            return self._file

    @contextlib.contextmanager
    def _disk_full_is_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise GeofedError("DISK_FULL", f"no space left for {self._path}") from None
            raise

    def _advance(self) -> None:
        file, buffer = self._open(), memoryview(bytearray(_READ_BYTES))
        while (left := self.prefix - self._hashed) > 0:
            count = os.preadv(file, [buffer[: min(left, _READ_BYTES)]], self._hashed)
            if count == 0:
                raise OSError(f"{self._path} has become shorter")
            self._hash.update(buffer[:count])
            self._hashed += count
