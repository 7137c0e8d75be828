"""Files of a shard, brought to where they can be opened."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path, PurePosixPath

import httpx

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import ShardFile

__all__ = ["fetch_split"]

_FETCH_CHUNK = 1 << 20
_PAUSES_SECONDS = (0.2, 1.0, 4.0)
"""Before each new try where the store does not answer, or answers that it cannot now."""
_NAMES = (
    "rename the object: what follows the prefix in its key must be a path of a file, and no file may be a folder, too"
)


def fetch_split(files: tuple[ShardFile, ...], into: Path) -> str:
    """A local path for a split: the file itself, or the folder that its files lie in."""
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
            raise GeofedError("SHARD_UNREADABLE", f"{file.path} is not there")
        return Path(file.path)
    place = into / _checked(file.name)
    try:
        if place.exists() and (file.size is None or place.stat().st_size == file.size):
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        # Of a name that no object can have been given.
        descriptor, partial = tempfile.mkstemp(prefix=".fetched-", dir=place.parent)
        os.close(descriptor)
        try:
            _fetch_into(file, Path(partial))
            os.replace(partial, place)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {error.strerror}", hint=_NAMES) from None
    return place


def _checked(name: str) -> str:
    """A file's name, if it says where the file lies and no two names say the same."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or str(path) != name or name == ".":
        raise GeofedError("SHARD_UNREADABLE", f"{name!r} is no name for a file of a shard", hint=_NAMES)
    return name


def _fetch_into(file: ShardFile, partial: Path) -> None:
    for pause in (*_PAUSES_SECONDS, None):
        try:
            _download(file, partial)
            return
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            # The address holds a signature; only the object's name is told.
            how = type(error).__name__
            if isinstance(error, httpx.HTTPStatusError):
                how = f"status {error.response.status_code}"
            elif isinstance(error, _OtherSize):
                how = str(error)
            if refused or pause is None:
                raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {how}") from None
        time.sleep(pause)


class _OtherSize(httpx.RemoteProtocolError):
    """The store gave more or fewer bytes than the object has."""


def _download(file: ShardFile, into: Path) -> None:
    """The object's bytes as they are stored, whatever they are an encoding of."""
    # As it was signed: a client would leave "." and ".." out of the path, which in a key are letters as any.
    target = "/" + file.url.partition("://")[2].partition("/")[2]
    with (
        httpx.Client(timeout=30.0, headers={"Accept-Encoding": "identity"}) as client,
        client.stream("GET", file.url, extensions={"target": target.encode("ascii")}) as answer,
        into.open("wb") as out,
    ):
        answer.raise_for_status()
        for piece in answer.iter_raw(_FETCH_CHUNK):
            out.write(piece)
    if file.size is not None and into.stat().st_size != file.size:
        raise _OtherSize(f"the store gave {into.stat().st_size} bytes of {file.size}")
