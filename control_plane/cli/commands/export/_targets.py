"""What an export writes over: only its own files, the same content, or what the user has agreed to."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from control_plane.cli._output import unwritable

__all__ = ["MANIFEST", "Agree", "agree_to_overwrite", "check_places", "manifest_of"]

Agree = Callable[[str], None]
"""Gets the files that would be overwritten, in words; raises ``GeofedError`` if they must not be."""

MANIFEST = "ModelManifest"
"""`kind` of a manifest."""
_MOST_MANIFEST_BYTES = 64 << 20
"""Limit of the size of a manifest that is read into memory: it has an entry for each tensor."""


def manifest_of(file: Path) -> Path:
    """Return the path of the manifest next to a file."""
    return file.with_name(f"{file.name}.manifest.json")


def check_places(target: Path, *, is_folder: bool) -> None:
    """Check, before anything is fetched, that a file or folder can be at a place.

    Raises ``GeofedError("USAGE")``.
    """
    number = 0
    if is_folder:
        number = errno.ENOTDIR if target.exists() and not target.is_dir() else 0
    elif target.is_dir():
        number = errno.EISDIR
    elif not target.parent.is_dir():
        number = errno.ENOENT
    if number:
        raise unwritable(target, OSError(number, os.strerror(number)))


def agree_to_overwrite(files: Mapping[Path, bytes | None], model: Path, agree: Agree) -> None:
    """Have it agreed to that other files are overwritten, those and the manifest of ``model``.

    ``files``: their new content by path, by which they do not count if they have it; None: unknown. Raises what
    ``agree`` raises.
    """
    lost = [path for path, content in files.items() if path.exists() and not _has(path, content)]
    manifest = manifest_of(model)
    if manifest.exists() and not _is_manifest(manifest):
        lost.append(manifest)
    if lost:
        agree(", ".join(map(str, lost)))


def _has(path: Path, content: bytes | None) -> bool:
    try:
        return content is not None and path.stat().st_size == len(content) and path.read_bytes() == content
    except OSError:
        return False


def _is_manifest(path: Path) -> bool:
    try:
        if path.stat().st_size > _MOST_MANIFEST_BYTES:
            return False
        held = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(held, dict) and held.get("kind") == MANIFEST
