"""Files of a shard, brought to where they can be opened."""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath

import httpx

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import ShardFile

__all__ = ["fetch_split"]

_FETCH_CHUNK = 1 << 20
_PAUSES_SECONDS = (0.2, 1.0, 4.0)
"""Before each new try where the store does not answer, or answers that it cannot now."""


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
    name = PurePosixPath(file.name)
    if name.is_absolute() or ".." in name.parts:
        raise GeofedError("SHARD_UNREADABLE", f"{file.name} is no name for a file of a shard")
    place = into / name
    if place.exists() and (file.size is None or place.stat().st_size == file.size):
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(place.name + ".partial")
    for pause in (*_PAUSES_SECONDS, None):
        try:
            _download(file, partial)
            break
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            # The address holds a signature; only the object's name is told.
            how = (
                f"status {error.response.status_code}"
                if isinstance(error, httpx.HTTPStatusError)
                else type(error).__name__
            )
            if refused or pause is None:
                raise GeofedError("SHARD_UNREADABLE", f"{file.name}: {how}") from None
        time.sleep(pause)
    partial.rename(place)
    return place


def _download(file: ShardFile, into: Path) -> None:
    with httpx.stream("GET", file.url, timeout=30.0) as answer, into.open("wb") as out:
        answer.raise_for_status()
        for piece in answer.iter_bytes(_FETCH_CHUNK):
            out.write(piece)
    if file.size is not None and into.stat().st_size != file.size:
        raise httpx.RemoteProtocolError(f"{into.stat().st_size} bytes of {file.size}")
