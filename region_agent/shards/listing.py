"""List of a shard's files with their digests, which identifies the whole shard."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error
from region_agent.config import DatasetConfig, StoreConfig
from region_agent.shards.reading import shard_files
from region_agent.worker.data.fetching import fetch_split
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.invocation import ShardFile
from sync.framing import digest_of

__all__ = [
    "MAX_LIST_BYTES",
    "FileContent",
    "Listed",
    "ListedFile",
    "ShardManifest",
    "list_bytes",
    "listed",
    "read_list",
    "shard_bytes",
]

_log = structlog.get_logger("geofed.shard")
MAX_LIST_BYTES = 32 << 20
"""Largest list, of about 190,000 files. Each file is transferred on its own, and both agents hold the list in
memory."""
_listing_lock = threading.Lock()
"""Held while a shard is listed, since a thread of a cancelled transfer may still download to the same files."""
_READ_BYTES = 1 << 20
"""Bytes that are read at a time for a digest."""
_ENTRY_BYTES = 140
"""Largest size of an entry of the list without its names."""
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ListedFile(BaseModel):
    """One file of a shard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: str
    name: str
    """Path relative to the split."""
    folder: bool
    """The split is a folder, and this is one of its files."""
    size: int = Field(ge=0)
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")

    @field_validator("split")
    @classmethod
    def _check_split(cls, value: str) -> str:
        if not _SPLIT.fullmatch(value):
            raise ValueError("not a valid name for a split")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in value or str(path) != value:
            raise ValueError("not a valid name for a file of a shard")
        return value


class ShardManifest(BaseModel):
    """All files of a shard, in the order of the transfer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    format: FormatSpec | None = None
    """How the files are read; None: by the task."""
    files: tuple[ListedFile, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_unique(self) -> ShardManifest:
        if len({(file.split, file.name) for file in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")
        alone = [file.split for file in self.files if not file.folder]
        if len(set(alone)) < len(alone) or any(file.folder and file.split in alone for file in self.files):
            raise ValueError("a split is one file or one folder")
        for split in {file.split for file in self.files}:
            if clash := _file_and_folder(file.name for file in self.files if file.split == split):
                raise ValueError(f"{clash} is a file and a folder")
        return self

    @property
    def total_bytes(self) -> int:
        """Sum of the files' sizes."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Return the list as JSON."""
        return self.model_dump_json(exclude=_lacking(self.format)).encode()

    @property
    def digest(self) -> str:
        """Digest of the list, which identifies the shard."""
        return digest_of([self.to_bytes()])


def read_list(data: bytes) -> ShardManifest:
    """Parse a list; raises ``GeofedError("FRAME_INVALID")``."""
    try:
        return ShardManifest.model_validate_json(data)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise GeofedError("FRAME_INVALID", f"not a valid list of a shard's files: {reason}") from None


@dataclass(frozen=True)
class Listed:
    """A shard of this region with the paths of its files."""

    shard: ShardManifest
    paths: tuple[Path, ...]
    """Paths in the order of the list."""
    marks: tuple[tuple[int, int], ...]
    """Size and modification time of each file when its digest was computed."""

    def content(self, index: int) -> FileContent:
        """Open a file; raises ``GeofedError("SHARD_UNREADABLE")`` if it has changed since it was listed."""
        path, mark = self.paths[index], self.marks[index]
        if _mark(path) != mark:
            raise _changed(path)
        return FileContent(path, mark[0])


