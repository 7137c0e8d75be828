"""What an agent keeps in its state directory, and what it removes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.failures import command

from geofed_pb.v1 import agent_pb2
from region_agent.config import RetentionConfig
from region_agent.state.store import AgentStore
from region_agent.storage import RegionStorage

DAY = 86_400.0
NOW = time.time()
USED, UNUSED, MARK = "a" * 64, "b" * 64, "c" * 64
FILES = {
    "jobs/here-1/ps/model": 40, "jobs/gone-1/ps/model": 8,
    "shards/here-1/east/part": 40, "shards/gone-1/east/part": 1, "sending/sent-1/x": 40, "sending/gone-2/x": 1,
    f"bundles/{USED}": 40, f"bundles/{UNUSED}": 8, f"bundles/.{UNUSED}.partial": 2, ".status.json.partial": 2,
    "gateway/state/logs/geofed-here-1.log": 40, "gateway/state/logs/geofed-gone-1.log.1": 31,
    f"approvals/{MARK}.approved": 400, "approvals/here-1.approved": 400, "approvals/code-1.waiting": 31,
    "approvals/profile-1.approved": 31, "agent.key": 400, "gateway/config.json": 400,
    f"environments/{USED[:32]}/site/x.py": 400, f"environments/.{UNUSED[:32]}.partial/site/x.py": 2,
}  # fmt: skip
"""By path, age in days."""
KEPT = {
    "jobs/here-1/ps/model", "shards/here-1/east/part", "sending/sent-1/x", f"bundles/{USED}",
    "gateway/state/logs/geofed-here-1.log", f"approvals/{MARK}.approved", "approvals/here-1.approved", "agent.key",
    "gateway/config.json", f"environments/{USED[:32]}/site/x.py",
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A state directory after months, with a job that runs and one whose shard is sent elsewhere."""
    store = AgentStore(tmp_path / "agent.db")
    task = agent_pb2.TaskRef(bundle_digest=f"sha256:{USED}")
    store.took_start(1, "here-1", agent_pb2.StartPartition(job="here-1", task=task).SerializeToString(), "key")
    store.took_sending(2, "sent-1", agent_pb2.SendShard(job="sent-1").SerializeToString())
    store.close()
    for name, days in FILES.items():
        _aged(tmp_path, name, days)
    return tmp_path


def _aged(place: Path, name: str, days: float) -> None:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 5000)
    for one in (path, *(parent for parent in path.parents if parent.is_relative_to(place) and parent != place)):
        os.utime(one, (NOW - days * DAY, NOW - days * DAY))


def _files(place: Path) -> set[str]:
    found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("agent.db")}


def test_what_no_job_needs_goes_when_its_time_is_over(place: Path) -> None:
    RegionStorage(place, RetentionConfig()).sweep(NOW)
    assert _files(place) == KEPT


def test_nothing_goes_before_its_time(place: Path) -> None:
    """All is as old as it may be, but for an hour."""
    limits = {"jobs": 7, "shards": 0, "sending": 0, "bundles": 7, "gateway": 30, "approvals": 30}
    for name in FILES:
        _aged(place, name, limits.get(name.split("/")[0], 1) - 1 / 24)
    for name in (f"bundles/.{UNUSED}.partial", ".status.json.partial"):
        _aged(place, name, 1 - 1 / 24)
    before = _files(place)
    storage = RegionStorage(place, RetentionConfig())
    storage.sweep(NOW)
    assert _files(place) == before
    assert sum(total.due_count for total in storage.totals(NOW)) == 0
    assert sum(total.due_count for total in storage.totals(NOW + DAY)) == 10


def test_without_the_list_of_jobs_nothing_is_removed(place: Path) -> None:
    (place / "agent.db").write_bytes(b"this is no database" * 1000)
    before = _files(place)
    RegionStorage(place, RetentionConfig()).sweep(NOW)
    assert _files(place) == before


def test_a_job_is_deleted_with_its_code_unless_another_has_the_same(place: Path) -> None:
    storage = RegionStorage(place, RetentionConfig())
    storage.delete_job("gone-1", f"sha256:{USED}")
    gone = {"jobs/gone-1/ps/model", "shards/gone-1/east/part", "gateway/state/logs/geofed-gone-1.log.1"}
    assert _files(place) == set(FILES) - gone
    storage.delete_job("gone-2", f"sha256:{UNUSED}")
    assert _files(place) == set(FILES) - gone - {"sending/gone-2/x", f"bundles/{UNUSED}"}
    storage.delete_job("gone-2", "")


def test_a_job_is_measured_with_its_workers_files(place: Path) -> None:
    channel = place / "channel"
    for name in ("r/geofed-here-1-7/tmp/x", "r/geofed-here-1-7-8/tmp/x", "r/geofed-here-10-7/tmp/x"):
        path = place / "gateway" / "state" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1_000_000))
    (channel / "here-1").mkdir(parents=True)
    (channel / "here-1" / "value").write_bytes(bytes(2_000_000))
    on_disk = RegionStorage(place, RetentionConfig(), channel).job_bytes("here-1")
    assert 3_000_000 < on_disk < 3_200_000
    assert 1_000_000 < RegionStorage(place, RetentionConfig()).job_bytes("here-1") < 1_200_000


@pytest.mark.processes
def test_the_command_tells_it(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("config") / "region.yaml"
    head = {"apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test"}
    file.write_text(json.dumps({**head, "capacity": {"workers": 1}, "retention": {"bundlesDays": 90}}))
    done = command("region-agent", "storage", "--config", str(file), "--state-dir", str(place), "-o", "json")
    told = {one["kind"]: one for one in json.loads(done.stdout)["data"]["kinds"]}
    assert (told["bundles"]["count"], told["bundles"]["due_count"], told["bundles"]["keep_seconds"]) == (2, 0, 90 * DAY)
    assert (told["jobs"]["count"], told["jobs"]["due_count"]) == (2, 1)
    shown = command("region-agent", "storage", "--config", str(file), "--state-dir", str(place)).stdout
    assert "jobs" in shown
    assert "of which the next sweep removes" in shown
    none = command("region-agent", "storage", "--config", str(file), "--state-dir", str(place / "nowhere"))
    assert (none.returncode, "error[UNAVAILABLE]" in none.stderr) == (6, True)
