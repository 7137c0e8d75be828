"""Files of a region that jobs start from: only those in its folders, only with their digest, in pieces."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import ModelsConfig, RegionConfig, StoreConfig
from region_agent.shards import weights
from region_agent.shards.weights import check_weights_uri, copy_weights
from tests.region_agent.conftest import session

CONTENT = bytes(range(256)) * 40
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def _region(*folders: ModelsConfig, **stores: StoreConfig) -> RegionConfig:
    """Return a region with folders of models; other parts of it are not read."""
    return RegionConfig.model_construct(
        metadata=type("Named", (), {"name": "east"})(), models=folders, stores=stores
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    (made / "base.safetensors").write_bytes(CONTENT)
    (tmp_path / "secret.safetensors").write_bytes(CONTENT)
    (made / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (made / "folder").mkdir()
    return made


def _refused(config: RegionConfig, uri: str, into: Path, digest: str = DIGEST) -> tuple[str, str]:
    with pytest.raises(GeofedError) as caught:
        copy_weights(config, uri, digest, into)
    assert [*into.parent.iterdir()] == []
    return caught.value.code, caught.value.message


def test_a_file_of_the_regions_folder_is_copied_and_verified(folder: Path, tmp_path: Path) -> None:
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    uri = f"file://{folder}/base.safetensors"
    code, message = _refused(config, uri, into, f"sha256:{'ab' * 32}")
    assert code == "MODEL_MISMATCH"
    assert DIGEST in message
    assert _refused(config, f"file://{folder}/none.safetensors", into)[0] == "MODEL_NOT_FOUND"
    assert _refused(config, f"file://{folder}/folder", into)[0] == "MODEL_NOT_FOUND"
    assert _refused(config, f"file://{folder}/a\0b", into)[0] == "MODEL_NOT_FOUND"
    copy_weights(config, uri, DIGEST, into)
    assert into.read_bytes() == CONTENT
    (folder / "base.safetensors").unlink()
    copy_weights(config, uri, DIGEST, into)


def test_nothing_outside_of_the_regions_folders_is_read(folder: Path, tmp_path: Path) -> None:
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    for name in ("../secret.safetensors", "link.safetensors"):
        assert _refused(config, f"file://{folder}/{name}", into)[0] == "FORBIDDEN", name
    for uri in (f"file://{tmp_path}/secret.safetensors", "s3://models/base.safetensors", f"file://{folder}/"):
        assert _refused(config, uri, into)[0] == "FORBIDDEN", uri
        with pytest.raises(GeofedError, match="lets no job start from"):
            check_weights_uri(config, uri)


def test_a_file_above_the_limit_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    monkeypatch.setattr(weights, "MAX_WEIGHTS_BYTES", len(CONTENT) - 1)
    assert _refused(config, f"file://{folder}/base.safetensors", into)[0] == "LIMIT_EXCEEDED"


def test_a_broken_download_continues_where_it_was(
    store: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(session().client("s3", endpoint_url=store.endpoint_url)) as client:
        client.put_object(Bucket="shards", Key="models/base.safetensors", Body=CONTENT)
    config = _region(ModelsConfig(uri="s3://shards/models/", store="main"), main=store)
    into, uri = tmp_path / "job" / "initial.safetensors", "s3://shards/models/base.safetensors"
    into.parent.mkdir()
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 1000)
    whole, begins = weights._range, []

    def broken(client: Any, bucket: str, key: str, begin: int, version: str) -> Any:
        begins.append(begin)
        for number, piece in enumerate(whole(client, bucket, key, begin, version)):
            if number == 3:
                raise OSError("the connection was reset")
            yield piece

    monkeypatch.setattr(weights, "_range", broken)
    copy_weights(config, uri, DIGEST, into)
    assert into.read_bytes() == CONTENT
    assert begins == [0, 3000, 6000, 9000]
    into.unlink()
    assert _refused(config, f"{uri}.none", into)[0] == "MODEL_NOT_FOUND"

    def gone(*_: Any) -> Any:
        raise OSError("the connection was reset")
        yield

    monkeypatch.setattr(weights, "_range", gone)
    code, message = _refused(config, uri, into)
    assert (code, "the connection was reset" in message) == ("MODEL_NOT_FOUND", True)
