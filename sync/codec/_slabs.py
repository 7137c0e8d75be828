"""Vectors coded slab by slab, so that what arises on the way stays in the processor's cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from sync.codec._contract import Codec, Tensors
from sync.layout import Vector

__all__ = ["SLAB", "Slab", "Slabwise", "apart", "decoded", "in_slabs", "joined", "one_behind_the_other"]

SLAB = 1 << 15
"""Coordinates that are coded together: a multiple of the usual blocks; what arises on the way stays in the cache."""
Slab = tuple[slice, Codec]
"""Coordinates, and what codes them."""


@runtime_checkable
class Apart(Protocol):
    """A codec whose vectors can be cut."""

    def apart(self, size: int) -> Iterator[Slab]:
        """Slabs of a vector of ``size``, in order."""

    def joined(self, parts: Sequence[Tensors]) -> Tensors:
        """The vector's arrays, of those of its slabs, as these are coded."""


def apart(codec: Codec, size: int) -> Iterator[Slab]:
    """Slabs of a vector of ``size``; a single one for a codec that must see the whole."""
    return codec.apart(size) if isinstance(codec, Apart) else iter([(slice(0, size), codec)])


def joined(codec: Codec, parts: Sequence[Tensors]) -> Tensors:
    """The vector's arrays, of those of all that it has been cut `apart` into."""
    if isinstance(codec, Apart):
        return codec.joined(parts)
    (whole,) = parts
    return whole


class Slabwise(Codec, Protocol):
    """A codec whose slabs are all coded alike, and that decodes into memory that is there already."""

    slab: int = SLAB
    in_place: bool = True

    def apart(self, size: int) -> Iterator[Slab]:
        return in_slabs(self, size, self.slab)

    def joined(self, parts: Sequence[Tensors]) -> Tensors:
        return one_behind_the_other(parts)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.empty(size, np.float32)
        self.decode_into(tensors, out)
        return out

    @abstractmethod
    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """As `decode`, into ``out``."""


def decoded(codec: Codec, tensors: Tensors, size: int, room: Vector | None = None) -> Vector:
    """As `Codec.decode`; in ``room``, where that has the size and the codec has a use for it."""
    if room is None or room.size != size or not codec.in_place:
        return codec.decode(tensors, size)
    codec.decode_into(tensors, room)
    return room


def in_slabs(codec: Codec, size: int, slab: int) -> Iterator[Slab]:
    """Slabs of so many coordinates, the last one shorter, all coded alike; one that is empty where ``size`` is 0."""
    for at in range(0, max(size, 1), slab):
        yield slice(at, min(at + slab, size)), codec


def one_behind_the_other(parts: Sequence[Tensors]) -> Tensors:
    """Arrays of slabs, by name."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
