"""Checkpoints that another thread writes while the exchange continues in the background."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

from sync.channel import Channel
from sync.ps.core.actions import LogRoundEnd, MergeUpdates
from sync.ps.execution.checkpoint_file import PendingCheckpoint
from sync.ps.execution.replica import ReplicaState
from sync.ps.execution.storage import Storage
from sync.ps.execution.threads import background_thread

__all__ = ["Checkpoints"]

_CHECKPOINT_TIME_FRACTION = 0.1
"""At most this fraction of the time is spent on checkpoints, where the log would be enough to recover."""
_REPLAY_BYTES = 1 << 28
"""A checkpoint is due when the models that a replay of the log needs take more bytes of the channel than this ..."""
_REPLAY_CHANNEL_FRACTION = 1 / 16
"""... or more than this fraction of the channel's capacity, ..."""
_MIN_REPLAY_ROUNDS = 3
"""... and at least this many rounds have ended since the last checkpoint."""


@dataclass(frozen=True)
class _PendingWrite:
    """A checkpoint that another thread is writing; times are in seconds of the monotonic clock."""

    checkpoint: PendingCheckpoint
    begun: float
    written: Future[str]
    """The model's digest, once the file is written."""
    flushed: Future[float]
    """When the file became durable."""


class Checkpoints:
    """When to write the next checkpoint, and the one that is being written."""

    def __init__(self, storage: Storage, channel: Channel) -> None:
        self._storage, self._channel = storage, channel
        self._pending: _PendingWrite | None = None
        """The checkpoint that another thread is writing."""
        self._at, self._took = 0.0, 0.0
        """When the last checkpoint became durable (monotonic clock), and how long it took, both in seconds."""
        self._of = 0
        """The last round that the newest checkpoint holds, be it durable or being written."""

    def begin_if_due(self, state: ReplicaState, action: MergeUpdates, ended: LogRoundEnd | None, attempt: int) -> None:
        """Have another thread write a checkpoint if one is due. Only an action that would change the state waits until
        it is written, by `settle`."""
        now = time.monotonic()
        due = now - self._at >= self._took / _CHECKPOINT_TIME_FRACTION
        rounds = action.sequence - self._of
        replay_is_large = rounds >= _MIN_REPLAY_ROUNDS and rounds * state.model.nbytes > self._max_replay_bytes()
        # On a slow disk, checkpoints take at most half of the time nevertheless.
        due |= replay_is_large and now - self._at >= self._took
        if due and self._pending is None:
            checkpoint = self._storage.begin_checkpoint(state, action, ended, attempt)
            writer = background_thread()
            self._pending = _PendingWrite(
                checkpoint, now, writer.submit(checkpoint.write), writer.submit(_flushed, checkpoint)
            )
            writer.shutdown(wait=False)
            self._of = action.sequence

    def _max_replay_bytes(self) -> float:
        total = self._channel.limits.total_bytes
        return _REPLAY_BYTES if total is None else min(_REPLAY_BYTES, _REPLAY_CHANNEL_FRACTION * total)

    def settle(self, *, written: bool = False) -> None:
        """Wait until the pending checkpoint is durable; ``written``: only until it is written and the state may
        change."""
        pending = self._pending
        if pending is None:
            return
        pending.written.result()
        if written and not pending.flushed.done():
            return
        self._at = pending.flushed.result()
        self._pending = None
        self._storage.finish_checkpoint(pending.checkpoint)
        self._took = self._at - pending.begun


def _flushed(checkpoint: PendingCheckpoint) -> float:
    checkpoint.flush(throttled=True)
    return time.monotonic()
