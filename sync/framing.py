"""The frame format for tensors: in channels, over the network and on disk.

A frame is a fixed prefix, a table of entries and the raw little-endian values, each tensor aligned to 64 bytes::

    prefix  "GFT1"  u32 entries  u32 facts  u32 header_bytes  u64 total_bytes  u32 crc32 of prefix and table
    fact    u8 length, name, f64 value                     (numbers about the whole: step, samples, ...)
    entry   u8 length, name, u8 dtype, u8 dimensions, u64 size of each, u64 offset

A frame contains no code. Sizes are checked against the buffer before any memory is allocated, and decoding copies
nothing: the arrays are read-only views of the buffer.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError

__all__ = [
    "Array",
    "Arrays",
    "Buffer",
    "Frame",
    "TensorPlace",
    "TensorTable",
    "decode",
    "decode_head",
    "digest_of",
    "encode",
    "encode_blocks",
]

Array = npt.NDArray[np.generic]
Arrays = Mapping[str, Array | Sequence[Array]]
"""Tensors of a frame, by name. A vector may be given in consecutive parts."""
Buffer = bytes | bytearray | memoryview

_MAGIC = b"GFT1"
_PREFIX = struct.Struct("<4sIIIQ")
_CHECK = struct.Struct("<I")
_TABLE = _PREFIX.size + _CHECK.size
"""Offset of the table."""
_ALIGN = 64
"""Alignment of each tensor in bytes."""
_MAX_DIMENSIONS = 8
"""Dimensions that a tensor of a frame has at most, so that a corrupt table cannot ask for more; models use up to five.

A limit of the format.
"""
_DTYPES: tuple[np.dtype[np.generic], ...] = tuple(
    np.dtype(name) for name in ("<f4", "<f8", "<f2", "<u2", "<i8", "<i4", "|i1", "|u1", "|b1")
)
_CODES = {dtype.str: code for code, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class Frame:
    """A decoded frame."""

    tensors: dict[str, Array]
    """Read-only views of the buffer, by name."""
    facts: dict[str, float]
    """Numbers about the frame, by name."""


@dataclass(frozen=True)
class TensorPlace:
    """Type and place of a tensor in a frame."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte."""


@dataclass(frozen=True)
class TensorTable:
    """What the begin of a frame says."""

    entries: dict[str, TensorPlace]
    """The tensors, by name."""
    facts: dict[str, float]
    total: int
    """Bytes of the whole frame."""


def encode(tensors: Arrays, facts: Mapping[str, float] | None = None) -> list[memoryview]:
    """Return the frame as consecutive buffers; the values are not copied.

    Raises ``GeofedError("FRAME_INVALID")`` for a dtype or a name that the format does not support.
    """
    parts = {name: _parts(given) for name, given in tensors.items()}
    shapes = {name: (held[0].dtype, _shape(held)) for name, held in parts.items()}
    head, starts, total = _head(shapes, facts or {})
    pieces, written = [memoryview(head)], len(head)
    for at, held in zip(starts, parts.values(), strict=True):
        pieces.append(memoryview(bytes(at - written)))
        pieces += [memoryview(array.reshape(-1).view(np.uint8).data) for array in held]
        written = at + sum(array.nbytes for array in held)
    if not parts:
        pieces.append(memoryview(bytes(total - written)))
    return [piece for piece in pieces if piece.nbytes]


def encode_blocks(
    name: str, size: int, blocks: Iterable[npt.NDArray[np.float32]], facts: Mapping[str, float]
) -> tuple[int, Iterator[memoryview]]:
    """Return the bytes of a frame with one vector of float32, shape (size,), and its consecutive buffers.

    The vector comes in blocks. Each must be used before the next one is taken.
    """
    head, (start,), total = _head({name: (np.dtype(np.float32), (size,))}, facts)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(head + bytes(start - len(head)))
        for block in blocks:
            yield memoryview(block.view(np.uint8).data)

    return total, pieces()


def _parts(given: Array | Sequence[Array]) -> list[Array]:
    # ascontiguousarray would turn a scalar into a vector of one element.
    return [np.asarray(one, order="C") for one in (given if isinstance(given, list) else [given])]


def _shape(parts: Sequence[Array]) -> tuple[int, ...]:
    return parts[0].shape if len(parts) == 1 else (sum(array.size for array in parts),)


def _head(
    shapes: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]], facts: Mapping[str, float]
) -> tuple[bytes, list[int], int]:
    """Return prefix and table of a frame, the offset of each tensor, and the bytes of the whole frame."""
    header_bytes = sum(_entry_bytes(name, len(shape)) for name, (_, shape) in shapes.items())
    header_bytes += sum(1 + len(name.encode()) + 8 for name in facts)
    end = _TABLE + header_bytes
    table, starts = bytearray(), list[int]()
    for name, value in facts.items():
        table += _name(name) + struct.pack("<d", value)
    for name, (dtype, shape) in shapes.items():
        starts.append(_aligned(end))
        table += _entry(name, dtype, shape, starts[-1])
        end = starts[-1] + math.prod(shape) * dtype.itemsize
    total = end if shapes else _aligned(end)
    prefix = _PREFIX.pack(_MAGIC, len(shapes), len(facts), len(table), total)
    check = _CHECK.pack(zlib.crc32(table, zlib.crc32(prefix)))
    return prefix + check + bytes(table), starts, total


