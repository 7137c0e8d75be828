"""What jobs measure of links counts in later plans, where no operator states it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import LinksMeasured, MeasuredLink, RegionMachine, RegionState
from control_plane.core import region_state_from_json as read
from control_plane.core import region_state_to_json as written
from control_plane.server import ServeConfig
from control_plane.service.measuring._links import with_measured
from geofed_pb.v1 import agent_pb2
from scheduler import Link, Sighting, measured_path
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


def test_what_an_operator_states_counts_more() -> None:
    region = replace(catalogue("a"), links=(Link("a", "b", 5.0, 1000.0),))
    state = RegionState("a", measured=(MeasuredLink("b", 50.0, 10.0), MeasuredLink("c", 70.0, 20.0)))
    assert with_measured(region, state).links == (Link("a", "b", 5.0, 1000.0), Link("a", "c", 70.0, 20.0))
    assert with_measured(region, RegionState("a")) is region


@given(rtt=st.floats(1.0, 500.0), mbps=st.floats(1.0, 1000.0), size=st.integers(1000, 10**9))
def test_a_rate_is_only_taken_from_updates_that_tell_it(rtt: float, mbps: float, size: int) -> None:
    """An update takes the line's time and a round trip or more: the small ones tell of the round trip alone."""
    seconds = size * 8e-6 / mbps + rtt / 1e3
    path = measured_path(Sighting(size * 8e-6 / seconds, rtt), size)
    assert path.rtt_ms == pytest.approx(rtt, rel=0.05)
    if size * 8e-6 / mbps < rtt / 1e3:
        assert path.mbps >= min(100.0, 0.5 * mbps), "no slow link is made of a long one"
    elif seconds > 2.0:
        assert path.mbps == pytest.approx(mbps, rel=0.7)
    assert measured_path(Sighting(0.0, rtt), size, known_mbps=37.0).mbps == 37.0


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
