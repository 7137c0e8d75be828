"""How a task folder travels: an archive of its small files, and each other file, a part, by itself.

The archive is a tar.gz. Where there are parts, its first entry, `LISTED`, names them with their digests, so that the
archive's digest identifies the whole folder. Archive and parts are stored by digest: what has not changed is not sent
again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from geofed_pb.errors import GeofedError

__all__ = [
    "LISTED",
    "MAX_ARCHIVE_BYTES",
    "MAX_FILES",
    "MAX_FOLDER_BYTES",
    "MAX_UNPACKED_BYTES",
    "SMALL_BYTES",
    "Part",
    "file_digest",
    "kept_parts",
    "listing_of",
    "parts_of",
    "read_parts",
    "smallest",
]

LISTED = ".geofed/parts.json"
"""Entry of the archive that lists the parts. Folders pack no hidden files, so no file of a task has this name."""
MAX_FOLDER_BYTES = 512 << 20
"""Limit of a whole folder: a model to fine-tune, or tables that a task needs; data belong into the regions."""
MAX_FILES = 10_000
"""Limit of the files of a folder, each of which may be a transfer of its own."""
MAX_ARCHIVE_BYTES = 16 << 20
"""Limit of the packed archive, which is held in memory while it is unpacked. Clients of earlier versions send whole
folders in it."""
MAX_UNPACKED_BYTES = 64 << 20
"""Limit of the unpacked archive."""
SMALL_BYTES = 1 << 20
"""Bytes of files that are in the archive, the smallest ones: they are sent together when one of them changes, and most
tasks have no more."""
_MAX_LISTING_BYTES = 8 << 20
"""Limit of the listing: 10,000 parts with long names."""
_MAX_NAME = 1000
"""Limit of a name in characters, well below what systems accept as a path."""
_MAX_COMPONENT_BYTES = 255
"""Limit of the name of a file or folder by itself, as of Linux's file systems."""
_BLOCK = tarfile.BLOCKSIZE
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Part:
    """A file of a task folder that is not in its archive."""

    name: str
    """Path in the folder, with slashes."""
    digest: str
    """"sha256:<hex>" of its content."""
    bytes: int


def smallest(sizes: Mapping[str, int]) -> set[str]:
    """Return the files that are in the archive, given the sizes of all, in bytes: the smallest up to `SMALL_BYTES`."""
    found, total = set(), 0
    for name in sorted(sizes, key=lambda one: (sizes[one], one)):
        total += sizes[name]
        if total > SMALL_BYTES:
            break
        found.add(name)
    return found


def listing_of(parts: Iterable[Part]) -> bytes:
    """Return the content of the entry `LISTED`; the same for the same parts."""
    files = [
        {"name": one.name, "sha256": one.digest.removeprefix("sha256:"), "bytes": one.bytes}
        for one in sorted(parts, key=lambda part: part.name)
    ]
    return json.dumps({"files": files}, separators=(",", ":")).encode()


def read_parts(archive: BinaryIO) -> tuple[Part, ...]:
    """Return the parts that an archive lists, by name; reads no more than the beginning of it.

    Raises ``GeofedError("TASK_INVALID")`` if it cannot be read, or lists what no folder may hold.
    """
    try:
        with gzip.GzipFile(fileobj=archive) as file:
            head = file.read(_BLOCK)
            # The name comes first in an entry; other archives are left to those who unpack them.
            if head[: len(LISTED) + 1] != f"{LISTED}\0".encode() or len(head) < _BLOCK:
                return ()
            entry = tarfile.TarInfo.frombuf(head, "utf-8", "strict")
            if not entry.isreg() or not 0 <= entry.size <= _MAX_LISTING_BYTES:
                raise _invalid(f"it has {entry.size} bytes")
            listing = json.loads(file.read(entry.size))
        return _checked([_part(one) for one in listing["files"]])
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None
    except (tarfile.TarError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid(f"{type(error).__name__}: {error}") from None


def parts_of(path: Path) -> tuple[Part, ...]:
    """Return the parts that the archive in a file lists. Raises as `read_parts`, and ``OSError``."""
    with path.open("rb") as file:
        return read_parts(file)


def kept_parts(path: Path) -> tuple[Part, ...]:
    """Return the parts that the archive in a file lists; none if it is missing, or damaged."""
    try:
        return parts_of(path)
    except (OSError, GeofedError):
        return ()


def file_digest(path: Path) -> str:
    """Return the "sha256:<hex>" of a file's content, which is not held in memory. Raises ``OSError``."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _part(one: dict[str, Any]) -> Part:
    name, digest, size = one["name"], one["sha256"], one["bytes"]
    if not (isinstance(name, str) and isinstance(digest, str) and type(size) is int):
        raise _invalid("a value has a wrong type")
    path = PurePosixPath(name)
    if not 0 < len(name) <= _MAX_NAME or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise _invalid(f"{name[:80]!r} is outside of the folder")
    # Raises ValueError for a lone surrogate, which no file system takes.
    if max((len(component.encode()) for component in path.parts), default=0) > _MAX_COMPONENT_BYTES:
        raise _invalid(f"{name[:80]!r} is longer than file systems accept")
    if path.as_posix() != name or name == LISTED or size < 0 or not _HEX.fullmatch(digest):
        raise _invalid(f"{name[:80]!r} has no valid name, size or digest")
    return Part(name, f"sha256:{digest}", size)


def _checked(parts: list[Part]) -> tuple[Part, ...]:
    if len({one.name for one in parts}) < len(parts):
        raise _invalid("a name is there twice")
    if len(parts) > MAX_FILES or sum(one.bytes for one in parts) > MAX_FOLDER_BYTES:
        text = f"the task folder has more than {MAX_FOLDER_BYTES >> 20} MiB or {MAX_FILES:,} files"
        raise GeofedError("LIMIT_EXCEEDED", text, hint="keep data and models out of the job's folder")
    return tuple(sorted(parts, key=lambda one: one.name))


def _invalid(why: str) -> GeofedError:
    return GeofedError("TASK_INVALID", f"the list of the task folder's files is invalid: {why}")
