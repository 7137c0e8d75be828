"""Encoding of vectors slab by slab, so that intermediate results stay in the CPU's cache, and decoding range by
range."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from sync.codec._contract import RANGE, Codec, Tensors
from sync.layout import Vector
from sync.mapped_files import release

__all__ = ["SLAB", "Decoding", "Slab", "SlabCodec", "concatenated", "decoded", "equal_slabs", "join_slabs", "slabs_of"]

SLAB = 1 << 15
"""Coordinates that are encoded together: a multiple of the usual block sizes."""
_GROWTH = 1.125
"""Factor by which a growing array's memory is enlarged: few enlargements, and little that is not used in the end."""
Slab = tuple[slice, Codec]
"""A range of coordinates, and the codec that encodes it."""


@runtime_checkable
class Sliceable(Protocol):
    """A codec that can encode parts of a vector separately."""

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Return the slabs of a vector of ``size``, in order."""

    def join_slabs(self, parts: Iterable[Tensors]) -> Tensors:
        """Combine the arrays of a vector's slabs into those of the vector."""


def slabs_of(codec: Codec, size: int) -> Iterator[Slab]:
    """Return the slabs of a vector of ``size``; a single one if the codec needs the whole vector."""
    return codec.slabs_of(size) if isinstance(codec, Sliceable) else iter([(slice(0, size), codec)])


def join_slabs(codec: Codec, parts: Iterable[Tensors]) -> Tensors:
    """Combine the arrays of all slabs of `slabs_of` into those of the vector."""
    if isinstance(codec, Sliceable):
        return codec.join_slabs(parts)
    (whole,) = parts
    return whole


class SlabCodec(Codec, Protocol):
    """A codec that encodes all slabs alike, and decodes into an existing buffer."""

    slab: int = SLAB
    """Coordinates of a slab."""
    in_place: bool = True

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Return slices of `slab` coordinates of a vector of `size`, each with this codec."""
        return equal_slabs(self, size, self.slab)

    def join_slabs(self, parts: Iterable[Tensors]) -> Tensors:
        """Concatenate the tensors of all slabs, in order."""
        return concatenated(parts)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Decode to a new vector, float32 of shape (size,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        out = np.empty(size, np.float32)
        self.decode_into(tensors, out)
        return out

    @abstractmethod
    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Decode into ``out``, shape (n,)."""


def decoded(codec: Codec, tensors: Tensors, size: int, buffer: Vector | None = None) -> Vector:
    """Decode a vector of ``size`` elements, into ``buffer`` if it has this size and the codec can use it."""
    if buffer is None or buffer.size != size or not codec.in_place:
        return codec.decode(tensors, size)
    codec.decode_into(tensors, buffer)
    return buffer


def equal_slabs(codec: Codec, size: int, slab: int) -> Iterator[Slab]:
    """Return slabs of so many coordinates, the last one shorter, all encoded alike; an empty one if ``size`` is 0."""
    for at in range(0, max(size, 1), slab):
        yield slice(at, min(at + slab, size)), codec


def concatenated(parts: Iterable[Tensors]) -> Tensors:
    """Concatenate the slabs' arrays of each name. Each part is copied as it comes, so that those of an iterator are
    never held all at once."""
    rest = iter(parts)
    first = next(rest)
    whole, used = dict(first), {name: array.size for name, array in first.items()}
    for part in rest:
        for name, array in part.items():
            begin, used[name] = used[name], used[name] + array.size
            if whole[name] is first[name]:
                whole[name] = np.array(array[:0])
                whole[name].resize(used[name], refcheck=False)
                whole[name][:begin] = first[name]
            elif used[name] > whole[name].size:
                # The C library moves a large array's pages instead of copying it.
                whole[name].resize(max(used[name], int(_GROWTH * whole[name].size)), refcheck=False)
            whole[name][begin : used[name]] = array
    for name, array in whole.items():
        if array.size > used[name]:
            array.resize(used[name], refcheck=False)
    return whole


class Decoding:
    """A vector of ``size`` elements that is never in memory as a whole."""

    def __init__(self, codec: Codec, tensors: Tensors, size: int) -> None:
        """Raises ``GeofedError("FRAME_INVALID")`` if the arrays don't fit."""
        codec.check(tensors, size)
        self._codec, self._tensors, self.size = codec, tensors, size
        # Very many updates may be merged together, and all of them are checked before.
        self.release()

    def __getitem__(self, part: slice) -> Vector:
        begin, stop, _ = part.indices(self.size)
        if begin >= stop:
            return np.empty(0, np.float32)
        first = begin // RANGE * RANGE
        return self._codec.decode_range(self._tensors, slice(first, stop), self.size)[begin - first :]

    def release(self) -> None:
        """Give back the pages of the file that the arrays are views of."""
        release(*self._tensors.values())
