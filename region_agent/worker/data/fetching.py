"""Downloads the files of a shard to local files."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path, PurePosixPath

import httpx2

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import ShardFile

__all__ = ["RETRY_PAUSES_SECONDS", "fetch_split"]

_CHUNK_BYTES = 1 << 20
"""Bytes that are read from the store at a time."""
RETRY_PAUSES_SECONDS = (0.2, 1.0, 4.0)
"""Pauses before the retries of a request that the store has not answered, or has answered with a status of 500 or
more."""
_NAME_HINT = (
    "rename the object: its key after the prefix must be a file's path, and no file may have the name of a folder"
)


def fetch_split(files: tuple[ShardFile, ...], into: Path) -> str:
    """Return a local path for a split: its file, or the folder of its files; downloads them if necessary.

    Raises ``GeofedError("SHARD_UNREADABLE")``.
    """
    if not files:
        raise GeofedError("SHARD_UNREADABLE", "the split has no files")
    paths = [_fetch(file, into) for file in files]
    if not files[0].folder:
        return str(paths[0])
    roots = {Path(file.path).parents[len(Path(file.name).parts) - 1] for file in files if file.path}
    return str(roots.pop() if len(roots) == 1 else into)


def _fetch(file: ShardFile, into: Path) -> Path:
    if file.path:
        if not Path(file.path).exists():
            raise GeofedError("SHARD_UNREADABLE", f"{file.path} not found")
        return Path(file.path)
    path = into / _checked(file.name)
    try:
        if path.exists() and (file.size is None or path.stat().st_size == file.size):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # No object of a shard can have such a name.
        descriptor, partial = tempfile.mkstemp(prefix=".fetched-", dir=path.parent)
        os.close(descriptor)
        try:
            _fetch_into(file, Path(partial))
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {error.strerror}", hint=_NAME_HINT) from None
    return path


def _checked(name: str) -> str:
    """Return a file's name if it is a normalised relative path, so that different names mean different files."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name or name == ".":
        raise GeofedError("SHARD_UNREADABLE", f"{name!r} is not a valid name for a file of a shard", hint=_NAME_HINT)
    return name


def _fetch_into(file: ShardFile, partial: Path) -> None:
    for pause in (*RETRY_PAUSES_SECONDS, None):
        try:
            _download(file, partial)
            return
        except httpx2.HTTPError as error:
            refused = isinstance(error, httpx2.HTTPStatusError) and error.response.status_code < 500
            # The URL contains a signature, so the message has the object's name only.
            reason = type(error).__name__
            if isinstance(error, httpx2.HTTPStatusError):
                reason = f"status {error.response.status_code}"
            elif isinstance(error, _WrongSize):
                reason = str(error)
            if refused or pause is None:
                raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {reason}") from None
        time.sleep(pause)


class _WrongSize(httpx2.RemoteProtocolError):
    """The store has sent more or fewer bytes than the object has."""


def _download(file: ShardFile, into: Path) -> None:
    """Download an object's bytes as they are stored, without decoding them."""
    # The path as it was signed: httpx2 would normalise "." and "..", which are ordinary characters in a key.
    target = "/" + file.url.partition("://")[2].partition("/")[2]
    with (
        httpx2.Client(timeout=30.0, headers={"Accept-Encoding": "identity"}) as client,
        client.stream("GET", file.url, extensions={"target": target.encode("ascii")}) as answer,
        into.open("wb") as out,
    ):
        answer.raise_for_status()
        for piece in answer.iter_raw(_CHUNK_BYTES):
            out.write(piece)
    if file.size is not None and into.stat().st_size != file.size:
        raise _WrongSize(f"received {into.stat().st_size} of {file.size} bytes")
