"""Tar shards in WebDataset's layout: consecutive files with the same name before the first dot are a sample."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.pictures import ENDINGS, decoded, require_pillow
from region_agent.worker.data.formats.tables import data_files
from region_agent.worker.data.index import Block, BlockIndex, least_block_bytes
from region_agent.worker.data.sources import Source, Sources, file_faults
from region_agent.worker.data.spec import FormatSpec

if TYPE_CHECKING:
    import torch

__all__ = ["WebDatasetFormat"]

_RECORD = 512
"""Bytes of a tar file's records."""
_WINDOW_BYTES = 1 << 20
"""Bytes that are read at a time for the index."""
_MOST_HEADER_BYTES = 1 << 20
"""Most bytes of a header, as of a long name."""
_MOST_SAMPLE_BYTES = 256 << 20
"""Most bytes of a sample."""
_MOST_PARTS = 64
"""Most files of a sample."""


class WebDatasetFormat:
    """Tar files that are not compressed. Samples are counted by their members' names."""

    kind = "webdataset"
    options = ("size",)

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split in blocks of whole samples; reads headers, and what lies between those of small members."""
        blocks: list[Block] = []
        schema: dict[str, str] = {}
        for number in data_files(sources):
            source = sources[number]
            if not source.name.endswith(".tar"):
                text = f"{source.name}: not a .tar file; compressed ones cannot be read in parts"
                raise GeofedError("SHARD_UNREADABLE", text)
            with file_faults(source.name, tarfile.TarError):
                found = list(_samples(source, schema))
                blocks += _blocks(number, found, least_block_bytes(source.size))
        if set(schema) & set(ENDINGS):
            require_pillow(self.kind)
        return BlockIndex.of(blocks, schema)

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> _TarReader:
        """Return a reader."""
        if set(index.schema) & set(ENDINGS):
            require_pillow(self.kind)
        return _TarReader(spec, sources, index)


@dataclass
class _Sample:
    """Where a sample is in a file."""

    key: str
    begin: int
    end: int = 0
    parts: list[str] = field(default_factory=list)


class _Headers(io.RawIOBase):
    """A source as `tarfile` reads its headers: seeking past large members costs nothing."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source, self._at, self._start, self._held = source, 0, 0, b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        size = max(0, min(size, self._source.size - self._at))
        if size > _MOST_HEADER_BYTES:
            raise GeofedError("LIMIT_EXCEEDED", f"{self._source.name}: the header at {self._at:,} is too large")
        if not self._start <= self._at <= self._at + size <= self._start + len(self._held):
            self._start = self._at
            self._held = self._source.read(self._at, min(_WINDOW_BYTES, self._source.size - self._at))
        found = self._held[self._at - self._start :][:size]
        self._at += len(found)
        return found


