"""A running job is replanned: it ends with its model, and another one continues with that where the data are now."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from control_plane.core import Charge, MeterTotals, Report
from control_plane.server import ServeConfig
from control_plane.service import Replanner
from control_plane.service.jobs import _replanner
from control_plane.service.jobs._replanner import rest_of
from control_plane.service.planning._replan_gain import RoundTimes, pays
from control_plane.service.state._entries import JobEntry
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, bring_up, figures, run, train
from tests.control_plane.test_elasticity import Watch
from tests.control_plane.test_users import as_user, refused, submitted

LONG = ("train.end.steps=40",)


async def come(stage: Stage, region: str) -> FakeAgent:
    agent = await stage.agent(region)
    await agent.connect()
    return agent


async def rounds(job: str, agents: tuple[FakeAgent, FakeAgent], count: int, usd: float = 0.25) -> None:
    for agent, other in (agents, agents[::-1]):
        told = figures(agent.region, other.region, count)
        told["totals"]["money"] = [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=usd, source="test")]
        agent.report(job, "training", **told)
        await agent.settled()


async def end_early(job: str, agents: tuple[FakeAgent, FakeAgent], count: int, usd: float = 0.25) -> None:
    """They end together, and the first one hands the model in."""
    for agent, other in (agents, agents[::-1]):
        assert (await agent.command("peers", 2)).finish
        told = figures(agent.region, other.region, count)
        told["totals"]["money"] = [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=usd, source="test")]
        agent.report(job, "finished", model_digest="m", **told)
    a, b = agents
    await a.command("publish")
    assert (await a.put(MODEL)).complete
    told = figures("a", "b", count)
    told["totals"]["money"] = [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=usd, source="test")]
    a.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL), **told)
    await a.settled()
    await b.settled()


async def ended(stage: Stage, job: str) -> Any:
    async def there() -> bool:
        return bool((await stage.client.job(job)).finished_at)

    await stage.until(there)
    return await stage.client.job(job)


async def data_of(stage: Stage, job: str, kind: str) -> dict[str, Any]:
    (event,) = [event async for event in stage.client.watch(job, follow=False) if event.kind == kind]
    told: dict[str, Any] = json.loads(event.data_json)
    return told


async def close(*agents: FakeAgent) -> None:
    for agent in agents:
        await agent.close()


@pytest.mark.slow
def test_another_job_goes_on_over_the_region_that_has_come(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            ann = (await stage.client.add_user("ann")).token
            a, b = await bring_up(stage)
            wanted = (*LONG, "objective.deadline=2h", "objective.budget=3")
            async with as_user(stage, ann) as client:
                job = (await submitted(client, job_file, "r1", *wanted)).id
                await train(job, a, b)
                await rounds(job, (a, b), 5)
                await refused(client.replan(job), "INADMISSIBLE", "in the same regions, so")
                c = await come(stage, "c")
                ended_by = await client.replan(job, "c is here")
                assert "over a, b, c: c is here" in ended_by.condition
                assert (await client.replan(job)).id == job, "asked again it is asked once"
            # What is trained until it ends counts.
            await end_early(job, (a, b), 6)
            first = await ended(stage, job)
            assert (first.state, json.loads(first.result_json)["successor"]) == ("succeeded", first.successor)
            after = await stage.client.job(first.successor)
            assert (after.user, after.initial_model.job, after.initial_model.digest) == ("ann", job, digest_of(MODEL))
            assert after.deadline_at == pytest.approx(first.deadline_at, abs=1e-3)
            spec = json.loads(after.spec_json)
            assert spec["train"]["end"] == {"epochs": None, "steps": 28, "goal": None, "patience": None, "time": None}
            assert spec["train"]["seed"] == 1
            assert spec["objective"]["budget"] == pytest.approx(2.5)
            speeds = {p["region"]: p["samples_per_second"] for p in json.loads(after.plan_json)["partitions"]}
            assert speeds == {"a": 400.0, "b": 400.0, "c": 500.0}, "as the job before it has measured them"
            starts = [await a.command("start", 2), await b.command("start", 2), await c.command("start")]
            assert {start.job for start in starts} == {after.id}
            assert {start.task.initial_model for start in starts} == {digest_of(MODEL)}
            assert await a.fetch(digest_of(MODEL)) == MODEL
            kinds = await stage.events(job)
            assert [kind for kind in kinds if kind.startswith("job.")][-4:] == [
                "job.finishing", "job.publishing", "job.replanned", "job.succeeded",
            ]  # fmt: skip
            assert await data_of(stage, job, "job.replanned") == {"successor": after.id, "regions": ["a", "b", "c"]}
            await refused(stage.client.finish(job), "ILLEGAL_STATE", f"job {after.id} continues")
            assert (await data_of(stage, after.id, "job.submitted"))["initial_model"]["job"] == job
            await close(a, b, c)

    run(scenario())


@pytest.mark.slow
def test_a_crash_between_the_two_loses_neither(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None: ...

    async def scenario() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Replanner, "_create_successor", nothing)
            async with staged(serve_config) as stage:
                a, b = await bring_up(stage)
                job = (await stage.submit(job_file, overrides=LONG)).job.id
                await train(job, a, b)
                c = await come(stage, "c")
                await rounds(job, (a, b), 5)
                await stage.client.replan(job)
                await end_early(job, (a, b), 5)
                waits = await stage.client.job(job)
                assert (waits.state, waits.successor) == ("finishing", "")
                assert "plan of the job that continues its model" in waits.condition
                await close(a, b, c)
        # What it was to continue in is not there any more: so long that is waited for.
        monkeypatch.setattr(_replanner, "_RECONNECT_SECONDS", 0.2)
        async with staged(serve_config) as stage:
            first = await ended(stage, job)
            assert first.state == "succeeded"
            assert len(await stage.client.jobs(ended=True)) == 2
            assert (await stage.client.job(first.successor)).initial_model.job == job

    run(scenario())


@pytest.mark.parametrize(
    ("usd", "count", "why", "code"),
    [(5.0, 5, "the budget of", None), (0.25, 20, "has nothing left to train", "ILLEGAL_STATE")],
)
def test_where_nothing_is_left_there_is_no_other(
    serve_config: ServeConfig, job_file: Path, usd: float, count: int, why: str, code: str | None
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=(*LONG, "objective.budget=8"))).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            await end_early(job, (a, b), count, usd)
            first = await ended(stage, job)
            assert (first.state, first.successor) == ("succeeded", "")
            told = await data_of(stage, job, "job.replanned")
            assert told == {"successor": None, "regions": [], "code": code}
            assert len(await stage.client.jobs(ended=True)) == 1
            texts = [e.text async for e in stage.client.watch(job, follow=False) if e.kind == "job.replanned"]
            assert why in texts[0]
            await close(a, b, c)

    run(scenario())


async def silent(stage: Stage, agent: FakeAgent) -> None:
    await agent.close()

    async def gone() -> bool:
        return any(region.name == agent.region and region.state != "live" for region in await stage.client.regions())

    await stage.until(gone)


@pytest.mark.slow
def test_nothing_waits_for_a_region_that_has_left_meanwhile(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(_replanner, "_RECONNECT_SECONDS", 0.2)
        async with staged(replace(serve_config, lease=timedelta(hours=1))) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=LONG)).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            await silent(stage, c)
            await end_early(job, (a, b), 6)
            first = await ended(stage, job)
            after = await stage.client.job(first.successor)
            assert [part["region"] for part in json.loads(after.plan_json)["partitions"]] == ["a", "b"]
            assert json.loads(after.spec_json)["regions"]["avoid"] == [], "what it may run in stays as it was"
            texts = [e.text async for e in stage.client.watch(job, follow=False) if e.kind == "job.replanned"]
            assert "over the same regions as before; planned without c" in texts[0]
            # Nor does a running job end for one that is silent.
            for agent in (a, b):
                await agent.command("start", 2)
                agent.report(after.id, "ready", ps_address=f"{agent.region}.example:9000")
                agent.report(after.id, "training")
            await rounds(after.id, (a, b), 5)
            await refused(stage.client.replan(after.id), "INADMISSIBLE", "in the same regions, so")
            c = await come(stage, "c")
            await stage.client.replan(after.id)
            await close(a, b, c)

    run(scenario())


@pytest.mark.slow
def test_a_region_that_comes_back_in_a_moment_is_waited_for(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(_replanner, "_RECONNECT_SECONDS", 60.0)
        async with staged(replace(serve_config, lease=timedelta(hours=1))) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=LONG)).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            await silent(stage, c)
            await end_early(job, (a, b), 6)
            c = await come(stage, "c")
            after = await stage.client.job((await ended(stage, job)).successor)
            assert [part["region"] for part in json.loads(after.plan_json)["partitions"]] == ["a", "b", "c"]
            await close(a, b, c)

    run(scenario())


@pytest.mark.parametrize(
    ("request_id", "done", "may"), [("r", 3, True), ("replan-k-1", 3, False), ("replan-k-1", 4, True)]
)
def test_what_goes_on_makes_a_tenth_of_its_rounds_first(tmp_path: Path, request_id: str, done: int, may: bool) -> None:
    """Whatever comes and goes; of 40 rounds."""
    watch = Watch(tmp_path)
    watch.regions["c"] = replace(watch.regions["a"], row=replace(watch.regions["a"].row, name="c"))
    job = running(tmp_path, "regions.replan=auto", done=done)
    job = replace(job, row=replace(job.row, request_id=request_id), plan=replace(job.plan, rounds=40))
    job = replace(job, state=replace(job.state, started_at=1000.0))
    federation: Any = SimpleNamespace(regions=watch.regions, jobs={job.row.id: job}, clock=lambda: 900.0)
    replanner = Replanner(federation)
    federation.clock = lambda: 1010.0
    assert replanner._may_pay(job) is may


@pytest.mark.slow
def test_a_user_who_wants_a_job_ended_gets_no_other(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=LONG)).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            assert "requested by a user: enough" in (await stage.client.finish(job, "enough")).condition
            await refused(stage.client.replan(job), "ILLEGAL_STATE", "is ending already")
            await end_early(job, (a, b), 6)
            first = await ended(stage, job)
            assert (first.state, first.successor) == ("succeeded", "")
            assert (await data_of(stage, job, "job.goal"))["asked"] is True
            assert (await data_of(stage, job, "job.replanned"))["successor"] is None
            assert (await stage.client.finish(job)).state == "succeeded", "asked again it stays so"
            await close(a, b, c)

    run(scenario())


@pytest.mark.slow
def test_a_promise_that_cannot_be_given_again_is_told_and_the_job_goes_on(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            wanted = (*LONG, "objective.deadline=1h", "train.workers=2")
            job = (await stage.submit(job_file, overrides=wanted)).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            # Meanwhile another job has taken c, to its end.
            holds = ("regions.use=[c]", "train.workers=2", "train.end.steps=1200000")
            assert (await stage.submit(job_file, "r2", holds)).created
            await end_early(job, (a, b), 5)
            first = await ended(stage, job)
            after = await stage.client.job(first.successor)
            assert after.deadline_at == 0.0
            assert (await data_of(stage, after.id, "job.promise"))["in_danger"] is True
            await close(a, b, c)

    run(scenario())


def test_what_is_planned_again_must_run_and_be_ones_own(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            bob = (await stage.client.add_user("bob")).token
            job = (await stage.submit(job_file, overrides=LONG)).job.id
            await refused(stage.client.replan("nobody"), "JOB_NOT_FOUND")
            await refused(stage.client.replan(job), "ILLEGAL_STATE", "is not running")
            await train(job, a, b)
            await rounds(job, (a, b), 5)
            async with as_user(stage, bob) as client:
                await refused(client.replan(job), "FORBIDDEN")
            await stage.client.finish(job)
            await refused(stage.client.replan(job), "ILLEGAL_STATE", "is ending already: requested by a user")
            await close(a, b)

    run(scenario())


def test_a_job_takes_up_a_region_by_itself_where_its_file_says_so(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(_replanner, "_STABLE_SECONDS", 0.0)
        wanted = ("train.end.steps=40000", "train.workers=1")
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            quiet, job = [
                (await stage.submit(job_file, f"r-{how}", (*wanted, f"regions.replan={how}"))).job.id
                for how in ("asked", "auto")
            ]
            for one in (quiet, job):
                for agent in (a, b):
                    await agent.command("start", 1 + (one == job))
                    agent.report(one, "ready", ps_address=f"{agent.region}.example:9000")
                for agent in (a, b):
                    agent.report(one, "training")
                await rounds(one, (a, b), 5)
            c = await come(stage, "c")
            told = await a.command("peers", 3)
            assert (told.job, told.finish) == (job, True)
            data = await data_of(stage, job, "job.replanning")
            assert data == {
                "regions": ["a", "b"], "wanted": ["a", "b", "c"], "reason": "c adds data", "by_itself": True,
            }  # fmt: skip
            assert (await stage.client.job(quiet)).condition == ""
            await close(a, b, c)

    run(scenario())


def running(folder: Path, *wanted: str, done: int) -> JobEntry:
    """A job over two regions, of which one is a round ahead; each has cost 0.5 USD."""
    watch = Watch(folder)
    spec = load(folder / "job.yaml", wanted).spec
    money = (Charge("function-seconds", 1.0, "GB-s", 0.5, "list"),)
    reports = [Report(1, "training", round=done + ahead, totals=MeterTotals(money=money)) for ahead in (0, 1)]
    parts = tuple(replace(part, report=told) for part, told in zip(watch.state.partitions, reports, strict=True))
    plan = replace(watch.plan, rounds=20, interval=10)
    return replace(watch.entry, spec=spec, plan=plan, state=replace(watch.state, partitions=parts))


def test_what_is_left_of_a_job(tmp_path: Path) -> None:
    wanted = (
        "train.end={epochs: 40}", "train.learningRate={schedule: cosine, begin: 0.2}", "train.seed=5",
        "objective={deadline: 1h, soft: [{deadline: 2h}], budget: 4}", "regions.avoid=[c]",
    )  # fmt: skip
    job = running(tmp_path, *wanted, done=5)
    rest = rest_of(replace(job, state=replace(job.state, deadline_at=1_800_000_000.5)), 0.0)
    assert rest.train.initial_model is not None
    assert rest.train.initial_model.job == job.row.id
    assert (rest.train.end.epochs, rest.train.end.steps, rest.train.seed) == (30.0, None, 6)
    assert rest.train.learning_rate is not None
    assert rest.train.learning_rate.begin == pytest.approx(0.4), "a quarter of what was left is gone"
    assert (rest.objective.budget, rest.objective.soft) == (3.0, [])
    assert rest.objective.deadline == "2027-01-15T08:00:00.500000+00:00"
    kept = ("task", "data", "regions", "wan", "function", "metadata", "limits")
    assert all(getattr(rest, name) == getattr(job.spec, name) for name in kept)
    chosen = running(tmp_path, "train.end={epochs: 40}", "train.batch=auto", done=5)
    parts = tuple(replace(part, batch=16) for part in chosen.plan.partitions)
    assert rest_of(replace(chosen, plan=replace(chosen.plan, partitions=parts)), 0.0).train.batch == 16
    # One that was taken without a promise continues without one.
    assert rest_of(job, 0.0).objective.deadline is None
    with pytest.raises(GeofedError, match="has nothing left to train"):
        rest_of(running(tmp_path, "train.end={steps: 195}", done=20), 0.0)
    with pytest.raises(GeofedError, match="budget of j is spent"):
        rest_of(running(tmp_path, "objective.budget=1", done=5), 0.0)


@settings(deadline=None, max_examples=budget(40))
@given(st.integers(1, 400), st.lists(st.integers(0, 12), max_size=6))
def test_however_often_it_is_planned_again_all_is_trained_once(steps: int, ends: list[int]) -> None:
    """Over jobs of ever fewer steps, each of which ends after some of its rounds; and the schedule continues as one."""
    with TemporaryDirectory() as name:
        job = running(Path(name), f"train.end={{steps: {steps}}}", "train.learningRate={schedule: linear}", done=0)
    made = 0
    for end in ends:
        total = steps - made
        job = replace(job, plan=replace(job.plan, rounds=-(-total // 10)))
        done = min(end, job.plan.rounds)
        parts = tuple(replace(part, report=Report(1, "training", round=done)) for part in job.state.partitions)
        job = replace(job, state=replace(job.state, partitions=parts))
        if total - done * 10 <= 0:
            with pytest.raises(GeofedError, match="has nothing left"):
                rest_of(job, 0.0)
            return
        job = replace(job, spec=rest_of(job, 0.0))
        made += done * 10
        assert job.spec.train.end.steps == steps - made
        assert job.spec.train.learning_rate is not None
        # To the round: the last one of a job may be longer than what is asked for.
        assert job.spec.train.learning_rate.begin == pytest.approx(made / steps, abs=10 * (len(ends) + 1) / steps)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"regions": ("a", "b", "c")}, "c adds data"),
        ({"regions": ("a", "b", "c"), "begun_at": 0.0}, ""),  # its start alone takes a tenth of what is left
        ({"seconds": 60.0, "minimise": "time"}, "it ends 53% sooner"),
        ({"seconds": 130.0, "minimise": "time"}, ""),
        ({"seconds": 60.0, "minimise": "time", "basis": "prior"}, ""),
        ({"seconds": 60.0}, ""),
        ({"usd": 1.0}, "it costs 60% less"),
        ({"usd": 2.6}, ""),
        ({"done": 19, "regions": ("a", "b", "c")}, ""),
        ({"done": 0, "regions": ("a", "b", "c")}, ""),
    ],
)
def test_when_it_pays_to_take_a_region_up(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    """After 5 of 20 rounds of 10 s each and 0.2 USD; 150 s and 3 USD are left, and a round more to end."""
    job = running(tmp_path, f"objective.minimise={change.get('minimise', 'cost')}", done=change.get("done", 5))
    start = change.get("begun_at", 998.0)
    job = replace(job, state=replace(job.state, begun_at=start, started_at=1000.0))
    expected = job.plan.estimate
    told = replace(
        expected,
        seconds=replace(expected.seconds, expected=change.get("seconds", 1e6)),
        usd=replace(expected.usd, expected=change.get("usd", 1e6)),
        basis=change.get("basis", "stated"),
    )
    part = job.plan.partitions[0]
    parts = tuple(replace(part, region=name) for name in change.get("regions", ("a", "b")))
    then = replace(job.plan, partitions=parts, estimate=told)
    assert pays(job, then, 10.0) == why


@given(st.lists(st.floats(8.0, 12.0), min_size=5, max_size=40), st.integers(0, 39), st.floats(0.0, 1e6), st.booleans())
def test_a_pause_makes_no_pace(took: list[float], paused: int, seconds: float, new: bool) -> None:
    """Nor does a look between two rounds, or what had been done before anybody looked."""
    pace, at, done = RoundTimes(1000.0 if new else None), 1000.0, 0 if new else 500
    pace.record(done, at)
    for index, each in enumerate(took):
        at += each / 2
        pace.record(done, at)
        at, done = at + each / 2 + seconds * (index == paused), done + 1
        pace.record(done, at)
        known = index + 1 if new else index
        assert (pace.round_seconds is not None) == (known >= 3)
        if pace.round_seconds is not None:
            assert 8.0 - 1e-6 <= pace.round_seconds <= 12.0 + 1e-6


def test_rounds_that_are_heard_of_at_once_do_not_outweigh_those_that_come_one_by_one() -> None:
    pace = RoundTimes(None)
    pace.record(500, 0.0)
    pace.record(501, 1.0)
    pace.record(900, 1.5)
    for n in range(1, 5):
        pace.record(900 + n, 1.5 + 10.0 * n)
    assert pace.round_seconds == pytest.approx(10.0)
