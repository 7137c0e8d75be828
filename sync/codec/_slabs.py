"""Vectors coded slab by slab, so that what arises on the way stays in the processor's cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from sync.codec._contract import Codec, Tensors
from sync.layout import Vector

__all__ = ["SLAB", "Slab", "Slabwise", "concatenated", "decoded", "equal_slabs", "join_slabs", "slabs_of"]

SLAB = 1 << 15
"""Coordinates that are coded together: a multiple of the usual blocks; what arises on the way stays in the cache."""
Slab = tuple[slice, Codec]
"""Coordinates, and what codes them."""


@runtime_checkable
class Sliceable(Protocol):
    """A codec whose vectors can be cut."""

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Slabs of a vector of ``size``, in order."""

    def join_slabs(self, parts: Sequence[Tensors]) -> Tensors:
        """The vector's arrays, of those of its slabs, as these are coded."""


def slabs_of(codec: Codec, size: int) -> Iterator[Slab]:
    """Slabs of a vector of ``size``; a single one for a codec that must see the whole."""
    return codec.slabs_of(size) if isinstance(codec, Sliceable) else iter([(slice(0, size), codec)])


def join_slabs(codec: Codec, parts: Sequence[Tensors]) -> Tensors:
    """The vector's arrays, of those of all that it has been cut `apart` into."""
    if isinstance(codec, Sliceable):
        return codec.join_slabs(parts)
    (whole,) = parts
    return whole


class Slabwise(Codec, Protocol):
    """A codec whose slabs are all coded alike, and that decodes into memory that is there already."""

    slab: int = SLAB
    in_place: bool = True

    def slabs_of(self, size: int) -> Iterator[Slab]:
        return equal_slabs(self, size, self.slab)

    def join_slabs(self, parts: Sequence[Tensors]) -> Tensors:
        return concatenated(parts)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.empty(size, np.float32)
        self.decode_into(tensors, out)
        return out

    @abstractmethod
    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """As `decode`, into ``out``."""


def decoded(codec: Codec, tensors: Tensors, size: int, buffer: Vector | None = None) -> Vector:
    """As `Codec.decode`; in ``buffer``, where that has the size and the codec has a use for it."""
    if buffer is None or buffer.size != size or not codec.in_place:
        return codec.decode(tensors, size)
    codec.decode_into(tensors, buffer)
    return buffer


def equal_slabs(codec: Codec, size: int, slab: int) -> Iterator[Slab]:
    """Slabs of so many coordinates, the last one shorter, all coded alike; one that is empty where ``size`` is 0."""
    for at in range(0, max(size, 1), slab):
        yield slice(at, min(at + slab, size)), codec


def concatenated(parts: Sequence[Tensors]) -> Tensors:
    """Arrays of slabs, by name."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
