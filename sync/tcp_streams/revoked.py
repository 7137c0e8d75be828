"""Certificates that are revoked: a file of serial numbers that the region's agent keeps up to date."""

from __future__ import annotations

import json
import os
from pathlib import Path

from geofed_pb.errors import GeofedError

__all__ = ["RevokedSerials"]


class RevokedSerials:
    """The serial numbers in a file, which is read again when it has changed. May be used by any thread."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: None, or missing: no certificate is revoked."""
        self._file = file
        self._known: tuple[object, frozenset[str]] = (None, frozenset())

    @property
    def serials(self) -> frozenset[str]:
        """The serial numbers at present, in hexadecimal."""
        try:
            status = os.stat(self._file) if self._file is not None else None
        except FileNotFoundError:
            status = None
        mark = None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)
        if mark != self._known[0] and self._file is not None:
            self._known = mark, frozenset(json.loads(self._file.read_text())) if mark is not None else frozenset()
        return self._known[1]

    def require(self, serial: str, region: str) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` if a region's certificate is revoked."""
        if serial in self.serials:
            raise GeofedError("FORBIDDEN", f"the certificate of region {region} is revoked")
