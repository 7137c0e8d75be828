"""What a parameter server lays out for its workers in the channel, and takes away once none of them reads it."""

from __future__ import annotations

from collections.abc import Callable

from sync import chunked, framing
from sync.channel import Channel
from sync.layout import Vector
from sync.ps.execution.storage import Storage, correction_key

__all__ = ["ChannelStore"]

_ATTEMPT_KINDS = ("init", "g", "b", "w", "c", "p")
"""Channel folders whose next part is the attempt."""


class ChannelStore:
    """Models, optimiser states and corrections of one partition. Used from one thread at a time."""

    def __init__(self, channel: Channel, storage: Storage, *, background: bool, part_elements: int) -> None:
        """``part_elements``: what workers read is put in parts of so many; 0: whole, as workers that hold all of the
        model read it."""
        self._channel, self._storage = channel, storage
        self._background, self._part_elements = background, part_elements
        self._handed: tuple[int, str] = -1, ""
        """With synchronous exchange: the round of which workers have handed over the optimiser's state last, and where
        that lies in the channel: it stays there until all have ended the next one."""
        self._lent = self._outlived = ""
        """Trees of attempts whose workers' own state was published: of the present one, and of one that is over."""
        self._corrections: dict[str, Vector] = {}
        self._ends: dict[int, str] = {}
        """Channel keys of models that a replay of the log would need, by sequence."""
        self._attempts_over = 0
        self._trees: list[str] = []
        """Trees of attempts that are over which a replay of the log may still need."""

    # Models and states

    def publish(self, sequence: int, model: Vector, attempt: int = 0) -> tuple[str, str]:
        """Put a model, and the optimiser's state that belongs to it; their keys, "" where there is no state."""
        key = f"model/{sequence}"
        self._put(key, "model", model)
        handed, state_key = self._handed
        if handed == sequence and state_key.startswith(f"b/{attempt}/") and not self._background:
            # Only a new attempt asks for it, and finds it where the workers have put it.
            self._lent = f"b/{attempt}"
            return key, state_key
        return key, self._publish_state(sequence)

    def publish_start(self, attempt: int, model: Vector, sequence: int) -> tuple[str, str]:
        """Put what an attempt begins with; the keys of the model and of the state after the round ``sequence``."""
        key = f"start/{attempt}"
        self._put(key, "model", model)
        return key, self._publish_state(sequence)

    def take_state(self, sequence: int, key: str) -> None:
        """The workers have handed over the optimiser's state of a round: store it."""
        if (state := chunked.read_state(self._channel, key)) is None:
            return
        self._storage.keep_state(sequence, framing.encode(state.tensors, state.facts))
        if self._background:
            # A restart puts it where a new attempt finds it, and nobody else asks for it.
            chunked.forget(self._channel, key)
        else:
            self._handed = sequence, key

    def _publish_state(self, sequence: int) -> str:
        state = self._storage.newest_state(sequence)
        if state is None:
            return ""
        key = f"state/{sequence}"
        if self._part_elements:
            chunked.put_state(self._channel, key, framing.decode(state), 4 * self._part_elements)
        else:
            self._channel.put(key, [state])
        return key

    # Corrections

    def correction(self, key: str) -> Vector | None:
        """One that is kept; None: workers need it no more, or never did."""
        return self._corrections.get(key)

    def keep_correction(self, version: int, given: str, make: Callable[[Vector | None], Vector]) -> str:
        """Remember what leads the workers to the model, and what they were ``given`` last; no other is asked for again.

        ``make`` is handed memory that it may use, if there is any.
        """
        key, room = correction_key(version), None
        for old in [old for old in self._corrections if old != given]:
            room = self._corrections.pop(old)
            self._delete(old)
        self._corrections[key] = make(room)
        return key

    def publish_correction(self, key: str) -> None:
        """Put one that is kept."""
        self._put(key, "correction", self._corrections[key])

    # What goes

    def need_end(self, sequence: int, key: str) -> None:
        """Keep the model that workers have ended a round with until a checkpoint holds what it has led to."""
        self._ends[sequence] = key

    def clear(self, sequence: int, attempt: int) -> None:
        """Forget what no worker reads any more: older models, and all that fenced attempts have left."""
        for kind in ("model", "state"):
            self._delete(f"{kind}/{sequence - 2}")
        if self._background:
            durable = self._storage.durable_sequence()
            for old in [old for old in self._ends if old <= durable]:
                self._delete(self._ends.pop(old))
        if self._outlived:
            self._channel.delete_tree(self._outlived)
        self._outlived = ""
        for old in range(self._attempts_over + 1, attempt):
            self._trees += [f"{kind}/{old}" for kind in _ATTEMPT_KINDS]
            self._delete(f"start/{old}")
        self._attempts_over = max(self._attempts_over, attempt - 1)
        needed = tuple(self._ends.values())
        for tree in [tree for tree in self._trees if not any(key.startswith(f"{tree}/") for key in needed)]:
            self._trees.remove(tree)
            if tree == self._lent:
                # Workers of a new attempt may have been told of the state there, and read it until the next time.
                self._lent, self._outlived = "", tree
            else:
                self._channel.delete_tree(tree)

    def _put(self, key: str, name: str, vector: Vector) -> None:
        chunked.put_vector(self._channel, key, name, vector, self._part_elements)

    def _delete(self, key: str) -> None:
        if self._part_elements:
            chunked.forget(self._channel, key)
        else:
            self._channel.delete(key)
