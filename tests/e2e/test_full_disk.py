"""A disk that is full stops what needs it, says so, and continues once there is space; nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.failures import filled, told
from support.running import Federation, Running, check_succeeded, digits_sites, eventually
from support.small_disk import small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LONG = ("train.end.epochs=15", "wan.interval=10", "train.evaluateEvery=0")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Two regions; the control plane and one region each have a small disk for their state."""
    sites = digits_sites(tmp_path, ("bergen", "oslo"))
    folder = tmp_path / "federation"
    with (
        small_disk(folder / "control-plane", 24 << 20),
        small_disk(folder / "regions" / "oslo", 24 << 20),
        Federation(folder, sites) as federation,
    ):
        yield Running(federation, tmp_path)


def test_a_full_disk_loses_nothing(running: Running) -> None:
    federation = running.federation
    job = running.submit(*LONG)
    running.wait_round(job, 3)
    with filled(federation.region_state("oslo")):
        eventually(lambda: "DISK_FULL" in running.describe(job)["condition"], "the job says that it waits", 30)
    check_succeeded(running.wait_end(job))

    # SQLite's log has room from before; code that is new to the control plane has none.
    (running.job_folder() / "table.bin").write_bytes(os.urandom(1 << 20))
    submission = ("submit", str(running.job_folder() / "job.yaml"), "--request-id", "while-full", "-o", "name")
    with filled(federation.control_state):
        refused = told(federation.control_plane(*submission, check=False))
        assert (refused.code, refused.exit_status) == ("DISK_FULL", 6)
        assert running.describe(job)["state"] == "succeeded"
    after = federation.control_plane(*submission).stdout.strip()
    check_succeeded(running.wait_end(after))
    jobs = federation.control_plane("list", "--all", "-o", "name").stdout.split()
    assert sorted(jobs) == sorted([job, after])
