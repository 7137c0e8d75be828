"""Whether a process sends spans of a job, and to which trace."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.collector import Collector, running_collector

from geofed_pb import tracing
from geofed_pb.errors import GeofedError
from geofed_pb.tracing import JobTrace, partition_key, span_of, trace_of, traceparent

KEY = partition_key("oslo")
WANTED = traceparent("job-1", KEY, wanted=True)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with running_collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        tracing._processor.cache_clear()
        yield server
        # Its thread would go on to try, and draw random numbers in the midst of other tests.
        if (sending := tracing._processor("geofed-test")) is not None:
            sending.span_exporter.shutdown()
            sending.shutdown()
        tracing._processor.cache_clear()


def test_spans_are_sent_into_the_trace_that_the_context_names(collector: Collector) -> None:
    trace = JobTrace.of(WANTED, "job-1", "geofed-test", region="oslo")
    trace.add("merge", time.time() - 2, {"round": 3})
    with pytest.raises(GeofedError), trace.span("deploy", attempt=1):
        raise GeofedError("DISK_FULL", "no space")
    tracing.flush("geofed-test")
    merge, deploy = sorted(collector.spans, key=lambda span: str(span.name), reverse=True)
    assert {span.trace_id for span in (merge, deploy)} == {trace_of("job-1").to_bytes(16)}
    assert merge.parent_span_id == deploy.parent_span_id == span_of("job-1", "region/oslo").to_bytes(8)
    assert (deploy.status.message, merge.status.message) == ("DISK_FULL", "")
    assert 1.9e9 < merge.end_time_unix_nano - merge.start_time_unix_nano < 60e9
    assert {one.key for one in merge.attributes} == {"geofed.job", "geofed.region", "geofed.round"}


@pytest.mark.parametrize(
    "context",
    ["", "00-xyz", traceparent("job-1", KEY, wanted=False), traceparent("job-2", KEY, wanted=True), f"{WANTED}-1"],
)
def test_nothing_is_sent_without_a_context_of_the_job_that_wants_it(collector: Collector, context: str) -> None:
    trace = JobTrace.of(context, "job-1", "geofed-test")
    trace.add("merge", time.time(), {})
    tracing.flush("geofed-test")
    assert (collector.spans, trace) == ([], JobTrace())


def test_nothing_is_made_without_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing._ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing._processor.cache_clear()
    assert JobTrace.of(WANTED, "job-1", "geofed-test") == JobTrace()
    assert tracing._processor.cache_info().currsize == 0


def test_a_collector_that_is_away_delays_the_end_of_a_process_by_two_seconds_at_most(collector: Collector) -> None:
    collector.status = 503
    trace = JobTrace.of(WANTED, "job-1", "geofed-test")
    for _ in range(5000):
        trace.add("merge", time.time(), {})
    began = time.monotonic()
    tracing.flush("geofed-test")
    assert time.monotonic() - began < 10
