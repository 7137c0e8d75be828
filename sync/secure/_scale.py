"""Updates as integers whose sum over all regions fits into a modulus, with scales that all regions know.

A scale must not depend on one region's data, or it would tell something of them. So the scale of a block of coordinates
follows from the sum, over all regions, of the largest change in that block in the round before, which travels masked
like the update. In the first round nothing is known: the update is sent as fixed-point numbers of 32 bits, with a
constant scale. What rounding and the limits of a region's range leave out stays in its residual, and is added to its
next update (error feedback, Karimireddy et al. 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.codec import MaskedIntegers, Tensors, codec_named
from sync.layout import Vector
from sync.secure._masks import Integers, PairMasks

__all__ = ["FEWEST_REGIONS", "SharedScale", "check_masked", "first_codec", "hiding_regions"]

FEWEST_REGIONS = 3
"""Of two regions, each would learn the other's update from the sum."""
_SMALLEST_PART = 0.1
"""Share of a region, as a part of an equal one, with which it still counts among those that hide each other."""
_BLOCK = 512
"""Coordinates with one scale."""
_SLAB = 64 * _BLOCK
"""Coordinates that are encoded together, so that intermediate results stay in the CPU's cache."""
_FIXED_EXPONENT = -26
"""Scale of fixed-point numbers, as an exponent of 2: 1.5e-8, with which a sum of changes may reach 32."""
_STATE_EXPONENT = -32
"""The same for state that gradients do not train, in 64 bits: 2.3e-10, less than the epsilon of any normalisation, so
that a running variance near 0 does not become negative by more; and counters of steps may grow by 2^31 in a round."""
_MIN_EXPONENT = -30
"""Smallest scale. From it, a block that had no change before has the right scale after one round."""
_MAX_EXPONENT = 60
"""Largest scale: sums of all regions stay far within the range of float32 (2^127)."""
_MARGIN = 1.25
"""Factor by which the changes of a block may grow from one round to the next without being limited, where each region's
part of the largest ones is its share. A region's limit follows its share, not its part of the changes: a block that one
region alone changes is sent over several rounds, the fewer the larger its share."""
_TYPES: dict[int, tuple[type[np.unsignedinteger], type[np.generic]]] = {
    8: (np.uint8, np.uint8),
    16: (np.uint16, np.uint16),
    32: (np.uint32, np.int32),
    64: (np.uint64, np.int64),
}
"""By bits: types of the numbers, and of the array in a frame, which has no uint32 and no uint64."""
_SIGNED: dict[int, type[np.signedinteger]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_WIDE = 32
"""Bits of fixed-point numbers, and of largest changes."""
_STATE_BITS = 64
"""Bits of the sums of what is not trained, such as counters and statistics, whose range no scale follows."""
_EXACT = 1.0 - 2.0**-40
"""Part of the range that is used, so that what float64 rounds off a limit of 64 bits cannot exceed it."""

Wide = npt.NDArray[np.float64]


def first_codec(codec: str, sequence: int) -> MaskedIntegers:
    """Return the codec of a round's updates in a job with this one: fixed-point numbers in the first round."""
    found = codec_named("fp32-masked" if sequence <= 1 else codec)
    if not isinstance(found, MaskedIntegers):
        raise GeofedError("CONFIG_INVALID", f"codec {codec} cannot be used with secure aggregation")
    return found


def hiding_regions(shares: Mapping[str, float]) -> int:
    """Return among how many regions' updates the sum hides each: those with at least a tenth of an equal share.

    ``shares``: each region's weight in the mean. Raises ``GeofedError("CONFIG_INVALID")`` unless all are finite and
    above 0.
    """
    for region, share in shares.items():
        if not (math.isfinite(share) and share > 0):
            raise GeofedError("CONFIG_INVALID", f"the share of {region} is {share}, with secure aggregation")
    least = _SMALLEST_PART * sum(shares.values()) / max(1, len(shares))
    return sum(share >= least for share in shares.values())


def check_masked(tensors: Tensors, size: int, trained: int, codec: str, sequence: int) -> None:
    """Raise ``GeofedError("FRAME_INVALID")`` unless these are the arrays of a masked update of a round."""
    scaled = codec_named(codec) != first_codec(codec, 1)
    wanted = {
        "masked": (first_codec(codec, sequence).bits, trained),
        "state": (_STATE_BITS, size - trained),
        "largest": (_WIDE, -(-trained // _BLOCK) if scaled else 0),
    }
    for name, (bits, length) in wanted.items():
        found = tensors.get(name)
        if found is None or found.dtype != _TYPES[bits][1] or found.shape != (length,):
            raise GeofedError("FRAME_INVALID", f"a masked update without {length} numbers {name!r} of {bits} bits")


class SharedScale:
    """Encodes the updates of one region, and decodes the sum of all regions' updates."""

    def __init__(self, region: str, shares: Mapping[str, float], codec: str) -> None:
        """``shares``: each region's weight in the mean. ``codec``: name of a `MaskedIntegers`."""
        self._count, self._share = len(shares), shares[region] / sum(shares.values())
        self._codec = first_codec(codec, 2)
        self._scaled = self._codec.bits != _WIDE

    def encode(
        self,
        end: Vector,
        start: Vector,
        residual: Vector,
        trained: int,
        scales: Vector | None,
        masks: PairMasks,
        sequence: int,
    ) -> Tensors:
        """Return the masked update of a round, ``end - start`` times the region's share, plus the residual.

        ``residual``, shape (n,), becomes what the update leaves out. ``trained``: number of leading coordinates that
        gradients train. ``scales``: see `decode`; None in the first round. All regions' updates of a round must be made
        with the same scales.
        """
        bits = _WIDE if scales is None else self._codec.bits
        values = np.empty(trained, _TYPES[bits][0])
        largest = np.zeros(-(-trained // _BLOCK) if self._scaled else 0, np.uint32)
        most = (1 << 32) // self._count - 1
        for part in _slabs(0, trained):
            rows = _in_rows(self._changed(end, start, residual, part))
            blocks = slice(part.start // _BLOCK, part.start // _BLOCK + len(rows))
            quantum = _quanta(scales, blocks)
            if self._scaled:
                tops = np.ceil(np.abs(rows).max(axis=1) / quantum[:, 0])
                largest[blocks] = np.minimum(tops, most).astype(np.uint32)
            numbers = self._rounded(rows, quantum, bits)
            rows -= numbers * quantum
            residual[part] = rows.reshape(-1)[: part.stop - part.start]
            values[part] = numbers.reshape(-1)[: part.stop - part.start].astype(np.int64).astype(values.dtype)
        state = np.empty(end.size - trained, np.uint64)
        quantum = np.array(2.0**_STATE_EXPONENT)
        for part in _slabs(trained, end.size):
            change = self._changed(end, start, residual, part)
            numbers = self._rounded(change, quantum, _STATE_BITS)
            residual[part] = change - numbers * quantum
            state[part.start - trained : part.stop - trained] = numbers.astype(np.int64).astype(np.uint64)
        made: dict[str, npt.NDArray[np.generic]] = {}
        for name, numbers_of in (("masked", values), ("state", state), ("largest", largest)):
            masks.add(numbers_of, sequence, name)
            made[name] = numbers_of.view(_TYPES[8 * numbers_of.itemsize][1])
        return made

    def decode(self, updates: Sequence[Tensors], trained: int, scales: Vector | None) -> tuple[Vector, Vector | None]:
        """Return the sum of all regions' updates of a round, shape (n,), and the scales of the next round.

        The scale of a block is 2 to the power of its element; None: the codec has fixed-point numbers only.
        """
        bits = _WIDE if scales is None else self._codec.bits
        values = _total(updates, "masked", bits).view(_SIGNED[bits])
        state = _total(updates, "state", _STATE_BITS).view(np.int64)
        delta = np.empty(trained + state.size, np.float32)
        for part in _slabs(0, trained):
            rows = _in_rows(values[part].astype(np.float64))
            blocks = slice(part.start // _BLOCK, part.start // _BLOCK + len(rows))
            rows *= _quanta(scales, blocks)
            delta[part] = rows.reshape(-1)[: part.stop - part.start]
        delta[trained:] = state * 2.0**_STATE_EXPONENT
        if not self._scaled:
            return delta, None
        tops = _total(updates, "largest", _WIDE)
        sums = tops * _quanta(scales, slice(0, tops.size))[:, 0]
        # frexp: x = m * 2^e with m < 1, so 2^e is not less.
        exponents = np.frexp(sums * (_MARGIN / _largest(self._codec.bits)))[1]
        exponents = np.where(tops > 0, np.clip(exponents, _MIN_EXPONENT, _MAX_EXPONENT), _MIN_EXPONENT)
        return delta, exponents.astype(np.float32)

    def _changed(self, end: Vector, start: Vector, residual: Vector, part: slice) -> Wide:
        change = np.subtract(end[part], start[part], dtype=np.float64)
        change *= self._share
        change += residual[part]
        return change

    def _rounded(self, change: Wide, quantum: Wide, bits: int) -> Wide:
        """Return a change in units of the scale, within the region's part of the range."""
        # The parts of all regions add up to the range at most.
        limit = int((_largest(bits) - self._count) * _EXACT * self._share) + 1
        numbers: Wide = np.rint(change / quantum)
        return np.clip(numbers, -limit, limit, out=numbers)


def _largest(bits: int) -> int:
    return int((1 << (bits - 1)) - 1)


def _slabs(begin: int, end: int) -> Iterator[slice]:
    for at in range(begin, end, _SLAB):
        yield slice(at, min(at + _SLAB, end))


def _in_rows(values: Wide) -> Wide:
    """Return a vector as blocks, shape (blocks, _BLOCK), the last one filled up with zeros."""
    rows = -(-values.size // _BLOCK)
    if rows * _BLOCK == values.size:
        return values.reshape(rows, _BLOCK)
    padded = np.zeros(rows * _BLOCK)
    padded[: values.size] = values
    return padded.reshape(rows, _BLOCK)


def _quanta(scales: Vector | None, blocks: slice) -> Wide:
    """Return the scales of blocks, shape (blocks, 1)."""
    if scales is None:
        return np.full((blocks.stop - blocks.start, 1), 2.0**_FIXED_EXPONENT)
    return np.ldexp(1.0, scales[blocks].astype(np.int32))[:, None]


def _total(updates: Sequence[Tensors], name: str, bits: int) -> Integers:
    """Return the sum of one of the arrays over all regions, modulo its range."""
    total = np.zeros(np.asarray(updates[0][name]).shape, _TYPES[bits][0])
    for tensors in updates:
        total += np.asarray(tensors[name]).view(total.dtype)
    return total
