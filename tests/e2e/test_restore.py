"""After a restore of an older backup every job continues or ends with a code, and none waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.postgres import postgres_server
from support.running import UNHURRIED, Federation, Running, check_succeeded, digits_sites, eventually, named

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LONG = ("train.end.epochs=400", "wan.interval=10", "train.evaluateEvery=0")


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_a_drill_with_jobs_in_flight(database: str, tmp_path: Path) -> None:
    """One job trains all the time, one ends after the backup, and one is submitted after it."""
    if database == "sqlite":
        _drill(tmp_path, ())
    else:
        with postgres_server() as server:
            _drill(tmp_path, ("--database-url", server.database()))


def _drill(folder: Path, options: tuple[str, ...]) -> None:
    file = folder / "backup.tar"
    with Federation(
        folder / "federation", digits_sites(folder, ("bergen", "oslo"), workers=3), serve_options=options
    ) as federation:
        running = Running(federation, folder)
        where = (str(file), "--state-dir", str(federation.control_state), *options)
        training, ending = (
            running.submit(*LONG, f"metadata.name={name}", task=UNHURRIED) for name in ("training", "ending")
        )
        for job in (training, ending):
            running.wait_round(job, 1)
        federation.control_plane("backup", *where)
        federation.control_plane("finish", ending)
        check_succeeded(running.wait_end(ending), accuracy=0.1)
        late = running.submit(*LONG, "metadata.name=late", task=UNHURRIED)
        for job in (training, late):
            running.wait_round(job, 2)
        federation.kill("control-plane")
        federation.control_plane("restore", *where, "--yes")
        federation.start_control_plane()

        # The one that was in training continues where it is, not where the backup was.
        here = max(part["round"] for part in running.describe(training)["partitions"])
        running.wait_round(training, here + 2)
        # Nobody knows the one that was submitted later: its regions have stopped it.
        for region in ("bergen", "oslo"):
            eventually(lambda region=region: late not in federation.agent_status(region)["partitions"], "it is stopped")
        # The one that ended is in the backup as running, and its regions have nothing of it any more: it begins again,
        # or fails with a code.
        federation.control_plane("finish", ending, check=False)
        ended = running.wait_end(ending)
        assert ended["state"] == "succeeded" or ended["error"]["code"]
        federation.control_plane("finish", training)
        check_succeeded(running.wait_end(training), accuracy=0.1)
        check_succeeded(running.wait_end(running.submit("metadata.name=new", task=named("new"))))
