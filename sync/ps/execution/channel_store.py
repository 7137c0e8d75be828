"""What a parameter server puts into the channel for its workers, and deletes once no worker reads it any more."""

from __future__ import annotations

from geofed_pb.errors import GeofedError
from sync import chunked_values, framing
from sync.channel import Channel
from sync.layout import Vector
from sync.ps.execution.replica import Replica
from sync.ps.execution.storage import Storage

__all__ = ["ChannelStore"]

_ATTEMPT_KINDS = ("init", "g", "b", "w", "c", "p")
"""First parts of the keys whose second part is the attempt; all of them are deleted once the attempt is over."""


class ChannelStore:
    """Models, optimiser states and corrections of one partition, in its channel. Must be used from one thread at a
    time."""

    def __init__(self, channel: Channel, storage: Storage, *, background: bool, part_elements: int) -> None:
        """``part_elements``: vectors are put in parts of this many elements, for workers that hold a stage of the
        model; 0: in one piece, for workers that hold the whole model."""
        self._channel, self._storage = channel, storage
        self._background, self._part_elements = background, part_elements
        self._worker_state: tuple[int, str] = -1, ""
        """The last round whose optimiser state the workers put into the channel, and its key; synchronous exchange
        only. It stays in the channel until all workers have ended the next round."""
        self._state_tree = self._old_state_tree = ""
        """Key prefix of the attempt whose workers' own optimiser state was published last, and of an earlier such
        attempt that is over but whose state may still be read."""
        self.given = ""
        """Channel key of the correction that the workers were given last; "": none."""
        self._ends: dict[int, str] = {}
        """Channel keys of the models that a replay of the log since the newest checkpoint would need, by sequence."""
        self._attempts_over = 0
        """The last attempt that is over."""
        self._trees: list[str] = []
        """Key prefixes of attempts that are over, but that a replay of the log may still need."""

    # Models and optimiser states

    def publish(self, sequence: int, model: Vector, attempt: int = 0) -> tuple[str, str]:
        """Put the model after a round and its optimiser state; return their keys, the second one "" without a state."""
        key = f"model/{sequence}"
        self._put(key, "model", model)
        stored, state_key = self._worker_state
        if stored == sequence and state_key.startswith(f"b/{attempt}/") and not self._background:
            # Only the workers of a new attempt read it, and they can read it where the old workers put it.
            self._state_tree = f"b/{attempt}"
            return key, state_key
        return key, self._publish_state(sequence)

    def publish_start(self, attempt: int, model: Vector, sequence: int) -> tuple[str, str]:
        """Put the model that an attempt begins with and the optimiser state after a round; return their keys."""
        key = f"start/{attempt}"
        self._put(key, "model", model)
        return key, self._publish_state(sequence)

    def take_state(self, sequence: int, key: str) -> None:
        """Store the optimiser state that the workers have put into the channel at the end of a round."""
        if (state := chunked_values.read_state(self._channel, key)) is None:
            return
        self._storage.keep_state(sequence, framing.encode(state.tensors, state.facts))
        if self._background:
            # Only a new attempt needs it, and `publish_start` puts it again for that.
            chunked_values.forget(self._channel, key)
        else:
            self._worker_state = sequence, key

    def _publish_state(self, sequence: int) -> str:
        state = self._storage.newest_state(sequence)
        if state is None:
            return ""
        key = f"state/{sequence}"
        if self._part_elements:
            chunked_values.put_state(self._channel, key, framing.decode(state), 4 * self._part_elements)
        else:
            self._channel.put(key, [state])
        return key

    # Corrections

    def correction(self, key: str) -> Vector | None:
        """Return a correction that the workers are given, shape (n,); ``key`` "": None.

        Raises ``GeofedError("INTERNAL")`` if it is not in the channel.
        """
        if not key:
            return None
        vector = chunked_values.read_vector(self._channel, key, "correction")
        if vector is None:
            raise GeofedError("INTERNAL", f"{key} is no longer in the channel")
        return vector

    def give_correction(self, key: str, replica: Replica) -> None:
        """Put the correction that the workers are given at the end of a round, in place of the one before: all of them
        have added that by then. ``key`` "": they are given none."""
        if self.given != key:
            self._delete(self.given)
        if key:
            size, elements = replica.model.size, self._part_elements
            chunked_values.put_blocks(self._channel, key, "correction", size, replica.correction_blocks, elements)
        self.given = key

    # Deletion

    def need_end(self, sequence: int, key: str) -> None:
        """Keep the model that the workers have ended a round with, until a checkpoint holds that round.

        If the newest checkpoint is damaged, the merges since the one before it are repeated without these models: as
        after a failure of the machine, what was held back in these rounds is then lost.
        """
        self._ends[sequence] = key

    def clear_ends(self) -> None:
        """Delete the models that a checkpoint has made unnecessary."""
        durable = self._storage.durable_sequence()
        for old in [old for old in self._ends if old <= durable]:
            self._delete(self._ends.pop(old))

    def clear(self, sequence: int, attempt: int) -> None:
        """Delete what no worker reads any more: older models, and everything from earlier attempts."""
        for kind in ("model", "state"):
            self._delete(f"{kind}/{sequence - 2}")
        if self._background:
            self.clear_ends()
        if self._old_state_tree:
            self._channel.delete_tree(self._old_state_tree)
        self._old_state_tree = ""
        for old in range(self._attempts_over + 1, attempt):
            self._trees += [f"{kind}/{old}" for kind in _ATTEMPT_KINDS]
            self._delete(f"start/{old}")
        self._attempts_over = max(self._attempts_over, attempt - 1)
        needed = tuple(self._ends.values())
        for tree in [tree for tree in self._trees if not any(key.startswith(f"{tree}/") for key in needed)]:
            self._trees.remove(tree)
            if tree == self._state_tree:
                # Workers of the new attempt may have been given the key of a state in it, so it stays for one round.
                self._state_tree, self._old_state_tree = "", tree
            else:
                self._channel.delete_tree(tree)

    def _put(self, key: str, name: str, vector: Vector) -> None:
        chunked_values.put_vector(self._channel, key, name, vector, self._part_elements)

    def _delete(self, key: str) -> None:
        if not key:
            return
        if self._part_elements:
            chunked_values.forget(self._channel, key)
        else:
            self._channel.delete(key)
