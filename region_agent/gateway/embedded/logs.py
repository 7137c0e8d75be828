"""What replicas write: bounded in memory for the logs route, and in a bounded file per function."""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from region_agent.gateway.functions import LogLine

__all__ = ["LogQuery", "LogStore", "pipe_to_lines"]

_MAX_LINE_BYTES = 16 * 1024
_FOLLOWER_LINES = 10_000


@dataclass(frozen=True)
class LogQuery:
    """What a reader of logs asks for."""

    name: str
    """Function."""
    instance: str = ""
    """Replica, empty for all."""
    tail: int | None = None
    """Most lines of the past, the newest of them."""
    since: datetime | None = None
    """Nothing older than this."""
    follow: bool = False
    """True goes on with new lines until the function is gone."""


class LogStore:
    """The logs of all functions."""

    def __init__(self, directory: Path, *, lines_in_memory: int, file_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._lines_in_memory = lines_in_memory
        self._file_bytes = file_bytes
        self._rings: dict[str, deque[LogLine]] = {}
        self._followers: dict[asyncio.Queue[LogLine | None], LogQuery] = {}

    def append(self, function: str, instance: str, text: str) -> None:
        """Take a line."""
        line = LogLine(function, instance, datetime.now(UTC), text)
        ring = self._rings.setdefault(function, deque(maxlen=self._lines_in_memory))
        ring.append(line)
        self._write(line)
        for follower, query in self._followers.items():
            if _matches(line, query) and not follower.full():
                follower.put_nowait(line)

    async def read(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Lines in order of arrival."""
        follower: asyncio.Queue[LogLine | None] = asyncio.Queue(_FOLLOWER_LINES)
        past = [line for line in self._rings.get(query.name, ()) if _matches(line, query)]
        if query.follow:
            self._followers[follower] = query
        try:
            for line in past if query.tail is None else past[len(past) - min(query.tail, len(past)) :]:
                yield line
            while query.follow and (fresh := await follower.get()) is not None:
                yield fresh
        finally:
            self._followers.pop(follower, None)

    def end(self, function: str | None = None) -> None:
        """End the followers of a function that was deleted, or all of them."""
        for follower, query in list(self._followers.items()):
            if function in (None, query.name):
                while follower.full():
                    follower.get_nowait()
                follower.put_nowait(None)

    def _write(self, line: LogLine) -> None:
        path = self._directory / f"{line.name}.log"
        record = {"instance": line.instance, "timestamp": line.timestamp.isoformat(), "text": line.text}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            full = file.tell() > self._file_bytes
        if full:
            os.replace(path, path.with_suffix(".log.1"))


def _matches(line: LogLine, query: LogQuery) -> bool:
    return (
        line.name == query.name
        and query.instance in ("", line.instance)
        and (query.since is None or line.timestamp >= query.since)
    )


class _Lines(asyncio.Protocol):
    def __init__(self, take: Callable[[str], None], ended: asyncio.Future[None]) -> None:
        self._take = take
        self._ended = ended
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        while len(self._rest) > _MAX_LINE_BYTES:
            self._emit(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._emit(self._rest)
        if not self._ended.done():
            self._ended.set_result(None)

    def _emit(self, line: bytes) -> None:
        for start in range(0, max(len(line), 1), _MAX_LINE_BYTES):
            self._take(line[start : start + _MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r"))


@dataclass(frozen=True)
class LinePipe:
    """A pipe whose lines are being read."""

    transport: asyncio.ReadTransport
    """Close it to stop reading."""
    ended: asyncio.Future[None]
    """Done when the last writer is gone or the pipe was closed."""


async def pipe_to_lines(read_fd: int, take: Callable[[str], None]) -> LinePipe:
    """Read a pipe, which this takes over, and hand each line to ``take``."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    transport, _ = await loop.connect_read_pipe(lambda: _Lines(take, ended), os.fdopen(read_fd, "rb", 0))
    return LinePipe(transport, ended)
