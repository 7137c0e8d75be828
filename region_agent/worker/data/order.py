"""Order of the samples of a split that is read in blocks.

A split of at most 64 MiB is shuffled as a whole. Of a larger one the blocks are shuffled and dealt to lanes, which are
contiguous parts of the shuffled sequence, and each step takes the next samples of every lane; in each block the samples
are shuffled, too. So the samples of a step come from as many blocks as there are lanes, each block is read once in an
epoch, by the worker whose samples come from its lane, and which samples a step has does not depend on the number of
workers. MosaicML's StreamingDataset divides samples over "canonical nodes" for the same reason
(docs.mosaicml.com/projects/streaming, on elastic determinism).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from region_agent.worker.data.index import BlockIndex

__all__ = ["BlockOrder"]

SMALL_BYTES = 64 << 20
"""Size of a split in memory up to which each worker keeps all that it has read, so that any order costs the same."""
_MOST_LANES = 64
"""Most lanes; each holds a block, and the samples of a step come from so many."""
_BLOCKS_OF_LANE = 64
"""Fewest blocks of a lane: where two lanes meet, a block may be read twice."""
_HELD_BYTES = 256 << 20
"""Most bytes that the blocks of all lanes take in memory."""


class BlockOrder:
    """Which sample has a position: epoch by epoch, each sample once in an epoch."""

    def __init__(self, index: BlockIndex, seed: Sequence[int], batch: int) -> None:
        """``batch``: samples of all workers of the region in a step."""
        self._samples, self._seed = index.samples, list(seed)
        self._first = np.concatenate([[0], np.cumsum(index.samples)])
        self._size, held = index.total, int(index.held.sum())
        self.small = held <= SMALL_BYTES
        """Whether the split is shuffled as a whole."""
        largest = max(1, int(index.held.max(initial=1)))
        most = max(1, min(batch, _MOST_LANES, len(index) // _BLOCKS_OF_LANE, _HELD_BYTES // largest))
        self._batch, self._slots = batch, _slots(batch, most)
        self.lanes = -(-batch // self._slots)
        """Lanes; every lane has the same number of samples in a step, but for the last one."""
        self._epochs: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self._inside: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def at(self, epoch: int, begin: int, end: int) -> list[int]:
        """Return the samples at positions [begin, end) of an epoch."""
        order, starts = self._epoch(epoch)
        if self.small:
            return [int(one) for one in order[begin:end]]
        rows, places = np.divmod(np.arange(begin, end), self._batch)
        lane = places // self._slots
        sequence = self._lane_starts()[lane] + rows * self._width(lane) + places - lane * self._slots
        drawn = np.searchsorted(starts, sequence, side="right") - 1
        inside = sequence - starts[drawn]
        return [self._sample(epoch, int(order[at]), int(place)) for at, place in zip(drawn, inside, strict=True)]

    def blocks_of(self, samples: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the block of each sample."""
        return np.searchsorted(self._first, np.asarray(samples, np.int64), side="right") - 1

    def _width(self, lane: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.minimum(self._slots, self._batch - lane * self._slots)

    def _lane_starts(self) -> npt.NDArray[np.int64]:
        lanes = np.arange(self.lanes)
        rows, rest = divmod(self._size, self._batch)
        width = self._width(lanes)
        lengths = rows * width + np.clip(rest - lanes * self._slots, 0, width)
        return np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return an epoch's order of the blocks with the position of each one's first sample in the sequence; of a
        small split, that of the samples."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                self._epochs.clear()
            rng = np.random.default_rng([*self._seed, epoch])
            order = rng.permutation(self._size if self.small else len(self._samples))
            sizes = np.zeros(0, np.int64) if self.small else self._samples[order]
            self._epochs[epoch] = order, np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return self._epochs[epoch]

    def _sample(self, epoch: int, block: int, place: int) -> int:
        key = epoch, block
        if key not in self._inside:
            if len(self._inside) > 4 * _MOST_LANES:
                del self._inside[next(iter(self._inside))]
            rng = np.random.default_rng([*self._seed, epoch, 1 + block])
            self._inside[key] = rng.permutation(int(self._samples[block]))
        return int(self._first[block] + self._inside[key][place])


def _slots(batch: int, most: int) -> int:
    """Return the samples that each lane has in a step, so that there are at most so many lanes.

    A divisor of the batch, if there is one near, so that the samples of a worker come from whole lanes.
    """
    least = -(-batch // most)
    return next((slots for slots in range(least, 2 * least + 1) if batch % slots == 0), least)
