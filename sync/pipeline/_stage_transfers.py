"""StageTransfers: a stage's uploads and downloads, concurrent with its computing.

As in FuncPipe (section 3.1 of the paper), computing, uploading and downloading overlap, and receives are queued before
their values are needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Collection, Sequence

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.framing import Buffer

__all__ = ["StageTransfers"]

_CHECK_SECONDS = 0.5
"""Interval at which a wait checks whether it is still needed."""
_DELETE_BATCH = 16
"""Keys that are deleted together."""

_Pieces = Sequence[Buffer]


class StageTransfers:
    """The transfers of one computing thread. After an error, which any call may raise, they can only be closed."""

    def __init__(self, channel: Channel, timeout_seconds: float) -> None:
        """``timeout_seconds``: timeout of `take`, which then raises ``GeofedError("CHANNEL_TIMEOUT")``."""
        self._channel, self._timeout = channel, timeout_seconds
        self._outgoing: queue.SimpleQueue[tuple[str, _Pieces] | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[tuple[str, ...] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._arrived: dict[str, memoryview] = {}
        self._unsent = 0
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._consumed: list[str] = []
        self._to_delete: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self.waited_seconds = 0.0
        """Total time that the computing thread has spent in `take`."""
        self.taken_bytes = 0
        """Total size of the values that were taken."""
        self._threads = [
            threading.Thread(target=self._guarded, args=(lane,), name=name, daemon=True)
            for name, lane in (("upload", self._upload), ("download", self._download), ("delete", self._delete))
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, keys: Collection[str]) -> None:
        """Download these values as they arrive, after those expected before. Each must be taken."""
        if keys:
            self._wanted.put(tuple(keys))

    def take(self, key: str, *, keep: bool = False) -> memoryview:
        """Return the value of an expected key, which is then deleted from the channel with others, unless ``keep``."""
        begun = time.monotonic()
        with self._changed:
            arrived = self._changed.wait_for(lambda: key in self._arrived or self._error, self._timeout)
            self.waited_seconds += time.monotonic() - begun
            self._check()
            if not arrived:
                raise GeofedError("CHANNEL_TIMEOUT", f"timed out after {self._timeout:g} s waiting for {key}")
            value = self._arrived.pop(key)
        self.taken_bytes += value.nbytes
        if not keep:
            self.drop(key)
        return value

    def send(self, key: str, pieces: _Pieces) -> None:
        """Upload a value; the memory of its pieces must not change any more."""
        with self._changed:
            self._check()
            self._unsent += 1
        self._outgoing.put((key, pieces))

    def drop(self, key: str) -> None:
        """Delete a key, together with others."""
        self._consumed.append(key)
        if len(self._consumed) >= _DELETE_BATCH:
            self.flush()

    def flush(self) -> None:
        """Have all that is consumed deleted now."""
        if self._consumed:
            self._to_delete.put(self._consumed)
            self._consumed = []

    def drain(self) -> None:
        """Wait until everything has been sent. Raises ``GeofedError("CHANNEL_TIMEOUT")``."""
        with self._changed:
            sent = self._changed.wait_for(lambda: not self._unsent or self._error, self._timeout)
            self._check()
            if not sent:
                raise GeofedError("CHANNEL_TIMEOUT", f"{self._unsent} values were not sent within {self._timeout:g} s")

    def close(self) -> None:
        """End the threads; what was not sent is lost, what was not taken stays in the channel."""
        self._closed.set()
        self.flush()
        for lane in (self._outgoing, self._wanted, self._to_delete):
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(self, lane: object) -> None:
        try:
            lane()  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - outermost frame of the thread: the computing thread must be notified
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _upload(self) -> None:
        while (first := self._outgoing.get()) is not None and not self._closed.is_set():
            waiting = dict([first])
            with contextlib.suppress(queue.Empty):
                while (more := self._outgoing.get_nowait()) is not None:
                    waiting[more[0]] = more[1]
                # The end of the lane was requested.
                self._outgoing.put(None)
            count = len(waiting)
            if count == 1:
                self._channel.put(*first)
            else:
                self._channel.put_many(waiting)
            with self._changed:
                self._unsent -= count
                self._changed.notify_all()

    def _download(self) -> None:
        while (keys := self._wanted.get()) is not None:
            left = dict.fromkeys(keys)
            while left and not self._closed.is_set():
                try:
                    for key, value in self._channel.wait(tuple(left), _CHECK_SECONDS):
                        del left[key]
                        with self._changed:
                            self._arrived[key] = value
                            self._changed.notify_all()
                        if self._closed.is_set():
                            return
                except GeofedError as error:
                    if error.code != "CHANNEL_TIMEOUT":
                        raise

    def _delete(self) -> None:
        while (keys := self._to_delete.get()) is not None:
            # What cannot be deleted now is deleted with the attempt's tree; no worker will read it.
            with contextlib.suppress(GeofedError, OSError):
                self._channel.delete_many(keys)
