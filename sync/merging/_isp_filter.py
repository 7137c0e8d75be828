"""MLLess' significance filter (10.1145/3464298.3494884 §3.1): which changes a worker holds back, and until when."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sync.framing import Arrays
from sync.layout import Vector
from sync.merging._parted import PartedVector
from sync.merging.lists import Chosen, ListCodec

__all__ = ["SignificanceFilter", "blocks", "send_chosen", "significant"]

_MIN_WEIGHT = 1e-6
"""A weight counts as at least this large: by the published rule every change of a zero weight would be infinitely
significant, and no change at all would be NaN."""
_BLOCK = 1 << 16
"""Elements that are processed together, so that intermediate results stay in the CPU's cache."""


def significant(change: Vector, model: Vector, significance: float, step: int) -> npt.NDArray[np.bool_]:
    """Return which changes are sent in step t = 0, 1, ...: |change / weight| > v / sqrt(t + 1). Shapes (n,)."""
    threshold = significance / math.sqrt(step + 1)
    return np.asarray(np.abs(change) > threshold * np.maximum(np.abs(model), np.float32(_MIN_WEIGHT)))


class SignificanceFilter:
    """The changes that a worker has made and not sent, shape (n,).

    Sent plus held back equals the sum of all changes exactly, as long as the changes of a coordinate lie within a
    factor of 2^29: what is held back is kept in float64, and includes what the encoding of values rounds away.
    """

    def __init__(self, size: int, significance: float) -> None:
        self.held = np.zeros(size)
        self._significance = significance

    def send(
        self,
        part: slice,
        change: Vector,
        model: Vector | PartedVector,
        step: int,
        codec: ListCodec,
        out: Vector | None = None,
    ) -> Arrays:
        """Add the change of a part; return the encoded entries to send, which are in its memory. Shapes (part,).

        ``out``: where the values that receivers read are written.
        """
        held = self.held[part]
        chosen, count = np.empty(held.size, np.bool_), 0
        for block in blocks(held.size):
            held[block] += change[block]
            whole = held[block].astype(np.float32)
            chosen[block] = significant(whole, model[block], self._significance, step)
            values = whole[chosen[block]]
            # What is sent takes the place of changes that are held by now.
            change[count : count + values.size] = values
            count += values.size
        return send_chosen(held, chosen, change, count, codec, out)

    def flush(self, part: slice, codec: ListCodec, out: Vector | None = None) -> Arrays:
        """Return all held back changes of a part to send, except for what the codec rounds away. ``out``: as in
        `send`."""
        held = self.held[part]
        chosen, values, count = np.empty(held.size, np.bool_), np.empty(held.size, np.float32), 0
        for block in blocks(held.size):
            whole = held[block].astype(np.float32)
            chosen[block] = whole != 0
            some = whole[chosen[block]]
            values[count : count + some.size] = some
            count += some.size
        return send_chosen(held, chosen, values, count, codec, out)

    def drop(self, part: slice) -> None:
        """Discard the held back changes of a part that the other workers have received differently."""
        self.held[part] = 0.0


def send_chosen(
    held: npt.NDArray[np.float64], chosen: Chosen, room: Vector, count: int, codec: ListCodec, out: Vector | None
) -> Arrays:
    """Encode the chosen entries, with which ``room`` begins, and hold back what the encoding rounds away. The encoded
    ones may be in its memory. ``out``: as in `send`; shapes (part,)."""
    tensors, read = codec.encode_chosen(chosen, room[:count], room)
    at = 0
    for block in blocks(held.size):
        (here,) = np.nonzero(chosen[block])
        received = read[block][here] if read.size == held.size else read[at : at + here.size]
        held[block][here] -= received
        if out is not None:
            out[block] = 0.0
            out[block][here] = received
        at += here.size
    return tensors


def blocks(size: int) -> Iterator[slice]:
    """Yield ranges that cover so many elements."""
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))
