"""Pack a job's code reproducibly: the same files give the same archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from geofed_pb.errors import GeofedError

MAX_BUNDLE_BYTES = 16 << 20
"""Limit of the packed archive, which each worker holds in memory while it unpacks it."""
_MAX_UNPACKED_BYTES = 64 << 20
"""Limit of the unpacked archive, equal to the agents'."""
_CODE = (".py", ".pyc", ".so")
"""Suffixes of files that Python imports."""
_EXCLUDED_FOLDERS = {"__pycache__", "node_modules", "venv"}
"""Folders that are not packed, in addition to hidden ones."""


def pack(folder: Path, module: str, weights: Path | None = None) -> tuple[bytes, str]:
    """Pack `folder`, which must contain `module`, into a tar.gz; return its bytes and their "sha256:<hex>".

    Hidden files, caches, virtual environments and links that leave the folder are excluded, and ``weights``, which are
    uploaded by themselves.
    Raises ``GeofedError``: TASK_INVALID, LIMIT_EXCEEDED.
    """
    if not (folder / module).is_file():
        raise GeofedError("TASK_INVALID", f"task module {module} not found in {folder}")
    files = {name: path for name, path in _files(folder).items() if path.resolve() != weights}
    if module not in files:
        raise GeofedError("TASK_INVALID", f"the task module {module} is in a folder that is not packed")
    total = sum(path.stat().st_size for path in files.values())
    if total > _MAX_UNPACKED_BYTES:
        raise _too_large(f"{folder} has {total} bytes", _MAX_UNPACKED_BYTES, files)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files.items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    packed = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    if len(packed) > MAX_BUNDLE_BYTES:
        raise _too_large(f"{folder} packs to {len(packed)} bytes", MAX_BUNDLE_BYTES, files)
    return packed, f"sha256:{hashlib.sha256(packed).hexdigest()}"


def code_digest(folder: Path) -> str:
    """Return the "sha256:<hex>" of the code files that would be packed of `folder`."""
    return _digest_of_code((name, path.read_bytes) for name, path in _files(folder).items())


def packed_code_digest(bundle: bytes) -> str:
    """Return the `code_digest` of a packed folder.

    Raises ``GeofedError``: TASK_INVALID; LIMIT_EXCEEDED if it unpacks to more than agents accept.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(bundle)) as file:
            # Unpack with a limit first, instead of trusting the sizes in the headers.
            raw = file.read(_MAX_UNPACKED_BYTES + 1)
        if len(raw) > _MAX_UNPACKED_BYTES:
            text = f"the task folder unpacks to more than {_MAX_UNPACKED_BYTES >> 20} MiB"
            raise GeofedError("LIMIT_EXCEEDED", text, hint="keep data and models out of the job's folder")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            members = sorted((member for member in archive if not member.isdir()), key=lambda member: member.name)
            odd = next((one.name for one in members if not one.isfile() or one.issparse()), None)
            if odd is not None:
                raise GeofedError("TASK_INVALID", f"{odd}: the task folder may contain only files and folders")
            return _digest_of_code((member.name, partial(_content, archive, member)) for member in members)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _digest_of_code(files: Iterable[tuple[str, Callable[[], bytes]]]) -> str:
    code = hashlib.sha256()
    for name, read in files:
        if name.endswith(_CODE):
            content = read()
            code.update(f"{name} {len(content)}\n".encode() + content)
    return f"sha256:{code.hexdigest()}"


def _files(folder: Path) -> dict[str, Path]:
    root = folder.resolve()
    found = {}
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _EXCLUDED_FOLDERS)
        for name in names:
            path = Path(parent, name)
            inside = path.is_file() and path.resolve().is_relative_to(root)
            if inside and not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def _too_large(what: str, limit: int, files: dict[str, Path]) -> GeofedError:
    largest = max(files, key=lambda name: files[name].stat().st_size)
    return GeofedError(
        "LIMIT_EXCEEDED",
        f"the task folder {what}; the limit is {limit}",
        hint=f"keep data and models out of the job's folder; the largest file is {largest}",
    )
