"""A channel in this process's memory, for tests: it counts, delays, and fails when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from geofed_pb.errors import GeofedError
from sync.channel import Buffer, ChannelLimits, RangedValue, Usage

__all__ = ["MemoryChannel"]


class MemoryChannel:
    """Opened several times over the same ``values``, as workers would open one store."""

    def __init__(
        self,
        values: dict[str, bytes] | None = None,
        *,
        changed: threading.Condition | None = None,
        before: Callable[[str, str], None] = lambda what, key: None,
    ) -> None:
        """``before``: called before each request with its kind and key; may sleep, or raise."""
        self.values = {} if values is None else values
        self.changed = threading.Condition() if changed is None else changed
        self.before = before
        self.usage = Usage()
        self.limits = ChannelLimits(1 << 40, None)
        self.puts = self.gets = 0
        self.in_memory = False
        """As if it were a store elsewhere, since `before` may sleep."""

    def another(self) -> MemoryChannel:
        """As another worker opens it."""
        return MemoryChannel(self.values, changed=self.changed, before=self.before)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self.before("put", key)
        value = b"".join(bytes(piece) for piece in pieces)
        with self.changed:
            self.puts += 1
            self.values[key] = value
            self.changed.notify_all()

    def put_made(self, key: str, make: Callable[[], tuple[int, Iterator[memoryview]]]) -> None:
        self.put(key, [bytes(piece) for piece in make()[1]])

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        for key, pieces in items.items():
            self.put(key, pieces)

    def get(self, key: str) -> memoryview | None:
        self.before("get", key)
        with self.changed:
            value = self.values.get(key)
            self.gets += value is not None
        return None if value is None else memoryview(value)

    def has(self, key: str) -> bool:
        self.before("has", key)
        return key in self.values

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        left, deadline = list(keys), time.monotonic() + timeout_seconds
        while left:
            with self.changed:
                self.changed.wait_for(
                    lambda: any(key in self.values for key in left), max(0.0, deadline - time.monotonic())
                )
                there = [key for key in left if key in self.values]
            if not there:
                raise GeofedError("CHANNEL_TIMEOUT", f"{', '.join(left)} not there")
            for key in there:
                value = self.get(key)
                if value is not None:
                    left.remove(key)
                    yield key, value

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        for key, value in self.wait(keys, timeout_seconds):
            yield key, value if whole > 0 else _Ranged(self, key)
            whole -= 1

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Collection[str]) -> None:
        with self.changed:
            for key in keys:
                self.before("delete", key)
                self.values.pop(key, None)

    def delete_tree(self, prefix: str) -> None:
        with self.changed:
            for key in [key for key in self.values if key.startswith(f"{prefix}/")]:
                del self.values[key]

    def close(self) -> None:
        """Nothing to let go of."""


class _Ranged(RangedValue):
    def __init__(self, channel: MemoryChannel, key: str) -> None:
        self._channel, self._key = channel, key

    def pieces(self, start: int, stop: int, size: int) -> Iterator[memoryview]:
        for at in range(start, stop, size):
            self._channel.before("range", self._key)
            yield memoryview(self._channel.values[self._key])[at : min(at + size, stop)]
