"""Digests of a region's data, which bind a model to what it was made of."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from geofed_pb.errors import GeofedError
from region_agent.cli import app
from region_agent.config import DatasetConfig, SplitConfig, StoreConfig
from region_agent.shards.digests import DATA_KEY, DataDigests, JobDigests
from region_agent.shards.indexing import INDEXES
from tests.region_agent.test_shards import _put


def held(folder: Path, **more: Any) -> DatasetConfig:
    splits = {"train": {"uri": f"{folder / 'train'}/", "samples": 2}, "test": {"uri": str(folder / "t"), "samples": 1}}
    return DatasetConfig.model_validate({"splits": splits, **more})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "train" / "deep").mkdir(parents=True)
    for name, content in (("train/b", b"bb"), ("train/deep/a", b"a"), ("t", b"t")):
        (folder / name).write_bytes(content)
    return folder


def written_out(*files: tuple[str, bytes]) -> str:
    """The digest as docs/audit.md describes it."""
    named = [[name, len(content), hashlib.sha256(content).hexdigest()] for name, content in files]
    return f"sha256:{hashlib.sha256(json.dumps(named).encode()).hexdigest()}"


def test_a_plain_digest_is_what_anybody_computes_of_the_files(data: Path, tmp_path: Path) -> None:
    digests = DataDigests(tmp_path)
    found = digests.of(held(data, digest="plain"), {})
    assert found == {"train": written_out(("b", b"bb"), ("deep/a", b"a")), "test": written_out(("t", b"t"))}
    assert digests.of(held(data, digest="none"), {}) == {}
    assert not (tmp_path / DATA_KEY).exists(), "there is a key only where one is used"


def test_a_digest_with_a_key_tells_nothing_to_who_guesses_the_data(data: Path, tmp_path: Path) -> None:
    state = [tmp_path / name for name in ("east", "west")]
    for folder in state:
        folder.mkdir()
    east, west = (DataDigests(folder).of(held(data), {}) for folder in state)
    plain = DataDigests(tmp_path).of(held(data), {}, "plain")
    assert {text.partition(":")[0] for text in east.values()} == {"hmac-sha256"}
    values = [{text.partition(":")[2] for text in one.values()} for one in (east, west, plain)]
    assert len(set.union(*values)) == 6
    assert DataDigests(state[0]).of(held(data), {}) == east, "another run of the agent has the same key"
    assert (state[0] / DATA_KEY).stat().st_mode & 0o777 == 0o600
    (state[0] / DATA_KEY).write_text("00")
    with pytest.raises(GeofedError) as told:
        DataDigests(state[0]).of(held(data), {})
    assert told.value.code == "STATE_INVALID"


def test_nobody_else_on_the_machine_reads_a_plain_digest(data: Path, tmp_path: Path) -> None:
    (tmp_path / INDEXES).mkdir(mode=0o755)  # as an older agent has left it
    DataDigests(tmp_path).of(held(data), {})
    kept = [tmp_path / INDEXES, *(tmp_path / INDEXES).iterdir()]
    assert len(kept) > 1
    assert not [path for path in kept if path.stat().st_mode & 0o077]


def test_files_are_read_once_and_again_when_they_change(data: Path, tmp_path: Path) -> None:
    digests, dataset = DataDigests(tmp_path), held(data, digest="plain")
    before = digests.of(dataset, {})
    for path in (kept := list((tmp_path / INDEXES).glob("*.digest"))):
        path.write_text("0" * 64)
    assert len(kept) == 2
    assert digests.of(dataset, {})["train"] == f"sha256:{'0' * 64}", "what was kept is not computed again"
    (data / "train" / "b").write_bytes(b"bbb")
    changed = digests.of(dataset, {})
    assert changed["train"] == written_out(("b", b"bbb"), ("deep/a", b"a")) != before["train"]
    assert changed["test"] == f"sha256:{'0' * 64}"


@pytest.mark.slow
def test_objects_of_a_store_are_told_by_their_etags(store: StoreConfig, tmp_path: Path) -> None:
    dataset = DatasetConfig(
        store="minio", digest="plain", splits={"train": SplitConfig(uri="s3://shards/of/", samples=1)}
    )
    _put(store, {"of/a": b"one", "of/b": b"two"})
    first = DataDigests(tmp_path).of(dataset, {"minio": store})["train"]
    assert first.startswith("sha256-etags:")
    assert DataDigests(tmp_path).of(dataset, {"minio": store})["train"] == first, "signatures of addresses do not count"
    _put(store, {"of/b": b"owt"})
    assert DataDigests(tmp_path).of(dataset, {"minio": store})["train"] != first


def test_the_command_prints_both_kinds(data: Path, tmp_path: Path) -> None:
    region = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
        "capacity": {"workers": 1}, "datasets": {"d": held(data).model_dump(by_alias=True, exclude_none=True)},
    }  # fmt: skip
    file = tmp_path / "region.yaml"
    file.write_text(json.dumps(region))
    common = ["--config", str(file), "--state-dir", str(tmp_path)]
    told = json.loads(CliRunner().invoke(app, ["digest", "d", *common, "-o", "json"]).stdout)["data"]
    assert told["plain"]["test"] == written_out(("t", b"t"))
    assert told["keyed"] == DataDigests(tmp_path).of(held(data), {})
    shown = CliRunner().invoke(app, ["digest", "d", *common]).stdout
    assert told["keyed"]["train"] in shown
    assert told["plain"]["train"] in shown
    assert isinstance(CliRunner().invoke(app, ["digest", "other", *common]).exception, GeofedError)


def test_a_job_does_not_wait_for_the_digests_of_its_data_before_it_ends(tmp_path: Path, data: Path) -> None:
    async def scenario() -> None:
        digests = JobDigests(tmp_path, held(data, digest="plain"), {})
        first, second = asyncio.create_task(digests.compute()), asyncio.create_task(digests.compute())
        await asyncio.sleep(0)
        assert not digests.known
        assert digests.values == {}
        await asyncio.gather(first, second)
        assert digests.known
        assert digests.values == DataDigests(tmp_path).of(held(data, digest="plain"), {})

    asyncio.run(scenario())


def test_what_is_read_for_a_job_that_has_ended_is_given_up(tmp_path: Path, data: Path) -> None:
    async def scenario() -> None:
        digests = JobDigests(tmp_path, held(data, digest="plain"), {})
        digests.close()
        with pytest.raises(GeofedError, match="UNAVAILABLE"):
            await digests.compute()
        assert digests.known
        assert digests.values == {}

    asyncio.run(scenario())
