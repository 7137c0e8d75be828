"""Logs of replicas: bounded in memory for the logs route, and in a bounded file per function."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from region_agent.gateway.functions import LogLine
from region_agent.link.line_buffer import LineBuffer, dropped_text

__all__ = ["LineSplitter", "LogQuery", "LogStore", "pipe_to_lines"]

_MAX_LINE_BYTES = 16 * 1024
"""Longest line; longer ones are split."""
_LINE_OVERHEAD_BYTES = 300
"""Memory of a line besides its text, roughly."""
_FOLLOWER_BYTES = 2 << 20
"""Most bytes of lines that wait for one reader."""
_RING_BYTES = 16 << 20
"""Most bytes of lines of one function in memory."""
_MOST_RINGS = 32
"""Most functions with lines in memory, those that have been deleted included: the latest ones."""


@dataclass(frozen=True)
class LogQuery:
    """Query of a reader of logs."""

    name: str
    """Function."""
    instance: str = ""
    """Replica, empty for all."""
    tail: int | None = None
    """Largest number of past lines; the newest are returned."""
    since: datetime | None = None
    """Only lines from this time on."""
    follow: bool = False
    """Continue with new lines until the function is deleted."""


class _Follower:
    """A reader that follows new lines."""

    def __init__(self, query: LogQuery) -> None:
        self.query = query
        self.lines = LineBuffer[LogLine](_FOLLOWER_BYTES)
        self.changed = asyncio.Event()
        self.ended = False

    def end(self) -> None:
        self.ended = True
        self.changed.set()


class _Ring:
    """The newest lines of a function."""

    def __init__(self, most_lines: int) -> None:
        self.lines: deque[LogLine] = deque()
        self._most_lines, self._bytes = most_lines, 0

    def append(self, line: LogLine) -> None:
        self.lines.append(line)
        self._bytes += _size(line)
        while len(self.lines) > self._most_lines or self._bytes > _RING_BYTES:
            self._bytes -= _size(self.lines.popleft())


class LogStore:
    """The logs of all functions."""

    def __init__(self, directory: Path, *, lines_in_memory: int, file_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._lines_in_memory = lines_in_memory
        self._file_bytes = file_bytes
        self._rings: dict[str, _Ring] = {}
        """By function, the one that has written last at the end."""
        self._followers: set[_Follower] = set()
        self._files: dict[str, tuple[FileIO, int]] = {}
        """Open files with their sizes in bytes."""

    def append(self, function: str, instance: str, text: str) -> None:
        """Add a line."""
        line = LogLine(function, instance, datetime.now(UTC), text)
        ring = self._rings.pop(function, None) or _Ring(self._lines_in_memory)
        ring.append(line)
        self._rings[function] = ring
        if len(self._rings) > _MOST_RINGS:
            del self._rings[next(iter(self._rings))]
        self._write(line)
        for follower in self._followers:
            if _matches(line, follower.query):
                follower.lines.add(line, _size(line))
                follower.changed.set()

    async def read(self, query: LogQuery) -> AsyncIterator[list[LogLine]]:
        """Yield lines in order of arrival, in batches. For a slow reader the middle of the waiting lines is dropped."""
        ring = self._rings.get(query.name)
        past = [line for line in ring.lines if _matches(line, query)] if ring is not None else []
        follower = _Follower(query)
        if query.follow:
            self._followers.add(follower)
        try:
            yield past if query.tail is None else past[len(past) - min(query.tail, len(past)) :]
            while query.follow and (follower.lines or not follower.ended):
                await follower.changed.wait()
                if not follower.ended:
                    follower.changed.clear()
                first, dropped, newest = follower.lines.take()
                gap = [replace(newest[0], text=dropped_text(dropped))] if dropped else []
                yield [*first, *gap, *newest]
        finally:
            self._followers.discard(follower)

    def end(self, function: str | None = None) -> None:
        """End the followers of a function that was deleted, or all of them, after they have read the present lines."""
        for follower in self._followers:
            if function in (None, follower.query.name):
                follower.end()
        for name in [name for name in self._files if function in (None, name)]:
            self._files.pop(name)[0].close()

    def _write(self, line: LogLine) -> None:
        path = self._directory / f"{line.name}.log"
        record = {"instance": line.instance, "timestamp": line.timestamp.isoformat(), "text": line.text}
        if (held := self._files.get(line.name)) is None:
            opened = FileIO(path, "a")
            held = (opened, opened.tell())
        written = json.dumps(record).encode() + b"\n"
        file, size = held
        file.write(written)
        self._files[line.name] = (file, size + len(written))
        if size + len(written) > self._file_bytes:
            self._files.pop(line.name)[0].close()
            os.replace(path, path.with_suffix(".log.1"))


def _size(line: LogLine) -> int:
    """Return the approximate memory of a line in bytes."""
    return len(line.text.encode()) + _LINE_OVERHEAD_BYTES


def _matches(line: LogLine, query: LogQuery) -> bool:
    return (
        line.name == query.name
        and query.instance in ("", line.instance)
        and (query.since is None or line.timestamp >= query.since)
    )


class LineSplitter:
    """Makes lines of bounded length from the output of a replica."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the next part of the output."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        while len(self._rest) > _MAX_LINE_BYTES:
            self._emit(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]

    def end(self) -> None:
        """Take what has no end of a line."""
        if self._rest:
            self._emit(self._rest)
        self._rest = b""

    def _emit(self, line: bytes) -> None:
        for start in range(0, max(len(line), 1), _MAX_LINE_BYTES):
            self._take(line[start : start + _MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r"))


class _Lines(asyncio.Protocol):
    def __init__(self, take: Callable[[str], None], ended: asyncio.Future[None]) -> None:
        self._lines = LineSplitter(take)
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._lines.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lines.end()
        if not self._ended.done():
            self._ended.set_result(None)


@dataclass(frozen=True)
class LinePipe:
    """A pipe whose lines are being read."""

    transport: asyncio.ReadTransport
    """Close it to stop reading."""
    ended: asyncio.Future[None]
    """Done when the last writer is gone or the pipe was closed."""


async def pipe_to_lines(read_fd: int, take: Callable[[str], None]) -> LinePipe:
    """Read a pipe, which is closed afterwards, and call ``take`` with each line."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.connect_read_pipe(lambda: _Lines(take, ended), os.fdopen(read_fd, "rb", 0))
    return LinePipe(transport, ended)
