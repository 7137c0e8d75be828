"""The embedded channel: files in one folder, in shared memory if the machine has it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.channel import Buffer, ChannelLimits, RangedValue, Usage
from sync.channel_clients._arrivals import Arrivals
from sync.channel_clients._buffer_pool import MIN_BYTES, SPARE_FOLDER, BufferPool, locked
from sync.channel_clients._inotify import WatchPool
from sync.channel_clients._keys import checked_key, late
from sync.channel_clients._meter import Meter
from sync.channel_clients._pieces import checked_size, views

__all__ = ["FileChannel"]

_TRIES = 100
"""Attempts to write or read a file that other processes delete or replace at the same time."""
_MAX_VALUE_BYTES = 1 << 44
"""The largest file of ext4."""
_POPULATED_BYTES = 16 << 20
"""Values up to this size are mapped at once. Larger ones are read in windows (`sync.mapped_files`); to map 45 MB at
once took as long as page by page."""
_MAX_BUFFERS = 512
"""Buffers that are passed to one write; below the kernel's limit."""


class FileChannel:
    """A folder whose files are the values. A value is written under a temporary name and renamed.

    A file stays until it is deleted. The process that provided the folder removes it when the job is over. In shared
    memory, large files are reused once no process reads them any more (`BufferPool`).
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._meter, self._watches = Meter(), WatchPool()
        self._in_memory = _in_memory(self._folder)
        self._buffer_pool = BufferPool(self._folder / SPARE_FOLDER) if self._in_memory else None

    @property
    def usage(self) -> Usage:
        return self._meter.usage

    @property
    def limits(self) -> ChannelLimits:
        system = os.statvfs(self._folder)
        return ChannelLimits(value_bytes=_MAX_VALUE_BYTES, total_bytes=system.f_blocks * system.f_frsize)

    @property
    def in_memory(self) -> bool:
        return self._in_memory

    def _path(self, key: str) -> Path:
        return self._folder / checked_key(key)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        left = views(pieces)
        size = checked_size(key, left, _MAX_VALUE_BYTES, str(self._folder))
        self._put(key, size, lambda: iter([left]))

    def put_made(self, key: str, make: Callable[[], tuple[int, Iterator[memoryview]]]) -> None:
        size, _ = make()
        self._put(key, size, lambda: ([piece] for piece in make()[1]))

    def _put(self, key: str, size: int, groups: Callable[[], Iterator[list[memoryview]]]) -> None:
        """Write a value; ``groups``: returns the pieces of it that are written at once, each time from the first."""
        path = self._path(key)
        for tries_left in reversed(range(_TRIES)):
            try:
                _write_and_rename(path, size, groups(), self._buffer_pool if size >= MIN_BYTES else None)
                break
            except (FileNotFoundError, FileExistsError):
                # Another process is deleting the folder at this moment; the value is put nevertheless.
                if not tries_left:
                    raise
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if full and tries_left and self._buffer_pool is not None and self._buffer_pool.clear():
                    continue
                self._meter.count(failures=1)
                if full:
                    raise GeofedError("DISK_FULL", f"the channel {self._folder} is full") from None
                raise
        self._meter.count(puts=1, bytes_in=size)

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        # Sequential, because copying is limited by the memory, whatever the number of threads.
        for key in items:
            checked_key(key)
        for key, pieces in items.items():
            self.put(key, pieces)

    def get(self, key: str) -> memoryview | None:
        path = self._path(key)
        try:
            for _ in range(_TRIES):
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if self._buffer_pool is not None and size >= MIN_BYTES:
                        if not locked(file.fileno(), path):
                            continue
                        # It may have been reused before it was locked.
                        size = os.fstat(file.fileno()).st_size
                    # The mapping outlives the file's name, so a reader keeps its value when that is deleted. A value
                    # that is mapped at once counts as memory of the reader, all of it.
                    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size <= _POPULATED_BYTES else 0)
                    mapped = mmap.mmap(file.fileno(), size, flags, mmap.PROT_READ) if size else b""
                self._meter.count(gets=1, bytes_out=size)
                return memoryview(mapped)
        except FileNotFoundError:
            pass
        self._meter.count(misses=1)
        return None

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        paths = {self._path(key): key for key in keys}
        return self._wait(paths, time.monotonic() + timeout_seconds, timeout_seconds)

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        return self.wait(keys, timeout_seconds)

    def _wait(self, left: dict[Path, str], deadline: float, seconds: float) -> Iterator[tuple[str, memoryview]]:
        yield from self._arrived(left, set(left))
        if not left:
            return
        with Arrivals(iter(left), self._watches) as arrivals:
            arrivals.begin()
            # Files that appeared between the first check and the start of the watch.
            maybe = set(left)
            while True:
                in_time = time.monotonic() < deadline
                for key, value in self._arrived(left, maybe):
                    arrivals.found(self._folder / key)
                    yield key, value
                if not left:
                    return
                if not in_time:
                    raise late(left.values(), seconds)
                self._meter.count(waits=arrivals.watching)
                maybe = arrivals.next(max(0.0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    maybe = set(left)

    def _arrived(self, left: dict[Path, str], maybe: set[Path]) -> Iterator[tuple[str, memoryview]]:
        """Yield those of the files that exist, and remove them from ``left``."""
        for path in [path for path in left if path in maybe]:
            value = self.get(left[path])
            if value is not None:
                yield left.pop(path), value

    def has(self, key: str) -> bool:
        path = self._path(key)
        self._meter.count(looks=1)
        return path.exists()

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._meter.count(deletes=1)
        with contextlib.suppress(FileNotFoundError):
            if self._buffer_pool is None or not self._buffer_pool.keep(path):
                path.unlink()

    def delete_many(self, keys: Collection[str]) -> None:
        for key in keys:
            checked_key(key)
        for key in keys:
            self.delete(key)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        self._meter.count(deletes=1)
        if self._buffer_pool is not None and not (path / SPARE_FOLDER).exists():
            for folder, _, names in os.walk(path):
                for name in names:
                    with contextlib.suppress(OSError):
                        self._buffer_pool.keep(Path(folder, name))
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        self._watches.close()


def _in_memory(folder: Path) -> bool:
    """Whether the folder is in shared memory (tmpfs)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # "id parent device root MOUNT options ... - KIND source options", later mounts over earlier ones.
    mounts = {line.split()[4]: line.partition(" - ")[2].split()[0] for line in lines}
    real = folder.resolve()
    nearest = next((str(above) for above in (real, *real.parents) if str(above) in mounts), "")
    return mounts.get(nearest) in ("tmpfs", "ramfs")


def _write_and_rename(
    path: Path, size: int, groups: Iterator[list[memoryview]], buffer_pool: BufferPool | None
) -> None:
    """Write a file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        again = buffer_pool is not None and buffer_pool.take(size, partial)
        descriptor = os.open(partial, os.O_WRONLY if again else os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for pieces in groups:
                _write_all(descriptor, list(pieces))
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        # Also when interrupted: nobody would ever delete the partial file. The exception is raised again.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _write_all(descriptor: int, left: list[memoryview]) -> None:
    while left:
        done = os.writev(descriptor, left[:_MAX_BUFFERS])
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if left:
            left[0] = left[0][done:]
