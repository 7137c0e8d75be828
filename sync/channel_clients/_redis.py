"""The channel over a Redis server, 6.2 or newer.

A value is a string under its key. A stream with one entry, under a second key, announces it: unlike with strings and
lists, a reader can block on many streams at a time without taking anything from other readers. The value itself is not
in the stream, because the server would have to copy it; a small value is in both, which saves its reader a round trip.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from geofed_pb.errors import GeofedError
from sync.channel import Buffer, ChannelLimits, RangedValue, Usage
from sync.channel_clients._address import parsed, whole
from sync.channel_clients._keys import checked_key, late
from sync.channel_clients._meter import Meter
from sync.channel_clients._pieces import checked_size, cut, kept, views
from sync.channel_clients._redis_server import MAX_BLOCK_SECONDS, Command, ConnectionLost, Server

__all__ = ["RedisChannel"]

_LIFE_SECONDS = 24 * 3600
"""Default time after which a value expires if it is not read."""
_PART_BYTES = 512 << 20
"""Largest string in Redis (``proto-max-bulk-len``)."""
_PARTS = 8
"""Strings that a value is divided into, at most."""
_SMALL_BYTES = 1 << 16
"""Values up to this size are also in the stream: sending them twice takes less time than one more round trip."""
_KEYS_PER_REQUEST = 1000
"""Keys that one request deletes or looks up, at most. A choice: one request must not hold up the server's others."""
_SIGN = ":new"
"""Suffix of the stream's key; keys contain no colon."""


class RedisChannel:
    """A channel in one Redis server (no cluster: a request may name keys of different slots).

    ``redis://[user:password@]host[:port][/database]``, ``rediss://`` (TLS) or ``unix:///path.sock``, with the options
    ``prefix`` (prefix of all keys; default `geofed`), ``life`` (seconds after which a value expires since it was put or
    last read; default a day) and ``db``.
    """

    def __init__(
        self, address: str, *, part_bytes: int = _PART_BYTES, timeout_seconds: float = 10.0, parts: int = _PARTS
    ) -> None:
        url = parsed(address, ("redis", "rediss", "unix"), ("prefix", "life", "db"))
        prefix = url.options.get("prefix", "geofed")
        self._prefix = f"{checked_key(prefix)}/" if prefix else ""
        self._life_ms = 1000 * whole(url, "life", _LIFE_SECONDS)
        self._part_bytes, self._parts, self._shown = part_bytes, parts, url.shown
        self._meter = Meter()
        self._server = Server(url, self._meter, timeout_seconds)
        self._limits: ChannelLimits | None = None

    @property
    def usage(self) -> Usage:
        return self._meter.usage

    @property
    def limits(self) -> ChannelLimits:
        if self._limits is None:
            (reply,) = self._server.ask([("INFO", "memory")])
            self._meter.count(looks=1)
            facts = dict(line.partition(":")[::2] for line in bytes(reply).decode().splitlines())
            most = int(facts.get("maxmemory", "0"))
            self._limits = ChannelLimits(value_bytes=self._part_bytes * self._parts, total_bytes=most or None)
        return self._limits

    @property
    def in_memory(self) -> bool:
        return False

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self.put_many({key: pieces})

    def put_made(self, key: str, make: Callable[[], tuple[int, Iterator[memoryview]]]) -> None:
        self.put(key, kept(make()[1]))

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        commands: list[Command] = []
        size = strings = 0
        for key, pieces in items.items():
            name, left = self._name(key), views(pieces)
            bytes_ = checked_size(key, left, self._part_bytes * self._parts, f"Redis at {self._shown}")
            written = self._storing(name, left, bytes_)
            commands += [("MULTI",), *written, ("EXEC",)]
            strings += sum(command[0] == "SET" for command in written)
            size += bytes_
        if commands:
            self._server.ask(commands)
            self._meter.count(puts=strings, bytes_in=size)

    def _storing(self, name: str, pieces: list[memoryview], size: int) -> list[Command]:
        # An empty value consists of one part as well.
        parts = list(cut(pieces, self._part_bytes)) or [[]]
        named = zip(self._part_names(name), parts, strict=False)
        commands: list[Command] = [("SET", part, content, "PX", self._life_ms) for part, content in named]
        if size >= self._part_bytes and len(parts) < self._parts:
            # A full first part tells a reader that there are more parts, so further parts of an older value must be
            # deleted.
            commands.append(("UNLINK", *self._part_names(name)[len(parts) :]))
        sign = ("value", pieces) if size <= _SMALL_BYTES else ("large", "")
        commands.append(("XADD", name + _SIGN, "MAXLEN", 1, "*", *sign))
        commands.append(("PEXPIRE", name + _SIGN, self._life_ms))
        return commands

    def get(self, key: str) -> memoryview | None:
        name = self._name(key)
        # Reading renews the expiry: a job may need for days what it put at its start.
        value, _ = self._server.ask([("GETEX", name, "PX", self._life_ms), ("PEXPIRE", name + _SIGN, self._life_ms)])
        return self._value(name, value)

    def _value(self, name: str, reply: bytes | memoryview | None) -> memoryview | None:
        if reply is None:
            self._meter.count(misses=1)
            return None
        self._meter.count(gets=1, bytes_out=len(reply))
        if len(reply) < self._part_bytes:
            return memoryview(reply)
        (parts,) = self._server.ask([("MGET", *self._part_names(name))])
        there = [part for part in parts if part is not None]
        self._meter.count(gets=1, bytes_out=sum(len(part) for part in there))
        return memoryview(b"".join(there)) if parts[0] is not None else None

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        found: Any = self.wait_ranged(keys, timeout_seconds, len(keys))  # all are whole
        return iter(found)

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        names = {self._name(key): key for key in keys}
        return self._wait(names, time.monotonic() + timeout_seconds, timeout_seconds, whole)

    def _wait(
        self, left: dict[str, str], deadline: float, seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        retries = self._server.retries()
        seen: dict[str, bytes] = {}
        while left:
            block = min(deadline - time.monotonic(), MAX_BLOCK_SECONDS)
            signs = self._signs(left, seen, block)
            if not signs:
                if block <= 0:
                    raise late(left.values(), seconds)
                # Announcements whose values no longer exist are read again, in case their numbers have started again.
                seen.clear()
            small = {name: value for name, (_, value) in signs.items() if value is not None}
            for name, content in small.items():
                yield left.pop(name), memoryview(content)
            large = [name for name in signs if name not in small]
            for name in large[whole:]:
                yield left.pop(name), _Ranged(self._server, self._meter, name, self._part_names(name), self._part_bytes)
            del large[whole:]
            try:
                with closing(self._server.ask_pipelined([("GET", name) for name in large])) as replies:
                    for name in large:
                        value = self._value(name, next(replies))
                        if value is None:
                            seen[name] = signs[name][0]
                        else:
                            whole -= 1
                            yield left.pop(name), value
                        del value  # so that it can be freed while the next one is awaited
                retries.reset()
            except ConnectionLost as lost:
                retries.pause(lost)

    def _signs(
        self, left: Mapping[str, str], seen: Mapping[str, bytes], block_seconds: float
    ) -> dict[str, tuple[bytes, bytes | None]]:
        """Return which values have arrived, each with its entry's number and, if it is small, the value."""
        blocking = ("BLOCK", math.ceil(1000 * block_seconds)) if block_seconds > 0 else ()
        numbers = [seen.get(name, b"0") for name in left]
        (reply,) = self._server.ask([("XREAD", *blocking, "STREAMS", *(name + _SIGN for name in left), *numbers)])
        self._meter.count(waits=1)
        signs: dict[str, tuple[bytes, bytes | None]] = {}
        for stream, entries in reply or ():
            number, (kind, value) = entries[-1]
            signs[bytes(stream).decode().removesuffix(_SIGN)] = (number, value if kind == b"value" else None)
        self._meter.count(bytes_out=sum(len(value) for _, value in signs.values() if value is not None))
        return signs

    def has(self, key: str) -> bool:
        (reply,) = self._server.ask([("EXISTS", self._name(key))])
        self._meter.count(looks=1)
        return bool(reply)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Collection[str]) -> None:
        self._unlink([self._name(key) for key in keys])

    def _unlink(self, names: Sequence[str]) -> None:
        batches = [names[at : at + _KEYS_PER_REQUEST] for at in range(0, len(names), _KEYS_PER_REQUEST)]
        commands: list[Command] = [
            ("UNLINK", *(each for name in batch for each in (*self._part_names(name), name + _SIGN)))
            for batch in batches
        ]
        if commands:
            self._server.ask(commands)
            self._meter.count(deletes=len(commands))

    def delete_tree(self, prefix: str) -> None:
        pattern, cursor = f"{self._name(prefix)}/*", b"0"
        while True:
            # Keys contain no character with a special meaning in a pattern.
            ((cursor, found),) = self._server.ask([("SCAN", cursor, "MATCH", pattern, "COUNT", _KEYS_PER_REQUEST)])
            self._meter.count(lists=1)
            if found:
                self._server.ask([("UNLINK", *found)])
                self._meter.count(deletes=1)
            if bytes(cursor) == b"0":
                return

    def close(self) -> None:
        self._server.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _part_names(self, name: str) -> list[str]:
        return [name, *(f"{name}:{number}" for number in range(1, self._parts))]


