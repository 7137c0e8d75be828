"""Models of evaluated rounds: which are kept, when a job ends early because it does not improve, and over how long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save

from control_plane.core import (
    CancelRequested,
    Evaluation,
    JobAction,
    JobMachine,
    JobState,
    Keep,
    KeptModel,
    Partition,
    Planned,
    Record,
    RegionLive,
    RegionLost,
    Report,
    Reported,
    SendKeep,
    SendPeers,
    StartAllowed,
    Tick,
    Uploaded,
    best_model,
    last_model,
    models_of,
)
from control_plane.server import ServeConfig
from control_plane.service.planning._planning import keep_of
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import bring_up, figures, finish, run, train

LOSS = Keep()


class Job:
    """A running job of two regions, whose evaluations and uploads the test reports."""

    def __init__(self, keep: Keep = LOSS, **settings: Any) -> None:
        state = JobState("j", 100.0, 0.0, partitions=(Partition("a"), Partition("b")), keep=keep, evaluate_every=1)
        self.machine, self.at = JobMachine(replace(state, **settings)), 1.0
        self.machine.handle(Planned(0.0))
        self.machine.handle(StartAllowed(0.0))
        self.actions: list[JobAction] = []
        for region in "ab":
            self.report(region)

    @property
    def state(self) -> JobState:
        return self.machine.state

    def report(self, region: str, round_: int = 0, kept_bytes: int | None = None, **fields: Any) -> list[JobAction]:
        last = self.state.partition(region)
        evaluation = last.report.evaluation if last and last.report else Evaluation()
        if "metrics" in fields:
            evaluation = Evaluation(fields.pop("metrics"), 10, round_)
        told = {"keeps_models": True, "ps_address": f"{region}:1", "evaluation": evaluation, **fields}
        made = self.machine.handle(
            Reported(self.at, region, Report(1, "training", round=round_, **told), kept_bytes=kept_bytes)
        )
        self.actions += made
        return made

    def evaluated(self, round_: int, value: float, metric: str = "loss", regions: str = "ab") -> list[int]:
        """All regions have evaluated a round; returns the rounds that are then to be uploaded."""
        made = [one for region in regions for one in self.report(region, round_, metrics={metric: value})]
        return [one.round for one in made if isinstance(one, SendKeep)]

    def uploaded(self, round_: int, region: str = "a", *, error: str = "") -> list[int]:
        """The region has uploaded a model; returns the rounds that are then to be uploaded."""
        digest, size = ("", None) if error else (f"sha256:{round_}", 10 * round_)
        last = self.state.partition(region)
        at = last.report.round if last and last.report else 0
        made = self.report(region, at, size, kept=Uploaded(round_, digest, error))
        return [one.round for one in made if isinstance(one, SendKeep)]

    def rounds(self) -> list[int]:
        return [model.round for model in models_of(self.state)]

    def records(self, kind: str) -> list[str]:
        return [one.text for one in self.actions if isinstance(one, Record) and one.kind == kind]


def test_the_last_evaluated_round_is_kept_and_one_upload_runs_at_a_time() -> None:
    job = Job()
    assert job.evaluated(1, 0.5, regions="a") == [], "b has not evaluated it"
    assert job.evaluated(1, 0.7, regions="b") == [1]
    assert job.evaluated(2, 0.4) == []
    assert job.evaluated(3, 0.3) == []
    assert job.uploaded(1) == [3], "round 2 is superseded"
    assert job.uploaded(3) == []
    assert models_of(job.state) == (KeptModel(3, {"loss": 0.3}, "sha256:3", 30),)
    assert job.records("model.kept") == ["the model of round 1 is kept", "the model of round 3 is kept"]


def test_metrics_of_one_round_count_together_even_where_a_region_is_ahead() -> None:
    job = Job()
    job.report("a", 1, metrics={"loss": 1.0})
    job.report("a", 2, metrics={"loss": 0.1})
    assert job.evaluated(1, 2.0, regions="b") == [1]
    job.uploaded(1)
    assert models_of(job.state)[0].metrics == {"loss": 1.5}


def test_the_best_one_is_kept_by_its_metric() -> None:
    job = Job(Keep(best=True, metric="accuracy", highest=True))
    assert job.evaluated(1, 0.5, "accuracy") == [1]
    assert job.uploaded(1) == []
    assert job.evaluated(2, 0.4, "accuracy") == []
    assert job.evaluated(3, 0.6, "accuracy") == [3]
    assert job.evaluated(4, 0.7, "accuracy") == []
    assert job.evaluated(5, 0.65, "accuracy") == []
    assert job.uploaded(3) == [4], "better than the one under way; round 5 is not"
    job.uploaded(4)
    assert job.rounds() == [4]
    assert best_model(job.state) == last_model(job.state)


def test_without_the_metric_the_last_one_is_kept_and_none_is_the_best() -> None:
    job = Job(Keep(best=True, metric="acuracy", highest=True))
    for round_ in (1, 2):
        assert job.evaluated(round_, 0.5, "accuracy") == [round_]
        job.uploaded(round_)
    assert job.rounds() == [2]
    assert best_model(job.state) is None


def test_a_number_keeps_the_last_ones_and_the_best_of_them_is_known() -> None:
    job = Job(Keep(models=3))
    for round_, loss in enumerate((0.5, 0.2, 0.4, float("nan"), 0.6), 1):
        job.evaluated(round_, loss)
        job.uploaded(round_)
    assert job.rounds() == [3, 4, 5]
    best = best_model(job.state)
    assert best is not None
    assert best.round == 3


def test_a_region_that_is_lost_or_fails_to_upload_leaves_the_job_running() -> None:
    job = Job()
    assert job.evaluated(1, 0.5) == [1]
    job.evaluated(2, 0.4)
    assert job.uploaded(1, error="the model of round 1 is not kept") == [2]
    assert job.records("model.left-out") == ["the model of round 1 is not kept: the model of round 1 is not kept"]
    sent = [one for one in job.machine.handle(RegionLost(2.0, "a")) if isinstance(one, SendKeep)]
    assert sent == [SendKeep("b", 1, 2)]
    job.uploaded(2, "b")
    assert job.rounds() == [2]
    assert job.evaluated(3, 0.3, regions="b") == []
    assert job.state.phase == "running"


def test_an_agent_that_has_restarted_is_asked_again() -> None:
    job = Job()
    job.evaluated(1, 0.5)
    sent = [one for one in job.machine.handle(RegionLive(2.0, "a", restarted=True)) if isinstance(one, SendKeep)]
    assert [one.round for one in sent] == [1]
    assert sent[0].region == "b", "a does not train at the moment"


def test_agents_of_older_versions_are_never_asked() -> None:
    job = Job()
    for region in "ab":
        made = job.report(region, 1, metrics={"loss": 1.0}, keeps_models=False)
        assert not any(isinstance(one, SendKeep) for one in made)
    assert job.state.models.awaited == ()
    for region in "ab":
        job.report(region, 2, metrics={"loss": 1.0}, keeps_models=False)
    told = "models of evaluated rounds are not kept: the regions' agents are of older versions"
    assert job.records("model.left-out") == [told], "once"


def test_the_final_model_takes_the_place_of_the_last_one_and_stands_beside_the_best() -> None:
    for keep, wanted in ((Keep(), [4]), (Keep(best=True), [2, 4]), (Keep(models=2), [3, 4])):
        job = Job(keep)
        for round_, loss in ((1, 0.5), (2, 0.2), (3, 0.3)):
            job.evaluated(round_, loss)
            job.uploaded(round_)
        for state in ("finished", "published"):
            for region in "ab":
                last = Evaluation({"loss": 0.4}, 10, 4)
                report = Report(1, state, round=4, model_digest="m", evaluation=last, ps_address="p", blob_digest="f")
                job.machine.handle(Reported(3.0, region, report, blob_bytes=7))
        assert job.state.phase == "succeeded"
        assert job.rounds() == wanted
        last_one = last_model(job.state)
        assert last_one is not None
        assert (last_one.digest, last_one.metrics) == ("f", {"loss": 0.4})


def test_the_end_of_a_job_says_what_is_kept() -> None:
    job = Job()
    job.evaluated(1, 0.5)
    job.uploaded(1)
    made = job.machine.handle(CancelRequested(5.0, "enough"))
    for region in "ab":
        made += job.machine.handle(Reported(6.0, region, Report(1, "stopped")))
    assert "cancelled: enough; the model of round 1 is kept" in [m.text for m in made if isinstance(m, Record)]
    assert job.rounds() == [1]


def ending(actions: list[JobAction]) -> bool:
    return any(isinstance(one, SendPeers) and one.finish for one in actions)


def test_a_job_that_does_not_improve_ends_early() -> None:
    job = Job(Keep(metric="accuracy", highest=True), patience=2)
    for round_, accuracy in ((1, 0.5), (2, 0.4), (3, 0.6), (4, 0.6)):
        job.evaluated(round_, accuracy, "accuracy")
    assert not job.state.ends_early
    job.actions = []
    job.evaluated(5, 0.55, "accuracy")
    assert ending(job.actions)
    text = "accuracy has not improved in 2 evaluations since round 3, where it was 0.6000"
    assert job.state.ends_early == text
    assert job.records("job.goal") == [f"ending early: {text}"]


def test_a_job_ends_when_its_time_is_over() -> None:
    job = Job(time_limit_seconds=60.0)
    assert not ending(job.machine.handle(Tick(60.5)))
    made = job.machine.handle(Tick(61.0))
    assert ending(made)
    assert job.state.ends_early == "the training time of 60 s is over"
    assert job.machine.handle(Tick(62.0)) == []


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ((), Keep()),
        (("train.evaluateEvery=2", "train.keep=all"), Keep(models=100)),
        (("train.evaluateEvery=2", "train.keep=3", "train.best={metric: f1, mode: max}"), Keep(3, False, "f1", True)),
        (
            ("train.evaluateEvery=2", "train.keep=best", "train.end.goal={metric: accuracy, atLeast: 0.9}"),
            Keep(1, True, "accuracy", True),
        ),
    ],
)
def test_what_the_job_file_says(job_file: Path, settings: tuple[str, ...], keep: Keep) -> None:
    assert keep_of(load(job_file, list(settings)).spec) == keep


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.keep=best", "`keep` requires `evaluateEvery`"),
        ("train.end.patience=3", "`end.patience` requires `evaluateEvery`"),
        ("train.keep=0", "train.keep"),
        ("train.best={metric: loss}", "mode"),
        ("train.end.time=soon", "not a valid duration"),
    ],
)
def test_what_the_job_file_may_not_say(job_file: Path, setting: str, says: str) -> None:
    with pytest.raises(GeofedError, match=says):
        load(job_file, [setting])


def model_of(job: str, round_: int) -> bytes:
    return save({}, {"job": job, "round": str(round_)})


async def keeps(job: str, a: FakeAgent, b: FakeAgent, round_: int, asked: int) -> bytes:
    """Both regions have evaluated a round, and one of them uploads its model, as it is asked for the n-th time."""
    for agent, other in ((a, "b"), (b, "a")):
        agent.report(job, "training", keeps_models=True, **figures(agent.region, other, round_))
    wanted = await a.command("keep", asked)
    assert (wanted.job, wanted.round) == (job, round_)
    model = model_of(job, round_)
    await a.put(model)
    kept = agent_pb2.UploadedModel(round=round_, blob_digest=digest_of(model))
    a.report(job, "training", keeps_models=True, kept=kept, **figures("a", "b", round_))
    await a.settled()
    return model


async def model(stage: Stage, job: str, round_: int = 0) -> bytes:
    return b"".join([chunk.data async for chunk in stage.client.model(job, round_=round_)])


def blobs(config: ServeConfig) -> set[str]:
    return {f"sha256:{path.name}" for path in (config.state_dir / "blobs").glob("[0-9a-f]*")}


@pytest.mark.slow
def test_a_cancelled_job_leaves_its_model_and_is_resumed_from_it(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            end = ("train.end={steps: 20}", "wan.interval=2", "train.evaluateEvery=1", "objective.deadline=2h")
            job = (await stage.submit(job_file, "r1", end)).job.id
            with pytest.raises(GeofedError, match="no model of it is kept"):
                await model(stage, job)
            with pytest.raises(GeofedError, match="only an ended job can be resumed"):
                await stage.client.resume(job, "again")
            await train(job, a, b)
            first = await keeps(job, a, b, 1, 1)
            assert await model(stage, job) == first, "while it runs"
            second = await keeps(job, a, b, 2, 2)
            assert digest_of(first) not in blobs(serve_config), "only the last one is kept"
            with pytest.raises(GeofedError, match=r"the model of round 1 of job .* is not kept"):
                await model(stage, job, 1)
            await stage.client.cancel(job)
            for agent in (a, b):
                agent.report(job, "stopped")
                await agent.settled()
            ended = await stage.client.job(job)
            (kept,) = ended.models
            assert (ended.state, kept.round, kept.digest) == ("cancelled", 2, digest_of(second))
            assert kept.metrics["accuracy"] == pytest.approx(0.825)
            assert await model(stage, job, 2) == second
            reply = await stage.client.resume(job, "again")
            after = reply.job
            assert (after.initial_model.job, after.initial_model.round, reply.created) == (job, 2, True)
            assert '"steps":16' in after.spec_json, "two rounds of two steps are made"
            again = await stage.client.resume(job, "again")
            assert (again.job.id, again.created) == (after.id, False)
            start = await a.command("start", 2)
            assert start.task.initial_model == digest_of(second)
            assert await a.fetch(digest_of(second)) == second
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_job_starts_from_a_round_of_a_failed_one(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            end = ("train.end={steps: 20}", "train.evaluateEvery=1", "train.keep=all")
            job = (await stage.submit(job_file, "r1", end)).job.id
            await train(job, a, b)
            first = await keeps(job, a, b, 1, 1)
            await keeps(job, a, b, 2, 2)
            a.report(job, "failed", condition="boom")
            await a.settled()
            wanted = (f"train.initialModel={{job: {job}, round: 1}}",)
            assert (await stage.submit(job_file, "r2", wanted)).job.initial_model.digest == digest_of(first)
            with pytest.raises(GeofedError, match=r"no kept model of job .* has the metric loss") as caught:
                await stage.submit(job_file, "r3", (f"train.initialModel={{job: {job}, round: best}}",))
            assert caught.value.hint == "name one of accuracy in `train.best`"
            with pytest.raises(GeofedError, match="the model of round 7 of job") as caught:
                await stage.submit(job_file, "r4", (f"train.initialModel={{job: {job}, round: 7}}",))
            assert caught.value.hint == "kept rounds: 1, 2"
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_model_that_comes_too_late_leaves_nothing_behind(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, "r1", ("train.evaluateEvery=1", "train.end={steps: 20}"))).job.id
            await train(job, a, b)
            for agent, other in ((a, "b"), (b, "a")):
                agent.report(job, "training", keeps_models=True, **figures(agent.region, other, 1))
            await a.command("keep")
            late = model_of(job, 1)
            await a.put(late)
            await stage.client.cancel(job)
            kept = agent_pb2.UploadedModel(round=1, blob_digest=digest_of(late))
            for agent in (b, a):
                agent.report(job, "stopped")
                await agent.settled()
            assert (await stage.client.job(job)).state == "cancelled"
            assert digest_of(late) in blobs(serve_config)
            a.report(job, "stopped", keeps_models=True, kept=kept)
            await a.settled()
            assert digest_of(late) not in blobs(serve_config)
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_whole_job_has_nothing_to_resume_and_a_foreign_file_is_not_kept(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, "r1", ("train.evaluateEvery=1",))).job.id
            await train(job, a, b)
            for agent, other in ((a, "b"), (b, "a")):
                agent.report(job, "training", keeps_models=True, **figures(agent.region, other, 1))
            await a.command("keep")
            foreign = model_of("another", 1)
            await a.put(foreign)
            kept = agent_pb2.UploadedModel(round=1, blob_digest=digest_of(foreign))
            a.report(job, "training", keeps_models=True, kept=kept, **figures("a", "b", 1))
            await a.settled()
            assert not (await stage.client.job(job)).models
            await finish(job, a, b)
            assert [one.round for one in (await stage.client.job(job)).models] == [2]
            with pytest.raises(GeofedError, match="has nothing left to train"):
                await stage.client.resume(job, "again")
            for agent in (a, b):
                await agent.close()

    run(scenario())
