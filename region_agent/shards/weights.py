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
_HINT = "see `models` of the region file, and the address in train.initialModel.uri"


def check_weights_uri(config: RegionConfig, uri: str) -> None:
    """Raise ``GeofedError("FORBIDDEN")`` unless the region's file lets jobs start from files at this address."""
    _folder_of(config, uri)


def copy_weights(config: RegionConfig, uri: str, digest: str, into: Path) -> None:
    """Copy a file to a path of this machine unless it is there, in pieces, and verify it. Blocks.

    ``digest``: "sha256:<hex>".

    Raises ``GeofedError``: FORBIDDEN as `check_weights_uri`; MODEL_NOT_FOUND if it cannot be read; LIMIT_EXCEEDED if it
    is too large; MODEL_MISMATCH if it has another digest; DISK_FULL; CONFIG_INVALID for a store that cannot be used.
    """
    folder = _folder_of(config, uri)
    if into.exists():
        return
    # A partition that was replaced may still be copying.
    partial, hashed = into.with_name(f"{into.name}.{secrets.token_hex(4)}.partial"), hashlib.sha256()
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
            text = f"{uri} has the digest {found} in region {config.name}, not {digest}"
            raise GeofedError("MODEL_MISMATCH", text, hint="correct train.initialModel.digest, or the region's file")
        os.replace(partial, into)
    finally:
        partial.unlink(missing_ok=True)


def _folder_of(config: RegionConfig, uri: str) -> ModelsConfig:
    for folder in config.models:
        if uri.startswith(folder.uri) and uri != folder.uri and not uri.endswith("/"):
            return folder
    text = f"region {config.name} lets no job start from {uri}"
    raise GeofedError("FORBIDDEN", text, hint="its operator lists the folder in `models` of the region file")


def _local(folder: ModelsConfig, uri: str) -> Generator[bytes]:
    path = Path(uri.removeprefix("file://"))
    try:
        # Links and ".." must not lead out of the folder.
        if not path.resolve(strict=True).is_relative_to(Path(folder.uri.removeprefix("file://")).resolve()):
            raise GeofedError("FORBIDDEN", f"{uri} is not in {folder.uri}", hint=_HINT)
        if not path.is_file():
            raise GeofedError("MODEL_NOT_FOUND", f"{uri} is no file", hint=_HINT)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_WEIGHTS_BYTES:
                raise _too_large(uri)
            yield from _pieces(file)
    except (OSError, RuntimeError, ValueError) as error:
        raise GeofedError("MODEL_NOT_FOUND", f"cannot read {uri}: {error}", hint=_HINT) from None


def _pieces(file: BinaryIO) -> Generator[bytes]:
    while piece := file.read(_CHUNK_BYTES):
        yield piece


def _objects(config: RegionConfig, folder: ModelsConfig, uri: str) -> Generator[bytes]:
    """Yield an object's bytes; a broken download continues where it was."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    client, errors = open_store(config.stores.get(folder.store, StoreConfig()))
    with contextlib.closing(client):
        try:
            told = client.head_object(Bucket=bucket, Key=key)
            size, version = int(told["ContentLength"]), str(told["ETag"])
        except errors as error:
            raise GeofedError("MODEL_NOT_FOUND", f"cannot read {uri}: {error}", hint=_HINT) from None
        if size > MAX_WEIGHTS_BYTES:
            raise _too_large(uri)
        at, failed = 0, 0
        broken: tuple[type[Exception], ...] = (*errors, OSError)
        while at < size:
            try:
                for piece in _range(client, bucket, key, at, version):
                    at, failed = at + len(piece), 0
                    yield piece
            except broken as error:
                failed += 1
                if failed == _ATTEMPTS:
                    raise GeofedError("MODEL_NOT_FOUND", f"cannot read {uri}: {error}", hint=_HINT) from None


def _range(client: Any, bucket: str, key: str, begin: int, version: str) -> Generator[bytes]:
    body = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={begin}-", IfMatch=version)["Body"]
    with contextlib.closing(body):
        yield from body.iter_chunks(_CHUNK_BYTES)


def _too_large(uri: str) -> GeofedError:
    return GeofedError("LIMIT_EXCEEDED", f"{uri} is larger than {MAX_WEIGHTS_BYTES >> 30} GiB", hint=_HINT)
