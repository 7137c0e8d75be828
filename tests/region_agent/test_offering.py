"""A region offers what it can read, and says what it cannot."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from geofed_pb.errors import GeofedError
from region_agent.config import DatasetConfig, RegionConfig
from region_agent.shards import offered as offered_datasets
from region_agent.shards.indexing import Indexes
from region_agent.shards.offered import OfferedDatasets
from region_agent.shards.reading import shard_files
from region_agent.worker.invocation import ShardFile


def _config(folder: Path, residency: str = "region") -> RegionConfig:
    def held(name: str) -> dict[str, object]:
        return {"residency": residency, "splits": {"train": {"uri": str(folder / name), "samples": 1}}}

    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "datasets": {"a": held("a.npz"), "b": held("b.npz")},
        }
    )  # fmt: skip


def _told(config: RegionConfig, offered: OfferedDatasets) -> list[str]:
    return [held["name"] for held in config.catalogue(withheld=offered.withheld)["datasets"]]


def test_what_cannot_be_read_is_withheld_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"x")
    monkeypatch.setattr(offered_datasets, "_RECHECK_SECONDS", 0.01)

    async def act() -> None:
        changed = asyncio.Event()
        offered = OfferedDatasets(config, changed.set, Indexes(tmp_path / "indexes"))
        await offered.check()
        assert _told(config, offered) == ["a"]
        assert offered.condition == f"dataset b is not offered: SHARD_UNREADABLE: {tmp_path / 'b.npz'} not found"
        looking = asyncio.create_task(offered.keep_checking())
        await asyncio.sleep(0.1)
        assert not changed.is_set()
        (tmp_path / "b.npz").write_bytes(b"x")
        await asyncio.wait_for(changed.wait(), 10)
        assert (_told(config, offered), offered.condition) == (["a", "b"], "")
        looking.cancel()

    with capture_logs() as lines:
        asyncio.run(act())
    assert len(lines) == 2, "each thing is told once"
    assert lines[0]["dataset"] == "b"
    assert "b.npz not found" in lines[0]["error"]
    assert "check the shard's path" in lines[0]["hint"]


def test_a_store_that_does_not_answer_keeps_nothing_else_from_being_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once; what it says at last is taken."""
    monkeypatch.setattr(offered_datasets, "_CHECK_TIMEOUT_SECONDS", 0.05)
    config, silent, asked = _config(tmp_path, residency="anywhere"), threading.Event(), list[DatasetConfig]()
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(b"1234")

    def files(dataset: DatasetConfig, _: object) -> dict[str, tuple[ShardFile, ...]]:
        asked.append(dataset)
        if dataset is config.datasets["b"]:
            silent.wait(30)
        return shard_files(dataset, {})

    async def act() -> None:
        monkeypatch.setattr(offered_datasets, "shard_files", files)
        offered = OfferedDatasets(config, lambda: None, Indexes(tmp_path / "indexes"))
        for _ in range(3):
            await offered.check()
            assert _told(config, offered) == ["a"]
            assert isinstance(offered.withheld["b"], GeofedError)
            assert offered.sizes == {"a": {"train": 4}}
        assert asked.count(config.datasets["b"]) == 1, "one thread waits, however long the store is silent"
        silent.set()
        monkeypatch.setattr(offered_datasets, "_CHECK_TIMEOUT_SECONDS", 10.0)
        await offered.check()
        assert _told(config, offered) == ["a", "b"]
        assert offered.sizes == {"a": {"train": 4}, "b": {"train": 4}}

    try:
        asyncio.run(act())
    finally:
        silent.set()


def test_the_size_of_what_never_leaves_is_nobody_s_business(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(b"1234")
    offered = OfferedDatasets(_config(tmp_path), lambda: None, Indexes(tmp_path / "indexes"))
    asyncio.run(offered.check())
    assert not any(offered.sizes.values())
