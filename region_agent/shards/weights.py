"""Files of the region that jobs start from, by `train.initialModel.uri`.

A job names an address and a digest; the region reads it only in the folders of its file's `models`, with its own
credentials. Without the digest nothing of a file is used, so that a job gets no content that its user does not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO

import structlog
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error
from region_agent.config import ModelsConfig, RegionConfig, StoreConfig
from region_agent.shards.reading import open_store

__all__ = ["MAX_WEIGHTS_BYTES", "check_weights_uri", "copy_weights"]

MAX_WEIGHTS_BYTES = 64 << 30
"""Limit of a file's size; uploaded ones have the same."""
_CHUNK_BYTES = 8 << 20
"""Bytes in memory at a time."""
_ATTEMPTS = 4
"""Requests in a row that bring no byte, after which a store counts as unreachable."""
_WAIT = wait_random_exponential(multiplier=1, max=10)
"""Seconds between them: random, so that regions do not return together to a store that is overloaded."""
_FINAL = (403, 404, 412)
"""HTTP statuses that another request does not change: forbidden, no such object, replaced since the first request."""
_RUN = secrets.token_hex(4)
"""In the names of this process's unfinished copies. A state folder has one agent, so that those of others are left."""
_log = structlog.get_logger("geofed.shard")
_HINT = "see `models` of the region file, and the address in train.initialModel.uri"


def check_weights_uri(config: RegionConfig, uri: str) -> None:
    """Raise ``GeofedError("FORBIDDEN")`` unless the region's file lets jobs start from files at this address."""
    _folder_of(config, uri)


def copy_weights(config: RegionConfig, uri: str, digest: str, into: Path) -> None:
    """Copy a file to a path of this machine unless it is there, in pieces, and verify it. Blocks.

    ``digest``: "sha256:<hex>".

    Raises ``GeofedError``: FORBIDDEN as `check_weights_uri`; MODEL_NOT_FOUND if it cannot be read; UNAVAILABLE if its
    store does not answer; LIMIT_EXCEEDED if it is too large; MODEL_MISMATCH if it has another digest; DISK_FULL;
    CONFIG_INVALID for a store that cannot be used.
    """
    folder = _folder_of(config, uri)
    if into.exists():
        return
    _remove_left(into)
    # A partition that was replaced may still be copying.
    partial, hashed = into.with_name(f"{into.name}.{_RUN}-{secrets.token_hex(4)}.partial"), hashlib.sha256()
    pieces = _objects(config, folder, uri) if uri.startswith("s3://") else _local(folder, uri)
    try:
        with disk_full_as_error(into.parent), partial.open("wb") as out, contextlib.closing(pieces):
            for piece in pieces:
                hashed.update(piece)
                out.write(piece)
                if out.tell() > MAX_WEIGHTS_BYTES:
                    raise _too_large(uri)
            out.flush()
            os.fsync(out.fileno())
        if (found := f"sha256:{hashed.hexdigest()}") != digest:
            # Whoever learned the digest could state it in the next job, and read a file that they do not know.
            _log.warning("a file of `models` has another digest than a job states", uri=uri, found=found, stated=digest)
            text = f"{uri} does not have the digest {digest} in region {config.name}"
            raise GeofedError("MODEL_MISMATCH", text, hint="correct train.initialModel.digest, or the region's file")
        os.replace(partial, into)
    finally:
        partial.unlink(missing_ok=True)


def _folder_of(config: RegionConfig, uri: str) -> ModelsConfig:
    """Return the innermost folder that holds an address."""
    # Some stores resolve such parts of a key, as a file system does.
    plain = {"", ".", ".."}.isdisjoint(uri.partition("://")[2].removeprefix("/").split("/"))
    holding = [folder for folder in config.models if plain and uri.startswith(folder.uri)]
    if holding:
        return max(holding, key=lambda folder: len(folder.uri))
    text = f"region {config.name} lets no job start from {uri}"
    raise GeofedError("FORBIDDEN", text, hint="its operator lists the folder in `models` of the region file")


def _remove_left(into: Path) -> None:
    """Remove what a killed agent left of a copy."""
    for left in into.parent.glob(f"{into.name}.*.partial"):
        if not left.name.startswith(f"{into.name}.{_RUN}-"):
            left.unlink(missing_ok=True)


def _local(folder: ModelsConfig, uri: str) -> Generator[bytes]:
    try:
        # Links must not lead out of the folder, and not tell whether something exists there.
        path = Path(uri.removeprefix("file://")).resolve()
        if not path.is_relative_to(Path(folder.uri.removeprefix("file://")).resolve()):
            raise GeofedError("FORBIDDEN", f"{uri} is not in {folder.uri}", hint=_HINT)
        if not path.is_file():
            raise GeofedError("MODEL_NOT_FOUND", f"{uri} is no file", hint=_HINT)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_WEIGHTS_BYTES:
                raise _too_large(uri)
            yield from _pieces(file)
    except (OSError, RuntimeError, ValueError) as error:
        # The error's own text has the path that links lead to.
        reason = getattr(error, "strerror", None) or "it is no path of a file"
        raise GeofedError("MODEL_NOT_FOUND", f"cannot read {uri}: {reason}", hint=_HINT) from None


def _pieces(file: BinaryIO) -> Generator[bytes]:
    while piece := file.read(_CHUNK_BYTES):
        yield piece


def _objects(config: RegionConfig, folder: ModelsConfig, uri: str) -> Generator[bytes]:
    """Yield an object's bytes; a broken download continues where it was."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    client, errors = open_store(config.stores.get(folder.store, StoreConfig()))
    broken: tuple[type[Exception], ...] = (*errors, OSError)
    again = retry_if_exception(lambda error: isinstance(error, broken) and _status(error) not in _FINAL)
    retrying = Retrying(retry=again, wait=_WAIT, stop=stop_after_attempt(_ATTEMPTS), reraise=True)
    with contextlib.closing(client):
        try:
            told = retrying(client.head_object, Bucket=bucket, Key=key)
            size, version, at = int(told["ContentLength"]), str(told["ETag"]), 0
            if size > MAX_WEIGHTS_BYTES:
                raise _too_large(uri)
            while at < size:
                piece, more = retrying(_begun, client, bucket, key, at, version)
                with contextlib.closing(more), contextlib.suppress(*broken):
                    while piece:
                        at += len(piece)
                        yield piece
                        piece = next(more, b"")
        except broken as error:
            code = "MODEL_NOT_FOUND" if _status(error) in _FINAL else "UNAVAILABLE"
            raise GeofedError(code, f"cannot read {uri}: {error}", hint=_HINT) from None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a store's answer; None: it did not answer."""
    status: int | None = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _begun(client: Any, bucket: str, key: str, begin: int, version: str) -> tuple[bytes, Generator[bytes]]:
    """Return the first piece of a range, and the others."""
    pieces = _range(client, bucket, key, begin, version)
    if not (piece := next(pieces, b"")):
        raise ConnectionError("the store sends no byte of it")
    return piece, pieces


def _range(client: Any, bucket: str, key: str, begin: int, version: str) -> Generator[bytes]:
    body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-", IfMatch=version)["Body"]
    with contextlib.closing(body):
        yield from body.iter_chunks(_CHUNK_BYTES)


def _too_large(uri: str) -> GeofedError:
    return GeofedError("LIMIT_EXCEEDED", f"{uri} is larger than {MAX_WEIGHTS_BYTES >> 30} GiB", hint=_HINT)
