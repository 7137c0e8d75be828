"""Vectors with few entries as lists: where they lie (`_places`), and their values (`_values`).

No entry takes more than 5 bytes with values of 16 bits or fewer at any density, nor with float32 values down to one
entry in 64. All of a list are one array of bytes: each further array in a frame would take some 60 bytes more, and a
range of a small model has no more than some hundreds.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from geofed_pb.errors import GeofedError
from sync.codec import Codec, Float32, Tensors
from sync.codec._arrays import require
from sync.collective._places import Bytes, Places, pack_places, unpack_places
from sync.collective._values import FORMS
from sync.layout import Vector

__all__ = ["AsPublished", "ListCodec", "Lists", "ListsAndState", "Places"]

_KEY = "l"
"""As short as can be: with it, and a weight, a frame's header just has 64 bytes."""
_DENSE, _LIST = 0, 1
_COUNT = np.dtype("<u4")
_TURNS = 2
"""So often entries are left out that are too small to be told of beside the rest."""


class ListCodec(Codec, Protocol):
    """A codec of vectors with few entries."""

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        """A vector that is zero but at ``places``, which ascend; and the values as they will be read there."""


class Lists(ListCodec):
    """A list of the coordinates that are not zero, or the dense vector where that is smaller.

    Bytes: 0 and the values of all coordinates; or 1, the number of entries, their places, their values.
    """

    mark = -1
    """Never in a frame of an update."""

    def __init__(self, values: str) -> None:
        """``values``: fp32, bf16, fp8 or int4; raises ``GeofedError("CONFIG_INVALID")`` for any other."""
        if values not in FORMS:
            raise GeofedError("CONFIG_INVALID", f"lists have values in {', '.join(FORMS)}, not in {values}")
        self._values = FORMS[values]
        self.name, self.lossy = f"lists-{values}", self._values.lossy

    def encode(self, vector: Vector) -> Tensors:
        # Of truth values numpy finds the places several times as fast as of numbers.
        (places,) = np.nonzero(vector != 0)
        return self.encode_entries(vector.size, places, vector[places])[0]

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        read, left = np.zeros(values.size, np.float32), np.ones(values.size, np.bool_)
        for turn in range(_TURNS):
            packed = self._values.pack(values[left])
            told = self._values.unpack(packed, int(np.count_nonzero(left)))
            if not self.lossy or turn == _TURNS - 1 or told.all():
                break
            left[left] = told != 0
        read[left] = told
        entries, nbytes = places[left], self._values.nbytes(size)
        if packed.size < nbytes:
            listed = np.concatenate([*_head(entries.size), pack_places(size, entries), packed])
            if listed.size <= 1 + nbytes:
                return {_KEY: listed}, read
        # Among all coordinates the scales may be others.
        whole = np.zeros(size, np.float32)
        whole[entries] = values[left]
        packed = self._values.pack(whole)
        read[left] = self._values.unpack(packed, size)[entries]
        return {_KEY: np.concatenate([np.array([_DENSE], np.uint8), packed])}, read

    def decode(self, tensors: Tensors, size: int) -> Vector:
        listed = tensors.get(_KEY)
        require(listed is not None and listed.dtype == np.uint8 and listed.ndim == 1 and listed.size, "not a list")
        kind, rest = int(np.asarray(listed)[0]), np.asarray(listed, np.uint8)[1:]
        if kind == _DENSE:
            require(rest.size == self._values.nbytes(size), "there are not as many values as coordinates")
            return self._values.unpack(rest, size)
        require(kind == _LIST and rest.size >= _COUNT.itemsize, f"a list of kind {kind}, which is not known here")
        count = int(np.frombuffer(rest[: _COUNT.itemsize].tobytes(), _COUNT)[0])
        places, used = unpack_places(size, count, rest[_COUNT.itemsize :])
        values = rest[_COUNT.itemsize + used :]
        require(values.size == self._values.nbytes(count), "there are not as many values as places")
        out = np.zeros(size, np.float32)
        out[places] = self._values.unpack(values, count)
        return out


class ListsAndState(Codec):
    """The first ``trained`` coordinates as a list, those behind them, which gradients do not train, in float32."""

    mark, lossy = -1, True

    def __init__(self, values: str, trained: int) -> None:
        self._lists, self._trained, self._state = Lists(values), trained, Float32()
        self.name = self._lists.name

    def encode(self, vector: Vector) -> Tensors:
        state = self._state.encode(vector[self._trained :])["delta"]
        return {**self._lists.encode(vector[: self._trained]), "state": state}

    def decode(self, tensors: Tensors, size: int) -> Vector:
        require("state" in tensors and size >= self._trained, "no state")
        state = self._state.decode({"delta": tensors["state"]}, size - self._trained)
        rest = {name: array for name, array in tensors.items() if name != "state"}
        return np.concatenate([self._lists.decode(rest, self._trained), state])


class AsPublished(ListCodec):
    """Float64 values and int64 places: 16 bytes an entry, as MLLess pickles them. For comparison only."""

    name, mark, lossy = "lists-as-published", -1, False

    def encode(self, vector: Vector) -> Tensors:
        (places,) = np.nonzero(vector != 0)
        return self.encode_entries(vector.size, places, vector[places])[0]

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        return {"at": places.astype(np.int64), "values": values.astype(np.float64)}, values

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.zeros(size, np.float32)
        out[np.asarray(tensors["at"], np.int64)] = tensors["values"]
        return out


def _head(count: int) -> tuple[Bytes, Bytes]:
    """Of a list of so many entries."""
    return np.array([_LIST], np.uint8), np.array([count], _COUNT).view(np.uint8)
