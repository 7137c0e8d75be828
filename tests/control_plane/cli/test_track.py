"""`track`, into each place."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from control_plane.client import ControlClient
from control_plane.spec._types import TRACKING_KINDS
from control_plane.tracking import KINDS, __main__, check_place_of_jobs, open_sink, points_of, track_job
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import control_pb2
from tests.control_plane.cli.conftest import Federation, Run

EVENT = {
    "cursor": 7, "at": "2026-11-27T17:00:00.500Z", "region": "a", "kind": "partition.round",
    "data": {"round": 3, "step": 6, "samples": 60, "loss": 0.25},
}  # fmt: skip
EVALUATED = {
    "cursor": 8, "at": "2026-11-27T17:00:01Z", "region": "a", "kind": "partition.evaluated",
    "data": {"round": 3, "metrics": {"loss": 0.5, "accuracy": 0.75}, "samples": 10},
}  # fmt: skip
LOGGED = {**EVALUATED, "cursor": 9, "kind": "partition.logged", "data": {"round": 3, "values": {"top@5": 0.9}}}
VIEW = {
    "state": "succeeded", "spec": {"train": {"seed": 1, "end": {"steps": 4}}}, "result": {"metrics": {"accuracy": 0.8}}
}  # fmt: skip


@pytest.mark.processes
def test_a_job_is_written_to_files_again_and_again(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    for _ in range(2):
        told = run("track", job, "metrics.csv", "jsonl:metrics", "--follow", "-o", "json").data
        with (tmp_path / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert told == {"job": job, "state": "succeeded", "figures": len(rows)}
    lines = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [{key: str(value) for key, value in line.items()} for line in lines] == rows
    assert {row["region"] for row in rows} == {"a", "b"}
    assert {row["name"] for row in rows} == {"loss", "step", "samples", "usd", "wan_bytes", "accuracy"}
    assert {float(row["value"]) for row in rows if row["name"] == "accuracy"} == {0.9}
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    wrong = run("track", job, "mine.csv")
    assert (wrong.status, (tmp_path / "mine.csv").read_text()) == (2, "a,b\n1,2\n")


@pytest.mark.parametrize("place", ["metrics", "comet:x", "csv:", "metrics.parquet"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(GeofedError, match="no place for metrics") as raised:
        open_sink(place, "job-1")
    assert "tensorboard:FOLDER" in raised.value.hint


def test_an_event_without_figures_has_no_points() -> None:
    assert points_of({**EVENT, "kind": "job.running"}) == []
    assert [(point.name, point.value) for point in points_of(EVALUATED)] == [("test_loss", 0.5), ("accuracy", 0.75)]


def test_tensorboard_has_a_scalar_for_each_figure_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        sink = open_sink(f"tensorboard:{tmp_path}", "job-1")
        for event in (EVENT, EVALUATED):
            sink.write(event)
        sink.close(VIEW)
    read = EventAccumulator(str(tmp_path / "job-1"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"loss/a", "step/a", "samples/a", "test_loss/a", "accuracy/a"}
    assert [(one.step, one.value) for one in read.Scalars("test_loss/a")] == [(3, 0.5)]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # of MLflow's own use of SQLAlchemy
def test_mlflow_has_one_run_for_a_job_that_continues(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for events, view in (((EVENT,), {**VIEW, "state": "running", "result": None}), ((EVENT, EVALUATED, LOGGED), VIEW)):
        sink = open_sink(f"mlflow:{uri}", "job-1")
        for event in events:
            sink.write(event)
        sink.close(view)
    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("geofed").experiment_id])
    assert (run.info.run_name, run.info.status) == ("job-1", "FINISHED")
    assert run.data.params == {"train.seed": "1", "train.end.steps": "4"}
    history = client.get_metric_history(run.info.run_id, "loss/a")
    assert [(one.step, one.value) for one in history] == [(3, 0.25)], "once, although it was written twice"
    assert run.data.metrics["accuracy/a"] == 0.75
    assert run.data.metrics["accuracy"] == 0.8
    assert run.data.metrics["top_5/a"] == 0.9


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "tensorboard": "torch.utils.tensorboard",
        "mlflow": "mlflow.tracking",
        "wandb": "wandb",
        "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    }
    for kind, module in places.items():
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(GeofedError) as raised:
            open_sink(f"{kind}:{tmp_path}", "job-1")
        assert raised.value.hint == f"in a clone of geofed: pip install '.[{kind}]'"


def _records(file: Path) -> list[bytes]:
    """Return the records of a `.wandb` file: a log in blocks, in which a long record is in several pieces."""
    content, at, found, piece = file.read_bytes(), 7, list[bytes](), b""
    while at < len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        piece += content[at + 7 : at + 7 + length]
        at += 7 + length
        # Whole, or the last piece.
        if kind in (1, 4):
            found.append(piece)
            piece = b""
    return found


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_wandb_has_one_offline_run_with_each_figure(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(2):
        sink = open_sink(f"wandb:{tmp_path / 'runs'}", "job-1")
        for event in (EVENT, EVALUATED):
            sink.write(event)
        sink.close(VIEW)
    wandb.teardown()  # its service ends with this process otherwise
    (file,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/*.wandb")
    records = [Record.FromString(one) for one in _records(file)]
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [{name: row[name] for name in row if "/" in name or name == "round"} for row in rows] == [
        {"loss/a": 0.25, "step/a": 6, "samples/a": 60, "round": 3},
        {"test_loss/a": 0.5, "accuracy/a": 0.75, "round": 3},
    ]
    assert rows[0]["_timestamp"] == pytest.approx(1795798800.5)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.run_id, run.project) == ("job-1", "geofed")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]
    summaries = [item for record in records for item in record.summary.update if item.key == "accuracy"]
    assert [json.loads(item.value_json) for item in summaries] == [0.8]


def test_a_job_file_knows_all_kinds_of_places() -> None:
    assert set(TRACKING_KINDS) == set(KINDS)


@pytest.mark.parametrize(
    ("place", "told"),
    [("metrics.csv", "one file for all jobs"), ("jsonl:all", "one file for all jobs"), ("comet:x", "no place")],
)
def test_a_place_of_all_jobs_is_checked_before_there_are_any(place: str, told: str) -> None:
    with pytest.raises(GeofedError, match=told) as raised:
        check_place_of_jobs(place)
    assert raised.value.code == "USAGE"
    check_place_of_jobs("metrics/{job}.csv")


class Listing:
    """Jobs of a control plane, the newest first; every other answer is lost."""

    def __init__(self, jobs: Iterable[control_pb2.Job]) -> None:
        self._jobs, self._calls = list(jobs), 0

    async def jobs(self, *, ended: bool = False, limit: int = 100) -> list[control_pb2.Job]:
        asked = control_pb2.ListJobsRequest(all=ended, limit=limit)
        self._calls += 1
        if self._calls % 2:
            raise GeofedError("UNAVAILABLE", "the connection broke")
        return [job for job in self._jobs if asked.all or not job.finished_at][: asked.limit]


class Followed(__main__.Tracker):
    """Notes which jobs are written."""

    def __init__(self, client: Listing) -> None:
        super().__init__(cast(ControlClient, client), ["metrics/{job}.csv"])
        self.jobs: list[str] = []

    async def _write(self, job: str, place: str) -> None:
        self.jobs.append(job)


@pytest.mark.parametrize(
    ("jobs", "followed"),
    [
        ([], []),
        ([control_pb2.Job(id="old", finished_at=1.0)], []),
        (
            [*(control_pb2.Job(id=f"new-{number}", finished_at=1.0) for number in range(300)),
             control_pb2.Job(id="long", state="running")],
            ["long"],
        ),
    ],
)  # fmt: skip
def test_each_active_job_is_followed_and_none_that_ended_long_ago(
    monkeypatch: pytest.MonkeyPatch, jobs: list[control_pb2.Job], followed: list[str]
) -> None:
    monkeypatch.setattr(__main__, "_LOOK_SECONDS", 0.01)

    async def look() -> list[str]:
        tracker = Followed(Listing(jobs))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tracker.run(), 0.5)
        return tracker.jobs

    assert asyncio.run(look()) == followed


class Deleted:
    """A control plane on which a job is deleted while it is followed."""

    def __init__(self) -> None:
        self._there = True

    async def job(self, job: str) -> control_pb2.Job:
        if not self._there:
            raise GeofedError("JOB_NOT_FOUND", f"there is no job {job}")
        return control_pb2.Job(id=job, state="running")

    async def watch(self, job: str, *, follow: bool) -> AsyncIterator[control_pb2.Event]:
        self._there = False
        raise GeofedError("JOB_NOT_FOUND", f"there is no job {job}")
        yield control_pb2.Event()


class Noted:
    """A place that notes how it is closed, and may fail then."""

    def __init__(self, closed: list[str], error: str = "") -> None:
        self._closed, self._error = closed, error

    def write(self, event: Mapping[str, Any]) -> None:
        raise AssertionError(event)

    def close(self, view: dict[str, Any]) -> None:
        self._closed.append(view["state"])
        if self._error:
            raise OSError(self._error)


def _refused(*_: str) -> Noted:
    raise GeofedError("USAGE", "cannot write")


@pytest.mark.parametrize(
    ("kinds", "closed", "raised"),
    [
        (["noted", "noted"], 2, GeofedError),
        (["noted", "full"], 2, OSError),
        (["full", "noted"], 2, OSError),
        (["noted", "refused"], 1, GeofedError),
    ],
)
def test_what_is_open_is_closed_also_if_the_job_is_deleted(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], closed: int, raised: type[Exception]
) -> None:
    seen: list[str] = []
    monkeypatch.setitem(KINDS, "noted", lambda target, job: Noted(seen))
    monkeypatch.setitem(KINDS, "full", lambda target, job: Noted(seen, "the disk is full"))
    monkeypatch.setitem(KINDS, "refused", _refused)
    with pytest.raises(raised):
        asyncio.run(track_job(cast(ControlClient, Deleted()), "job-1", [f"{kind}:x" for kind in kinds], follow=True))
    assert seen == ["running"] * closed
