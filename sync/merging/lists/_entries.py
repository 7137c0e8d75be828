"""Encoding of vectors with few entries as lists: positions (`_places`) and values (`sync.codec._list_values`).

An entry takes at most 5 bytes, at any density with values of 16 bits or fewer, and down to one entry in 64 with float32
values. A list is one array of bytes: each further array in a frame would take about 60 bytes more, and a range of a
small model has only some hundreds.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from geofed_pb.errors import GeofedError
from sync.codec import Codec, Float32, Tensors
from sync.codec._arrays import require
from sync.codec._list_values import VALUE_FORMATS, Bytes
from sync.framing import Arrays
from sync.layout import Vector
from sync.merging.lists._places import Chosen, Places, pack_places, unpack_places

__all__ = ["AsPublished", "Chosen", "ListCodec", "Lists", "ListsAndState", "Places"]

_KEY = "l"
"""Name of the array: as short as possible, so that with it and a weight, a frame's header has just 64 bytes."""
_DENSE, _LIST = 0, 1
_COUNT = np.dtype("<u4")
_BLOCK = 1 << 16
"""Entries that are moved together, so that they stay in the CPU's cache."""


class ListCodec(Codec, Protocol):
    """A codec for vectors with few entries."""

    def encode_chosen(self, chosen: Chosen, values: Vector, room: Vector | None = None) -> tuple[Arrays, Vector]:
        """Encode a vector that is zero except where ``chosen``; also return what it will be decoded to: the values
        there, or the whole vector. Both may be in the memory of the given values.

        ``room``: memory of the vector's size, which begins with the values, and may be overwritten.
        """


class Lists(ListCodec):
    """Encodes the non-zero coordinates as a list, or the dense vector where that is smaller.

    Bytes: 0 and the values of all coordinates; or 1, the number of entries, their positions, their values.
    """

    mark = -1
    """Not used in frames of updates."""

    def __init__(self, values: str) -> None:
        """``values``: fp32, bf16, fp8 or int4. Raises ``GeofedError("CONFIG_INVALID")`` for any other."""
        if values not in VALUE_FORMATS:
            raise GeofedError("CONFIG_INVALID", f"lists have values in {', '.join(VALUE_FORMATS)}, not in {values}")
        self._values = VALUE_FORMATS[values]
        self.name, self.lossy = f"lists-{values}", self._values.lossy

    def encode(self, vector: Vector) -> Tensors:
        chosen = np.asarray(vector != 0)
        return {_KEY: np.concatenate(self.encode_chosen(chosen, vector[chosen])[0][_KEY])}

    def encode_chosen(
        self, chosen: Chosen, values: Vector, room: Vector | None = None
    ) -> tuple[dict[str, list[Bytes]], Vector]:
        packed = self._values.pack(values)
        if not self.lossy:
            listed, dense = self._listed(chosen, packed, values, room)
            return {_KEY: listed}, values if dense is None else dense.view(np.float32)
        read, left = self._values.unpack(packed, values.size), None
        if not read.all():
            # Entries that became zero are left out.
            left = np.asarray(read != 0)
            values = values[left]
            packed = self._values.pack(values)
            read[left] = self._values.unpack(packed, values.size)
            some = np.zeros(chosen.size, np.bool_)
            some[chosen] = left
            chosen = some
        listed, dense = self._listed(chosen, packed, values)
        if dense is not None:
            # The dense encoding may use other scales.
            read[slice(None) if left is None else left] = self._values.unpack(dense, chosen.size)[chosen]
        return {_KEY: listed}, read

    def _listed(
        self, chosen: Chosen, packed: Bytes, values: Vector, room: Vector | None = None
    ) -> tuple[list[Bytes], Bytes | None]:
        """Return the encoded entries in pieces, and, if they are encoded as the dense vector, its values."""
        nbytes = self._values.nbytes(chosen.size)
        if packed.size < nbytes:
            parts = [*_head(values.size), pack_places(chosen), packed]
            if sum(part.size for part in parts) <= 1 + nbytes:
                return parts, None
        packed = self._values.pack(_spread(chosen, values, np.empty(chosen.size, np.float32) if room is None else room))
        return [np.array([_DENSE], np.uint8), packed], packed

    def decode(self, tensors: Tensors, size: int) -> Vector:
        listed = tensors.get(_KEY)
        require(listed is not None and listed.dtype == np.uint8 and listed.ndim == 1 and listed.size, "not a list")
        kind, rest = int(np.asarray(listed)[0]), np.asarray(listed, np.uint8)[1:]
        if kind == _DENSE:
            require(rest.size == self._values.nbytes(size), "the number of values is wrong")
            return self._values.unpack(rest, size)
        require(kind == _LIST and rest.size >= _COUNT.itemsize, f"unknown kind {kind} of list")
        count = int(np.frombuffer(rest[: _COUNT.itemsize].tobytes(), _COUNT)[0])
        places, used = unpack_places(size, count, rest[_COUNT.itemsize :])
        values = rest[_COUNT.itemsize + used :]
        require(values.size == self._values.nbytes(count), "the number of values is wrong")
        out = np.zeros(size, np.float32)
        out[places] = self._values.unpack(values, count)
        return out


class ListsAndState(Codec):
    """Encodes the first ``trained`` coordinates as a list, and those that gradients do not train in float32."""

    mark, lossy = -1, True

    def __init__(self, values: str, trained: int) -> None:
        self._lists, self._trained, self._state = Lists(values), trained, Float32()
        self.name = self._lists.name

    def encode(self, vector: Vector) -> Tensors:
        state = self._state.encode(vector[self._trained :])["delta"]
        return {**self._lists.encode(vector[: self._trained]), "state": state}

    def decode(self, tensors: Tensors, size: int) -> Vector:
        require("state" in tensors and size >= self._trained, "the state is missing")
        state = self._state.decode({"delta": tensors["state"]}, size - self._trained)
        rest = {name: array for name, array in tensors.items() if name != "state"}
        return np.concatenate([self._lists.decode(rest, self._trained), state])


class AsPublished(ListCodec):
    """Encodes float64 values and int64 positions: 16 bytes per entry, as MLLess pickles them. For comparison only."""

    name, mark, lossy = "lists-as-published", -1, False

    def encode(self, vector: Vector) -> Tensors:
        (places,) = np.nonzero(vector != 0)
        return self.encode_entries(vector.size, places, vector[places])[0]

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        return {"at": places.astype(np.int64), "values": values.astype(np.float64)}, values

    def encode_chosen(self, chosen: Chosen, values: Vector, room: Vector | None = None) -> tuple[Tensors, Vector]:
        return self.encode_entries(chosen.size, np.nonzero(chosen)[0], values)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.zeros(size, np.float32)
        out[np.asarray(tensors["at"], np.int64)] = tensors["values"]
        return out


def _head(count: int) -> tuple[Bytes, Bytes]:
    """Return the head of a list of so many entries."""
    return np.array([_LIST], np.uint8), np.array([count], _COUNT).view(np.uint8)


def _spread(chosen: Chosen, values: Vector, room: Vector) -> Vector:
    """Write a vector that is zero except where ``chosen``, into memory that may begin with these values."""
    if values.size == chosen.size:
        return values
    stop = values.size
    for at in reversed(range(0, chosen.size, _BLOCK)):
        here = chosen[at : at + _BLOCK]
        start = stop - int(np.count_nonzero(here))
        some, block = values[start:stop].copy(), room[at : at + _BLOCK]
        block.fill(0.0)
        block[here] = some
        stop = start
    return room
