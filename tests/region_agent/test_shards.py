"""Shards on disks and in an S3-compatible store: the worker gets what it may read, and nothing to read more with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import DatasetConfig, SplitConfig, StoreConfig
from region_agent.shards import shard_files
from region_agent.worker.data import fetch_split
from tests.region_agent.conftest import SECRET


def _dataset(uri: str) -> DatasetConfig:
    return DatasetConfig(store="minio", splits={"train": SplitConfig(uri=uri, samples=1)})


def test_an_object_is_fetched_by_the_address_alone(
    store: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = shard_files(_dataset("s3://shards/one.npz"), {"minio": store})["train"]
    assert (file.name, file.size, file.path, file.folder) == ("one.npz", 3, "", False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert Path(fetch_split((file,), tmp_path / "into")).read_bytes() == b"one"


def test_a_folder_of_objects_is_a_folder(store: StoreConfig, tmp_path: Path) -> None:
    files = shard_files(_dataset("s3://shards/train/"), {"minio": store})["train"]
    assert [(file.name, file.size) for file in files] == [("a.npy", 1000), ("deep/b.npy", 1)]
    folder = Path(fetch_split(files, tmp_path / "into"))
    assert (folder / "a.npy").read_bytes() == b"a" * 1000
    assert (folder / "deep" / "b.npy").read_bytes() == b"b"


def test_the_secret_does_not_travel(store: StoreConfig) -> None:
    files = shard_files(_dataset("s3://shards/train/"), {"minio": store})["train"]
    body = "".join(file.model_dump_json() for file in files)
    assert SECRET not in body
    assert "X-Amz-Expires=3600" in body
    assert "X-Amz-Signature=" in body


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://shards/nothing.npz", "Not Found"),
        ("s3://shards/nothing/", "holds no objects"),
        ("s3://nowhere/train/", "bucket does not exist"),
    ],
)
def test_what_is_not_there_is_told_with_its_address(store: StoreConfig, uri: str, says: str) -> None:
    with pytest.raises(GeofedError, match=says) as raised:
        shard_files(_dataset(uri), {"minio": store})
    assert raised.value.code == "SHARD_UNREADABLE"
    assert raised.value.message.startswith(uri)
    assert SECRET not in raised.value.message


def test_missing_keys_are_told(store: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(GeofedError, match="credentials") as raised:
        shard_files(_dataset("s3://shards/one.npz"), {"minio": store})
    assert raised.value.code == "SHARD_UNREADABLE"


def test_a_profile_that_there_is_not_is_told(store: StoreConfig) -> None:
    with pytest.raises(GeofedError, match="nobody") as raised:
        shard_files(_dataset("s3://shards/one.npz"), {"minio": store.model_copy(update={"profile": "nobody"})})
    assert raised.value.code == "CONFIG_INVALID"


def test_local_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b"):
        (tmp_path / name).touch()
    (file,) = shard_files(_dataset(str(tmp_path / "a")), {})["train"]
    assert (file.name, file.path, file.folder) == ("a", str(tmp_path / "a"), False)
    files = shard_files(_dataset(f"{tmp_path}/"), {})["train"]
    assert [(file.name, file.folder) for file in files] == [("a", True), ("deep/b", True)]


def test_a_name_that_cannot_travel_is_told(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    with pytest.raises(GeofedError, match=r"deep/caf\\xe9.txt: the name is not UTF-8") as raised:
        shard_files(_dataset(f"{tmp_path}/"), {})
    assert raised.value.code == "SHARD_UNREADABLE"
    assert raised.value.hint.startswith("rename the file")


def test_missing_and_empty_local_shards_are_told(tmp_path: Path) -> None:
    for uri, says in ((str(tmp_path / "none"), "is not there"), (f"{tmp_path}/", "is empty")):
        with pytest.raises(GeofedError, match=says) as raised:
            shard_files(_dataset(uri), {})
        assert raised.value.code == "SHARD_UNREADABLE"
