"""Files of a region that jobs start from: only those in its folders, only with their digest, in pieces."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from tenacity import wait_none

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
    with capture_logs() as logged:
        code, message = _refused(config, uri, into, f"sha256:{'ab' * 32}")
    # The user would state what the error tells; the region's operator finds it in the agent's log.
    assert (code, DIGEST in message) == ("MODEL_MISMATCH", False)
    assert [line["found"] for line in logged] == [DIGEST]
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
    (folder / "dangling.safetensors").symlink_to(tmp_path / "none.safetensors")
    for name in ("../secret.safetensors", "../none.safetensors", "link.safetensors", "dangling.safetensors"):
        assert _refused(config, f"file://{folder}/{name}", into)[0] == "FORBIDDEN", name
    for uri in (f"file://{tmp_path}/secret.safetensors", "s3://models/base.safetensors", f"file://{folder}/"):
        assert _refused(config, uri, into)[0] == "FORBIDDEN", uri
        with pytest.raises(GeofedError, match="lets no job start from"):
            check_weights_uri(config, uri)


def test_an_error_leaves_out_where_links_lead(folder: Path, tmp_path: Path) -> None:
    (folder / "to.safetensors").symlink_to(folder / "elsewhere")
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    for name in ("to.safetensors", "long" * 100):
        uri = f"file://{folder}/{name}"
        code, message = _refused(config, uri, into)
        assert code == "MODEL_NOT_FOUND"
        assert str(folder) not in message.replace(uri, "")


@pytest.mark.parametrize("part", ["..", ".", ""])
def test_an_address_has_plain_parts(part: str) -> None:
    config = _region(ModelsConfig(uri="s3://shards/models/"), ModelsConfig(uri="file:///srv/"))
    for uri in (f"s3://shards/models/{part}/a.safetensors", f"file:///srv/{part}/a.safetensors"):
        with pytest.raises(GeofedError, match="lets no job start from"):
            check_weights_uri(config, uri)
    check_weights_uri(config, "s3://shards/models/..a/.b/c...safetensors")


def test_the_innermost_folder_holds_a_file() -> None:
    outer, inner = ModelsConfig(uri="s3://shards/", store="a"), ModelsConfig(uri="s3://shards/models/", store="b")
    for folders in ((outer, inner), (inner, outer)):
        assert weights._folder_of(_region(*folders), "s3://shards/models/a.safetensors") is inner


def test_what_a_killed_agent_left_is_removed(folder: Path, tmp_path: Path) -> None:
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    running = into.with_name(f"{into.name}.{weights._RUN}-0a1b2c3d.partial")
    for left in (into.with_name(f"{into.name}.0a1b2c3d-0a1b2c3d.partial"), running):
        left.write_bytes(b"a part")
    copy_weights(config, f"file://{folder}/base.safetensors", DIGEST, into)
    assert {*into.parent.iterdir()} == {into, running}


def test_a_file_above_the_limit_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, into = _region(ModelsConfig(uri=f"file://{folder}/")), tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    monkeypatch.setattr(weights, "MAX_WEIGHTS_BYTES", len(CONTENT) - 1)
    assert _refused(config, f"file://{folder}/base.safetensors", into)[0] == "LIMIT_EXCEEDED"


@pytest.mark.slow
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

    waits: list[float] = []
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=waits.append))

    def gone(*_: Any) -> Any:
        raise OSError("the connection was reset")
        yield

    monkeypatch.setattr(weights, "_range", gone)
    code, message = _refused(config, uri, into)
    assert (code, "the connection was reset" in message) == ("UNAVAILABLE", True)
    assert len(waits) == 3
    assert 0 < max(waits) <= 10
    monkeypatch.setattr(weights, "_range", lambda *_: iter(()))
    code, message = _refused(config, uri, into)
    assert (code, "no byte" in message) == ("UNAVAILABLE", True)


@pytest.mark.parametrize(
    ("status", "code", "requests"),
    [(403, "MODEL_NOT_FOUND", 1), (404, "MODEL_NOT_FOUND", 1), (412, "MODEL_NOT_FOUND", 1), (503, "UNAVAILABLE", 4)],
)
def test_only_what_may_pass_is_asked_again(
    status: int, code: str, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Answer(Exception):
        def __init__(self) -> None:
            self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}

    class Client:
        def head_object(self, **_: Any) -> Any:
            asked.append(1)
            raise Answer

        def close(self) -> None:
            pass

    monkeypatch.setattr(weights, "open_store", lambda _: (Client(), (Answer,)))
    monkeypatch.setattr(weights, "_WAIT", wait_none())
    into = tmp_path / "job" / "initial.safetensors"
    into.parent.mkdir()
    assert _refused(_region(ModelsConfig(uri="s3://shards/")), "s3://shards/a", into)[0] == code
    assert len(asked) == requests
