"""Compact encoding of the positions of a list's entries: the shortest of three forms.

- *Ranks*, as in Elias (1974) and Fano (1971): of n ascending positions, the low bits are stored directly and the high
  bits in unary, 2 + log2(size / n) bits per entry. For scattered entries.
- *Groups*: the same for the groups of eight coordinates that contain an entry, and one bit per coordinate of those.
  Rows of an embedding are contiguous: their positions then take little more than one bit per entry.
- *Bits*: one bit per coordinate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import require
from sync.codec._list_values import Bytes

__all__ = ["Chosen", "Places", "pack_places", "unpack_places"]

Places = npt.NDArray[np.intp]
Chosen = npt.NDArray[np.bool_]
"""Whether a vector has an entry at a position: an eighth of the memory of positions where all are entries."""
_RANKS, _GROUPS, _BITS = 1, 2, 3
_COUNT = np.dtype("<u4")
_BLOCK = 1 << 16
"""Positions whose bits are in memory at a time, one byte each; a multiple of 8, so that blocks end with a byte."""


def pack_places(chosen: Chosen) -> Bytes:
    """Encode the positions of a vector's entries as bytes; the first byte is the form. Shape (bytes,)."""
    size, count = chosen.size, int(np.count_nonzero(chosen))
    if _ranks_bits(size, count) <= count + 8 * _COUNT.itemsize:
        # No other form is shorter than one bit per entry.
        return np.concatenate([_byte(_RANKS), _pack_ranks(chosen)])
    bits = np.packbits(chosen)
    occupied = np.asarray(bits != 0)
    groups = int(np.count_nonzero(occupied))
    in_groups = 8 * (groups + _COUNT.itemsize) + _ranks_bits(bits.size, groups)
    least = min(_ranks_bits(size, count), in_groups, 8 * bits.size)
    if least == 8 * bits.size:
        return np.concatenate([_byte(_BITS), bits])
    if least == in_groups:
        number = np.array([groups], _COUNT).view(np.uint8)
        return np.concatenate([_byte(_GROUPS), number, _pack_ranks(occupied), bits[occupied]])
    return np.concatenate([_byte(_RANKS), _pack_ranks(chosen)])


def unpack_places(size: int, count: int, packed: Bytes) -> tuple[Places | Chosen, int]:
    """Decode the positions of `pack_places`, to either index of a vector; return them, and the number of bytes that
    they took, which others may follow.

    Raises ``GeofedError("FRAME_INVALID")``.
    """
    require(packed.size > 0 and 0 <= count <= size, "the number of positions is invalid")
    form, rest = int(packed[0]), packed[1:]
    if form == _RANKS:
        places, used = _unpack_ranks(size, count, rest)
        return places, 1 + used
    require(form in (_GROUPS, _BITS), f"unknown form {form} of positions")
    bits = np.zeros(-(-size // 8), np.uint8)
    if form == _BITS:
        require(rest.size >= bits.size, "too few places")
        bits, used = rest[: bits.size], bits.size
    else:
        require(rest.size >= _COUNT.itemsize, "the groups are missing")
        number = int(rest[: _COUNT.itemsize].view(_COUNT)[0])
        require(number <= min(count, bits.size), "more groups than entries")
        groups, used = _unpack_ranks(bits.size, number, rest[_COUNT.itemsize :])
        used += _COUNT.itemsize
        require(rest.size >= used + number, "the coordinates of groups are missing")
        bits[groups] = rest[used : used + number]
        used += number
    marks = np.unpackbits(bits)
    require(int(np.count_nonzero(marks)) == count and not marks[size:].any(), "the number of positions is wrong")
    return marks[:size].view(np.bool_), 1 + used


def _byte(number: int) -> Bytes:
    return np.array([number], np.uint8)


def _low_bits(size: int, count: int) -> int:
    """Return the number of low bits of each position that are stored directly."""
    return max(0, (size // count).bit_length() - 1) if count else max(0, size.bit_length())


def _ranks_bits(size: int, count: int) -> int:
    low = _low_bits(size, count)
    return count * low + (size >> low) + count + 1


def _pack_ranks(chosen: Chosen) -> Bytes:
    # numpy finds the positions in a boolean array several times as fast as in one of numbers.
    (places,) = np.nonzero(chosen)
    low = _low_bits(chosen.size, places.size)
    high = np.zeros((chosen.size >> low) + places.size + 1, np.uint8)
    packed = []
    for start in range(0, places.size, _BLOCK):
        block = places[start : start + _BLOCK]
        high[(block >> low) + np.arange(start, start + block.size)] = 1
        lows = (block & ((1 << low) - 1)).astype(np.uint32)
        packed.append(np.packbits(((lows[:, None] >> np.arange(low, dtype=np.uint32)) & 1).astype(np.uint8)))
    return np.concatenate([*packed, np.packbits(high)])


def _unpack_ranks(size: int, count: int, packed: Bytes) -> tuple[Places, int]:
    low = _low_bits(size, count)
    lows, highs = -(-count * low // 8), -(-((size >> low) + count + 1) // 8)
    require(packed.size >= lows + highs, "too few places")
    (places,) = np.nonzero(np.unpackbits(packed[lows : lows + highs]).view(np.bool_))
    require(places.size == count, "the number of positions is wrong")
    for start in range(0, count, _BLOCK):
        block = places[start : start + _BLOCK]
        block -= np.arange(start, start + block.size)
        block <<= low
        if low:
            bits = np.unpackbits(packed[start * low // 8 : lows], count=block.size * low).reshape(block.size, low)
            block |= bits.astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
    require(count == 0 or (places[-1] < size and (np.diff(places) > 0).all()), "positions are not in order")
    return places, lows + highs
