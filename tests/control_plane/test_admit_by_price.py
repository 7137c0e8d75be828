"""Deadlines by price: what a user is told, over real TLS sockets, by played agents."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.server import ServeConfig
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import catalogue
from tests.control_plane.scenario import run

SMALL, LARGE = ("train.workers=1", "train.end={epochs: 20}"), ("train.workers=16", "train.end={epochs: 320}")
"""Both take as long: the large one has as many times the workers as it has work."""


@pytest.mark.slow
@pytest.mark.parametrize("by_price", [False, True])
def test_a_job_far_larger_than_usual_takes_no_place_of_small_ones(
    serve_config: ServeConfig, job_file: Path, by_price: bool
) -> None:
    async def scenario() -> None:
        async with staged(replace(serve_config, admits_by_price=by_price)) as stage:
            agents = [await stage.agent(name) for name in "ab"]
            for agent in agents:
                agent.catalogue = catalogue(agent.region, samples=5000, workers=27)
                await agent.connect()
            plan = json.loads((await stage.client.plan(load(job_file, SMALL).json)).plan_json)
            soon = f"objective.deadline={math.ceil(1.15 * plan['estimate']['seconds']['high']) + 20}s"
            for number in range(10):
                await stage.submit(job_file, f"small-{number}", (*SMALL, soon, f"train.seed={number}"))
            if by_price:
                with pytest.raises(GeofedError, match="no job is promised more than") as caught:
                    await stage.submit(job_file, "large", (*LARGE, soon))
                assert caught.value.code == "INADMISSIBLE"
                assert "could be promised" in str(caught.value.hint)
            else:
                assert (await stage.submit(job_file, "large", (*LARGE, soon))).job.deadline_at > 0
            assert (await stage.submit(job_file, "like-others", (*SMALL, soon))).job.deadline_at > 0
            assert (await stage.submit(job_file, "best-effort", LARGE)).job.deadline_at == 0
            for agent in agents:
                await agent.close()

    run(scenario())