def decode(buffer: Buffer, *, max_elements: int = 1 << 34) -> Frame:
    """Decode a frame. Raises ``GeofedError("FRAME_INVALID")`` unless the buffer is exactly one valid frame.

    ``max_elements`` limits the size of each tensor.
    """
    view = memoryview(buffer).cast("B")
    head = decode_head(view, max_elements=max_elements)
    with _refusing():
        if head.total != view.nbytes:
            raise ValueError("wrong length")
        return Frame({name: _read(view, entry) for name, entry in head.entries.items()}, head.facts)


def decode_head(buffer: Buffer, *, max_elements: int = 1 << 34) -> TensorTable:
    """Decode the begin of a frame, of which ``buffer`` has the prefix and the table at least. Raises
    ``GeofedError("FRAME_INVALID")`` if it is invalid."""
    with _refusing():
        return _decode_head(memoryview(buffer).cast("B"), max_elements)


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise FRAME_INVALID for what is no frame."""
    try:
        yield
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise GeofedError("FRAME_INVALID", f"not a tensor frame: {error}") from None


def _read(view: memoryview, entry: TensorPlace) -> Array:
    array = np.frombuffer(view, dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.start)
    array.flags.writeable = False
    return array.reshape(entry.shape)


def _decode_head(view: memoryview, max_elements: int) -> TensorTable:
    magic, entries, facts, header_bytes, total = _PREFIX.unpack_from(view)
    (crc,) = _CHECK.unpack_from(view, _PREFIX.size)
    if magic != _MAGIC or header_bytes > min(view.nbytes, total) - _TABLE:
        raise ValueError("wrong prefix or length")
    table = view[_TABLE : _TABLE + header_bytes]
    if zlib.crc32(table, zlib.crc32(view[: _PREFIX.size])) != crc:
        raise ValueError("the header is damaged")
    at, values = 0, {}
    for _ in range(facts):
        name, at = _read_name(table, at)
        (values[name],) = struct.unpack_from("<d", table, at)
        at += 8
    found: dict[str, TensorPlace] = {}
    end = _TABLE + header_bytes
    for _ in range(entries):
        name, entry, at, end = _read_entry(table, at, end, total, max_elements)
        if name in found:
            raise ValueError(f"tensor {name!r} is contained twice")
        found[name] = entry
    if at != header_bytes:
        raise ValueError("the header is longer than its entries")
    return TensorTable(found, values, total)


def _read_entry(
    table: memoryview, at: int, end: int, total: int, max_elements: int
) -> tuple[str, TensorPlace, int, int]:
    name, at = _read_name(table, at)
    code, dimensions = table[at], table[at + 1]
    if code >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has an unknown dtype or too many dimensions")
    *shape, offset = struct.unpack_from(f"<{dimensions + 1}Q", table, at + 2)
    count = math.prod(shape)
    nbytes = count * _DTYPES[code].itemsize
    if count > max_elements or offset != _aligned(end) or offset + nbytes > total:
        raise ValueError(f"tensor {name!r} is not within the frame")
    return name, TensorPlace(_DTYPES[code], tuple(shape), offset), at + 2 + 8 * (dimensions + 1), offset + nbytes


def digest_of(pieces: Iterable[Buffer]) -> str:
    """Return the SHA-256 of consecutive buffers, as "sha256:<hex>"."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _name(name: str) -> bytes:
    raw = name.encode()
    if len(raw) > 255:
        raise GeofedError("FRAME_INVALID", f"name of {len(raw)} bytes is longer than 255")
    return bytes([len(raw)]) + raw


def _read_name(table: memoryview, at: int) -> tuple[str, int]:
    length = table[at]
    if at + 1 + length > table.nbytes:
        raise ValueError("a name exceeds the header")
    return bytes(table[at + 1 : at + 1 + length]).decode(), at + 1 + length


def _entry_bytes(name: str, dimensions: int) -> int:
    return 1 + len(name.encode()) + 2 + 8 * (dimensions + 1)


def _entry(name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...], offset: int) -> bytes:
    code, dimensions = _CODES.get(dtype.str), len(shape)
    if code is None or dimensions > _MAX_DIMENSIONS:
        raise GeofedError("FRAME_INVALID", f"tensor {name!r}: dtype {dtype} or {dimensions} dimensions")
    return _name(name) + struct.pack(f"<BB{dimensions + 1}Q", code, dimensions, *shape, offset)
