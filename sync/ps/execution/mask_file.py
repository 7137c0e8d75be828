"""The file of a region's mask key, which must not leave the region."""

from __future__ import annotations

import json
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from sync.secure import MaskKey

__all__ = ["MaskFile"]

_NAME = "mask-key.json"
_LOST = "run the job again, with train.initialModel from this one"


class MaskFile:
    """A mask key, and the last round whose masks were used: in one file, so that neither is kept without the other."""

    def __init__(self, folder: Path, done: int, *, lost: bool) -> None:
        """``done``: the last round of which an update of this region is durable; 0: none. ``lost``: whether the
        region's state is lost.

        Raises ``GeofedError("STATE_INVALID")`` if so, or if only the key is.
        """
        self._path = folder / _NAME
        if lost or (done > 0 and not self._path.exists()):
            text = "the region's state is lost, and with it the key of its masks"
            raise GeofedError("STATE_INVALID", text, hint=_LOST)
        if self._path.exists():
            held = json.loads(self._path.read_text())
            self.key, self._used = MaskKey(bytes.fromhex(held["private"])), int(held["used"])
            # The process may have ended after that update was durable, and before this file was.
            self.use(done)
        else:
            self.key, self._used = MaskKey(), 0
            self._write()

    def check(self, sequence: int) -> None:
        """Raise ``GeofedError("STATE_INVALID")`` if the masks of a round were used already."""
        if sequence <= self._used:
            text = f"an update of round {sequence} was masked before, and is lost: another would be under the same mask"
            raise GeofedError("STATE_INVALID", text, hint=_LOST)

    def use(self, sequence: int) -> None:
        """Record that the masks of a round are used: its update is durable, and may be sent from now on."""
        if sequence > self._used:
            self._used = sequence
            self._write()

    def _write(self) -> None:
        held = {"private": self.key.private.hex(), "used": self._used}
        write_durably(self._path, [json.dumps(held).encode()], mode=0o600)
