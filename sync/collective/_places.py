"""Where the entries of a list lie, in few bits: whichever of three forms is the shortest for the places at hand.

- *Ranks*, as Elias (1974) and Fano (1971) write them: of n places in a row of ascending numbers, the low bits as they
  are and the high bits in unary, 2 + log2(size / n) bits an entry. For entries that lie apart.
- *Groups*: the same of the groups of eight coordinates that hold an entry, and a bit for each coordinate of those. Rows
  of an embedding lie together: their places then take little more than a bit an entry.
- *Bits*: one for each coordinate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import require

__all__ = ["Bytes", "Places", "pack_places", "unpack_places"]

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]
_RANKS, _GROUPS, _BITS = 1, 2, 3
_COUNT = np.dtype("<u4")


def pack_places(size: int, places: Places) -> Bytes:
    """Places, which ascend, below ``size``, as bytes, the form first; shape (count,)."""
    if _ranks_bits(size, places.size) <= places.size + 8 * _COUNT.itemsize:
        # Nothing is shorter than a bit for each entry.
        return np.concatenate([_byte(_RANKS), _pack_ranks(size, places)])
    there = np.zeros(size, np.bool_)
    there[places] = True
    bits = np.packbits(there)
    (groups,) = np.nonzero(bits)
    in_groups = 8 * (groups.size + _COUNT.itemsize) + _ranks_bits(bits.size, groups.size)
    least = min(_ranks_bits(size, places.size), in_groups, 8 * bits.size)
    if least == 8 * bits.size:
        return np.concatenate([_byte(_BITS), bits])
    if least == in_groups:
        count = np.array([groups.size], _COUNT).view(np.uint8)
        return np.concatenate([_byte(_GROUPS), count, _pack_ranks(bits.size, groups), bits[groups]])
    return np.concatenate([_byte(_RANKS), _pack_ranks(size, places)])


def unpack_places(size: int, count: int, packed: Bytes) -> tuple[Places, int]:
    """What `pack_places` was given, and how many bytes that took, of bytes that may continue behind.

    Raises ``GeofedError("FRAME_INVALID")``.
    """
    require(packed.size > 0 and 0 <= count <= size, "no places, or more than there are")
    form, rest = int(packed[0]), packed[1:]
    if form == _RANKS:
        places, used = _unpack_ranks(size, count, rest)
        return places, 1 + used
    require(form in (_GROUPS, _BITS), f"places in a form of number {form}, which is not known here")
    bits = np.zeros(-(-size // 8), np.uint8)
    if form == _BITS:
        require(rest.size >= bits.size, "too few places")
        bits, used = rest[: bits.size], bits.size
    else:
        require(rest.size >= _COUNT.itemsize, "no groups")
        number = int(rest[: _COUNT.itemsize].view(_COUNT)[0])
        require(number <= min(count, bits.size), "more groups than entries")
        groups, used = _unpack_ranks(bits.size, number, rest[_COUNT.itemsize :])
        used += _COUNT.itemsize
        require(rest.size >= used + number, "groups without their coordinates")
        bits[groups] = rest[used : used + number]
        used += number
    (places,) = np.nonzero(np.unpackbits(bits))
    require(places.size == count and (count == 0 or places[-1] < size), "there are not as many places as values")
    return places, 1 + used


def _byte(number: int) -> Bytes:
    return np.array([number], np.uint8)


def _low_bits(size: int, count: int) -> int:
    """How many bits of each place are written as they are."""
    return max(0, (size // count).bit_length() - 1) if count else max(0, size.bit_length())


def _ranks_bits(size: int, count: int) -> int:
    low = _low_bits(size, count)
    return count * low + (size >> low) + count + 1


def _pack_ranks(size: int, places: Places) -> Bytes:
    low = _low_bits(size, places.size)
    high = np.zeros((size >> low) + places.size + 1, np.uint8)
    high[(places >> low) + np.arange(places.size)] = 1
    lows = (places & ((1 << low) - 1)).astype(np.uint32)
    bits = ((lows[:, None] >> np.arange(low, dtype=np.uint32)) & 1).astype(np.uint8)
    return np.concatenate([np.packbits(bits), np.packbits(high)])


def _unpack_ranks(size: int, count: int, packed: Bytes) -> tuple[Places, int]:
    low = _low_bits(size, count)
    lows, highs = -(-count * low // 8), -(-((size >> low) + count + 1) // 8)
    require(packed.size >= lows + highs, "too few places")
    (marks,) = np.nonzero(np.unpackbits(packed[lows : lows + highs]))
    require(marks.size == count, "there are not as many places as values")
    places = (marks - np.arange(count)) << low
    if low:
        bits = np.unpackbits(packed[:lows], count=count * low).reshape(count, low)
        places |= bits.astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
    require(count == 0 or (places[-1] < size and (np.diff(places) > 0).all()), "places are not in order")
    return places, lows + highs
