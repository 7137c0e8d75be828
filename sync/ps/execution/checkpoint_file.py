"""Checkpoints: files with the state of the replica and the watermarks after a merge."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import Reuse, begin_write, commit_write
from sync import framing
from sync.channel_clients import BufferPool
from sync.layout import Vector
from sync.mapped_files import map_file, pieces_of
from sync.ps.core.actions import LogRoundEnd
from sync.ps.execution.threads import background_thread

__all__ = [
    "DIRECT_BYTES",
    "PendingCheckpoint",
    "checksum",
    "correction_key",
    "ended_round_of",
    "numbers_named",
    "read_checkpoint",
]

DIRECT_BYTES = 16 << 20
"""Checkpoints from this size on are written past the page cache where the exchange waits for them: they are hardly ever
read, and neither a copy nor new pages of the page cache are needed. A choice."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is not durable yet. Call ``store``, or ``write`` and then ``flush`` from any one thread."""

    folder: Path
    buffer_pool: BufferPool
    version: int
    marks: dict[str, int]
    """Watermark of every region."""
    model: Vector
    rest: dict[str, framing.Array]
    """All other tensors, by their name in the file."""
    facts: dict[str, float]
    written: list[tuple[Path, BinaryIO]] = field(default_factory=list)
    """Final path, and the open file under its temporary name, between ``write`` and ``flush``."""

    def store(self) -> str:
        """Make the file durable and return the model's digest."""
        if self.model.nbytes < DIRECT_BYTES:
            digest = self.write()
            self.flush()
            return digest
        path = self.folder / f"checkpoint-{self.version}.frame"
        with background_thread() as background:
            hashing = background.submit(self._digest)
            file = self._begin(path, direct=True)
            digest = hashing.result()
        commit_write(path, file, final=self._path(digest))
        return digest

    def write(self) -> str:
        """Write the file and return the model's digest. The vectors must not change until this returns."""
        digest = self._digest()
        self.written.append((self._path(digest), self._begin(self._path(digest), self.buffer_pool.take)))
        return digest

    def _digest(self) -> str:
        return framing.digest_of([np.ascontiguousarray(self.model).data.cast("B")])

    def _begin(self, path: Path, reuse: Reuse | None = None, *, direct: bool = False) -> BinaryIO:
        facts = {**self.facts, "memory_crc": checksum(self.rest)}
        pieces = framing.encode({"model": self.model, **self.rest}, facts)
        total_bytes = sum(piece.nbytes for piece in pieces)
        return begin_write(path, pieces_of(*pieces), reuse, direct=direct, total_bytes=total_bytes)

    def _path(self, digest: str) -> Path:
        return self.folder / f"checkpoint-{self.version}-{digest.removeprefix('sha256:')}.frame"

    def flush(self, *, throttled: bool = False) -> None:
        """Make the file durable; ``throttled``: in small pieces, so that other writes to the disk hardly wait for
        it."""
        commit_write(*self.written.pop(), throttled=throttled)


def read_checkpoint(path: Path) -> framing.Frame | None:
    """Return the checkpoint in a file, or None if it is damaged."""
    try:
        frame = framing.decode(map_file(path))
        digest = framing.digest_of(pieces_of(np.asarray(frame.tensors["model"], np.float32)))
    except (GeofedError, KeyError, ValueError):
        return None
    whole = digest.removeprefix("sha256:") == path.stem.rpartition("-")[2]
    rest = {name: array for name, array in frame.tensors.items() if name != "model"}
    return frame if whole and frame.facts.get("memory_crc") == checksum(rest) else None


def checksum(tensors: Mapping[str, framing.Array]) -> int:
    """Return the CRC-32 of named tensors."""
    crc = 0
    for name, array in sorted(tensors.items()):
        crc = zlib.crc32(name.encode(), crc)
        for piece in pieces_of(np.ascontiguousarray(array)):
            crc = zlib.crc32(piece, crc)
    return crc


def numbers_named(frame: framing.Frame, prefix: str) -> dict[str, int]:
    """Return the numbers of a frame whose names have a prefix, without it."""
    return {name.removeprefix(prefix): int(value) for name, value in frame.facts.items() if name.startswith(prefix)}


def ended_round_of(facts: Mapping[str, float]) -> LogRoundEnd:
    """Return what a checkpoint states about the last ended round; the fields that recovery does not use are empty."""
    step, until, correction = int(facts["ended_step"]), int(facts["until_step"]), int(facts["correction"])
    key = correction_key(correction) if correction >= 0 else ""
    return LogRoundEnd(int(facts["sequence"]), "", "", 0.0, step, key, until, bool(facts.get("ended_last", 0)))


def correction_key(version: int) -> str:
    """Return the channel key of the correction that workers add to their model after a merge."""
    return f"correction/{version}"
