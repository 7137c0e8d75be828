"""`serve --track`: the metrics of all jobs, as each job file wants them, whatever becomes of the process."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest
from support.processes import alive, family, running_as
from support.running import Federation, Running, digits_sites, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]


def rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def test_jobs_are_written_where_the_control_plane_and_they_themselves_say(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    places = (f"{metrics}/{{job}}.csv", f"jsonl:{metrics}/{{job}}.lines", "mlflow:http://127.0.0.1:9")
    options = [word for place in places for word in ("--track", place)]
    with Federation(tmp_path / "federation", digits_sites(tmp_path, ["a", "b"]), serve_options=options) as federation:
        running = Running(federation, tmp_path / "jobs")
        short = ("train.end.epochs=2", "train.evaluateEvery=1")
        every, none = running.submit(*short), running.submit(*short, "tracking=[]")
        one = running.submit("train.end.epochs=40", "train.evaluateEvery=1", "tracking=[csv]")
        running.wait_round(one, 2)
        eventually(lambda: rows(metrics / f"{one}.csv"), "rounds are written while the job runs")
        (tracker,) = running_as("-m control_plane.tracking", family(federation.processes["control-plane"].pid))
        tracker.send_signal(signal.SIGKILL)
        for job in (every, none, one):
            assert running.wait_end(job)["state"] == "succeeded"
        for job in (every, one):
            rounds = [line for line in running.events(job) if line["kind"] == "partition.round"]
            eventually(
                lambda job=job, rounds=rounds: (
                    {(row["region"], row["round"]) for row in rows(metrics / f"{job}.csv") if row["name"] == "loss"}
                    >= {(line["region"], str(line["data"]["round"])) for line in rounds if "loss" in line["data"]}
                ),
                "all rounds are written by the process that was started again",
            )
        assert sorted(path.name for path in metrics.iterdir()) == sorted(
            [f"{every}.csv", f"{every}.lines", f"{one}.csv"]
        )
        (tracker,) = running_as("-m control_plane.tracking", family(federation.processes["control-plane"].pid))
    assert not alive(tracker), "it ends with the control plane"
