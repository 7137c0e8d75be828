"""The merge order: an owner adds vectors by ascending worker number, in float64, whatever the order of their arrival.

The sums have the same bits each time; vectors that arrive early wait for their turn. With groups, the other groups'
results take part under the number of the worker that made them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.layout import Vector
from sync.mapped_files import windows
from sync.merging._parted import PartedVector, RangedVector

__all__ = ["OrderedSum"]

_BLOCK = 1 << 16
"""Elements that are added at a time, so that the products stay in the CPU's cache."""
_AT_ONCE = 4
"""Vectors that are added together: the sums, in float64, are then read and written once for all of them. They take the
memory of two vectors; vectors that are mapped from files take none."""

Numbers = npt.NDArray[np.float32] | npt.NDArray[np.float64] | PartedVector | RangedVector


class OrderedSum:
    """Computes sum(w_i * x_i) in float64, in the order of the contributors' numbers: a vector that arrives early waits
    for its turn.

    `mean` has the same bits as `weighted_mean` of the same vectors, also if chunks of it are computed separately.
    """

    into: PartedVector | None = None
    """Where `mean` writes its result, shape (size,): memory of its own, or that of one of the vectors."""
    at_once: float = _AT_ONCE
    """Vectors that are added together; infinite: all, so that no sums are kept in between."""

    def __init__(self, size: int, contributors: Sequence[int], *, weighted: bool = True) -> None:
        """``weighted``: if not, weights are only summed, and vectors are added unscaled."""
        self._weighted, self._size = weighted, size
        self._sums: npt.NDArray[np.float64] | None = None
        """Sum of the vectors that had their turn, without those in ``_last``; None if there are no others."""
        self._last: list[tuple[Numbers, float]] = []
        self._turns = sorted(contributors)
        self._early: dict[int, tuple[Numbers, float]] = {}
        self._weights: list[float] = []

    @property
    def complete(self) -> bool:
        return not self._turns

    @property
    def missing(self) -> tuple[int, ...]:
        """Contributors whose vector is still missing."""
        return tuple(worker for worker in self._turns if worker not in self._early)

    def add(self, contributor: int, vector: Numbers, weight: float) -> None:
        """Add a contributor's vector, shape (size,), with a weight of at least 0 (0 leaves it out). Raises
        ``GeofedError("FRAME_INVALID")``.

        The vector must not change until `sum` or `mean` is called.
        """
        if vector.shape != (self._size,) or not (math.isfinite(weight) and weight >= 0):
            raise GeofedError(
                "FRAME_INVALID", f"worker {contributor}: shape {vector.shape} or weight {weight} is wrong"
            )
        if contributor not in self._turns or contributor in self._early:
            raise GeofedError("FRAME_INVALID", f"worker {contributor} has delivered its part already, or is unknown")
        self._early[contributor] = (vector, weight)
        while self._turns and self._turns[0] in self._early:
            self._take(*self._early.pop(self._turns.pop(0)))

    def _take(self, vector: Numbers, weight: float) -> None:
        self._weights.append(weight)
        if self._weighted and weight == 0:
            return
        if len(self._last) >= self.at_once:
            self._sums, self._last = self._added(np.empty(self._size) if self._sums is None else self._sums, 1.0), []
        self._last.append((vector, weight))

    def _added(self, out: npt.NDArray[np.floating] | PartedVector, divisor: float) -> Any:
        """Write the sum of all vectors that had their turn, divided, to an array of shape (size,), which may be that of
        the sums."""
        for part, sums in self._block_sums():
            if divisor != 1.0:
                sums /= divisor
            out[part] = sums
        return out

    def _block_sums(self) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
        """Yield ranges with the sums of all vectors that had their turn, each valid until the next one."""
        block, term = np.empty(min(_BLOCK, self._size)), np.empty(min(_BLOCK, self._size))
        for part in self._blocks():
            sums, product = block[: part.stop - part.start], term[: part.stop - part.start]
            if self._sums is None:
                sums.fill(0.0)
            else:
                sums[:] = self._sums[part]
            for vector, weight in self._last:
                if self._weighted:
                    np.multiply(vector[part], weight, out=product, dtype=np.float64)
                    sums += product
                else:
                    sums += vector[part]
            yield part, sums

    def _blocks(self) -> Iterator[slice]:
        mapped = [vector for vector, _ in self._last if not isinstance(vector, PartedVector)]
        for window in windows(self._size, *mapped):
            for vector in mapped:
                if isinstance(vector, RangedVector):
                    vector.load(window)
            for start in range(window.start, window.stop, _BLOCK):
                yield slice(start, min(start + _BLOCK, window.stop))

    def sum(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the sum of the vectors and that of the weights; the array belongs to this object."""
        self._require_complete()
        if self._sums is None or self._last:
            self._sums, self._last = self._added(np.empty(self._size) if self._sums is None else self._sums, 1.0), []
        return self._sums, self.weight

    def block_sums(self) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
        """Yield ranges with the sum of the vectors, as `sum` returns it; the array may be written to. It can be called
        once: the vectors are dropped."""
        self._require_complete()
        yield from self._block_sums()
        self._last = []

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return float(sum(self._weights))

    def rounded_sum(self, out: Vector) -> float:
        """Write the sum of the vectors, rounded to float32, to ``out``, shape (size,), and return that of the
        weights."""
        self._require_complete()
        self._added(out, 1.0)
        self._last = []
        return self.weight

    def mean(self) -> tuple[Vector | PartedVector, float]:
        """Return the weighted mean, rounded once, and the sum of weights; zeros if that is 0. It can be called once:
        the vectors are dropped."""
        self._require_complete()
        total = self.weight
        out = np.empty(self._size, np.float32) if self.into is None else self.into
        mean: Vector | PartedVector = self._added(out, total if total > 0 else 1.0)
        self._last = []
        return mean, total

    def _require_complete(self) -> None:
        if self._turns:
            raise RuntimeError(f"parts of workers {self.missing} are missing")
