"""`geofed agent status`, by which health checks see whether an agent runs."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
from support.commands import run_here
from support.failures import filled
from support.small_disk import small_disk

from region_agent.state.store import AgentStore
from region_agent.status import Status, StatusFile


def _status(at: float, shards: int = 0) -> Status:
    held: dict[str, dict[str, object]] = {f"job-{number}": {"to": "west"} for number in range(shards)}
    return Status("east", os.getpid(), at, True, at, "fed:7444", "geofed", at + 1e6, "gateway", "none", {}, held, "")


def _running(state: Path) -> bool:
    told = run_here("agent", "status", "--state-dir", str(state), "-o", "json", program="geofed")
    running = bool(json.loads(told.stdout.splitlines()[0])["data"]["running"])
    assert (told.returncode == 0) is running
    return running


@pytest.mark.processes
def test_an_agent_whose_disk_is_full_counts_as_running(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=1 << 20) as state:
        store = AgentStore(state / "agent.db")
        file = StatusFile(state, store)
        long_ago, now = time.time() - 60, time.time()
        file.write(_status(long_ago))
        os.utime(state / "status.json", (long_ago, long_ago))
        assert not _running(state)
        with filled(state):
            file.write(_status(now, shards=4000))
            assert json.loads((state / "status.json").read_text())["at"] == long_ago, "the disk was not full"
            assert _running(state)
        file.write(dataclasses.replace(_status(now), condition="room"))
        assert json.loads((state / "status.json").read_text())["condition"] == "room"
        store.close()


def test_nobody_else_on_the_machine_reads_what_conditions_quote(tmp_path: Path) -> None:
    store = AgentStore(tmp_path / "agent.db")
    (tmp_path / ".status.json").touch(mode=0o644)
    StatusFile(tmp_path, store).write(_status(1.0))
    assert not (tmp_path / "status.json").stat().st_mode & 0o077
    store.close()
