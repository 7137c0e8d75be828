"""A job's links, from what both ends say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.core import (
    JobState,
    LinkReport,
    MeterTotals,
    Partition,
    Report,
    WanExchange,
    job_state_from_json,
    job_state_to_json,
    wan_links,
)
from control_plane.service._metrics import MetricsExporter
from control_plane.service.rpc._wire import _partition, _suspicions, job_message
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._sums import JobSums
from control_plane.store import JobRow


def job(**b_to_a: object) -> JobState:
    a = Report(
        1,
        "training",
        totals=MeterTotals(sent_bytes={"b": 7}),
        exchange=WanExchange(staleness={"b": 2.0}, refused={"b": 1}, interval=20, codec="int8"),
        links={"b": LinkReport(rtt_ms=80.0, mbps=40.0, streams=4)},
    )
    b = replace(
        Report(1, "training", totals=MeterTotals(received_bytes={"a": 6}), exchange=WanExchange(staleness={"a": 1.5})),
        **b_to_a,
    )  # type: ignore[arg-type]
    parts = (Partition("a", state="training", report=a), Partition("b", state="training", report=b))
    return JobState("job-1", 600.0, 0.0, "running", parts)


def judged(*suspicions: dict[str, int]) -> JobState:
    """A job of regions a, b, …, each of which reports so many suspect rounds of others."""
    parts = [
        Partition(name, state="training", report=Report(1, "training", exchange=WanExchange(suspicion=found)))
        for name, found in zip("abcde", suspicions, strict=True)
    ]
    return JobState("job-1", 600.0, 0.0, "running", tuple(parts))


def test_each_figure_comes_from_the_end_that_knows_it() -> None:
    forth, back = wan_links(job_state_from_json(job_state_to_json(job())))
    assert (forth.source, forth.destination, forth.state) == ("a", "b", "up")
    assert (forth.rtt_ms, forth.goodput_mbps, forth.streams, forth.codec, forth.interval) == (80.0, 40.0, 4, "int8", 20)
    assert (forth.sent_bytes, forth.received_bytes, forth.staleness, forth.refused) == (7, 6, 1.5, 0)
    assert (back.source, back.state, back.staleness, back.refused) == ("b", "relayed", 2.0, 1)


def test_a_region_whose_updates_lie_far_from_the_others_is_told_before_its_quarantine() -> None:
    assert _suspicions(job(), quarantine=True) == {}
    state = judged({"e": 3}, {"e": 3}, {"e": 4, "a": 5}, {}, {"a": 5, "b": 5})
    found = _suspicions(job_state_from_json(job_state_to_json(state)), quarantine=True)
    told = _partition(state.partitions[4], 0.0, 1, found.get("e", ""), ended=False)
    assert told.condition == "its updates lay far from the others' in 3 of the 5 rounds that lead to quarantine"
    assert found.keys() == {"e"}, "what two of five regions say of others is not believed"


@pytest.mark.parametrize(("settings", "says"), [({}, True), ({"quarantine": 4.0}, True), ({"quarantine": 0.0}, False)])
def test_nothing_is_told_of_a_quarantine_that_does_not_follow(settings: dict[str, float], says: bool) -> None:
    state = judged(*[{"e": 9}] * 5)
    row = JobRow("job-1", "o", "job-1", "", "", "", "{}", "{}", "", "running", 0.0)
    estimate = SimpleNamespace(seconds=SimpleNamespace(expected=1.0))
    plan: Any = SimpleNamespace(partitions=(), rounds=1, wan_settings=settings, estimate=estimate)
    told = job_message(row, state, plan, lambda region: 0.0).partitions[4].condition
    assert told == ("its updates lay far from the others' in 5 of the 5 rounds that lead to quarantine" if says else "")


def test_regions_without_anything_between_them_have_no_link() -> None:
    state = job(exchange=WanExchange(), totals=MeterTotals())
    parts = tuple(replace(part, report=None if part.region == "a" else part.report) for part in state.partitions)
    assert wan_links(replace(state, partitions=parts)) == ()


@pytest.mark.parametrize(
    ("link", "told"),
    [
        (LinkReport(), "idle"),
        (LinkReport(rtt_ms=9.0), "up"),
        (LinkReport(rtt_ms=9.0, down=True), "down"),
    ],
)
def test_a_link_says_how_it_stands(link: LinkReport, told: str) -> None:
    state = job(links={"a": link})
    assert wan_links(state)[1].state == told
    silent = tuple(replace(part, link="lost") for part in state.partitions)  # type: ignore[arg-type]
    assert wan_links(replace(state, partitions=silent))[1].state == "unknown"
    assert wan_links(replace(state, phase="succeeded"))[1].state == "closed"


def test_prometheus_sees_what_describe_shows() -> None:
    async def pending(_: object) -> dict[str, int]:
        return {}

    row: Any = SimpleNamespace(id="job-1", created_at=0.0)
    unused: Any = None
    going = {"job-1": JobEntry(row, job(), unused, unused)}
    sums = JobSums(going.values())
    federation: Any = SimpleNamespace(jobs=going, regions={}, sessions={}, clock=lambda: 0.0, read=pending, sums=sums)
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
