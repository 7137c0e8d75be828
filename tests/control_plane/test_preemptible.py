"""Preemptible workers, as the control plane deals with them: over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.core import JobMachine, JobState, Partition, Report, Reported, ScaleRequested, SendScale
from control_plane.server import ServeConfig
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent
from tests.control_plane.scenario import run

LONG = ("train.end={epochs: 900}", "objective.minimise=time")


async def bring_up(stage: Stage, preemptible: int) -> tuple[FakeAgent, FakeAgent]:
    agents = await stage.agent("a"), await stage.agent("b")
    for agent in agents:
        agent.catalogue = replace(
            agent.catalogue, capacity=replace(agent.catalogue.capacity, preemptible=preemptible)
        )  # fmt: skip
        await agent.connect()
    return agents


async def started(job: str, *agents: FakeAgent) -> None:
    for agent in agents:
        await agent.command("start")
        scaled = await agent.command("scale")
        assert (scaled.job, scaled.preemptible) == (job, True)
        agent.report(job, "ready", ps_address=f"{agent.region}.example:9000", workers=scaled.workers)
        agent.report(job, "training", workers=scaled.workers)
        await agent.settled()


def left(agent: FakeAgent, preemptible: int) -> None:
    update = agent_pb2.CapacityNews(preemptible=preemptible)
    agent.catalogue = replace(agent.catalogue, capacity=replace(agent.catalogue.capacity, preemptible=preemptible))
    agent.send_raw(agent_pb2.FromAgent(capacity=update))


async def soon(condition: Callable[[], Awaitable[bool]]) -> None:
    """What changes without an event."""
    async with asyncio.timeout(15):
        while not await condition():  # noqa: ASYNC110 - only the control plane knows
            await asyncio.sleep(0.1)


def test_jobs_with_slack_train_there_and_leave_the_others_to_those_in_a_hurry(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage, 2)
            slack = (await stage.submit(job_file, overrides=(*LONG, "objective.deadline=3h"))).job
            await started(slack.id, a, b)
            # All that stays is free for one that cannot be told to change.
            held = (await stage.submit(job_file, "r2", ("train.seed=2", "train.workers=2", *LONG))).job
            assert held.state == "starting"
            job = await stage.client.job(slack.id)
            assert [part.preemptible for part in job.partitions] == [True, True]
            held = await stage.client.job(held.id)
            assert [part.preemptible for part in held.partitions] == [False, False]
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_job_goes_on_where_its_workers_are_taken_away_also_over_a_restart(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage, 2)
            job = (await stage.submit(job_file, overrides=(*LONG, "objective.deadline=3h"))).job.id
            await started(job, a, b)
            region = next(shown for shown in await stage.client.regions() if shown.name == "a")
            assert '"preemptible": 2' in region.catalogue_json
        async with staged(serve_config) as stage:
            for agent in (a, b):
                agent.identity = replace(agent.identity, address=f"127.0.0.1:{stage.ports.agent}")
                await agent.connect()
            assert all(part.preemptible for part in (await stage.client.job(job)).partitions), "that is kept"
            left(a, 0)
            a.report(job, "training", workers=0, preempted=True)
            for agent in (a, b):

                async def moved(agent: FakeAgent = agent) -> bool:
                    scales = [c.scale for c in agent.commands if c.WhichOneof("body") == "scale"]
                    return not scales[-1].preemptible and scales[-1].workers > 0

                await soon(moved)
                last = [c.scale for c in agent.commands if c.WhichOneof("body") == "scale"][-1]
                assert last.reason == "preemptible workers were preempted"
            kinds = await stage.events(job)
            assert "partition.preempted" in kinds
            capacity = [
                event async for event in stage.client.watch("", follow=False) if event.kind == "region.capacity"
            ]
            assert [event.text for event in capacity] == ["a now has 0 preemptible workers instead of 2"]
            for agent in (a, b):
                await agent.close()

    run(scenario())


def state(workers: int, *, preemptible: bool) -> JobState:
    part = Partition("a", state="training", workers=workers, preemptible=preemptible)
    return JobState("j", 60.0, 0.0, phase="running", partitions=(part,), deadline_at=100.0)


def test_what_is_left_is_known_once_and_a_late_word_of_it_changes_nothing() -> None:
    machine = JobMachine(state(4, preemptible=True))
    word = Reported(1.0, "a", Report(1, "training", workers=2, preempted=True))
    kinds = [getattr(action, "kind", "") for action in machine.handle(word)]
    assert kinds.count("partition.preempted") == 1
    assert not [action for action in machine.handle(word) if getattr(action, "kind", "") == "partition.preempted"]
    part = machine.state.partitions[0]
    assert (part.workers, part.preempted) == (2, True)
    # Told to continue as it is, the region hears of it once, so that it knows that it was seen.
    told = machine.handle(ScaleRequested(2.0, {"a": 2}, "", preemptible=True))
    assert [action for action in told if isinstance(action, SendScale)] == [SendScale("a", 1, 2, "", True, 1)]
    assert not machine.handle(ScaleRequested(3.0, {"a": 2}, "", preemptible=True))
    machine.handle(ScaleRequested(4.0, {"a": 3}, "its deadline"))
    machine.handle(word)
    part = machine.state.partitions[0]
    assert (part.workers, part.preemptible, part.preempted) == (3, False, False), "it was said before the move"


def test_a_report_that_crosses_an_order_is_no_word_of_what_became_of_it() -> None:
    machine = JobMachine(state(4, preemptible=True))
    machine.handle(ScaleRequested(0.5, {"a": 3}, "a test", preemptible=True))
    word = Reported(1.0, "a", Report(1, "training", workers=2, preempted=True, scale_order=1))
    machine.handle(word)
    assert (machine.state.partitions[0].workers, machine.state.partitions[0].preempted) == (2, True)
    machine.handle(ScaleRequested(2.0, {"a": 3}, "more are back", preemptible=True))
    machine.handle(word)
    part = machine.state.partitions[0]
    assert (part.workers, part.preempted, part.scale_order) == (3, False, 2)
    machine.handle(Reported(3.0, "a", Report(1, "training", workers=1, preempted=True, scale_order=2)))
    assert machine.state.partitions[0].workers == 1, "after the order some were taken away again"


@pytest.mark.parametrize("preempted", [False, True])
def test_fewer_workers_than_asked_for_are_noted_whatever_their_kind_so_that_the_region_is_asked_again(
    preempted: bool,
) -> None:
    machine = JobMachine(state(2, preemptible=True))
    machine.handle(ScaleRequested(1.0, {"a": 4}, "a test"))
    word = Reported(2.0, "a", Report(1, "training", workers=2, preempted=preempted, scale_order=1))
    kind = "partition.preempted" if preempted else "partition.short"
    assert kind in [getattr(action, "kind", "") for action in machine.handle(word)]
    assert kind not in [getattr(action, "kind", "") for action in machine.handle(word)]
    told = machine.handle(ScaleRequested(3.0, {"a": 4}, "a test"))
    assert SendScale("a", 1, 4, "a test", False, 2) in told


def test_workers_of_one_that_is_done_are_not_missed() -> None:
    machine = JobMachine(state(2, preemptible=True))
    machine.handle(ScaleRequested(1.0, {"a": 4}, "a test"))
    machine.handle(Reported(2.0, "a", Report(1, "finished", workers=2, scale_order=1)))
    assert machine.state.partitions[0].workers == 4


def test_one_that_lost_all_waits_for_workers_as_if_it_had_given_way() -> None:
    machine = JobMachine(state(2, preemptible=True))
    machine.handle(Reported(1.0, "a", Report(1, "training", workers=0, preempted=True)))
    assert machine.state.gave_way


def _scales(agent: FakeAgent, job: str) -> list[agent_pb2.ScalePartition]:
    return [c.scale for c in agent.commands if c.WhichOneof("body") == "scale" and c.scale.job == job]


@pytest.mark.slow
def test_a_job_begins_there_once_those_who_make_room_have_been_told(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage, 2)
            one = (await stage.submit(job_file, overrides=(*LONG, "objective.deadline=3h"))).job.id
            await started(one, a, b)
            assert [scale.workers for scale in _scales(a, one)] == [2], "it has all of them"
            two = (await stage.submit(job_file, "r2", ("train.seed=2", *LONG))).job
            assert two.state == "queued"

            async def begun() -> bool:
                return bool(_scales(a, two.id))

            await soon(begun)
            order = [(c.scale.job, c.scale.workers) for c in a.commands if c.WhichOneof("body") == "scale"]
            assert order == [(one, 2), (one, 1), (two.id, 1)]
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_by_hand_no_region_is_put_onto_workers_that_others_have(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage, 2)
            one = (await stage.submit(job_file, overrides=(*LONG, "objective.deadline=3h"))).job.id
            await started(one, a, b)
            other = ("train.seed=2", "train.workers=2", "regions.use=[b]", *LONG)
            two = (await stage.submit(job_file, "r2", other)).job.id
            await b.command("start")
            b.report(two, "training", workers=2, ps_address="b.example:9001")
            await b.settled()
            for workers in ({"b": 2}, {"a": 1}):
                with pytest.raises(GeofedError, match="INADMISSIBLE: region b has 0 regular workers"):
                    await stage.client.scale(one, workers)
            assert [scale.workers for scale in _scales(b, one)] == [2], "it continues as it was"
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_one_that_is_cancelled_takes_no_workers_that_stay_on_its_way_out(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage, 1)
            one = (await stage.submit(job_file, overrides=(*LONG, "objective.deadline=3h"))).job.id
            await started(one, a, b)
            other = ("train.seed=2", "train.end={epochs: 10}", "objective.minimise=time")
            two = (await stage.submit(job_file, "r2", other)).job.id
            for agent in (a, b):
                await agent.command("start")
                agent.report(two, "training", workers=2, ps_address=f"{agent.region}.example:9001")
                await agent.settled()
            await stage.client.cancel(one)
            await asyncio.sleep(3.0)
            assert not _scales(a, two), "nobody takes what it has"
            for agent in (a, b):
                await agent.close()

    run(scenario())
