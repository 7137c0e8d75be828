"""Indexes of splits whose files have a format, made by the agent once and read by all workers."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from region_agent.config import DatasetConfig
from region_agent.worker.data.formats import format_of
from region_agent.worker.data.formats.clients import clients_of
from region_agent.worker.data.index import BlockIndex, index_key
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec, Stream
from region_agent.worker.invocation import ShardFile

__all__ = ["INDEXES", "Indexes", "counted", "private_folder", "streams_of"]

INDEXES = "indexes"
"""Folder in the state directory for indexes."""
_VERSION = 1
"""Number that changes with the content of indexes, so that old ones are made again."""
_MOST_KEPT = 256
"""Most indexes that are kept; those that were used least recently are deleted."""


def private_folder(folder: Path) -> None:
    """Make a folder that only the agent's user can read, also if an earlier version has made another one: indexes name
    categories and clients, and digests confirm a guess of small data."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


class Indexes:
    """Makes indexes, and keeps them until their files change."""

    _lock = threading.Lock()
    """Of the process: a job that begins while its dataset is counted waits for that count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, spec: FormatSpec, files: Sequence[ShardFile]) -> BlockIndex:
        """Return the index of a split. Blocks, while a split is counted for the first time as long as reading it takes.

        Raises ``GeofedError``: SHARD_UNREADABLE, LIMIT_EXCEEDED, CONFIG_INVALID.
        """
        for file in files:
            _check_inside(file)
        named = [[file.name, file.size, file.version or file.path] for file in files]
        made_of = json.dumps([_VERSION, spec.model_dump(), named], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(made_of.encode()).hexdigest()}.safetensors"
        with self._lock:
            try:
                os.utime(path)
                return BlockIndex.from_bytes(path.read_bytes())
            except (OSError, GeofedError):
                found = self._made(spec, files)
            private_folder(self._folder)
            write_durably(path, [found.to_bytes()], mode=0o600)
            self._forget_old()
            return found

    def _made(self, spec: FormatSpec, files: Sequence[ShardFile]) -> BlockIndex:
        sources = Sources(files)
        try:
            found = format_of(spec).index(spec, sources)
            found = replace(found, clients=clients_of(spec, sources, found))
        finally:
            sources.close()
        if not found.total:
            raise GeofedError("SHARD_UNREADABLE", f"{files[0].name if files else 'the split'}: there are no samples")
        return found

    def _forget_old(self) -> None:
        kept = sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST_KEPT]:
            path.unlink(missing_ok=True)


def _check_inside(file: ShardFile) -> None:
    """Raise ``GeofedError("SHARD_UNREADABLE")`` for a link that leads out of the split's folder."""
    if not (file.path and file.folder) or file.shard:
        return
    path = Path(file.path)
    root = path.parents[len(Path(file.name).parts) - 1]
    if not path.resolve().is_relative_to(root.resolve()):
        text = f"{file.name} is a link that leads out of its folder"
        raise GeofedError("SHARD_UNREADABLE", text, hint="move the file there, or name its own folder")


def counted(dataset: DatasetConfig, indexes: Mapping[str, BlockIndex]) -> DatasetConfig:
    """Return a dataset with the counted samples and clients of its splits.

    Raises ``GeofedError("SAMPLES_MISMATCH")`` if the region file states other numbers.
    """
    splits = {}
    for name, part in dataset.splits.items():
        index = indexes.get(name)
        found = {} if index is None else {"samples": index.total, "clients": index.client_count}
        for what, number in found.items():
            stated = getattr(part, what)
            if number is not None and stated is not None and stated != number:
                text = f"split {name}: the region file states {stated:,} {what}, the files have {number:,}"
                raise GeofedError("SAMPLES_MISMATCH", text, hint=f"leave `{what}` out: they are counted")
        splits[name] = part.model_copy(update={what: number for what, number in found.items() if number is not None})
    return dataset.model_copy(update={"splits": splits})


def streams_of(spec: FormatSpec, indexes: Mapping[str, BlockIndex]) -> tuple[dict[str, Stream], dict[str, bytes]]:
    """Return how workers read the splits, and the content of the channel keys that it names."""
    contents = {split: index.to_bytes() for split, index in indexes.items()}
    streams = {split: Stream(format=spec, index_key=index_key(data)) for split, data in contents.items()}
    return streams, {streams[split].index_key: data for split, data in contents.items()}
