"""Backup of a control plane in one file, and its restore: database, code, models, and the keys of the federation.

The file is a tar archive: `manifest.json`, `rows.jsonl` with the database as of one instant, `pki/`, `admin.token`, and
`blobs/`. It may be restored into another kind of database.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from control_plane.service import SILENT_SECONDS
from control_plane.store import Line, Store, copy_rows, from_line, replace_rows, to_line
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import flush_folder, write_durably

__all__ = ["BackupContents", "back_up", "restore"]

_FORMAT = 1
"""Version of the archive's layout."""
_KEYS = ("pki/*", "*.token")
"""Files of the state directory that identify the federation and its operator."""
_CHUNK_BYTES = 1 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True)
class BackupContents:
    """What a backup holds."""

    federation: str
    created_at: float
    """Unix time of the database's copy."""
    rows: int
    blobs: int
    bytes: int
    """Size of the file."""


def back_up(store: Store, state_dir: Path, file: Path) -> BackupContents:
    """Write a backup; the control plane may run meanwhile. The file has mode 0600, since it holds the CA's key."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.part")
    at = time.time()
    try:
        with tempfile.TemporaryFile("w+b", dir=partial.parent) as rows:
            revision, count = _write_rows(store, rows)
            with _created(partial) as target, tarfile.open(fileobj=target, mode="w") as archive:
                federation = store.meta("federation") or ""
                manifest = {"format": _FORMAT, "federation": federation, "created_at": at, "revision": revision}
                _add_bytes(archive, "manifest.json", json.dumps({**manifest, "rows": count}).encode())
                rows.seek(0)
                _add(archive, "rows.jsonl", rows)
                for path in sorted(path for pattern in _KEYS for path in state_dir.glob(pattern) if path.is_file()):
                    _add_bytes(archive, str(path.relative_to(state_dir)), path.read_bytes())
                # After the rows: a blob that they name is complete, and stays the same.
                blobs = sum(_add_blob(archive, path) for path in sorted((state_dir / "blobs").glob("[0-9a-f]*")))
        os.replace(partial, file)
        flush_folder(file.parent)
    finally:
        partial.unlink(missing_ok=True)
    return BackupContents(federation, at, count, blobs, file.stat().st_size)


def restore(store: Store, state_dir: Path, file: Path) -> BackupContents:
    """Replace the state by a backup; no control plane may run. The caller has locked the state.

    Raises ``GeofedError``: ILLEGAL_STATE if a control plane leads; STATE_INVALID if the file is damaged or of a newer
    version.
    """
    _nobody_leads(store)
    try:
        with tarfile.open(file) as archive:
            manifest = json.loads(_read(archive, "manifest.json"))
            if manifest["format"] > _FORMAT:
                raise GeofedError("STATE_INVALID", f"{file} was written by a newer version of geofed")
            members = [member for member in archive if member.isfile()]
            blobs = [member for member in members if member.name.startswith("blobs/")]
            # Files first: if this is interrupted, the database is still the former one, and its files are all there.
            for member in blobs:
                _restore_blob(archive, member, state_dir / "blobs")
            for name in (member.name for member in members):
                if name.startswith("pki/") or name.endswith(".token"):
                    _restore_key(archive, name, state_dir)
            rows = archive.extractfile("rows.jsonl")
            assert rows is not None
            replace_rows(store, manifest["revision"], _lines(rows, manifest["rows"]))
    except (tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise GeofedError("STATE_INVALID", f"{file} is not a backup, or is damaged: {error}") from None
    size = file.stat().st_size
    return BackupContents(manifest["federation"], manifest["created_at"], manifest["rows"], len(blobs), size)


def _nobody_leads(store: Store) -> None:
    seen = store.leadership()
    if not store.shared or not seen.holder:
        return
    time.sleep(SILENT_SECONDS)
    if (now := store.leadership()) != seen and now.holder:
        text = f"a control plane uses the database: {now.holder}"
        raise GeofedError("ILLEGAL_STATE", text, hint="stop all control planes, then restore")


def _write_rows(store: Store, file: IO[bytes]) -> tuple[str, int]:
    copied = copy_rows(store)
    revision, count = next(copied), 0
    for line in copied:
        assert not isinstance(line, str)
        file.write(f"{to_line(line)}\n".encode())
        count += 1
    assert isinstance(revision, str)
    return revision, count


def _lines(file: IO[bytes], expected: int) -> Iterator[Line]:
    count = 0
    for line in file:
        count += 1
        yield from_line(line.decode())
    if count != expected:
        raise GeofedError("STATE_INVALID", f"the backup is damaged: it has {count} rows instead of {expected}")


@contextmanager
def _created(path: Path) -> Iterator[IO[bytes]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes], size: int | None = None) -> None:
    member = tarfile.TarInfo(name)
    member.size = os.fstat(file.fileno()).st_size if size is None else size
    member.mode, member.mtime = 0o600, int(time.time())
    archive.addfile(member, file)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    _add(archive, name, io.BytesIO(content), len(content))


def _add_blob(archive: tarfile.TarFile, path: Path) -> bool:
    """Add a blob; False if it was deleted meanwhile."""
    try:
        with path.open("rb") as file:
            _add(archive, f"blobs/{path.name}", file)
    except FileNotFoundError:
        return False
    return True


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None
    return member.read()


def _restore_blob(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a blob, verified by its digest; one that is there stays."""
    digest = member.name.removeprefix("blobs/")
    target = folder / digest
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"{member.name} is not the name of a blob")
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    source = archive.extractfile(member)
    assert source is not None
    partial = folder / "partial" / f"{digest}.restored"
    partial.parent.mkdir(exist_ok=True)
    with _created(partial) as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
    with partial.open("rb") as written:
        if hashlib.file_digest(written, "sha256").hexdigest() != digest:
            partial.unlink()
            raise ValueError(f"{member.name} has another digest")
    os.replace(partial, target)
    flush_folder(folder)


def _restore_key(archive: tarfile.TarFile, name: str, state_dir: Path) -> None:
    if Path(name).name not in (name, name.removeprefix("pki/")):
        raise ValueError(f"{name} is not the name of a key")
    (state_dir / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = 0o644 if name.endswith(".crt") else 0o600
    write_durably(state_dir / name, [_read(archive, name)], mode=mode)
