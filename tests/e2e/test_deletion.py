"""A job that is deleted, while another one of the same regions runs on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.running import Running, check_succeeded, eventually, named, paths_under

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SMALL = ("regions.use=[frankfurt, virginia]", "train.workers=1", "wan.interval=10")


def _left(running: Running, names: set[str]) -> list[str]:
    """Files of the daemons whose paths hold one of the names, and rows of their databases that hold one."""
    federation = running.federation
    folders = [federation.control_state, *(federation.region_state(name) for name in ("frankfurt", "virginia"))]
    found = [path for folder in folders for path in paths_under(folder) if any(name in str(path) for name in names)]
    databases = [folder / name for folder in folders for name in ("state.db", "state/agent.db")]
    rows = [row for file in databases if file.exists() for row in _rows(file) if any(name in row for name in names)]
    return [*map(str, found), *rows]


def _rows(file: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        tables = [name for (name,) in db.execute("select name from sqlite_master where type = 'table'")]
        return [f"{table}: {row}" for table in tables for row in db.execute(f'select * from "{table}"')]


def test_nothing_is_left_of_a_deleted_job_and_others_run_on(running: Running) -> None:
    federation = running.federation
    other = running.submit(*SMALL, "train.end.epochs=60")
    job = running.submit(*SMALL, "train.end.epochs=3", task=named("to be deleted"))
    refused = federation.control_plane("delete", job, "--yes", check=False)
    assert (refused.returncode, "error[ILLEGAL_STATE]" in refused.stderr) == (8, True)
    running.wait_round(other, 1)
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.0)
    stored: dict[str, Any] = json.loads(federation.control_plane("storage", "--job", job, "-o", "json").stdout)["data"]
    assert stored["jobs"][0]["by_kind"]["models"] >= ended["result"]["model"]["bytes"]
    model = ended["result"]["model"]["digest"].removeprefix("sha256:")
    bundles = {path.name for path in (federation.region_state("virginia") / "state" / "bundles").iterdir()}
    assert _left(running, {model})
    assert len(bundles) >= 2
    agent = federation.processes["virginia"]
    agent.terminate()
    agent.wait(timeout=30)
    told = json.loads(federation.control_plane("delete", job, "--yes", "-o", "json").stdout)["data"]
    assert (told["deleted_by"], told["regions"]) == ("operator", ["frankfurt", "virginia"])
    federation.start_agent("virginia")
    federation.wait_connected(["virginia"])

    def gone() -> bool:
        left = [
            one for one in _left(running, {job, model}) if not one.startswith(("audit: ", "deletions: ", "events: "))
        ]
        return not left

    eventually(gone, "nothing is left of the deleted job")
    (row,) = [one for one in _left(running, {job}) if one.startswith("events: ")]
    assert "job.deleted" in row
    kept = {path.name for path in (federation.region_state("virginia") / "state" / "bundles").iterdir()}
    assert len(bundles - kept) == 1, "its code, and not the other job's"
    federation.control_plane("finish", other)
    check_succeeded(running.wait_end(other), accuracy=0.0)
