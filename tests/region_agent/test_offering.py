"""A region offers what it can read, and says what it cannot."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from geofed_pb.errors import GeofedError
from region_agent import offering
from region_agent.config import RegionConfig
from region_agent.offering import Offering


def _config(folder: Path) -> RegionConfig:
    def held(name: str) -> dict[str, object]:
        return {"splits": {"train": {"uri": str(folder / name), "samples": 1}}}

    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "datasets": {"a": held("a.npz"), "b": held("b.npz")},
        }
    )  # fmt: skip


def _told(config: RegionConfig, offered: Offering) -> list[str]:
    return [held["name"] for held in config.catalogue(withheld=offered.withheld)["datasets"]]


def test_what_cannot_be_read_is_withheld_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"x")
    monkeypatch.setattr(offering, "_LOOK_AGAIN_SECONDS", 0.01)

    async def act() -> None:
        changed = asyncio.Event()
        offered = Offering(config, changed.set)
        await offered.look()
        assert _told(config, offered) == ["a"]
        assert offered.condition == f"dataset b is not offered: SHARD_UNREADABLE: {tmp_path / 'b.npz'} is not there"
        looking = asyncio.create_task(offered.keep_looking())
        await asyncio.sleep(0.1)
        assert not changed.is_set()
        (tmp_path / "b.npz").write_bytes(b"x")
        await asyncio.wait_for(changed.wait(), 10)
        assert (_told(config, offered), offered.condition) == (["a", "b"], "")
        looking.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(act())
    lines = [record.message for record in caplog.records if record.name == "geofed.data"]
    assert len(lines) == 2, "each thing is told once"
    assert "b.npz is not there; check the shard's path" in lines[0]


def test_a_store_that_does_not_answer_keeps_nothing_else_from_being_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "_LONGEST_LOOK_SECONDS", 0.05)

    async def act() -> None:
        silent = asyncio.Event()

        async def to_thread(_: object, dataset: object, __: object) -> None:
            if dataset is config.datasets["b"]:
                await silent.wait()

        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        offered = Offering(config, lambda: None)
        await offered.look()
        assert _told(config, offered) == ["a"]
        assert isinstance(offered.withheld["b"], GeofedError)

    config = _config(tmp_path)
    asyncio.run(act())
