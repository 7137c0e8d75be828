"""`serve --track`: the metrics of all jobs, as each job file wants them, whatever becomes of the process."""

from __future__ import annotations

import csv
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.collector import running_collector
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


def test_a_job_is_one_trace_over_control_plane_agents_and_parameter_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        options, sites = ("--track", collector.place), digits_sites(tmp_path, ["a", "b"])
        with Federation(tmp_path / "federation", sites, serve_options=options) as federation:
            running = Running(federation, tmp_path / "jobs")
            untraced = running.submit("train.end.epochs=2", "tracking=[]")
            job = running.submit("train.end.epochs=2")
            for one in (untraced, job):
                assert running.wait_end(one)["state"] == "succeeded"
            names = ("job", "upload model")
            eventually(lambda: set(names) <= {span.name for span in collector.spans}, "the job's last spans are sent")
        agents = {federation.processes[name].pid for name in ("a", "b")}
    sent = collector.spans_of_services
    assert len({span.trace_id for _, span in sent}) == 1
    services = {service for service, _ in sent}
    assert services >= {"geofed", *(f"geofed-region-agent/{pid}" for pid in agents)}
    assert Counter(service.partition("/")[0] for service in services) == {
        "geofed": 1, "geofed-region-agent": 2, "geofed-parameter-server": 2,
    }  # fmt: skip
    by_id = {span.span_id: span for _, span in sent}
    parents = {(span.name, by_id[span.parent_span_id].name) for _, span in sent if span.parent_span_id}
    assert parents == {
        ("plan", "job"), ("start", "job"), ("publish", "job"), ("partition", "job"), ("prepare", "partition"),
        ("round", "partition"), ("fetch task", "partition"), ("deploy function", "partition"),
        ("start server", "partition"), ("invocation", "partition"), ("upload model", "partition"),
        ("build update", "partition"), ("merge", "partition"),
    }  # fmt: skip
    told = {name: [attributes(span) for _, span in sent if span.name == name] for name in ("build update", "merge")}
    for each in told.values():
        assert {one["geofed.region"] for one in each} == {'string_value: "a"\n', 'string_value: "b"\n'}
        assert {"int_value: 1\n", "int_value: 2\n"} <= {one["geofed.round"] for one in each}


def attributes(span: Any) -> dict[str, str]:
    return {one.key: str(one.value) for one in span.attributes}
