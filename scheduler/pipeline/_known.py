"""The known part of the front, and what it beats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.pipeline._labels import Mask
from scheduler.pipeline._tables import Floats, Ints

__all__ = ["SINGLE", "Front", "Singles"]

ROUNDING = 1 - 1e-12
"""Factor on a sum in double precision below which another sum is surely smaller: relative rounding errors of some
dozens of additions stay below 1e-12."""
SINGLE = 1 - 3e-5
"""Factor on bounds for the rounding of single precision in sums of some dozens of numbers."""
LEAST_RATE = 1e-30
"""USD per second that replaces a rate of zero: at no cost, any time is allowed."""
CELLS = 1 << 14
"""Steps in seconds of a front that is looked up instead of searched."""

Singles = npt.NDArray[np.float32]


class Front:
    """The best pairs of seconds and USD so far."""

    def __init__(self) -> None:
        self.seconds, self.usd = np.array([-np.inf]), np.array([np.inf])
        """The fastest first, behind a pair that beats nothing."""
        self._source, self._row = np.array([-1]), np.array([-1])
        self._additions = 0
        self._look_up()

    @property
    def sources(self) -> list[tuple[int, int]]:
        """Return for each pair the number of the addition that brought it, and its row there."""
        return [(int(source), int(row)) for source, row in zip(self._source[1:], self._row[1:], strict=True)]

    def add(self, seconds: Floats, usd: Floats, rows: Ints) -> None:
        """Add pairs that were reached, with numbers that identify them."""
        source = np.full(len(rows), self._additions)
        self._additions += 1
        columns = [(self.seconds, seconds), (self.usd, usd), (self._source, source), (self._row, rows)]
        joined = [np.concatenate(column) for column in columns]
        order = np.lexsort((joined[2], joined[1], joined[0]))
        joined = [column[order] for column in joined]
        least = np.minimum.accumulate(joined[1])
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = joined[1][1:] < least[:-1]
        self.seconds, self.usd, self._source, self._row = (column[keep] for column in joined)
        self._look_up()

    def _look_up(self) -> None:
        """The price that was known at the beginning of each of many steps of seconds."""
        first, last = (self.seconds[1], self.seconds[-1]) if len(self.seconds) > 1 else (0.0, 0.0)
        self._begin, self._step = float(first), max(float(last - first), 1e-9) / (CELLS - 2)
        begins = self._begin + self._step * np.arange(-1, CELLS - 1)
        begins[-1] = max(begins[-1], last)
        self._known = self.usd[np.searchsorted(self.seconds, begins, side="right") - 1]
        self._known[0] = np.inf
        self._known = self._known.astype(np.float32)

    def beats(self, seconds: Floats, usd: Floats, within: float = 0.0) -> Mask:
        """Whether something is as fast and as cheap, or worse by no more than this share."""
        factor = (1 + within) * ROUNDING
        place = np.searchsorted(self.seconds, seconds * factor, side="right") - 1
        beaten: Mask = self.usd[place] <= usd * factor
        return beaten

    def surely_beats(self, seconds: Floats | Singles, usd: Floats | Singles, within: float) -> Mask:
        """The same, and faster; now and then not where it just does."""
        factor = (1 + within) * SINGLE
        # One step less than where the seconds are, so that no rounding leads to a later price.
        cell = seconds * (factor / self._step)
        cell -= self._begin / self._step
        np.minimum(np.maximum(cell, 0.0, out=cell), CELLS - 1.0, out=cell)
        beaten: Mask = self._known.take(cell.astype(np.intp)) <= usd * factor
        return beaten

    def beats_from(self, rate: Floats | Singles, other_usd: Floats | Singles, within: float) -> Singles:
        """Return the seconds from which on the front surely beats a label with these costs per second and besides."""
        known = np.stack([self.seconds, self.usd]) / ((1 + within) * SINGLE)
        begins, usd = known.astype(np.float32)[:, :, None]
        seconds = usd - other_usd.astype(np.float32)
        seconds *= (1 / np.maximum(rate, LEAST_RATE)).astype(np.float32)
        found: Singles = np.maximum(seconds, begins, out=seconds).min(axis=0)
        return found