def _members(archive: tarfile.TarFile, name: str) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the files of an archive with key and ending. Raises ``GeofedError("SHARD_UNREADABLE")``."""
    while (member := archive.next()) is not None:
        # tarfile would keep all members in memory.
        archive.members = []  # type: ignore[attr-defined]
        if member.isdir():
            continue
        path = PurePosixPath(member.name)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise GeofedError("SHARD_UNREADABLE", f"{name}: {member.name!r} is not a plain file")
        if path.is_absolute() or ".." in path.parts or len(member.name) > 1024:
            raise GeofedError("SHARD_UNREADABLE", f"{name}: {member.name[:200]!r} leads out of the archive")
        stem, dot, ending = path.name.partition(".")
        if not stem or not dot:
            # Hidden files, and such as a README, are no part of a sample.
            continue
        yield str(path.parent / stem), ending.lower(), member


def _samples(source: Source, schema: dict[str, str]) -> Iterator[_Sample]:
    """Yield the samples of a file; the first one of the split sets the schema."""
    now: _Sample | None = None
    with tarfile.open(fileobj=_Headers(source), mode="r:") as archive:
        for key, ending, member in _members(archive, source.name):
            if now is None or key != now.key:
                if now is not None:
                    yield _checked(now, schema, source.name)
                now = _Sample(key, member.offset)
            if ending in now.parts or len(now.parts) == _MOST_PARTS:
                raise GeofedError("SHARD_UNREADABLE", f"{source.name}: sample {key!r} has too many files")
            now.parts.append(ending)
            now.end = member.offset_data + -(-member.size // _RECORD) * _RECORD
            if now.end > source.size + _RECORD:
                raise GeofedError("SHARD_UNREADABLE", f"{source.name}: {member.name!r} is cut off")
            if now.end - now.begin > _MOST_SAMPLE_BYTES:
                text = f"{source.name}: sample {key!r} has more than {_MOST_SAMPLE_BYTES >> 20} MiB"
                raise GeofedError("LIMIT_EXCEEDED", text)
        # tarfile takes a damaged header for the end.
        if source.read(archive.offset, max(0, min(_RECORD, source.size - archive.offset))).strip(b"\0"):
            raise GeofedError("SHARD_UNREADABLE", f"{source.name}: the header at {archive.offset:,} is damaged")
    if now is not None:
        yield _checked(now, schema, source.name)


def _checked(sample: _Sample, schema: dict[str, str], name: str) -> _Sample:
    found = dict.fromkeys(sorted(sample.parts), "file")
    if not schema:
        schema.update(found)
    if schema != found:
        text = f"{name}: sample {sample.key!r} has {', '.join(found)}, the first one {', '.join(schema)}"
        raise GeofedError("SHARD_UNREADABLE", text)
    return sample


def _blocks(number: int, samples: Sequence[_Sample], least: int) -> Iterator[Block]:
    first = 0
    for at, sample in enumerate(samples):
        length = sample.end - samples[first].begin
        if length >= least or at + 1 == len(samples):
            yield Block(number, samples[first].begin, length, at + 1 - first, length)
            first = at + 1


class _TarReader:
    def __init__(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> None:
        self._spec, self._sources, self._index = spec, sources, index

    def load(self, number: int) -> tuple[str, list[dict[str, Any]]]:
        """Read a block; returns the file's name, and the undecoded files of each sample."""
        block = self._index.block(number)
        source = self._sources[block.file]
        found: list[dict[str, Any]] = []
        length = min(block.length, source.size - block.offset)
        with file_faults(source.name, tarfile.TarError):
            content = io.BytesIO(source.read(block.offset, length))
            with tarfile.open(fileobj=content, mode="r:") as archive:
                for key, ending, member in _members(archive, source.name):
                    if not found or found[-1]["__key__"] != key:
                        found.append({"__key__": key})
                    part = archive.extractfile(member)
                    found[-1][ending] = part.read() if part is not None else b""
        if len(found) != block.samples:
            raise GeofedError("SHARD_UNREADABLE", f"{source.name}: other samples than when the job began")
        return source.name, found

    def samples(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return the decoded files of each sample by their endings, and its name as ``__key__``."""
        return [self._decoded(blocks[block][0], blocks[block][1][place]) for block, place in places]

    def batch(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        """Return None: files may be anything."""
        return None

    def _decoded(self, name: str, sample: dict[str, Any]) -> dict[str, Any]:
        key = sample["__key__"]
        made = {
            ending: self._value(ending, content, f"{name}, {key}.{ending}")
            for ending, content in sample.items()
            if ending != "__key__"
        }
        return {"__key__": key, **made}

    def _value(self, ending: str, content: bytes, name: str) -> Any:
        import torch

        kind = ending.rpartition(".")[2]
        if kind in ENDINGS:
            return decoded(content, name, self._spec.size)
        with file_faults(name, RecursionError):
            if kind in ("cls", "id", "index"):
                return torch.tensor(int(content))
            if kind == "txt":
                return content.decode()
            if kind == "json":
                return json.loads(content)
            if kind == "npy":
                return _array(content)
        return content


def _array(content: bytes) -> torch.Tensor:
    """Return an array; its header is checked first, which may claim any size."""
    import torch

    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = header(file)
    if kind.hasobject or math.prod(shape) * kind.itemsize > len(content):
        raise ValueError("not an array of numbers of the stated shape")
    found = np.load(io.BytesIO(content), allow_pickle=False)
    try:
        return torch.from_numpy(found.astype(found.dtype.newbyteorder("=")))
    except TypeError:
        raise ValueError(f"an array of {kind}, which no tensor can hold") from None