class _Ranged(RangedValue):
    """A value that is read in ranges; while one is used, the next one is on its way."""

    def __init__(self, server: Server, meter: Meter, name: str, parts: Sequence[str], part_bytes: int) -> None:
        self._server, self._meter, self._name, self._parts, self._part_bytes = server, meter, name, parts, part_bytes

    def pieces(self, start: int, stop: int, size: int) -> Iterator[memoryview]:
        retries = self._server.retries()
        while start < stop:
            ranges = [(at, min(at + size, stop)) for at in range(start, stop, size)]
            try:
                with closing(self._server.ask_pipelined([one for each in ranges for one in self._asked(*each)])) as got:
                    for begin, end in ranges:
                        found = [next(got) for _ in self._asked(begin, end)]
                        self._meter.count(gets=len(found), bytes_out=sum(len(one) for one in found))
                        if sum(len(one) for one in found) < end - begin:
                            raise GeofedError("FENCED", f"{self._name} is no longer in Redis, or is another value")
                        yield memoryview(found[0] if len(found) == 1 else b"".join(found))
                        del found
                        start = end
                        retries.reset()
            except ConnectionLost as lost:
                retries.pause(lost)

    def _asked(self, start: int, stop: int) -> list[Command]:
        """Return the requests for a range, one for each string that it lies in."""
        borders = range(start - start % self._part_bytes, stop, self._part_bytes)
        return [
            (
                "GETRANGE",
                self._parts[at // self._part_bytes],
                max(start - at, 0),
                min(stop - at, self._part_bytes) - 1,
            )
            for at in borders
        ]
