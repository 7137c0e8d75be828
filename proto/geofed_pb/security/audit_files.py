"""Files of audit logs: read, checked, and what is to be said of them besides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import AnotherLog, AuditBroken, Head, Verified, verify

__all__ = ["lines_of", "remarks", "verified"]


def verified(
    file: Path,
    *,
    public_key: str = "",
    witnesses: Iterable[Head] = (),
    witness_files: Sequence[Path] = (),
    region: str = "",
) -> Verified:
    """Check a file as `audit.verify` does. Raises ``GeofedError``: AUDIT_BROKEN; USAGE for a file that cannot be read,
    and for another log than the one that was asked for."""
    files = [(str(path), lines_of(path)) for path in witness_files]
    try:
        return verify(lines_of(file), public_key=public_key, witnesses=witnesses, witness_files=files, region=region)
    except AnotherLog as error:
        raise GeofedError("USAGE", f"{file}: {error}", hint="name the files of one log") from None
    except AuditBroken as error:
        raise GeofedError("AUDIT_BROKEN", f"{file}: {error}") from None


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file without their ends. Raises ``GeofedError("USAGE")`` if it cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("USAGE", f"cannot read {path}: {error}") from None


def remarks(found: Verified, *, witnessed: bool) -> Iterator[str]:
    """Yield what a user must know of a log beside that it is whole. ``witnessed``: whether there were witnesses."""
    if found.other_keys:
        yield (
            f"heads of the region that another key has signed, which are not compared: {found.other_keys}; it enrolled "
            "again with a new state directory, or its log was rewritten"
        )
    if found.without_head:
        yield f"entries of the witnesses whose head was not valid, so that it is not compared: {found.without_head}"
    if not witnessed:
        yield "without --witness, a log that was rewritten as a whole is not found out"
