"""No message, however large or odd, keeps what stands behind it from being taken, on either side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ServeConfig
from control_plane.store import Change, CommandRow, open_store
from geofed_pb.bounds import LARGEST_MESSAGE_BYTES, MOST_METRICS, SESSION_MESSAGE_BYTES, TRUNCATED
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import bring_up, finish, run, train


async def _next_job_succeeds(stage: Stage, job_file: Path, a: FakeAgent, b: FakeAgent, request_id: str) -> None:
    for agent in (a, b):
        agent.commands.clear()
    job = (await stage.submit(job_file, request_id)).job.id
    await train(job, a, b)
    await finish(job, a, b)
    assert (await stage.client.job(job)).state == "succeeded"


async def _stopped(job: str, *agents: FakeAgent) -> None:
    for agent in agents:
        await agent.command("stop")
        agent.report(job, "stopped")
        await agent.settled()


@pytest.mark.slow
def test_an_error_text_of_an_older_agent_is_cut_where_it_arrives(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            error = common_pb2.Error(code="TASK_FAILED", message="unexpected keys: " + "layer, " * 1_200_000)
            a.report(job, "failed", error=error, condition=error.message[: 2 << 20])
            await a.settled()
            await _stopped(job, a, b)
            ended = await stage.client.job(job)
            assert (ended.state, ended.error.code) == ("failed", "TASK_FAILED")
            assert ended.error.message.startswith("region a failed: unexpected keys: layer, layer")
            assert ended.error.message.endswith(TRUNCATED)
            assert ended.ByteSize() < 1 << 17
            async for event in stage.client.watch(job):
                assert event.ByteSize() < 1 << 16
            await _next_job_succeeds(stage, job_file, a, b, "r2")

    run(scenario())


def test_metrics_of_an_older_agent_are_bounded(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            metrics = {f"recall of class {number} of all": 0.5 for number in range(60_000)}
            a.report(job, "training", round=1, evaluation={"metrics": metrics, "round": 1, "samples": 10})
            await a.settled()
            (part,) = [part for part in (await stage.client.job(job)).partitions if part.region == "a"]
            assert len(part.metrics) == MOST_METRICS
            events = [event async for event in stage.client.watch(job, follow=False)]
            (event,) = [event for event in events if event.kind == "partition.evaluated"]
            assert event.text.endswith("and 980 more")

    run(scenario())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"logs": agent_pb2.LogBatch(records=[agent_pb2.LogRecord(at=float("nan"))])}, "REQUEST_CONFLICT"),
        ({"happening": agent_pb2.Happening(kind="x", data_json="[" * 60_000)}, ""),
        ({"happening": agent_pb2.Happening(kind="k\0" * 500, text="t\0" * 500_000)}, ""),
    ],
)
def test_a_report_that_cannot_be_stored_is_passed_over(
    serve_config: ServeConfig, job_file: Path, body: dict[str, Any], code: str
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            a.send(agent_pb2.FromAgent(**body))
            a.send(agent_pb2.FromAgent(happening=agent_pb2.Happening(kind="ps-ended", text="it is back")))
            await a.settled()
            events = [event async for event in stage.client.watch("", follow=False)]
            assert "ps-ended" in [event.kind for event in events]
            told = [event.text for event in events if event.kind == "message.undeliverable"]
            assert len(told) == bool(code)
            assert all(f"is skipped: {code}: " in text for text in told)
            assert all("\0" not in event.text + event.kind + event.job for event in events)
            await _next_job_succeeds(stage, job_file, a, b, "r1")

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("payload", [b"\xff" * 10, b""], ids=["unreadable", "too large"])
def test_a_stored_command_that_cannot_be_sent_fails_its_job_alone(
    serve_config: ServeConfig, job_file: Path, payload: bytes
) -> None:
    """As an earlier version has left it."""
    start = agent_pb2.StartPartition(task=agent_pb2.TaskRef(config_json="x" * SESSION_MESSAGE_BYTES))
    stored = payload or agent_pb2.ToAgent(start=start).SerializeToString()

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            for agent in (a, b):
                await agent.settled()
                await agent.close()
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            store.commit(Change(commands=(CommandRow("a", job, stored),)))
        async with staged(serve_config) as stage:
            for agent in (a, b):
                agent.identity = replace(agent.identity, address=f"127.0.0.1:{stage.ports.agent}")
                agent.strict = False  # one number is left out
                await agent.connect()
            await _stopped(job, a, b)
            ended = await stage.client.job(job)
            assert (ended.state, ended.error.code) == ("failed", "FRAME_INVALID" if payload else "LIMIT_EXCEEDED")
            assert "of region a is skipped" in ended.error.message
            await _next_job_succeeds(stage, job_file, a, b, "r2")

    run(scenario())


@pytest.mark.slow
def test_a_job_file_that_no_agent_could_be_told_is_refused(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            await bring_up(stage)
            with pytest.raises(GeofedError) as raised:
                await stage.submit(job_file, overrides=("task.config.words=" + "x" * (1 << 20),))
            assert raised.value.code == "LIMIT_EXCEEDED"
            assert await stage.client.jobs(ended=True) == []

    run(scenario())


def test_what_is_sent_is_taken_by_older_peers_and_what_they_send_is_taken_here() -> None:
    default_of_grpc = 4 << 20
    assert SESSION_MESSAGE_BYTES < default_of_grpc < LARGEST_MESSAGE_BYTES
