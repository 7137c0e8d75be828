"""A task folder in a region: its archive, and its other files in the agent's state directory.

The workers get both through the job's channel, the files in pieces, so that nobody holds a whole one in memory.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import Part
from sync.channel import Channel

__all__ = ["BUNDLES", "TaskFolder", "pieces_of"]

BUNDLES = "bundles"
"""Folder in the state directory, of files that are named by their digests."""
_PIECE_BYTES = 4 << 20
"""Bytes of a file under one key of the channel: a request for it takes long enough to be worth it."""


@dataclass(frozen=True)
class TaskFolder:
    """A packed task folder."""

    archive: bytes
    parts: tuple[Part, ...] = ()
    kept: Path = Path()
    """Folder with the parts, named by their digests."""

    def read(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file. Blocks. Raises ``GeofedError("TASK_INVALID")``."""
        try:
            for part in self.parts:
                if part.name == name:
                    with self._path(part).open("rb") as file:
                        return file.read(most)
            with tarfile.open(fileobj=io.BytesIO(self.archive), mode="r:gz") as archive:
                for member in archive:
                    if member.name == name and member.isfile() and (found := archive.extractfile(member)) is not None:
                        return found.read(most)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None
        raise GeofedError("TASK_INVALID", f"the task folder has no {name}")

    def put_into(self, channel: Channel, archive_key: str) -> None:
        """Store the archive under its key, and the parts under keys of their own. Blocks.

        Raises ``GeofedError``: what the channel raises; UNAVAILABLE if a file was removed meanwhile.
        """
        for part in self.parts:
            try:
                with self._path(part).open("rb") as file:
                    for number, _ in enumerate(range(0, part.bytes, _PIECE_BYTES)):
                        channel.put(_key(part, number), [file.read(_PIECE_BYTES)])
            except FileNotFoundError:
                raise GeofedError("UNAVAILABLE", f"{part.name} of the task folder is not kept any more") from None
        channel.put(archive_key, [self.archive])

    def _path(self, part: Part) -> Path:
        return self.kept / part.digest.removeprefix("sha256:")


def pieces_of(channel: Channel, part: Part) -> Iterator[memoryview]:
    """Yield the content of a part from the channel, piece by piece.

    Raises ``GeofedError``: TASK_INVALID if a piece is missing; at the end DIGEST_MISMATCH if it is not the part.
    """
    found = hashlib.sha256()
    for number, _ in enumerate(range(0, part.bytes, _PIECE_BYTES)):
        piece = channel.get(_key(part, number))
        if piece is None:
            raise GeofedError("TASK_INVALID", f"{part.name} of the task folder is not in the channel")
        found.update(piece)
        yield piece
    if f"sha256:{found.hexdigest()}" != part.digest:
        text = f"{part.name} of the task folder in the channel is not the file that was submitted"
        raise GeofedError("DIGEST_MISMATCH", text)


def _key(part: Part, number: int) -> str:
    return f"part/{part.digest.removeprefix('sha256:')}/{number}"
