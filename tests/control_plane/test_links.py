"""A job's links, from what both ends say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.core import JobState, Partition, Report, job_state_from_json, job_state_to_json, wan_links
from control_plane.service._metrics import MetricsExporter


def job(**b_to_a: object) -> JobState:
    a = Report(1, "training", link_rtt_ms={"b": 80.0}, link_mbps={"b": 40.0}, link_streams={"b": 4},
               sent_bytes={"b": 7}, staleness={"b": 2.0}, refused={"b": 1}, interval=20, codec="int8")  # fmt: skip
    b = replace(Report(1, "training", received_bytes={"a": 6}, staleness={"a": 1.5}), **b_to_a)  # type: ignore[arg-type]
    parts = (Partition("a", state="training", report=a), Partition("b", state="training", report=b))
    return JobState("job-1", 600.0, 0.0, "running", parts)


def test_each_figure_comes_from_the_end_that_knows_it() -> None:
    forth, back = wan_links(job_state_from_json(job_state_to_json(job())))
    assert (forth.source, forth.destination, forth.state) == ("a", "b", "up")
    assert (forth.rtt_ms, forth.goodput_mbps, forth.streams, forth.codec, forth.interval) == (80.0, 40.0, 4, "int8", 20)
    assert (forth.sent_bytes, forth.received_bytes, forth.staleness, forth.refused) == (7, 6, 1.5, 0)
    assert (back.source, back.state, back.staleness, back.refused) == ("b", "relayed", 2.0, 1)


def test_regions_without_anything_between_them_have_no_link() -> None:
    state = job(staleness={}, received_bytes={})
    parts = tuple(replace(part, report=None if part.region == "a" else part.report) for part in state.partitions)
    assert wan_links(replace(state, partitions=parts)) == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"link_rtt_ms": {"a": 0.0}}, "idle"),
        ({"link_rtt_ms": {"a": 9.0}}, "up"),
        ({"link_rtt_ms": {"a": 9.0}, "links_down": ("a",)}, "down"),
    ],
)
def test_a_link_says_how_it_stands(change: dict[str, object], told: str) -> None:
    state = job(**change)
    assert wan_links(state)[1].state == told
    silent = tuple(replace(part, link="lost") for part in state.partitions)  # type: ignore[arg-type]
    assert wan_links(replace(state, partitions=silent))[1].state == "unknown"
    assert wan_links(replace(state, phase="succeeded"))[1].state == "closed"


def test_prometheus_sees_what_describe_shows() -> None:
    async def pending(_: object) -> dict[str, int]:
        return {}

    going = {"job-1": SimpleNamespace(state=job(), row=SimpleNamespace(id="job-1"))}
    federation: Any = SimpleNamespace(jobs=going, regions={}, sessions={}, clock=lambda: 0.0, read=pending)
    lines = asyncio.run(MetricsExporter(federation).exposition()).decode().splitlines()
    labels = '{destination="b",job="job-1",source="a"}'
    shown = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
    assert shown[f"geofed_link_up{labels}"] == 1
    assert shown[f"geofed_link_rtt_seconds{labels}"] == 0.08
    assert shown[f"geofed_link_goodput_bytes_per_second{labels}"] == 5e6
    assert shown[f"geofed_link_sent_bytes{labels}"] == 7
    assert shown[f"geofed_link_received_bytes{labels}"] == 6
    assert shown[f"geofed_link_staleness_rounds{labels}"] == 1.5
    assert shown[f"geofed_link_interval_steps{labels}"] == 20
    assert shown[f"geofed_link_streams{labels}"] == 4
    assert any(line.startswith("geofed_link_info{") and 'codec="int8"' in line for line in lines)
    assert shown['geofed_link_refused_updates{destination="a",job="job-1",source="b"}'] == 1
    assert 'geofed_link_rtt_seconds{destination="a",job="job-1",source="b"}' not in shown
