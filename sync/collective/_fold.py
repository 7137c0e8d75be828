"""Sums that are built up as vectors come, and come out with the same bits in whatever order they came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.layout import Vector

__all__ = ["Fold"]

_BLOCK = 1 << 16
"""Elements added at a time, so that the products stay in the cache."""

Numbers = npt.NDArray[np.float32] | npt.NDArray[np.float64]


class Fold:
    """sum(w_i * x_i) in float64, by the number of the contributor: a vector that comes early waits for its turn.

    `mean` has the bits of `weighted_mean` over the same vectors, and so have chunks of it that are folded apart.
    """

    def __init__(self, size: int, contributors: Sequence[int], *, weighted: bool = True) -> None:
        """``weighted``: otherwise weights are only counted, and every vector is added as it is."""
        self._weighted = weighted
        self._sums = np.zeros(size)
        self._turns = sorted(contributors)
        self._early: dict[int, tuple[Numbers, float]] = {}
        self._weights: list[float] = []

    @property
    def complete(self) -> bool:
        return not self._turns

    @property
    def missing(self) -> tuple[int, ...]:
        """Contributors that have given nothing yet."""
        return tuple(worker for worker in self._turns if worker not in self._early)

    def add(self, contributor: int, vector: Numbers, weight: float) -> None:
        """Shape (size,), weight from 0, which leaves the vector out; raises ``GeofedError("FRAME_INVALID")``.

        The vector must stay as it is until the fold is `complete`.
        """
        if vector.shape != self._sums.shape or not (math.isfinite(weight) and weight >= 0):
            raise GeofedError(
                "FRAME_INVALID", f"worker {contributor}: shape {vector.shape} or weight {weight} is wrong"
            )
        if contributor not in self._turns or contributor in self._early:
            raise GeofedError("FRAME_INVALID", f"worker {contributor} has given its part or is none of us")
        self._early[contributor] = (vector, weight)
        while self._turns and self._turns[0] in self._early:
            self._take(*self._early.pop(self._turns.pop(0)))

    def leave_out(self, contributor: int) -> None:
        """Go on without a contributor that is lost."""
        self._turns.remove(contributor)
        while self._turns and self._turns[0] in self._early:
            self._take(*self._early.pop(self._turns.pop(0)))

    def _take(self, vector: Numbers, weight: float) -> None:
        self._weights.append(weight)
        if not self._weighted:
            self._sums += vector
            return
        if weight == 0:
            return
        term = np.empty(min(_BLOCK, self._sums.size))
        for start in range(0, self._sums.size, _BLOCK):
            part = slice(start, min(start + _BLOCK, self._sums.size))
            product = term[: part.stop - start]
            np.multiply(vector[part], weight, out=product, dtype=np.float64)
            self._sums[part] += product

    def sum(self) -> tuple[npt.NDArray[np.float64], float]:
        """The sums and the weights'; the array is this object's own."""
        if self._turns:
            raise RuntimeError(f"{self.missing} have not given their parts")
        return self._sums, float(sum(self._weights))

    def mean(self) -> tuple[Vector, float]:
        """The weighted mean, rounded once, and the sum of weights; zeros where that is 0."""
        sums, total = self.sum()
        if total > 0 and total != 1.0:
            sums /= total
        return sums.astype(np.float32), total
