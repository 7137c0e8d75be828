"""Another region's update while it arrives, until it is durable."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geofed_pb.errors import GeofedError
from sync.durable import disk_full_as_error, write_durably
from sync.transfer.manifest import Manifest
from sync.transport.landing import Landing

__all__ = ["Arrival", "Key", "Tickets", "key_of"]

_FILL_BYTES = 4 << 20
_MOST_TICKETS = 64
"""Outstanding for one peer; the oldest is given up."""

Key = tuple[str, int, str]
"""Of an update: region, sequence, digest."""


def key_of(manifest: Manifest) -> Key:
    return manifest.region, manifest.sequence, manifest.digest


class Tickets:
    """What lets a peer send over bulk streams; each is bound to one update, at the latest by its first use."""

    def __init__(self) -> None:
        self._issued: dict[str, OrderedDict[bytes, Key | None]] = {}

    def issue(self, caller: str, key: Key | None) -> bytes:
        """A ticket for an update; without a key, for the one that is offered with it first."""
        issued = self._issued.setdefault(caller, OrderedDict())
        ticket = secrets.token_bytes(16)
        issued[ticket] = key
        while len(issued) > _MOST_TICKETS:
            issued.popitem(last=False)
        return ticket

    def redeem(self, caller: str, ticket: bytes, key: Key) -> None:
        """Raises ``GeofedError("FORBIDDEN")`` where the ticket is not the caller's, or is another update's."""
        issued = self._issued.get(caller, OrderedDict())
        if ticket not in issued or issued[ticket] not in (None, key):
            raise GeofedError("FORBIDDEN", f"{caller} has no such ticket for update {key[1]} of {key[0]}")
        issued[ticket] = key

    def spent(self, key: Key) -> None:
        """The update is here: its tickets are good for nothing more."""
        for issued in self._issued.values():
            for ticket in [ticket for ticket, bound in issued.items() if bound == key]:
                del issued[ticket]


@dataclass
class Arrival:
    """An update on its way in, over whichever streams bring parts of it."""

    manifest: Manifest
    frame: Path
    """Where it is to be, once it is durable."""
    stream: int = 0
    """Of the gRPC streams that bring it the newest one counts."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    filling: asyncio.Future[None] | None = None
    """Takes it from what is here already, or has tried to."""

    def __post_init__(self) -> None:
        self.frame.parent.mkdir(parents=True, exist_ok=True)
        mark = self.manifest.digest.removeprefix("sha256:")[:16]
        self._part = self.frame.with_name(f"{self.manifest.sequence}.{mark}.part")
        self.landing = Landing(self._part, self.manifest.total_bytes)

    def append(self, offset: int, data: bytes) -> None:
        """Write a chunk; raises ``GeofedError``."""
        if offset + len(data) > self.manifest.total_bytes:
            raise GeofedError("FRAME_INVALID", f"a chunk up to {offset + len(data)} of {self.manifest.total_bytes}")
        self.landing.write(offset, data)
        self.landing.keep_record()

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Write all of it, from what is here already, unless others complete it meanwhile."""
        at = 0
        for piece in pieces:
            for begin in range(0, len(piece), _FILL_BYTES):
                part = piece[begin : begin + _FILL_BYTES]
                try:
                    self.landing.write(at, part)
                except GeofedError as error:
                    if error.code != "FENCED":
                        raise
                    return
                # Hashed and flushed on the way, so that those who bring it wait for its end only shortly.
                self.landing.settle()
                at += len(part)

    def complete(self) -> None:
        """Verify the bytes and make them durable; damaged ones are dropped and must be sent again."""
        landing, manifest = self.landing, self.manifest
        landing.seal()
        with disk_full_as_error(self._part):
            if landing.digest() != manifest.digest:
                landing.discard()
                text = f"update {manifest.sequence} of {manifest.region} was damaged"
                raise GeofedError("DIGEST_MISMATCH", text)
            landing.flush()
        if self._part.exists():
            # Else an earlier try came this far, and found no room for the manifest.
            os.replace(self._part, self.frame)
        write_durably(self.frame.with_suffix(".json"), [json.dumps(asdict(manifest)).encode()])
        landing.forget_record()
        landing.close()
