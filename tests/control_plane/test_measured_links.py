"""What jobs measure of links counts in later plans, where no operator states it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import (
    JobState,
    LinkReport,
    LinksMeasured,
    MeasuredLink,
    Partition,
    RegionMachine,
    RegionState,
    Report,
)
from control_plane.core import region_state_from_json as read
from control_plane.core import region_state_to_json as written
from control_plane.server import ServeConfig
from control_plane.service.measuring._links import links_measured, with_measured
from geofed_pb.v1 import agent_pb2
from scheduler import Link, LinkMeasurement, measured_path
from scheduler import Path as LinkPath
from scheduler._link import pace
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import catalogue, digest_of
from tests.control_plane.scenario import MODEL, bring_up, figures, run, train


def _event(**links: tuple[float, float]) -> LinksMeasured:
    return LinksMeasured(tuple(MeasuredLink(name, rtt, mbps) for name, (rtt, mbps) in links.items()))


def test_the_last_measurement_of_each_link_counts() -> None:
    machine = RegionMachine(RegionState("a"))
    assert machine.handle(_event(b=(10.0, 100.0), c=(20.0, 50.0))) == []
    machine.handle(_event(b=(30.0, 100.0)))
    assert machine.state.measured == (MeasuredLink("c", 20.0, 50.0), MeasuredLink("b", 30.0, 100.0))
    assert read(written(machine.state)) == machine.state
    before = machine.state
    machine.handle(_event(b=(30.0, 100.0)))
    assert machine.state is before, "nothing is stored again"


def test_a_region_keeps_a_bounded_number_of_links() -> None:
    machine = RegionMachine(RegionState("a"))
    for number in range(300):
        machine.handle(_event(**{f"r{number}": (10.0, 100.0)}))
    assert len(machine.state.measured) == 256
    assert machine.state.measured[-1].destination == "r299"


@pytest.mark.parametrize("rtt", [float("nan"), float("inf"), -5.0, 0.0, 1e9])
@pytest.mark.parametrize("mbps", [10.0, float("nan")])
def test_what_no_link_can_have_is_not_kept(rtt: float, mbps: float) -> None:
    def measured(rtt: float, mbps: float) -> dict[str, tuple[MeasuredLink, ...]]:
        report = Report(1, "finished", links={"b": LinkReport(rtt, mbps)})
        state = JobState("j", 600.0, 0.0, partitions=(Partition("a", report=report), Partition("b")))
        return links_measured(state, {"a": RegionState("a"), "b": RegionState("b")})

    assert measured(rtt, mbps) == {}
    assert measured(50.0, float("nan")) == measured(50.0, -1.0) == measured(50.0, float("inf")) == {}
    assert [link.rtt_ms for link in measured(50.0, 0.0)["a"]] == [50.0]


def test_what_an_operator_states_counts_more() -> None:
    region = replace(catalogue("a"), links=(Link("a", "b", 5.0, 1000.0),))
    state = RegionState("a", measured=(MeasuredLink("b", 50.0, 10.0), MeasuredLink("c", 70.0, 20.0)))
    assert with_measured(region, state).links == (Link("a", "b", 5.0, 1000.0), Link("a", "c", 70.0, 20.0))
    assert with_measured(region, RegionState("a")) is region


@given(rtt=st.floats(1.0, 500.0), mbps=st.floats(1.0, 1000.0), size=st.integers(1000, 10**9))
def test_a_rate_is_only_taken_from_updates_that_tell_it(rtt: float, mbps: float, size: int) -> None:
    """An update takes the line's time and a round trip or more: the small ones tell of the round trip alone."""
    seconds = size * 8e-6 / mbps + rtt / 1e3
    path = measured_path(LinkMeasurement(size * 8e-6 / seconds, rtt), size)
    assert path.rtt_ms == pytest.approx(max(10.0, rtt), rel=0.05)
    if size * 8e-6 / mbps < rtt / 1e3:
        assert path.mbps >= min(100.0, 0.5 * mbps), "no slow link is made of a long one"
    elif (rate := size * 8e-6 / seconds) > 100.0:
        assert path.mbps == pytest.approx(rate, rel=0.05)
    else:
        # By the transport's model the link found takes as long, unless one of the usual rate takes hardly less.
        took = pace(path, size).first_seconds + path.rtt_ms / 1e3
        assert took == pytest.approx(seconds, rel=0.15) or (path.mbps == 100.0 and seconds <= 1.5 * took + 0.1)
    assert measured_path(LinkMeasurement(0.0, rtt), size, LinkPath(50.0, 37.0, 0.0)).mbps == 37.0


def test_the_shortest_round_trip_counts_until_the_way_is_longer() -> None:
    known = LinkPath(50.0, 100.0, 0.0)
    told = {
        rtt: measured_path(LinkMeasurement(0.0, rtt), 1000, known).rtt_ms for rtt in (3.0, 40.0, 60.0, 100.0, 120.0)
    }
    assert told == {3.0: 10.0, 40.0: 40.0, 60.0: 50.0, 100.0: 50.0, 120.0: 120.0}


def test_the_next_plan_knows_the_links_that_a_job_has_measured(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            told = {"a": figures("a", "b", 2), "b": figures("b", "a", 2)}
            for own, other in (("a", "b"), ("b", "a")):
                told[own]["links"] = {other: agent_pb2.LinkReport(rtt_ms=400.0, mbps=0.5)}
                told[own]["exchange"] |= {"update_bytes": 1000}
            for agent in (a, b):
                agent.report(job, "finished", model_digest="m", **told[agent.region])
            await a.command("publish")
            assert (await a.put(MODEL)).complete
            a.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL), **told["a"])
            await a.settled()
            regions = {region.name: region for region in await stage.client.regions()}
            assert [(link.destination, link.rtt_ms) for link in regions["a"].measured_links] == [("b", 400.0)]
            second = json.loads((await stage.submit(job_file, "again")).job.plan_json)
            assert 0.2 <= second["exchange_seconds"] <= 0.25, "half of 400 ms; half of the assumed 150 ms were less"

    run(scenario())
