"""Index of a split: the blocks that its files consist of, each of which is read by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from geofed_pb.errors import GeofedError

__all__ = ["MOST_BLOCKS", "Block", "BlockIndex", "index_key", "join_indexes", "least_block_bytes", "schema_digest"]

MOST_BLOCKS = 1 << 20
"""Most blocks of a split, so that its index has at most 40 MiB."""
_BLOCK_BYTES = 256 << 10
"""Usual size of a block of a file that can be cut anywhere: large enough for a request to a store, small enough to hold
dozens."""
_USUAL_BLOCKS = 1 << 16
"""Blocks of a file beyond which they become larger, so that an index does not grow with the file."""
_NUMBERS = {
    **dict.fromkeys(("float", "double", "halffloat", "float16", "float32", "float64"), "number"),
    **{f"{sign}int{bits}": "int64" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""Types of numbers in files that become the same type in a sample."""
_COLUMNS = ("file", "offset", "length", "samples", "held")
_CLIENTS = "clients"


@dataclass(frozen=True)
class Block:
    """One block of a split."""

    file: int
    """Number of the file among those of the split."""
    offset: int
    """First byte in the file; of a Parquet file, the number of the row group."""
    length: int
    """Bytes that are read for it."""
    samples: int
    held: int
    """Bytes that it takes in memory."""


@dataclass(frozen=True)
class BlockIndex:
    """All blocks of a split, in the order of its files."""

    file: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    schema: dict[str, str] = field(default_factory=dict)
    """Parts of a sample with their types, the same in all files."""
    clients: npt.NDArray[np.int32] | None = None
    """Number of the client that each sample belongs to, counted from 0; None: the format states no clients."""

    @classmethod
    def of(cls, blocks: Sequence[Block], schema: dict[str, str]) -> BlockIndex:
        """Make an index of blocks. Raises ``GeofedError("LIMIT_EXCEEDED")`` if there are too many."""
        if len(blocks) > MOST_BLOCKS:
            text = f"{len(blocks):,} blocks exceed the limit of {MOST_BLOCKS:,}"
            raise GeofedError("LIMIT_EXCEEDED", text, hint="write fewer, larger files or row groups")
        found = np.array(
            [(one.file, one.offset, one.length, one.samples, one.held) for one in blocks], np.int64
        ).reshape(-1, len(_COLUMNS))
        return cls._of_columns([np.ascontiguousarray(column) for column in found.T], schema)

    @classmethod
    def _of_columns(cls, columns: Sequence[npt.NDArray[np.int64]], schema: dict[str, str]) -> BlockIndex:
        file, offset, length, samples, held = columns
        return cls(file, offset, length, samples, held, schema)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def total(self) -> int:
        """Samples of the split."""
        return int(self.samples.sum())

    @property
    def client_count(self) -> int | None:
        """Clients of the split; None: the format states none."""
        return None if self.clients is None else int(self.clients.max(initial=-1)) + 1

    def block(self, number: int) -> Block:
        """Return one block."""
        return Block(*(int(getattr(self, name)[number]) for name in _COLUMNS))

    def to_bytes(self) -> bytes:
        """Return the index as a file of safetensors."""
        text = np.frombuffer(json.dumps(self.schema).encode(), np.uint8)
        own = {} if self.clients is None else {_CLIENTS: self.clients}
        return save({**{name: getattr(self, name) for name in _COLUMNS}, "schema": text, **own})

    @classmethod
    def from_bytes(cls, data: bytes) -> BlockIndex:
        """Read an index. Raises ``GeofedError("FRAME_INVALID")``."""
        try:
            tensors = load(data)
            columns = [tensors[name] for name in _COLUMNS]
            schema = {str(name): str(kind) for name, kind in json.loads(tensors["schema"].tobytes()).items()}
        except (SafetensorError, KeyError, ValueError, AttributeError) as error:
            raise GeofedError("FRAME_INVALID", f"not an index of a split: {type(error).__name__}") from None
        fit = len({column.shape for column in columns}) == 1 and columns[0].ndim == 1
        if not fit or any(column.dtype != np.int64 or (column < 0).any() for column in columns):
            raise GeofedError("FRAME_INVALID", "not an index of a split")
        found, clients = cls._of_columns(columns, schema), tensors.get(_CLIENTS)
        if clients is None:
            return found
        if clients.dtype != np.int32 or clients.shape != (found.total,) or (clients < 0).any():
            raise GeofedError("FRAME_INVALID", "not an index of a split")
        return replace(found, clients=clients)


def index_key(data: bytes) -> str:
    """Return the channel key of an index, which names its content."""
    return f"index/{hashlib.sha256(data).hexdigest()}"


def join_indexes(parts: Sequence[tuple[str, int, BlockIndex]]) -> BlockIndex:
    """Concatenate indexes of several regions' shards, each given with its region and number of files.

    Raises ``GeofedError("SHARD_UNREADABLE")`` if their schemas differ.
    """
    if len(parts) == 1:
        return parts[0][2]
    first = parts[0]
    for other in parts[1:]:
        if other[2].schema != first[2].schema:
            text = f"the shards of {first[0]} and {other[0]} differ: {difference(first[2].schema, other[2].schema)}"
            raise GeofedError("SHARD_UNREADABLE", text, hint="all regions must have the same columns and types")
    before = np.cumsum([0, *(files for _, files, _ in parts[:-1])])
    moved = np.concatenate([index.file + start for start, (_, _, index) in zip(before, parts, strict=True)])
    rest = [np.concatenate([getattr(index, name) for _, _, index in parts]) for name in _COLUMNS[1:]]
    joined = BlockIndex._of_columns([moved, *rest], first[2].schema)
    clients = [index.clients for _, _, index in parts if index.clients is not None]
    if len(clients) < len(parts):
        return joined
    # Clients of different shards are different ones, also if they have the same name.
    begins = np.cumsum([0, *(int(own.max(initial=-1)) + 1 for own in clients[:-1])])
    return replace(
        joined,
        clients=np.concatenate([own + begin for begin, own in zip(begins, clients, strict=True)]).astype(np.int32),
    )


def schema_digest(schema: dict[str, str]) -> str:
    """Return what equals for schemas whose samples are alike: whatever the order, and the width of numbers in files."""
    plain = {name: _NUMBERS.get(kind, kind.removeprefix("large_")) for name, kind in schema.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def difference(one: dict[str, str], other: dict[str, str]) -> str:
    """Describe the first difference of two schemas."""
    for name in [*one, *other]:
        if one.get(name) != other.get(name):
            return f"{name} is {one.get(name, 'missing')} and {other.get(name, 'missing')}"
    return f"the order {', '.join(one)} and {', '.join(other)}"


def least_block_bytes(size: int) -> int:
    """Return the size of the blocks of a file that can be cut anywhere."""
    return max(min(_BLOCK_BYTES, max(4096, size // 1024)), -(-size // _USUAL_BLOCKS))
