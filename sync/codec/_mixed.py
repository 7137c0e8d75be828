"""Codec for models with untrained state: trained parameters in few bits, state (BatchNorm statistics, counters) in
float32.

A codec with one scale per block does not suit blocks that contain tensors of different kinds: BatchNorm's counter grows
by the number of steps, and the running variances next to it, which change by tenths, would be rounded to whole numbers,
below zero. GeoMX (MPQ, docs/source/accelerator.rst) also sends small tensors uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from sync.codec._arrays import require
from sync.codec._contract import Codec, Tensors
from sync.codec._slabs import Slab, join_slabs, slabs_of
from sync.codec.fp32 import Float32
from sync.layout import Vector

__all__ = ["MIXED", "Mixed"]

MIXED = 16
"""Added to the mark of the codec of the trained parameters."""


class Mixed(Codec):
    """Encodes the first ``trained`` coordinates with the codec ``bulk``, and the others in float32."""

    in_place = True

    def __init__(self, bulk: Codec, trained: int) -> None:
        self._bulk, self._trained, self._state = bulk, trained, Float32()
        self.name, self.mark, self.lossy = bulk.name, MIXED + bulk.mark, bulk.lossy
        self.size_factor, self.bytes_per_second = bulk.size_factor, bulk.bytes_per_second
        self.in_ranges = bulk.in_ranges

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,): trained coordinates with `bulk`, the state as the tensor "state"."""
        state = self._state.encode(vector[self._trained :])["delta"]
        return {**self._bulk.encode(vector[: self._trained]), "state": state}

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Return the slabs of the bulk codec, then one with the whole state."""
        yield from slabs_of(self._bulk, min(self._trained, size))
        yield slice(min(self._trained, size), size), self._state

    def join_slabs(self, parts: Iterable[Tensors]) -> Tensors:
        """Join the bulk's slabs, and add the last one's values as "state"."""
        rest = iter(parts)
        last = next(rest)

        def bulk() -> Iterator[Tensors]:
            nonlocal last
            for part in rest:
                before, last = last, part
                yield before

        joined = join_slabs(self._bulk, bulk())
        return {**joined, "state": last["delta"]}

    def check(self, tensors: Tensors, size: int) -> None:
        """Check both parts."""
        bulk, state = self._parts(tensors, size)
        self._bulk.check(bulk, self._trained)
        self._state.check(state, size - self._trained)

    def _parts(self, tensors: Tensors, size: int) -> tuple[Tensors, Tensors]:
        require("state" in tensors and size >= self._trained, "the state is missing")
        return {name: array for name, array in tensors.items() if name != "state"}, {"delta": tensors["state"]}

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Decode to a new vector, float32 of shape (size,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        out = np.empty(size, np.float32)
        self.decode_into(tensors, out)
        return out

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        bulk, state = self._parts(tensors, out.size)
        self._bulk.decode_into(bulk, out[: self._trained])
        self._state.decode_into(state, out[self._trained :])

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector."""
        begin, stop, _ = part.indices(size)
        bulk, state = self._parts(tensors, size)
        out, cut = np.empty(stop - begin, np.float32), min(max(self._trained, begin), stop)
        if begin < cut:
            out[: cut - begin] = self._bulk.decode_range(bulk, slice(begin, cut), self._trained)
        out[cut - begin :] = np.asarray(state["delta"], np.float32)[cut - self._trained : stop - self._trained]
        return out