class FileContent:
    """A file's bytes, read piece by piece; the file is closed with the object.

    The file is not memory-mapped: its owner may truncate it at any time, and reading a truncated mapping ends the
    process.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size, self._file = path, size, -1
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise GeofedError("SHARD_UNREADABLE", f"{path}: {error.strerror}") from None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, piece: slice, /) -> memoryview:
        """Read a piece; raises ``GeofedError("SHARD_UNREADABLE")`` if the file has become shorter."""
        begin, end, _ = piece.indices(self._size)
        whole = memoryview(bytearray(max(0, end - begin)))
        at = 0
        try:
            while at < len(whole):
                if not (count := os.preadv(self._file, [whole[at:]], begin + at)):
                    raise _changed(self._path)
                at += count
        except OSError as error:
            raise GeofedError("SHARD_UNREADABLE", f"{self._path}: {error.strerror}") from None
        return whole

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _changed(path: Path) -> GeofedError:
    return GeofedError("SHARD_UNREADABLE", f"{path} has changed during its transfer")


def listed(name: str, dataset: DatasetConfig, stores: Mapping[str, StoreConfig], stage: Path) -> Listed:
    """Compute the digests of a shard's files; objects of a store are downloaded to the folder ``stage`` first.

    Blocks; raises ``GeofedError``: SHARD_UNREADABLE, LIMIT_EXCEEDED, DISK_FULL.
    """
    files, paths, marks = [], [], []
    with _listing_lock:
        splits = shard_files(dataset, dict(stores))
        _check_sendable(splits)
        for split, found in sorted(splits.items()):
            for file, path in zip(found, _local_paths(found, stage / split), strict=True):
                mark = _mark(path)
                entry = ListedFile(split=split, name=file.name, folder=file.folder, size=mark[0], digest=_digest(path))
                files.append(entry)
                paths.append(path)
                marks.append(mark)
    return Listed(ShardManifest(dataset=name, format=dataset.format, files=tuple(files)), tuple(paths), tuple(marks))


def list_bytes(splits: Mapping[str, tuple[ShardFile, ...]]) -> int:
    """Return an upper bound of the size of the list of these files."""
    names = ((split, json.dumps(file.name, ensure_ascii=False)) for split, files in splits.items() for file in files)
    return sum(_ENTRY_BYTES + len(split) + len(name.encode(errors="replace")) for split, name in names)


def _file_and_folder(names: Iterable[str]) -> str:
    """Return a name that is both a file's and a folder's, as an object store allows; empty if there is none."""
    files = set(names)
    folders = (name[: found.start()] for name in files for found in re.finditer("/", name))
    return next((folder for folder in folders if folder in files), "")


def _check_sendable(splits: Mapping[str, tuple[ShardFile, ...]]) -> None:
    """Check that a shard can be sent, before its files are read.

    Raises ``GeofedError``: LIMIT_EXCEEDED if the list would be too long; SHARD_UNREADABLE if names exclude each other.
    """
    for split, files in splits.items():
        if clash := _file_and_folder(file.name for file in files):
            text = f"split {split}: {clash} is an object's key and a prefix of another's, which files cannot represent"
            raise GeofedError("SHARD_UNREADABLE", text, hint="rename one of them")
    if (length := list_bytes(splits)) > MAX_LIST_BYTES:
        count = sum(len(files) for files in splits.values())
        raise GeofedError(
            "LIMIT_EXCEEDED",
            f"a shard of {count:,} files cannot be sent: its list has {length:,} bytes, "
            f"which exceeds the limit of {MAX_LIST_BYTES:,}",
            hint="pack the samples into fewer, larger files",
        )


def _local_paths(files: tuple[ShardFile, ...], stage: Path) -> list[Path]:
    """Return the paths of a split's files, and download those that are in a store and not downloaded yet."""
    if all(file.path for file in files):
        return [Path(file.path) for file in files]
    with disk_full_as_error(stage):
        stage.mkdir(parents=True, exist_ok=True)
        fetch_split(files, stage)
    return [stage / file.name for file in files]


def shard_bytes(splits: Mapping[str, tuple[ShardFile, ...]]) -> dict[str, int]:
    """Return the bytes of each split; empty if the shard cannot be sent. Blocks; raises OSError."""
    try:
        _check_sendable(splits)
    except GeofedError as error:
        _log.warning("a shard can only be processed in this region", error=str(error))
        return {}
    return {split: sum(_size(file) for file in files) for split, files in splits.items()}


def _size(file: ShardFile) -> int:
    return os.stat(file.path).st_size if file.path else file.size or 0


def _mark(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise GeofedError("SHARD_UNREADABLE", f"{path}: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                found.update(piece)
    except OSError as error:
        raise GeofedError("SHARD_UNREADABLE", f"{path}: {error.strerror}") from None
    return "sha256:" + found.hexdigest()


def _lacking(held: FormatSpec | None) -> dict[str, bool | set[str]]:
    """Return the fields that a list lacks, which agents of earlier versions do not know."""
    if held is None:
        return {"format": True}
    return {} if held.clients is not None else {"format": {"clients"}}
