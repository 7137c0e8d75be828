"""The guard: checks every received update before it is merged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from sync.layout import Vector

__all__ = ["Guard", "norm_of"]

_KEPT_NORMS = 15
"""Norms of a region's last updates that are kept."""
_MIN_NORMS = 3
"""Norms that must be known before an update can be refused for its norm."""


def norm_of(blocks: Iterable[Vector]) -> float:
    """Return the norm of a vector that is given in blocks; NaN or infinite if an element is."""
    squares = 0.0
    for block in blocks:
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.dot(block, block))
        # float32 may have overflowed: float64 distinguishes large from infinite.
        if not np.isfinite(square):
            wide = block.astype(np.float64)
            square = float(np.dot(wide, wide))
        squares += square
    return math.sqrt(squares)


class Guard:
    """Refuses updates that are not finite, or far larger than their region's usual ones.

    The usual norm is the highest median of 15 norms so far. A median, so that no single update changes it; and the
    highest one, because the updates of a region that is cut off from the others all but vanish once it has overfitted
    its shard, so that the first ones after the reconnection would all seem unusual.

    The guard is deterministic: its state is a function of the updates that it has seen, so that all regions which have
    seen the same updates judge alike. The state is stored with the model, as "guard/REGION": the highest median, then
    the last norms; shape (at most 16,).
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def judge(self, region: str, norm: float, memory: Mapping[str, Vector], rounds: int = 1) -> tuple[str, Vector]:
        """Judge an update of this norm (`norm_of`) that covers so many rounds: return why it is refused ("": it is
        not), and the region's new state."""
        known = memory.get(f"guard/{region}", np.zeros(1, np.float32))
        if not np.isfinite(norm):
            return "it is not finite", known
        norm /= rounds
        usual = float(known[0])
        if self._factor and usual > 0 and norm > self._factor * usual:
            return f"its norm of {norm:.3g} is {norm / usual:.0f} times the usual norm of its region", known
        last = np.append(known[1:], np.float32(min(norm, 3e38)))[-_KEPT_NORMS:]
        if last.size >= _MIN_NORMS:
            # numpy's own would import `numpy.ma` in each server, which takes a tenth of a second.
            usual = max(usual, statistics.median(last.tolist()))
        return "", np.append(np.float32(usual), last).astype(np.float32)
