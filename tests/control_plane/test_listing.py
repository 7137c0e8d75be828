"""Lists of a large federation: paged, light, and whole for whoever asks."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import grpc.aio
import httpx2
import pytest

from control_plane.core import RegionState, region_state_to_json
from control_plane.server import ServeConfig
from control_plane.store import Change, JobRow, RegionRow, open_store
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, error_of, with_token
from geofed_pb.v1 import control_pb2, control_pb2_grpc
from scheduler import Dataset, Split
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import catalogue
from tests.control_plane.scenario import bring_up, finish, run, train

REGIONS, JOBS = 1000, 1600


def regions_with_datasets(count: int) -> Iterator[RegionRow]:
    """With some 6 KB of datasets each."""
    datasets = tuple(Dataset(f"dataset-number-{n}", {"train": Split(100), "test": Split(20)}) for n in range(60))
    held = asdict(replace(catalogue(""), datasets=datasets))
    for number in range(count):
        name = f"region-{number:04}"
        yield RegionRow(
            name, "test", "1", json.dumps({**held, "name": name}), region_state_to_json(RegionState(name)), (), 0.0
        )


def _ended(row: JobRow) -> Iterator[JobRow]:
    """Copies of a job that has ended; many were submitted at one moment."""
    for number in range(JOBS):
        name = f"old-{number:05}"
        yield replace(
            row, id=name, name=name, request_id=name, created_at=1000.0 + number // 7, result_json=row.result_json * 3
        )


async def _fill(stage: Stage, job_file: Path) -> JobRow:
    a, b = await bring_up(stage)
    job = (await stage.submit(job_file)).job.id
    await train(job, a, b)
    await finish(job, a, b)
    with open_store(f"sqlite:///{stage.config.state_dir / 'state.db'}") as store:
        row = store.job(job)
    assert row is not None
    return row


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_large_federation_is_listed_page_by_page(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            row = await _fill(stage, job_file)
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            store.commit(Change(regions=tuple(regions_with_datasets(REGIONS)), jobs=tuple(_ended(row))))
        async with staged(serve_config) as stage:
            regions = await stage.client.regions()
            assert [region.name for region in regions] == ["a", "b", *(f"region-{n:04}" for n in range(REGIONS))]
            assert sum(region.ByteSize() for region in regions) > 5 << 20
            assert json.loads(regions[-1].catalogue_json)["datasets"][59]["name"] == "dataset-number-59"
            newest = await stage.client.jobs(ended=True, limit=1500)
            assert [job.id for job in newest[:9]] == [
                row.id, "old-01596", "old-01597", "old-01598", "old-01599",
                "old-01589", "old-01590", "old-01591", "old-01592",
            ]  # fmt: skip
            assert len({job.id for job in newest}) == len(newest) == 1500
            assert not newest[0].plan_json + newest[0].spec_json + newest[0].result_json
            assert (newest[0].state, newest[0].rounds, len(newest[0].partitions)) == ("succeeded", 2, 2)
            assert newest[0].expected_seconds > 0
            await _check_pages(stage)
            await _check_dashboard(stage)

    run(scenario())


async def _check_pages(stage: Stage) -> None:
    """What one answer holds, also for a client that does not ask for the rest."""
    context = stage.context
    async with channel(context.address, ca_pem=context.ca_file.read_bytes(), name=CONTROL_PLANE_NAME) as line:
        stub, token = control_pb2_grpc.ControlStub(line), with_token(context.token_file.read_text().strip())
        reply = await stub.ListJobs(control_pb2.ListJobsRequest(all=True, limit=100_000), metadata=token)
        assert reply.more
        assert 500 < len(reply.jobs) <= 1000
        assert reply.ByteSize() < 2 << 20
        reply = await stub.ListRegions(control_pb2.ListRegionsRequest(paged=True), metadata=token)
        assert reply.more
        assert reply.ByteSize() < 2 << 20
        last = control_pb2.ListRegionsRequest(paged=True, after="region-0990")
        reply = await stub.ListRegions(last, metadata=token)
        assert (len(reply.regions), reply.more) == (9, False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ListRegions(control_pb2.ListRegionsRequest(), metadata=token)
        assert error_of(raised.value).code == "LIMIT_EXCEEDED"


async def _check_dashboard(stage: Stage) -> None:
    token = stage.context.token_file.read_text().strip()
    base = f"https://127.0.0.1:{stage.ports.metrics}/"
    trusted = ssl.create_default_context(cafile=str(stage.context.ca_file))
    async with httpx2.AsyncClient(verify=trusted, auth=("any", token)) as browser:
        page = (await browser.get(base)).text
        assert "region-0097" in page
        assert "region-0098" not in page
        assert "902 more" in page
        page = (await browser.get(base, params={"regions-after": "region-0900"})).text
        assert "region-0901" in page
        assert "region-0999" in page
        assert "more</a>" not in page
        assert len(page) < 200_000


@pytest.mark.processes
def test_the_command_line_pages_by_itself(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            row = await _fill(stage, job_file)
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                store.commit(Change(jobs=tuple(_ended(row))[:1200]))
            command = [str(Path(sys.executable).with_name("control-plane")), "list", "--all", "--limit", "5000"]
            context = str(serve_config.state_dir / "context.json")
            told = await asyncio.create_subprocess_exec(
                *command, "-o", "json", "--context", context, stdout=asyncio.subprocess.PIPE
            )
            found = json.loads((await told.communicate())[0])
            found = found["data"] if isinstance(found, dict) else found
            assert len(found) == 1201
            assert {"partitions", "links", "usd", "slack_seconds"} <= set(found[0])

    run(scenario())
