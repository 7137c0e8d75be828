"""`track otlp:URL`: one trace for a job, whose spans are its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.collector import Collector, running_collector

from control_plane.tracking import _sinks, open_sink
from control_plane.tracking._spans import Spans
from geofed_pb.errors import GeofedError
from tests.control_plane.cli.conftest import Federation, Run


def event(second: int, kind: str, region: str = "", terminal: bool = False, **data: Any) -> dict[str, Any]:
    at = f"2026-11-27T17:00:{second:02}Z"
    told = {"cursor": second, "at": at, "job": "job-1", "region": region, "kind": kind, "text": kind}
    return told | {"data": data, "terminal": terminal}


COURSE = [
    event(0, "job.submitted"),
    event(1, "job.planned"),
    event(2, "job.starting"),
    event(3, "partition.state", "oslo", state="preparing"),
    event(5, "partition.state", "oslo", state="training"),
    event(5, "job.running"),
    event(8, "partition.round", "oslo", round=1, step=4, loss=0.5),
    event(9, "worker-failed", "oslo", code="FUNCTION_FAILED"),
    event(12, "partition.round", "oslo", round=2, step=8, loss=0.25, compute_seconds=3.0, merge_seconds=0.5),
    event(13, "partition.state", "oslo", state="finished"),
    event(14, "job.publishing"),
    event(16, "job.succeeded", terminal=True),
]


def test_each_part_of_a_job_is_a_span_between_its_events() -> None:
    spans, ended = Spans(), []
    for one in COURSE:
        ended += spans.add(one)
    start = min(span.start for span in ended)
    took = {span.key: (span.parent, span.name, span.start - start, span.end - start) for span in ended}
    assert took == {
        "plan": ("", "plan", 0, 1),
        "start": ("", "start", 2, 5),
        "region/oslo/prepare/1": ("region/oslo", "prepare", 3, 5),
        "region/oslo/round/1": ("region/oslo", "round", 5, 8),
        "region/oslo/round/2": ("region/oslo", "round", 8, 12),
        "region/oslo": ("", "partition", 3, 13),
        "publish": ("", "publish", 14, 16),
        "": (None, "job", 0, 16),
    }
    by_key = {span.key: span for span in ended}
    assert by_key["region/oslo/round/2"].attributes == {
        "geofed.region": "oslo", "geofed.round": 2, "geofed.step": 8, "geofed.loss": 0.25,
        "geofed.compute_seconds": 3.0, "geofed.merge_seconds": 0.5,
    }  # fmt: skip
    failed = [note for note in by_key["region/oslo"].notes if note.name == "worker-failed"]
    assert [note.attributes["geofed.code"] for note in failed] == ["FUNCTION_FAILED"]
    assert (by_key[""].attributes, by_key[""].error) == ({"geofed.job": "job-1", "geofed.state": "succeeded"}, "")


def test_all_spans_end_with_a_job_that_fails_and_its_own_tells_why() -> None:
    spans = Spans()
    ended = [span for one in (*COURSE[:7], event(20, "job.failed", terminal=True)) for span in spans.add(one)]
    assert {span.key for span in ended} == {
        "plan", "start", "region/oslo/prepare/1", "region/oslo/round/1", "region/oslo", ""
    }  # fmt: skip
    assert [span.error for span in ended if span.key == ""] == ["job.failed"]
    assert all(span.end >= span.start for span in ended)


def test_a_region_that_starts_again_prepares_again_and_a_part_is_no_region() -> None:
    spans, ended = Spans(), []
    again = [
        *COURSE[:7],
        event(20, "partition.state", "oslo", state="preparing"),
        event(24, "partition.state", "oslo", state="training"),
        event(26, "partition.round", "oslo", round=2),
        event(27, "partition.state", "plan", state="training"),
        event(28, "partition.round", "plan", round=1),
        event(29, "partition.state", "plan", state="failed", error={"code": "TASK_INVALID", "message": "no loss"}),
        event(30, "job.failed", terminal=True),
    ]
    for one in again:
        ended += spans.add(one)
    assert len({span.key for span in ended}) == len(ended)
    start = min(span.start for span in ended)
    assert {span.key: (span.start - start, span.end - start) for span in ended if "/prepare/" in span.key} == {
        "region/oslo/prepare/1": (3, 5), "region/oslo/prepare/2": (20, 24),
    }  # fmt: skip
    by_key = {span.key: span for span in ended}
    second = by_key["region/oslo/round/2"]
    assert (second.start - start, second.end - start) == (24, 26), "the outage is no part of a round"
    assert by_key["region/plan/round/1"].parent == "region/plan"
    assert (by_key["region/plan"].error, by_key["plan"].error) == ("TASK_INVALID: no loss", "")


def test_a_job_whose_oldest_events_are_gone_has_a_trace() -> None:
    spans = Spans()
    ended = [span for one in COURSE[6:] for span in spans.add(one)]
    assert [(span.name, span.parent) for span in ended] == [
        ("round", "region/oslo"), ("round", "region/oslo"), ("publish", ""), ("partition", ""), ("job", None),
    ]  # fmt: skip


def test_what_is_noted_of_a_long_job_is_bounded() -> None:
    spans = Spans()
    spans.add(COURSE[0])
    for _ in range(1500):
        spans.add(event(3, "wan.decision"))
    (job,) = [span for span in spans.add(event(9, "job.cancelled", terminal=True)) if span.key == ""]
    assert (len(job.notes), job.attributes["geofed.left_out"]) == (1000, 502)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as server:
        yield server


def test_a_job_that_is_sent_again_has_one_trace(collector: Collector) -> None:
    for _ in range(2):
        sink = open_sink(collector.place, "job-1")
        for one in COURSE:
            sink.write(one)
        sink.close({})
    assert set(collector.paths) == {"/v1/traces"}
    spans = collector.spans
    assert len(spans) == 2 * len({span.span_id for span in spans}) == 16
    assert len({span.trace_id for span in spans}) == 1
    by_id = {span.span_id: span for span in spans}
    (job,) = [span for span in by_id.values() if span.name == "job"]
    (oslo,) = [span for span in by_id.values() if span.name == "partition"]
    rounds = [span for span in by_id.values() if span.name == "round"]
    assert (job.parent_span_id, oslo.parent_span_id) == (b"", job.span_id)
    assert {span.parent_span_id for span in rounds} == {oslo.span_id}
    assert job.end_time_unix_nano - job.start_time_unix_nano == 16 * 10**9
    names = {one.key: one.value for one in collector.requests[0].resource_spans[0].resource.attributes}
    assert names["service.name"].string_value == "geofed"


@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_refuses_is_an_error(collector: Collector) -> None:
    collector.status = 400
    sink = open_sink(f"{collector.place}/otlp/traces", "job-1")
    for one in COURSE:
        sink.write(one)
    with pytest.raises(GeofedError, match="no collector takes the spans at http") as raised:
        sink.close({})
    assert (raised.value.code, set(collector.paths)) == ("UNAVAILABLE", {"/otlp/traces"})
    with pytest.raises(GeofedError, match="no URL of a collector"):
        open_sink("otlp:collector:4318", "job-1")


@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_was_away_gets_all_spans_once(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sinks, "_SEND_SECONDS", 0.0)
    collector.status = 400
    sink = open_sink(collector.place, "job-1")
    for one in COURSE[:7]:
        sink.write(one)
    collector.status = 200
    for one in COURSE[7:]:
        sink.write(one)
    sink.close({})
    assert len(collector.spans) == len({span.span_id for span in collector.spans}) == 8


@pytest.mark.processes
def test_the_trace_of_a_job_has_its_regions_and_rounds(
    live: Federation, run: Run, job_file: str, collector: Collector
) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    assert run("track", job, collector.place, "--follow", "-o", "json").data["state"] == "succeeded"
    spans = collector.spans
    assert {"job", "plan", "start", "partition", "round", "publish"} <= {span.name for span in spans}
    of = {one.key: one.value.string_value for span in spans if span.name == "job" for one in span.attributes}
    assert of == {"geofed.job": job, "geofed.state": "succeeded"}
    regions = {
        one.value.string_value
        for span in spans
        if span.name == "round"
        for one in span.attributes
        if one.key == "geofed.region"
    }
    assert regions == {"a", "b"}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in spans)
