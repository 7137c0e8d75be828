"""Updates that are being received from other regions, until they are durable."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import Reuse, disk_full_as_error, write_durably
from sync.file_transfer.manifest import Manifest
from sync.tcp_streams.partial_file import PartialFile

__all__ = ["Arrival", "Key", "Tickets", "key_of"]

_FILL_BYTES = 4 << 20
"""Bytes that are written, hashed and flushed in one piece when an update is copied from this region's own."""
_MAX_TICKETS = 64
"""Valid tickets of one peer; issuing another one invalidates the oldest."""

Key = tuple[str, int, str]
"""Identifies an update: region, sequence, digest."""


def key_of(manifest: Manifest) -> Key:
    """Return the key of a manifest's update."""
    return manifest.region, manifest.sequence, manifest.digest


class Tickets:
    """Tickets that authorise a peer to send over bulk streams. Each is bound to one update, at the latest by its first
    use."""

    def __init__(self) -> None:
        self._issued: dict[str, OrderedDict[bytes, Key | None]] = {}

    def issue(self, caller: str, key: Key | None) -> bytes:
        """Return a new ticket for an update; without a key, it is bound to the first update that is offered with it."""
        issued = self._issued.setdefault(caller, OrderedDict())
        ticket = secrets.token_bytes(16)
        issued[ticket] = key
        while len(issued) > _MAX_TICKETS:
            issued.popitem(last=False)
        return ticket

    def redeem(self, caller: str, ticket: bytes, key: Key) -> None:
        """Check a ticket and bind it to an update. Raises ``GeofedError("FORBIDDEN")`` if it was not issued to the
        caller, or is bound to another update."""
        issued = self._issued.get(caller, OrderedDict())
        if ticket not in issued or issued[ticket] not in (None, key):
            raise GeofedError("FORBIDDEN", f"{caller} has no such ticket for update {key[1]} of {key[0]}")
        issued[ticket] = key

    def revoke(self, key: Key) -> None:
        """Invalidate the tickets of an update, because it has been received."""
        for issued in self._issued.values():
            for ticket in [ticket for ticket, bound in issued.items() if bound == key]:
                del issued[ticket]


@dataclass
class Arrival:
    """An update that is being received, over one or several streams."""

    manifest: Manifest
    frame: Path
    """Path that the file gets once it is durable."""
    reserve: bool = True
    """Whether disk space is taken for the whole update at once: its size is known to be right."""
    reuse: Reuse = lambda size, path: None
    """Gives a path to an old file of about so many bytes, if there is one."""
    stream: int = 0
    """Number of the newest gRPC stream that sends it; chunks of older streams are refused."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    filling: asyncio.Future[None] | None = None
    """Copies it from this region's own data, or has tried to; see `fill`."""

    def __post_init__(self) -> None:
        self.frame.parent.mkdir(parents=True, exist_ok=True)
        digest = self.manifest.digest.removeprefix("sha256:")[:16]
        self._part = self.frame.with_name(f"{self.manifest.sequence}.{digest}.part")
        if not self._part.exists():
            # A record that is left of another file of that name tells nothing of this one.
            self._part.with_suffix(".have").unlink(missing_ok=True)
            self.reuse(self.manifest.total_bytes, self._part)
        self.file = PartialFile(self._part, self.manifest.total_bytes, reserve=self.reserve)

    def append(self, offset: int, data: bytes) -> None:
        """Write a chunk. Raises ``GeofedError`` if it exceeds the update's size, the update is complete, or the disk is
        full."""
        if offset + len(data) > self.manifest.total_bytes:
            raise GeofedError(
                "FRAME_INVALID", f"a chunk ends at {offset + len(data)} of {self.manifest.total_bytes} bytes"
            )
        self.file.write(offset, data)
        self.file.write_record()

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Write the whole update from this region's own copy. Stops if a peer's streams complete it first."""
        at = 0
        for piece in pieces:
            for begin in range(0, len(piece), _FILL_BYTES):
                part = piece[begin : begin + _FILL_BYTES]
                try:
                    self.file.write(at, part)
                except GeofedError as error:
                    if error.code != "FENCED":
                        raise
                    return
                # Hash and flush continuously, so that little is left to do when the update is complete.
                self.file.hash_and_flush()
                at += len(part)

    def drop(self) -> None:
        """Delete what has been received, because the update is no longer wanted."""
        self.file.seal()
        self.file.discard(restart=False)

    def complete(self, inspect: Callable[[Manifest, Path], None]) -> None:
        """Verify the update and make it durable. Raises ``GeofedError("DIGEST_MISMATCH")`` if it is damaged, and
        discards it then, so that it must be sent again. ``inspect`` reads the file and may raise as well, having moved
        or deleted it."""
        file, manifest = self.file, self.manifest
        file.seal()
        with disk_full_as_error(self._part):
            if file.digest() != manifest.digest:
                file.discard()
                text = f"update {manifest.sequence} of {manifest.region} was damaged"
                raise GeofedError("DIGEST_MISMATCH", text)
            if self._part.exists():
                try:
                    inspect(manifest, self._part)
                except GeofedError:
                    file.discard()
                    raise
            file.flush()
        if self._part.exists():
            # If it does not exist, an earlier call renamed it and then failed to write the manifest, for lack of disk
            # space.
            os.replace(self._part, self.frame)
        write_durably(self.frame.with_suffix(".json"), [json.dumps(asdict(manifest)).encode()])
        file.delete_record()
        file.close()
