"""Pack a job's code reproducibly: the same files give the same archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import (
    LISTED,
    MAX_FILES,
    MAX_FOLDER_BYTES,
    MAX_UNPACKED_BYTES,
    Part,
    file_digest,
    listing_of,
    parts_of,
    read_parts,
    smallest,
)

_CODE = (".py", ".pyc", ".so")
"""Suffixes of files that Python imports."""
_EXCLUDED_FOLDERS = {"__pycache__", "node_modules", "venv"}
"""Folders that are not packed, in addition to hidden ones."""
_PIECE_BYTES = 1 << 20
"""Bytes of a file that are in memory at once."""
_HINT = "keep data and models out of the job's folder"


@dataclass(frozen=True)
class PackedTask:
    """A task folder as it is sent."""

    content: bytes
    """The archive, a tar.gz of the small files."""
    digest: str
    """"sha256:<hex>" of the archive, which identifies all files."""
    parts: tuple[Part, ...] = ()
    """Files that are sent by themselves."""
    folder: Path = Path()
    """Where they are."""

    @property
    def bytes(self) -> int:
        """Size of all that is sent, unless it has been sent before."""
        return len(self.content) + sum(one.bytes for one in self.parts)


def pack(folder: Path, module: str, weights: Collection[Path] = ()) -> PackedTask:
    """Pack `folder`, which must contain `module`. Larger files stay where they are; here they are only hashed.

    Hidden files, caches, virtual environments and links that leave the folder are excluded, and ``weights``, which are
    uploaded by themselves.
    Raises ``GeofedError``: TASK_INVALID, LIMIT_EXCEEDED.
    """
    if not (folder / module).is_file():
        raise GeofedError("TASK_INVALID", f"task module {module} not found in {folder}")
    files = {name: path for name, path in _files(folder).items() if path.resolve() not in weights}
    if module not in files:
        raise GeofedError("TASK_INVALID", f"the task module {module} is in a folder that is not packed")
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > MAX_FOLDER_BYTES:
        raise _too_large(f"{folder} has {sum(sizes.values()):,} bytes", f"{MAX_FOLDER_BYTES:,}", sizes)
    if len(files) > MAX_FILES:
        raise _too_large(f"{folder} has {len(files):,} files", f"{MAX_FILES:,}", sizes)
    small = smallest(sizes)
    parts = tuple(Part(name, file_digest(path), sizes[name]) for name, path in files.items() if name not in small)
    packed = _archive({name: path for name, path in files.items() if name in small}, parts)
    # What nobody would unpack is refused before it is sent.
    read_parts(io.BytesIO(packed))
    return PackedTask(packed, f"sha256:{hashlib.sha256(packed).hexdigest()}", parts, folder)


def _archive(files: dict[str, Path], parts: tuple[Part, ...]) -> bytes:
    """Return a tar.gz of files, with a listing of the parts if there are any."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if parts:
            _add(archive, LISTED, listing_of(parts), 0o644)
        for name, path in files.items():
            _add(archive, name, path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def code_digest(folder: Path) -> str:
    """Return the "sha256:<hex>" of the code files that would be packed of `folder`."""
    return _digest_of_code((name, path.stat().st_size, partial(_pieces, path)) for name, path in _files(folder).items())


def packed_code_digest(archive: Path, part_path: Callable[[str], Path]) -> str:
    """Return the `code_digest` of a packed folder, however it is packed.

    ``part_path`` returns the file with a digest.

    Raises ``GeofedError``: TASK_INVALID; LIMIT_EXCEEDED if it unpacks to more than agents accept.
    """
    try:
        parts = parts_of(archive)
        with gzip.open(archive) as file:
            # Unpack with a limit first, instead of trusting the sizes in the headers.
            raw = file.read(MAX_UNPACKED_BYTES + 1)
        if len(raw) > MAX_UNPACKED_BYTES:
            text = f"the archive of the task folder unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB"
            raise GeofedError("LIMIT_EXCEEDED", text, hint=_HINT)
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as packed:
            members = [member for member in packed if not member.isdir()]
            odd = next((one.name for one in members if not one.isfile() or one.issparse()), None)
            if odd is not None:
                raise GeofedError("TASK_INVALID", f"{odd}: the task folder may contain only files and folders")
            if both := {one.name for one in members} & {one.name for one in parts}:
                raise GeofedError("TASK_INVALID", f"{min(both)}: the task folder has this file twice")
            found = [(one.name, one.size, partial(_content, packed, one)) for one in members]
            found += [(one.name, one.bytes, partial(_pieces, part_path(one.digest))) for one in parts]
            return _digest_of_code(sorted(found, key=lambda one: one[0]))
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file = archive.extractfile(member)
    yield file.read() if file is not None else b""


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _digest_of_code(files: Iterable[tuple[str, int, Callable[[], Iterator[bytes]]]]) -> str:
    code = hashlib.sha256()
    for name, size, pieces in files:
        if name.endswith(_CODE):
            code.update(f"{name} {size}\n".encode())
            for piece in pieces():
                code.update(piece)
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


def _too_large(what: str, limit: str, sizes: dict[str, int]) -> GeofedError:
    largest = max(sizes, key=lambda name: sizes[name])
    return GeofedError(
        "LIMIT_EXCEEDED",
        f"the task folder {what}; the limit is {limit}",
        hint=f"{_HINT}; the largest file is {largest}",
    )
