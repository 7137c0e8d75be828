"""What an agent keeps in its state directory, and what it removes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from support.failures import command

from geofed_pb.security.audit import verify
from geofed_pb.storage import Total, totals
from geofed_pb.v1 import agent_pb2
from region_agent.config import RetentionConfig, load_config
from region_agent.state.audit_log import AUDIT_KEY, RegionAudit, exported
from region_agent.state.store import AgentStore
from region_agent.storage import Held, RegionStorage, channel_folder

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
    "indexes/old.safetensors": 31, "indexes/new.safetensors": 29, "channel/here-1/key": 40, "channel/gone-1/key": 2,
    f"environments/{USED[:32]}/site/x.py": 400, f"environments/.{UNUSED[:32]}.partial/site/x.py": 2,
}  # fmt: skip
"""By path, age in days."""
KEPT = {
    "jobs/here-1/ps/model", "shards/here-1/east/part", "sending/sent-1/x", f"bundles/{USED}",
    "gateway/state/logs/geofed-here-1.log", f"approvals/{MARK}.approved", "approvals/here-1.approved", "agent.key",
    "gateway/config.json", "indexes/new.safetensors", "channel/here-1/key", f"environments/{USED[:32]}/site/x.py",
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


def storage_in(place: Path, config: RetentionConfig | None = None) -> RegionStorage:
    return RegionStorage(place, config or RetentionConfig(), place / "channel", place / "channel")


def _files(place: Path) -> set[str]:
    found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("agent.db")}


def test_what_no_job_needs_goes_when_its_time_is_over(place: Path) -> None:
    gone = storage_in(place).sweep(NOW)
    assert _files(place) == KEPT
    assert {item.kind for item in gone} == {
        "jobs", "shards", "bundles", "unfinished", "logs", "approvals", "indexes", "channel",
    }  # fmt: skip
    assert storage_in(place).sweep(NOW) == []


def test_each_removal_is_in_the_regions_audit_log(place: Path) -> None:
    store = AgentStore(place / "agent.db")
    log = RegionAudit(store, place / AUDIT_KEY, "east", "1")
    log.sending_model("gone-1", "sha256:7")
    storage = storage_in(place, RetentionConfig(logs_days=365))
    log.erased(storage.delete_job("gone-1", ""), "gone-1")
    log.erased(storage.sweep(NOW))
    log.erased(storage.sweep(NOW))
    store.close()
    lines = list(exported(place, "lab", "east"))
    verify(lines)
    read = [json.loads(one["entry"]) for line in lines if "entry" in (one := json.loads(line))]
    told = [entry for entry in read if entry["kind"] == "data.erased"]
    found = {(one["what"], one["rule"], one["job"]): one["names"] for one in told}
    assert len(found) == len(told)
    assert found["jobs", "job.deleted", "gone-1"] == ["jobs/gone-1"]
    assert found["logs", "job.deleted", "gone-1"] == ["gateway/state/logs/geofed-gone-1.log.1"]
    assert found["indexes", "retention", ""] == ["indexes/old.safetensors"]
    assert not any(what in ("jobs", "logs") for what, rule, _ in found if rule == "retention")
    (code,) = (one for one in told if one["what"] == "bundles")
    assert (code["count"], code["bytes"] > 4000) == (1, True)


def test_a_channel_that_the_region_file_names_is_not_swept(tmp_path: Path) -> None:
    """It may hold what is not the agent's."""
    head = {"apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test"}
    (tmp_path / "shared" / "other").mkdir(parents=True)
    for channel, kinds in (({"path": str(tmp_path / "shared")}, 0), ({}, 1)):
        file = tmp_path / "region.yaml"
        file.write_text(json.dumps({**head, "capacity": {"workers": 1}, "channel": {"kind": "file", **channel}}))
        config, state = load_config(file), tmp_path / "state"
        folder = channel_folder(config.channel, state)
        (folder / "gone-1").mkdir(parents=True, exist_ok=True)
        try:
            (told,) = (one for one in _totals(RegionStorage.of(config, state)) if one.kind == "channel")
            assert told.count == kinds
        finally:
            if not channel:
                shutil.rmtree(folder)


def _totals(storage: RegionStorage) -> list[Total]:
    return totals(storage.items(Held()), storage.keep, NOW)


def test_nothing_goes_before_its_time(place: Path) -> None:
    """All is as old as it may be, but for an hour."""
    limits = {"jobs": 7, "shards": 0, "sending": 0, "bundles": 7, "gateway": 30, "approvals": 30, "indexes": 30}
    for name in FILES:
        _aged(place, name, limits.get(name.split("/")[0], 1) - 1 / 24)
    for name in (f"bundles/.{UNUSED}.partial", ".status.json.partial"):
        _aged(place, name, 1 - 1 / 24)
    before = _files(place)
    storage = storage_in(place)
    storage.sweep(NOW)
    assert _files(place) == before
    assert sum(total.due_count for total in storage.totals(NOW)) == 0
    assert sum(total.due_count for total in storage.totals(NOW + DAY)) == 13


def test_without_the_list_of_jobs_nothing_is_removed(place: Path) -> None:
    (place / "agent.db").write_bytes(b"this is no database" * 1000)
    before = _files(place)
    assert storage_in(place).sweep(NOW) == []
    assert _files(place) == before


def test_a_job_is_deleted_with_its_code_unless_another_has_the_same(place: Path) -> None:
    storage = storage_in(place)
    storage.delete_job("gone-1", f"sha256:{USED}")
    gone = {
        "channel/gone-1/key",
        "jobs/gone-1/ps/model",
        "shards/gone-1/east/part",
        "gateway/state/logs/geofed-gone-1.log.1",
    }
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
