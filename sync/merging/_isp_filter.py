"""MLLess' significance filter (10.1145/3464298.3494884 §3.1): which changes a worker holds back, and until when."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sync.codec import Tensors
from sync.layout import Vector
from sync.merging.lists import ListCodec, Places

__all__ = ["SignificanceFilter", "significant"]

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

    def send(self, part: slice, change: Vector, model: Vector, step: int, codec: ListCodec) -> tuple[Tensors, Vector]:
        """Add the change of a part; return the encoded entries to send, and the values that receivers read. Shapes
        (part,)."""
        held = self.held[part]
        places, values = [np.zeros(0, np.intp)], [np.zeros(0, np.float32)]
        for start in range(0, held.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            held[block] += change[block]
            whole = held[block].astype(np.float32)
            (here,) = np.nonzero(significant(whole, model[block], self._significance, step))
            places.append(here + start)
            values.append(whole[here])
        return self._sent(held, np.concatenate(places), np.concatenate(values), codec)

    def flush(self, part: slice, codec: ListCodec) -> tuple[Tensors, Vector]:
        """Return all held back changes of a part to send, except for what the codec rounds away."""
        held = self.held[part]
        whole = held.astype(np.float32)
        (places,) = np.nonzero(whole != 0)
        return self._sent(held, places, whole[places], codec)

    def drop(self, part: slice) -> None:
        """Discard the held back changes of a part that the other workers have received differently."""
        self.held[part] = 0.0

    def _sent(
        self, held: npt.NDArray[np.float64], places: Places, values: Vector, codec: ListCodec
    ) -> tuple[Tensors, Vector]:
        tensors, read = codec.encode_entries(held.size, places, values)
        held[places] -= read
        sent = np.zeros(held.size, np.float32)
        sent[places] = read
        return tensors, sent
