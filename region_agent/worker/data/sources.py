"""Ranges of files: of this machine, or of objects of a store through presigned URLs."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from geofed_pb.errors import GeofedError
from region_agent.worker.data.fetching import RETRY_PAUSES_SECONDS
from region_agent.worker.invocation import ShardFile

__all__ = ["RangeFile", "Source", "Sources", "file_faults", "version_of"]

_CONNECTIONS = 32
"""Open connections to a store."""
_TIMEOUT_SECONDS = 30.0
"""Longest time until a store sends something."""
_FAULTS: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, IndexError, OverflowError, EOFError)
"""Exceptions that the content of a file causes; those of pyarrow are among them."""


class Sources:
    """The files of a split. The URLs are renewed for each invocation; may be used from several threads."""

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self._lock = threading.Lock()
        self._client: httpx2.Client | None = None
        self._files = list(files)
        self._open: dict[int, int] = {}
        self.read_bytes = 0
        """Bytes that were read."""

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Source:
        return Source(self, number)

    def renew(self, files: Sequence[ShardFile]) -> None:
        """Use the URLs of the same files that are valid now."""
        self._files = list(files)

    def file(self, number: int) -> ShardFile:
        """Return a file's description."""
        return self._files[number]

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Read a range. Raises ``GeofedError("SHARD_UNREADABLE")``, also if the file has become shorter."""
        file = self._files[number]
        content = self._local(number, offset, length) if file.path else self._remote(file, offset, length)
        if len(content) != length:
            text = f"{file.name}: has {len(content)} of the {length} bytes at {offset}: it has changed"
            raise GeofedError("SHARD_UNREADABLE", text)
        with self._lock:
            self.read_bytes += length
        return content

    def close(self) -> None:
        """Close files and connections."""
        with self._lock:
            opened, self._open = self._open, {}
            client, self._client = self._client, None
        for descriptor in opened.values():
            os.close(descriptor)
        if client is not None:
            client.close()

    def __del__(self) -> None:
        self.close()

    def _local(self, number: int, offset: int, length: int) -> bytes:
        file = self._files[number]
        try:
            with self._lock:
                if number not in self._open:
                    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                    if len(self._open) >= _CONNECTIONS:
                        os.close(self._open.pop(next(iter(self._open))))
                    self._open[number] = descriptor
                # Duplicated, since another thread may close it for a further file.
                descriptor = os.dup(self._open[number])
            try:
                if file.version and version_of(os.fstat(descriptor)) != file.version:
                    raise GeofedError("SHARD_UNREADABLE", f"{file.name}: has changed since the job began")
                pieces = bytearray()
                while len(pieces) < length:
                    if not (piece := os.pread(descriptor, length - len(pieces), offset + len(pieces))):
                        break
                    pieces += piece
                return bytes(pieces)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {error.strerror}") from None

    def _remote(self, file: ShardFile, offset: int, length: int) -> bytes:
        if not length:
            return b""
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                return self._request(file, offset, length)
            except httpx2.HTTPError as error:
                answer = error.response.status_code if isinstance(error, httpx2.HTTPStatusError) else 0
                # The URL contains a signature, so the message has the object's name only.
                reason = f"status {answer}" if answer else type(error).__name__
                if answer == 412:
                    reason = "it has changed since the job began"
                if 0 < answer < 500 or pause is None:
                    raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {reason}") from None
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _request(self, file: ShardFile, offset: int, length: int) -> bytes:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + length - 1}"}
        if file.version:
            headers["If-Match"] = file.version
        # The path as it was signed: see `fetching`.
        target = "/" + file.url.partition("://")[2].partition("/")[2]
        with self._lock:
            if self._client is None:
                limits = httpx2.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
                self._client = httpx2.Client(timeout=_TIMEOUT_SECONDS, limits=limits)
            client = self._client
        extensions = {"target": target.encode("ascii")}
        with client.stream("GET", file.url, headers=headers, extensions=extensions) as answer:
            answer.raise_for_status()
            if answer.status_code != 206 and (offset or length != file.size):
                text = f"{file.name}: the store answers a request for a part with the whole object"
                raise GeofedError("SHARD_UNREADABLE", text, hint="use a store that supports range requests")
            content = bytearray()
            for piece in answer.iter_raw(1 << 20):
                content += piece
                if len(content) > length:
                    raise httpx2.RemoteProtocolError("more bytes than requested")
        if len(content) < length:
            raise httpx2.RemoteProtocolError("fewer bytes than requested")
        return bytes(content)


class Source:
    """One file of a split."""

    def __init__(self, sources: Sources, number: int) -> None:
        file = sources.file(number)
        self._sources, self.number, self.name = sources, number, file.name
        try:
            self.size = Path(file.path).stat().st_size if file.path else int(file.size or 0)
        except OSError as error:
            raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {error.strerror}") from None

    def read(self, offset: int, length: int) -> bytes:
        """Read a range; raises ``GeofedError("SHARD_UNREADABLE")``."""
        return self._sources.read(self.number, offset, length)


class RangeFile(io.RawIOBase):
    """A source as a file object, which reads only what is asked for."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source, self._at = source, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read at most ``size`` bytes; -1: all that follow."""
        left = max(0, self._source.size - self._at)
        content = self._source.read(self._at, left if size < 0 else min(size, left))
        self._at += len(content)
        return content


def version_of(status: os.stat_result) -> str:
    """Return what changes when a file of this machine does."""
    return f"{status.st_size}-{status.st_mtime_ns}"


@contextmanager
def file_faults(name: str, *faults: type[Exception]) -> Iterator[None]:
    """Turn exceptions that a file's content has caused into SHARD_UNREADABLE with its name."""
    try:
        yield
    except GeofedError:
        raise
    except (*_FAULTS, *faults) as error:
        text = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise GeofedError("SHARD_UNREADABLE", f"{name}: {text}", hint="correct the file, or remove it") from None
