"""Files of a shard as a worker reads them: paths on this machine, or presigned URLs of objects.

The credentials of the region's object store stay in the agent. A worker, which runs the user's code, gets URLs that are
valid for one object and a short time.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError, install_hint
from region_agent.config import DatasetConfig, StoreConfig
from region_agent.worker.data.sources import version_of
from region_agent.worker.invocation import ShardFile

__all__ = ["SIGNATURE_LIFE", "open_store", "shard_files"]

SIGNATURE_LIFE = timedelta(hours=1)
"""Time for which a presigned URL is valid."""


def shard_files(
    dataset: DatasetConfig, stores: dict[str, StoreConfig], *, versions: bool = False
) -> dict[str, tuple[ShardFile, ...]]:
    """Return the files of each split. Blocks; raises ``GeofedError("SHARD_UNREADABLE")``.

    ``versions``: state for each file what changes with its content, also where the dataset has no format.
    """
    store, versions = stores.get(dataset.store, StoreConfig()), versions or dataset.format is not None
    return {name: _split(part.uri, store, versions=versions) for name, part in dataset.splits.items()}


def _split(uri: str, store: StoreConfig, *, versions: bool) -> tuple[ShardFile, ...]:
    """``versions``: state for each file what changes with its content."""
    if not uri.startswith("s3://"):
        found = _local(Path(uri), folder=uri.endswith("/"))
        return tuple(_with_version(file) for file in found) if versions else found
    found = _objects(uri, store)
    return found if versions else tuple(file.model_copy(update={"version": ""}) for file in found)


def _with_version(file: ShardFile) -> ShardFile:
    try:
        told = Path(file.path).stat()
    except OSError as error:
        raise GeofedError("SHARD_UNREADABLE", f"{file.path}: {error.strerror}") from None
    return file.model_copy(update={"version": version_of(told), "size": told.st_size})


def _local(path: Path, *, folder: bool) -> tuple[ShardFile, ...]:
    if folder:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        names = ((_readable(file.relative_to(path), path), str(file)) for file in files)
        found = tuple(ShardFile(name=name, path=place, folder=True) for name, place in names)
    else:
        found = (ShardFile(name=path.name, path=str(path)),) if path.is_file() else ()
    if not found:
        raise GeofedError("SHARD_UNREADABLE", f"{path} not found" if not path.exists() else f"{path} is empty")
    return found


def _readable(name: Path, folder: Path) -> str:
    """Return a file's name, which must be valid UTF-8, since it is sent to workers and other regions as text."""
    try:
        name.as_posix().encode()
    except UnicodeEncodeError:
        hint = f"rename the file, or remove it from {folder}, and restart the agent"
        raise GeofedError("SHARD_UNREADABLE", f"{folder / name}: the name is not UTF-8", hint=hint) from None
    return str(name)


def _objects(uri: str, store: StoreConfig) -> tuple[ShardFile, ...]:
    # Not parsed as a URL: in a key, "#" and "?" are ordinary characters.
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client, errors = open_store(store)
    with contextlib.closing(client):
        try:
            if not uri.endswith("/"):
                told = client.head_object(Bucket=bucket, Key=prefix)
                size, version = int(told["ContentLength"]), str(told.get("ETag", ""))
                return (_signed(client, bucket, prefix, prefix.rpartition("/")[2], size, version),)
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            listed = [entry for page in pages for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]
        except errors as error:
            raise GeofedError("SHARD_UNREADABLE", f"{uri}: {error}") from None
        if not listed:
            raise GeofedError("SHARD_UNREADABLE", f"{uri} holds no objects")
        return tuple(
            _signed(
                client,
                bucket,
                entry["Key"],
                entry["Key"].removeprefix(prefix),
                int(entry["Size"]),
                str(entry.get("ETag", "")),
                folder=True,
            )
            for entry in listed
        )


def _signed(
    client: Any, bucket: str, key: str, name: str, size: int, version: str, *, folder: bool = False
) -> ShardFile:
    wanted = {"Bucket": bucket, "Key": key}
    url = client.generate_presigned_url("get_object", Params=wanted, ExpiresIn=int(SIGNATURE_LIFE.total_seconds()))
    return ShardFile(name=name, folder=folder, url=url, size=size, version=version)


def open_store(store: StoreConfig) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the SDK's client of a store, and its errors. Raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:
        raise GeofedError("CONFIG_INVALID", "s3:// needs boto3", hint=install_hint("s3")) from None
    # Many S3-compatible stores do not support the newer checksums, so they are used only where they are required.
    config = Config(
        signature_version="s3v4",
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"max_attempts": 4, "mode": "standard"},
    )
    errors = (BotoCoreError, ClientError)
    try:
        session = boto3.Session(profile_name=store.profile, region_name=store.region)
        return session.client("s3", endpoint_url=store.endpoint_url, config=config), errors
    except (*errors, ValueError) as error:
        text = f"the object store at {store.endpoint_url or 'its default address'}: {error}"
        raise GeofedError("CONFIG_INVALID", text, hint="correct the store in the region's file") from None
