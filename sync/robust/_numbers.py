"""Sums whose bits are the same on every machine, and coordinate-wise statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["distances", "middle_mean", "squared_distance"]

_BLOCK = 1 << 15
"""Elements that are processed at a time, so that they stay in the CPU's cache. A power of two."""


def squared_distance(one: Vector, other: Vector) -> float:
    """Return the squared Euclidean distance of two vectors of shape (n,), in float64.

    The halves of a block are added elementwise until one number is left: a library's sum or dot product adds up in an
    order that depends on the processor.
    """
    total, block = 0.0, np.zeros(_BLOCK)
    for part in _parts(one.size):
        size = part.stop - part.start
        np.subtract(one[part], other[part], out=block[:size])
        block[size:] = 0.0
        np.multiply(block, block, out=block)
        half = _BLOCK
        while half > 1:
            half //= 2
            np.add(block[:half], block[half : 2 * half], out=block[:half])
        total += float(block[0])
    return total


def distances(vectors: Sequence[Vector]) -> list[list[float]]:
    """Return the squared distances between all vectors."""
    found = [[0.0] * len(vectors) for _ in vectors]
    for row, one in enumerate(vectors):
        for column in range(row):
            found[row][column] = found[column][row] = squared_distance(one, vectors[column])
    return found


def middle_mean(vectors: Sequence[Vector], cut: int) -> Vector:
    """Return the coordinate-wise mean without the ``cut`` lowest and the ``cut`` highest values, shape (n,)."""
    out = np.empty_like(vectors[0])
    for part in _parts(out.size):
        stacked: npt.NDArray[np.float32] = np.stack([vector[part] for vector in vectors])
        stacked.sort(axis=0)
        kept = stacked[cut : len(vectors) - cut]
        sums = kept[0].astype(np.float64)
        for row in kept[1:]:
            sums += row
        out[part] = sums / len(kept)
    return out


def _parts(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))
