"""Shards on disks and in an S3-compatible store: the worker gets what it may read, and nothing to read more with."""

from __future__ import annotations

import contextlib
import gzip
import os
import posixpath
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.budget import budget

from geofed_pb.errors import GeofedError
from region_agent.config import DatasetConfig, SplitConfig, StoreConfig
from region_agent.shards.reading import shard_files
from region_agent.worker.data.shard import fetch_split
from tests.region_agent.conftest import SECRET, session


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


def _put(store: StoreConfig, objects: dict[str, bytes], **more: str) -> None:
    with contextlib.closing(session().client("s3", endpoint_url=store.endpoint_url)) as client:
        for key, content in objects.items():
            client.put_object(Bucket="shards", Key=key, Body=content, **more)


_REFUSED = {"", ".", ".."}
_KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40).filter(
    lambda key: not key.endswith("/") and key.rpartition("/")[2] not in _REFUSED and len(key.encode()) < 250
)


@pytest.mark.slow
@given(key=_KEYS)
@example(key="run#1/train.npz")
@example(key="q?v=2/train.npz")
@example(key="pct%41/train.npz")
@example(key="a+b; &c=d/e f.npz")
@example(key="a/./b/../c.npz")
@example(key="/begins//twice")
@example(key="https://x/y?z#w")
@settings(deadline=None, max_examples=budget(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_object_that_is_fetched_is_the_one_that_is_written(
    store: StoreConfig, tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    # What a key would be taken for where it was taken apart as a URL's path.
    others = {key.partition("#")[0], key.partition("?")[0], unquote(key), key.lstrip("/"), posixpath.normpath(key)}
    _put(store, {other: b"another" for other in others - {"", ".", key} if not other.startswith("..")})
    _put(store, {key: b"the one"})
    files = shard_files(_dataset(f"s3://shards/{key}"), {"minio": store})["train"]
    fetched = Path(fetch_split(files, tmp_path_factory.mktemp("into")))
    assert fetched.read_bytes() == b"the one"
    assert fetched.name == key.rpartition("/")[2]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["run#1/", "q?v=2/", "100%41 %/", "uml ü 上海/", "a/../b/", "./", "twice//"])
def test_the_objects_of_a_folder_are_those_of_its_prefix(store: StoreConfig, tmp_path: Path, prefix: str) -> None:
    prefix = f"folders/{prefix}"
    objects = {f"{prefix}{name}": name.encode() for name in ("a#1.npy", "b?c/d%20.npy", "e+f g.npy")}
    _put(store, {**objects, "folders/run": b"another", "folders/q": b"another"})
    folder = Path(fetch_split(shard_files(_dataset(f"s3://shards/{prefix}"), {"minio": store})["train"], tmp_path))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {key.removeprefix(prefix): content for key, content in objects.items()}


@pytest.mark.parametrize(
    "keys", [["x/./a", "x/a"], ["x//a"], ["x/../a"], ["x/a", "x/a/b"], ["x/" + "n" * 300]], ids=lambda keys: keys[0][:9]
)
def test_keys_that_are_no_paths_of_files_are_refused(store: StoreConfig, tmp_path: Path, keys: list[str]) -> None:
    folder = f"refused-{abs(hash(tuple(keys)))}/"
    _put(store, {folder + key: key.encode() for key in keys})
    files = shard_files(_dataset(f"s3://shards/{folder}x/"), {"minio": store})["train"]
    with pytest.raises(GeofedError) as raised:
        fetch_split(files, tmp_path / "into")
    assert raised.value.code == "SHARD_UNREADABLE"
    assert "rename the object" in raised.value.hint


@pytest.mark.slow
def test_an_object_comes_as_it_is_stored(store: StoreConfig, tmp_path: Path) -> None:
    """Its encoding is the owner's: the size that the store tells is that of the bytes that it keeps."""
    packed = gzip.compress(bytes(100_000))
    _put(store, {"packed.bin": packed}, ContentEncoding="gzip")
    (file,) = shard_files(_dataset("s3://shards/packed.bin"), {"minio": store})["train"]
    assert Path(fetch_split((file,), tmp_path)).read_bytes() == packed


@pytest.mark.slow
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
    for uri, says in ((str(tmp_path / "none"), "not found"), (f"{tmp_path}/", "is empty")):
        with pytest.raises(GeofedError, match=says) as raised:
            shard_files(_dataset(uri), {})
        assert raised.value.code == "SHARD_UNREADABLE"
