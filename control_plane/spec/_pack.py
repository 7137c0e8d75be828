"""The code of a job as one archive: the same bytes for the same files, whoever packs them, whenever."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

from geofed_pb.errors import GeofedError

MAX_BUNDLE_BYTES = 3 << 20
_LEFT_OUT = {"__pycache__", "node_modules", "venv"}


def pack(folder: Path, module: str) -> tuple[bytes, str]:
    """Pack `folder` into a tar.gz; `module` must be in it. Returns the bytes and their "sha256:<hex>".

    Hidden files, caches, virtual environments and links that leave the folder stay out.
    Raises ``GeofedError``: TASK_INVALID, LIMIT_EXCEEDED.
    """
    if not (folder / module).is_file():
        raise GeofedError("TASK_INVALID", f"there is no task module {module} in {folder}")
    files = _files(folder)
    if module not in files:
        raise GeofedError("TASK_INVALID", f"the task module {module} lies in a folder that is not packed")
    total = sum(path.stat().st_size for path in files.values())
    if total > 16 * MAX_BUNDLE_BYTES:
        raise _too_large(folder, total, files)
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
        raise _too_large(folder, len(packed), files)
    return packed, f"sha256:{hashlib.sha256(packed).hexdigest()}"


def code_digest(folder: Path) -> str:
    """ "sha256:<hex>" of what is packed of `folder` and ends in ``.py``."""
    code = hashlib.sha256()
    for name, path in _files(folder).items():
        if name.endswith(".py"):
            code.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return f"sha256:{code.hexdigest()}"


def _files(folder: Path) -> dict[str, Path]:
    root = folder.resolve()
    found = {}
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in names:
            path = Path(parent, name)
            inside = path.is_file() and path.resolve().is_relative_to(root)
            if inside and not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                found[path.relative_to(root).as_posix()] = path
    return dict(sorted(found.items()))


def _too_large(folder: Path, size: int, files: dict[str, Path]) -> GeofedError:
    largest = max(files, key=lambda name: files[name].stat().st_size)
    return GeofedError(
        "LIMIT_EXCEEDED",
        f"the task folder {folder} packs to {size} bytes; the limit is {MAX_BUNDLE_BYTES}",
        hint=f"keep data and models out of the job's folder; the largest file is {largest}",
    )
