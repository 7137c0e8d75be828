"""A region's catalogue is its own word: what no real region has keeps it from others' plans, and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from control_plane.server import ServeConfig
from control_plane.service.state._catalogue import read_catalogue
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import catalogue
from tests.control_plane.scenario import bring_up, run

NAN, INFINITE = math.nan, math.inf
PATHS = [
    ("capacity", "workers"), ("capacity", "memory_mb"), ("capacity", "samples_per_second"), ("capacity", "preemptible"),
    ("capacity", "cores"), ("prices", "function_usd_per_gb_second"), ("prices", "function_usd_per_request"),
    ("prices", "server_usd_per_hour"), ("prices", "egress_usd_per_gb"), ("prices", "egress_to", "b"),
    ("datasets", 0, "splits", "train", "samples"), ("datasets", 0, "splits", "train", "bytes"),
    ("links", 0, "rtt_ms"), ("links", 0, "mbps"),
]  # fmt: skip


def told(path: tuple[Any, ...], value: object) -> str:
    whole: Any = asdict(catalogue("a"))
    whole["prices"]["egress_to"] = {"b": 0.01}
    whole["links"] = [{"source": "a", "destination": "b", "rtt_ms": 10.0, "mbps": 100.0}]
    at = whole
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(whole)


def test_an_ordinary_catalogue_is_taken() -> None:
    assert read_catalogue("a", told(("cloud",), "test")).capacity.workers == 2


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE, -1, 1e18, "1e400", None, [], True], ids=repr)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_no_number_outside_its_bounds_is_taken(path: tuple[Any, ...], value: object) -> None:
    optional = path[-1] in ("samples_per_second", "bytes") and value is None
    if optional or value is True:
        return  # True is the number 1
    with pytest.raises(GeofedError, match=str(path[-1])) as caught:
        read_catalogue("a", told(path, value))
    assert caught.value.code == "CONFIG_INVALID"


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("name",), "b", "the certificate is of region a, the catalogue of b"),
        (("cloud",), "x" * 65, "cloud"),
        (("channel",), "telepathy", "'telepathy' is unknown"),
        (("datasets", 0, "residency"), "wherever", "'wherever' is unknown"),
        (("prices", "as_of"), "soon", "'soon' is not a date"),
        (("links", 0, "source"), "b", "not a link from a"),
        (("datasets", 0, "name"), "", "the name has no character"),
    ],
)
def test_no_text_without_a_meaning_is_taken(path: tuple[Any, ...], value: object, text: str) -> None:
    with pytest.raises(GeofedError, match=text):
        read_catalogue("a", told(path, value))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=budget(200))
@given(st.sampled_from([*PATHS, ("capacity",), ("prices",), ("datasets",), ("links", 0)]), JSON)
def test_whatever_a_region_says_is_taken_or_named(path: tuple[Any, ...], value: object) -> None:
    taken = None
    with contextlib.suppress(GeofedError):
        taken = read_catalogue("a", told(path, value))
    assert taken is None or math.isfinite(taken.capacity.cores)


def test_a_misconfigured_region_harms_no_others_plan(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            before = json.loads((await stage.client.plan(load(job_file).json)).plan_json)
            assert {part["region"] for part in before["partitions"]} == {"a", "b"}
            good = b.catalogue
            assert good.prices is not None
            for bad in (NAN, -1.0, 1e18):
                await b.close()
                b.catalogue = replace(good, prices=replace(good.prices, egress_usd_per_gb=bad))
                await b.connect()
                shown = {region.name: region for region in await stage.client.regions()}
                assert (shown["a"].state, shown["b"].state) == ("live", "misconfigured")
                assert "prices.egress_usd_per_gb" in shown["b"].condition
                reply = await stage.client.plan(load(job_file).json)
                planned = json.loads(reply.plan_json)
                assert reply.admissible
                assert [part["region"] for part in planned["partitions"]] == ["a"]
            await b.close()
            b.catalogue = good
            await b.connect()
            assert await stage.phase_is("b", "live")
            b.send_raw(agent_pb2.FromAgent(capacity=agent_pb2.CapacityNews(preemptible=4_000_000_000)))
            await stage.until(lambda: stage.phase_is("b", "misconfigured"))
            for agent in (a, b):
                await agent.close()

    run(scenario())
