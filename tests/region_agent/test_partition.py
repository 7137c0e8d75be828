"""A partition with a real parameter server and a gateway that the test speaks for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs
from support.jobs import LINEAR_TASK, pack, write_samples
from support.pki import Authority, write
from support.processes import running_as

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import EDITIONS, Edition
from geofed_pb.v1 import agent_pb2
from region_agent.config import RegionConfig
from region_agent.config._data import PrivacyBudget
from region_agent.gateway.device_blocks import DeviceBlocks
from region_agent.link.identity import Identity
from region_agent.partition import invocation_bodies
from region_agent.partition.calls import whole_pipelines
from region_agent.partition.channel import RegionChannel
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import ConfigurePs, RecordEvent, Scaled, Stopped, WorkerEnded
from region_agent.partition.invocation_bodies import HeldDevices
from region_agent.partition.runner import PartitionRunner
from region_agent.privacy import PrivacyGuard
from region_agent.state.store import AgentStore
from region_agent.tasks.folder import TaskFolder
from region_agent.worker.invocation import Invocation, Outcome, Schedule
from sync.framing import digest_of

pytestmark = pytest.mark.processes

JOB = "job-1"


class Gateway:
    """Deploys nothing; what an invocation answers is the test's to say."""

    def __init__(self) -> None:
        self.calls: list[Invocation] = []
        self.called: list[str] = []
        self.answers: list[Outcome | bytes | GeofedError] = []
        self.deployed: list[str] = []
        self.deleted = 0
        self.delete_fails: list[GeofedError] = []
        self.hold = asyncio.Event()
        self.of_edition = EDITIONS["none"]

    def answer_open(self, answers: list[Outcome | bytes | GeofedError]) -> None:
        """Answer the open calls; later ones are held."""
        open_calls, self.hold = self.hold, asyncio.Event()
        self.answers = answers
        open_calls.set()

    async def deploy(self, spec: Any) -> None:
        self.deployed.append(spec.service)

    async def scale(self, name: str, replicas: int) -> None: ...

    async def edition(self) -> Edition:
        return self.of_edition

    async def wait_answering(self, name: str, timeout: timedelta) -> None: ...

    async def wait_ready(self, name: str, replicas: int, timeout: timedelta) -> None: ...

    async def delete(self, name: str) -> None:
        if self.delete_fails:
            raise self.delete_fails.pop(0)
        self.deleted += 1

    async def logs(self, name: str, **query: Any) -> AsyncIterator[Any]:
        return
        yield

    async def invoke(self, name: str, body: bytes, *, headers: dict[str, str], timeout: timedelta) -> Any:
        self.calls.append(Invocation.model_validate_json(body))
        self.called.append(name)
        if not self.answers:
            await self.hold.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, GeofedError):
            raise answer
        return SimpleNamespace(status=200, body=answer if isinstance(answer, bytes) else answer.model_dump_json())


class Scene:
    """A region around one partition."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = write_samples(folder / "data.npz", 20)
        self.config = RegionConfig.model_validate(
            {
                "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
                "capacity": {"workers": 2}, "policy": {"shipLogs": False},
                "prices": {
                    "source": "test", "asOf": "2026-11", "functionUsdPerGbSecond": 1.0, "functionUsdPerRequest": 1.0,
                    "serverUsdPerHour": 1.0, "egressUsdPerGb": 1.0,
                },
                "datasets": {"d": {"splits": {"train": {"uri": str(data), "samples": 20}}}},
                "server": {"exchangeHost": "127.0.0.1"},
            }
        )  # fmt: skip
        identity = Identity(folder)
        write(Authority().region("east"), identity.folder)
        self.store, self.gateway = AgentStore(folder / "agent.db"), Gateway()
        self.reports: list[agent_pb2.PartitionReport] = []
        self.events: list[RecordEvent] = []
        self.lines: list[str] = []
        self.bundle = pack({"task.py": LINEAR_TASK})
        self.blobs = {digest_of([self.bundle]): self.bundle}
        self.around = PartitionContext(
            config=self.config,
            identity=identity,
            store=self.store,
            gateway=self.gateway,  # type: ignore[arg-type]
            state_dir=folder,
            channel=RegionChannel(self.config.channel, folder / "channel", "east"),
            image="image",
            fetch_task=self._fetch,
            fetch_model=self._fetch_model,
            publish_model=self._publish,
            report=lambda message, durable: self.reports.append(message) if durable else None,
            record_event=lambda _, action: self.events.append(action),
            log=lambda job, source, line: self.lines.append(line),
        )
        self.start = agent_pb2.StartPartition(
            job=JOB, region="east", epoch=1, regions=["east"],
            task=agent_pb2.TaskRef(bundle_digest=digest_of([self.bundle]), module="task.py", dataset="d"),
            plan=agent_pb2.PartitionPlan(
                workers=1, batch=4, steps_per_round=1, rounds=1, memory_mb=512, slice_seconds=5.0,
                channel="file", wan_policy="ma", codec="fp32",
            ),
        )  # fmt: skip
        self.store.took_start(1, JOB, self.start.SerializeToString(), "a key of the right length for a test of it")
        self.partition = PartitionRunner(self.around, self.start)
        self.more: list[PartitionRunner] = []
        """Further partitions of a test."""

    async def _fetch(self, digest: str) -> TaskFolder:
        return TaskFolder(self.blobs[digest])

    async def _fetch_model(self, digest: str, into: Path) -> None:
        if digest not in self.blobs:
            raise GeofedError("UNAVAILABLE", "no such model yet")
        into.write_bytes(self.blobs[digest])

    async def _publish(self, job: str, ps: Any, round_: int) -> str:
        if round_ > 3:
            raise GeofedError("MODEL_NOT_FOUND", f"the model of round {round_} is not kept")
        return f"sha256:model-{round_}"

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - what is waited for knows of no event loop
                await asyncio.sleep(0.005)

    async def training(self) -> None:
        self.partition.begin()
        await self.until(lambda: self.gateway.calls)

    def servers(self) -> list[psutil.Process]:
        """The parameter servers of this region: other tests' may run in this process, too."""
        return running_as(f"-m sync.ps --config {self.folder}", psutil.Process().children())

    def server(self) -> psutil.Process:
        (process,) = self.servers()
        return process


def _play(act: Callable[[Scene], Awaitable[None]], folder: Path, rate: agent_pb2.LearningRate | None = None) -> None:
    async def whole() -> None:
        scene = Scene(folder)
        if rate is not None:
            scene.start.task.learning_rate.CopyFrom(rate)
        try:
            await act(scene)
        finally:
            for one in (scene.partition, *scene.more):
                await one.close()
            scene.store.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    "answer",
    [
        b"not an outcome",
        b'{"status": "perhaps"}',
        Outcome(status="failed", code="FENCED"),
        GeofedError("FUNCTION_FAILED", "x"),
    ],
)
def test_a_worker_is_called_again_whatever_its_function_answered(
    tmp_path: Path, answer: Outcome | bytes | GeofedError
) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.answers = [answer]
        await scene.training()
        await scene.until(lambda: len(scene.gateway.calls) == 2)
        assert [call.attempt for call in scene.gateway.calls] == [1, 2]
        assert scene.partition.machine.state == "training"
        assert scene.store.meters(JOB)["calls"] == 1.0

    _play(act, tmp_path)


def _account(report: agent_pb2.PartitionReport) -> dict[str, float]:
    return {line.item: line.quantity for line in report.totals.money}


@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_calls_that_are_cut_off_are_in_the_last_account(tmp_path: Path, end: str) -> None:
    """The end is told once they have stopped, with what they took and what the server took."""

    async def act(scene: Scene) -> None:
        scene.start.plan.workers = 2
        scene.partition = PartitionRunner(scene.around, scene.start)
        await scene.training()
        await scene.until(lambda: len(scene.gateway.calls) == 2)
        if end == "stopped":
            scene.partition.feed(Stopped("enough", discard=True))
        else:
            scene.gateway.answers = [Outcome(status="failed", code="TASK_FAILED", message="boom")]
            scene.gateway.hold.set()
            scene.gateway.hold = asyncio.Event()
        await scene.until(lambda: scene.reports[-1].state == end)
        account = _account(scene.reports[-1])
        assert account["function-calls"] == 2
        assert account["function-seconds"] > 0
        assert account["parameter-server"] > 0
        assert not scene.store.open_invocations()
        assert [report.state for report in scene.reports].count(end) == 1, "not before the account is whole"
        assert not (scene.folder / "jobs").stat().st_mode & 0o077

    with capture_logs() as logs:
        _play(act, tmp_path)
    lines = [(line["state"], line["condition"]) for line in logs if line["event"] == "partition" and line["job"] == JOB]
    why = "enough" if end == "stopped" else "boom"
    assert lines == [("preparing", None), ("ready", None), ("training", None), (end, why)]


def test_the_account_grows_while_a_call_is_open(tmp_path: Path) -> None:
    """A task that hangs costs money, also where nothing else happens."""

    async def act(scene: Scene) -> None:
        told: list[agent_pb2.PartitionReport] = []
        await scene.training()
        await scene.until(lambda: scene.partition.machine.state == "training")
        scene.partition._context = replace(scene.around, report=lambda message, durable: told.append(message))
        now = time.monotonic()
        scene.partition.report_account(now)
        assert not told, "it has just been told"
        scene.partition.report_account(now + 60.0)
        account = _account(told[-1])
        assert account["function-calls"] == 1
        assert account["function-seconds"] > 0
        assert account["parameter-server"] >= 60 / 3600
        assert scene.store.meters(JOB).get("calls", 0.0) == 0, "it is charged when it ends"

    _play(act, tmp_path)


def test_a_call_without_a_step_is_told_in_the_condition(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.training()
        now = time.monotonic()
        scene.partition.report_account(now)
        assert scene.partition.machine.condition == ""
        scene.partition.report_account(now + 50.0)
        told = scene.partition.machine.condition
        assert told == "no step for 50 s (a call without an answer is ended after 125 s)"

    _play(act, tmp_path)


def test_the_model_of_a_round_is_uploaded_when_it_is_asked_for(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.partition.keep(3)
        await scene.until(lambda: scene.reports)
        assert scene.reports[-1].kept.error == "the parameter server is not running"
        await scene.training()
        assert scene.reports[-1].keeps_models
        for round_, digest, error in ((3, "sha256:model-3", ""), (4, "", "the model of round 4 is not kept")):
            told = len(scene.reports)
            scene.partition.keep(round_)
            await scene.until(lambda told=told: len(scene.reports) > told)
            kept = scene.reports[-1].kept
            assert (kept.round, kept.blob_digest, kept.error) == (round_, digest, error)
        assert scene.partition.machine.state == "training", "the job continues"

    _play(act, tmp_path)


def test_a_report_during_an_upload_does_not_answer_it(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.training()
        uploads, goes_on = asyncio.Event(), asyncio.Event()

        async def publish(_: str, ps: Any, round_: int) -> str:
            uploads.set()
            await goes_on.wait()
            return f"sha256:model-{round_}"

        scene.partition._context = replace(scene.around, publish_model=publish)
        scene.partition.keep(3)
        await uploads.wait()
        scene.partition._report(durable=True)
        assert scene.reports[-1].kept == agent_pb2.UploadedModel()
        goes_on.set()
        await scene.until(lambda: scene.reports[-1].kept.round)
        assert scene.reports[-1].kept.blob_digest == "sha256:model-3"

    _play(act, tmp_path)


def test_what_never_came_up_has_lost_nothing(tmp_path: Path) -> None:
    """The agent ends before its first parameter server listens; the next one does not look for a state."""

    async def act(scene: Scene) -> None:
        in_the_way = tmp_path / "jobs" / JOB / "ps"
        in_the_way.write_text("no folder can be made here")
        scene.partition.begin()
        await scene.until(lambda: scene.events)
        await scene.partition.close()
        in_the_way.unlink()
        scene.partition = PartitionRunner(scene.around, scene.start)
        await scene.training()
        config = json.loads((tmp_path / "jobs" / JOB / "ps.json").read_text())
        assert not config["begun"]
        await scene.partition.close()
        scene.partition = PartitionRunner(scene.around, scene.start)
        scene.gateway.calls.clear()
        await scene.training()
        config = json.loads((tmp_path / "jobs" / JOB / "ps.json").read_text())
        assert config["begun"]

    _play(act, tmp_path)


def test_a_call_has_the_variables_of_the_task(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.start.task.env["MODE"] = "fast"
        await scene.training()
        assert scene.gateway.calls[0].env == {"MODE": "fast"}

    _play(act, tmp_path)


def _on_devices(scene: Scene) -> Callable[..., PartitionRunner]:
    """Return what makes partitions of jobs with four devices a worker on a machine with eight."""
    devices = {"kind": "a GPU", "count": 8}
    capacity = {"capacity": {"workers": 2, "devices": devices}}
    told = scene.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    told["prices"]["deviceUsdPerSecond"] = 1.0
    config = RegionConfig.model_validate({**told, **capacity})
    around = replace(scene.around, config=config, devices=DeviceBlocks(config.machine_devices))

    def partition(job: str, workers: int = 1) -> PartitionRunner:
        start = agent_pb2.StartPartition.FromString(scene.start.SerializeToString())
        start.job, start.task.gpus, start.plan.workers = job, "4", workers
        scene.store.took_start(2, job, start.SerializeToString(), "a key of the right length for a test of it")
        made = PartitionRunner(around, start)
        scene.more.append(made)
        return made

    return partition


def _devices(scene: Scene) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(call.job, call.worker, call.gpu_numbers) for call in scene.gateway.calls]


def test_workers_of_two_jobs_share_no_device(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        partition = _on_devices(scene)
        first, second = partition("first"), partition("second")
        first.begin()
        await scene.until(lambda: len(scene.gateway.calls) == 1)
        second.begin()
        await scene.until(lambda: len(scene.gateway.calls) == 2)
        low, high = (0, 1, 2, 3), (4, 5, 6, 7)
        assert _devices(scene) == [("first", 0, low), ("second", 0, high)]
        third = partition("third")
        third.begin()
        await scene.until(lambda: third.machine.state == "training")
        await asyncio.sleep(0.3)
        assert len(scene.gateway.calls) == 2, "it waits until devices are free"
        first.feed(Stopped("for the test", discard=True))
        await scene.until(lambda: len(scene.gateway.calls) == 3)
        assert _devices(scene)[2] == ("third", 0, low)
        assert first.machine.state == "stopped"
        scene.gateway.answer_open([Outcome(status="continue", resume_key="state") for _ in range(2)])
        await scene.until(lambda: len(scene.gateway.calls) == 5)
        assert sorted(_devices(scene)[3:]) == [("second", 0, high), ("third", 0, low)], "a worker keeps its devices"

    _play(act, tmp_path)


def test_devices_of_a_worker_that_is_scaled_in_are_free_once_its_call_has_ended(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        partition = _on_devices(scene)
        first, second = partition("first", 2), partition("second")
        first.begin()
        await scene.until(lambda: len(scene.gateway.calls) == 2)
        assert sorted(_devices(scene)) == [("first", 0, (0, 1, 2, 3)), ("first", 1, (4, 5, 6, 7))]
        first.scale(Scaled(1, "room for another job"))
        second.begin()
        await scene.until(lambda: second.machine.state == "training")
        await asyncio.sleep(0.3)
        assert len(scene.gateway.calls) == 2, "both calls are open"
        scene.gateway.answer_open([Outcome(status="left", resume_key="state", step=1) for _ in range(2)])
        await scene.until(lambda: {"second"} <= {job for job, _, _ in _devices(scene)})
        assert next(one[2] for one in _devices(scene) if one[0] == "second") == (4, 5, 6, 7)
        await scene.until(lambda: len(scene.gateway.calls) == 4)
        assert [one[2] for one in _devices(scene) if one[:2] == ("first", 0)] == [(0, 1, 2, 3)] * 2

    _play(act, tmp_path)


def test_where_no_devices_are_free_a_worker_is_called_as_if_there_were_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invocation_bodies, "_DEVICES_SECONDS", 0.1)

    async def act(scene: Scene) -> None:
        blocks = DeviceBlocks(8)
        assert blocks.take("another", 0, 5)
        held = HeldDevices(blocks, "job", 4, lambda: 2)
        with capture_logs() as logs:
            async with held.of(1) as numbers:
                assert numbers == ()
        assert [one["event"] for one in logs] == ["a worker shares devices with others: too few are free"]
        blocks.release("another", 0)
        async with held.of(1) as numbers:
            assert numbers == (0, 1, 2, 3)
        assert blocks.workers("job") == (1,)
        held.release()
        assert blocks.workers("job") == ()
        scene.start.task.gpus = "4"
        await scene.training()
        assert scene.gateway.calls[0].gpu_numbers == (), "the region states no devices"

    _play(act, tmp_path)


def test_a_busy_function_is_asked_again_in_the_same_attempt(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.answers = [GeofedError("FUNCTION_BUSY", "x"), Outcome(status="continue", resume_key="w/1/0/3")]
        await scene.training()
        await scene.until(lambda: len(scene.gateway.calls) == 3)
        assert [(call.attempt, call.resume_key) for call in scene.gateway.calls] == [(1, ""), (1, ""), (1, "w/1/0/3")]
        assert scene.events == []

    _play(act, tmp_path)


def test_job_code_that_is_wrong_ends_the_partition_with_its_sentence(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.answers = [Outcome(status="failed", code="TASK_FAILED", message="loss raised X at task.py:3")]
        await scene.training()
        await scene.partition.drained()
        last = scene.reports[-1]
        assert (last.state, last.error.code, last.condition) == ("failed", "TASK_FAILED", "loss raised X at task.py:3")
        assert scene.gateway.deleted == 1
        assert not (scene.folder / "channel" / JOB).exists()

    _play(act, tmp_path)


QUOTE = "dataset raised ValueError: could not convert string to float: 'Meier'"


@pytest.mark.parametrize("rule", [{"minimum_count": 10}, {"privacy": PrivacyBudget(epsilon=1.0, delta=1e-5)}, {}])
def test_a_text_that_may_quote_data_stays_in_the_region_where_its_owner_limits_what_is_told(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    async def act(scene: Scene) -> None:
        scene.config.datasets["d"] = scene.config.datasets["d"].model_copy(update=rule)
        if not rule:
            scene.start.plan.wan_settings.update({"noise": 1.0, "clip": 1.0, "delta": 1e-5})
            PrivacyGuard(scene.config, scene.folder).admit(scene.start)
        # The first one fails the attempt, the second one the job.
        scene.gateway.answers = [
            QUOTE.encode(),
            Outcome(status="failed", code="TASK_FAILED", message=QUOTE, hint="correct the task"),
        ]
        await scene.training()
        await scene.partition.drained()
        last = scene.reports[-1]
        assert (last.state, last.error.code) == ("failed", "TASK_FAILED")
        assert "the log of its agent has it" in last.error.message
        told = [*map(str, scene.reports), *map(str, scene.events), *scene.lines]
        assert not [text for text in told if "Meier" in text]
        assert [event.data["code"] for event in scene.events if event.kind == "worker-failed"] == [
            "FUNCTION_FAILED", "TASK_FAILED",
        ]  # fmt: skip

    _play(act, tmp_path)


@pytest.mark.parametrize("holds", ["", "all", "some"])
def test_a_model_to_start_from_is_there_before_a_worker_is_called(tmp_path: Path, holds: str) -> None:
    async def act(scene: Scene) -> None:
        model, adapter = b"safetensors", b"adapter"
        scene.start.task.initial_model = digest_of([model])
        if holds:
            scene.start.task.initial_adapter = digest_of([adapter])
        scene.start.task.initial_holds = holds
        scene.partition.begin()
        await scene.until(lambda: scene.partition.machine.condition)
        assert "no such model" in scene.partition.machine.condition
        assert scene.gateway.calls == []
        scene.blobs |= {digest_of([model]): model, digest_of([adapter]): adapter}
        await scene.until(lambda: scene.gateway.calls)
        config = json.loads((tmp_path / "jobs" / JOB / "ps.json").read_text())
        told = config["initial_model"]
        assert config["initial_holds"] == holds
        assert scene.gateway.calls[0].base_given is (holds != "some")
        assert Path(told).read_bytes() == model
        assert not holds or Path(config["initial_adapter"]).read_bytes() == adapter
        scene.partition.feed(Stopped("enough", discard=True))
        await scene.partition.drained()
        assert not Path(told).exists()

    _play(act, tmp_path)


def test_workers_are_told_how_the_learning_rate_goes(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.training()
        (call,) = scene.gateway.calls
        assert call.schedule == Schedule(shape="cosine", warmup=0.05, floor=0.1, scale=0.5)

    wanted = agent_pb2.LearningRate(schedule="cosine", warmup=0.05, floor=0.1, scale=0.5)
    _play(act, tmp_path, wanted)


def test_how_the_learning_rate_goes_must_be_known_here(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.partition.begin()
        await scene.partition.drained()
        last = scene.reports[-1]
        assert (last.state, last.error.code) == ("failed", "CONFIG_INVALID")
        assert "unknown learning-rate schedule 'zigzag'" in last.condition

    _play(act, tmp_path, agent_pb2.LearningRate(schedule="zigzag"))


def test_no_key_of_the_region_is_in_an_invocation(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.training()
        body = scene.gateway.calls[0].model_dump_json()
        assert scene.store.partition(JOB).token_key not in body  # type: ignore[union-attr]
        assert "PRIVATE KEY" not in body

    _play(act, tmp_path)


def test_a_killed_server_comes_back_under_its_ports_and_the_workers_stay(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        await scene.training()
        before = scene.server()
        address = scene.partition.machine.ps_address
        os.kill(before.pid, signal.SIGKILL)
        await scene.until(lambda: [h.kind for h in scene.events] == ["ps-ended"])
        assert scene.events[0].text.endswith("the parameter server ended with signal SIGKILL")
        await scene.until(lambda: scene.partition._server.process is not None)
        assert scene.server().pid != before.pid
        assert scene.partition.machine.ps_address == address
        assert len(scene.gateway.calls) == 1

    _play(act, tmp_path)


def test_workers_come_though_the_server_could_not_be_told_of_their_attempt_at_first(tmp_path: Path) -> None:
    """It stands still for a while, and does not end."""

    async def act(scene: Scene) -> None:
        await scene.training()
        ps = scene.partition._server.process
        assert ps is not None
        configure, unheard = ps.configure, True

        async def perhaps(wanted: ConfigurePs) -> Any:
            if unheard:
                raise GeofedError("UNAVAILABLE", "timed out")
            return await configure(wanted)

        ps.configure = perhaps  # type: ignore[method-assign]
        scene.partition.scale(Scaled(2, "a test", batch=8, rate=1.0))
        scene.gateway.answers.append(Outcome(status="left", code="FENCED", resume_key="left/1", step=1))
        scene.gateway.hold.set()
        scene.gateway.hold.clear()
        await scene.until(lambda: any("UNAVAILABLE: timed out" in report.condition for report in scene.reports))
        assert len(scene.gateway.calls) == 1
        unheard = False
        await scene.until(lambda: len(scene.gateway.calls) == 3)
        assert [(call.attempt, call.resume_key) for call in scene.gateway.calls[1:]] == [(2, "left/1")] * 2

    _play(act, tmp_path)


@pytest.mark.parametrize("moment", ["at once", "while the server starts", "while it trains"])
def test_a_stop_at_any_moment_leaves_no_process_and_no_function(tmp_path: Path, moment: str) -> None:
    async def act(scene: Scene) -> None:
        scene.partition.begin()
        if moment == "while the server starts":
            await scene.until(scene.servers)
        elif moment == "while it trains":
            await scene.until(lambda: scene.gateway.calls)
        scene.partition.feed(Stopped("cancelled", True))
        await scene.partition.drained()
        assert scene.servers() == []
        assert scene.gateway.deleted == 1
        assert not (scene.folder / "jobs" / JOB).exists()
        assert scene.reports[-1].state == "stopped"

    _play(act, tmp_path)


def test_an_event_that_cannot_be_handled_fails_the_partition_and_ends_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        machine, handle = scene.partition.machine, scene.partition.machine.handle

        def broken(event: Any) -> Any:
            if isinstance(event, WorkerEnded):
                raise RuntimeError("a bug")
            return handle(event)

        monkeypatch.setattr(machine, "handle", broken)
        scene.gateway.answers = [Outcome(status="failed", code="FENCED")]
        await scene.training()
        await scene.until(lambda: scene.reports[-1].state == "failed")
        await scene.partition.drained()
        assert (machine.state, scene.reports[-1].error.code) == ("failed", "INTERNAL")
        assert "a bug" in scene.reports[-1].condition
        assert scene.servers() == []
        assert scene.gateway.deleted == 1

    _play(act, tmp_path)


def test_a_failed_partition_is_reported_although_it_cannot_be_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(scene: Scene) -> None:
        async def broken() -> None:
            raise RuntimeError("no logs")

        monkeypatch.setattr(scene.partition._logs, "catch_up", broken)
        await scene.training()
        scene.partition.fail(GeofedError("INTERNAL", "a bug"))
        await scene.until(lambda: scene.reports[-1].state == "failed")

    _play(act, tmp_path)


def test_a_function_is_deleted_once_the_gateway_is_back(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.delete_fails = [GeofedError("GATEWAY_UNAVAILABLE", "x")] * 2
        await scene.training()
        scene.partition.feed(Stopped("cancelled", False))
        await scene.partition.drained()
        assert scene.gateway.deleted == 1
        assert (scene.folder / "jobs" / JOB).exists()

    _play(act, tmp_path)


def test_a_function_that_the_platform_has_lost_is_deployed_again(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.answers = [GeofedError("FUNCTION_NOT_FOUND", "x"), Outcome(status="continue")]
        await scene.training()
        await scene.until(lambda: len(scene.gateway.calls) == 3)
        assert {call.attempt for call in scene.gateway.calls} == {1}
        assert scene.events == []

    _play(act, tmp_path)


def test_each_worker_has_a_function_where_one_has_a_single_replica(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.of_edition = EDITIONS["faasd"]
        scene.start.plan.workers = 2
        scene.store.took_start(1, JOB, scene.start.SerializeToString(), "key")
        scene.partition = PartitionRunner(scene.around, scene.start)
        await scene.training()
        await scene.until(lambda: len(scene.gateway.called) == 2)
        assert sorted(scene.gateway.called) == [f"geofed-{JOB}", f"geofed-{JOB}-w1"]
        scene.partition.feed(Stopped("enough", False))
        await scene.partition.drained()
        assert scene.gateway.deleted == 2

    _play(act, tmp_path)


def test_a_function_that_stays_busy_fails_in_the_end(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.partition._function._call_seconds = timedelta(seconds=0.5)
        scene.gateway.answers = [GeofedError("FUNCTION_BUSY", "x") for _ in range(30)]
        await scene.training()
        await scene.until(lambda: scene.partition.machine.attempt == 2)
        assert scene.events[0].data["code"] == "FUNCTION_BUSY"

    _play(act, tmp_path)


def test_old_addresses_of_shards_are_signed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene) -> None:
        scene.gateway.answers = [Outcome(status="continue"), Outcome(status="continue")]
        signed: list[float] = []
        original = scene.partition._invocations.sign_splits

        async def sign() -> None:
            signed.append(time.monotonic())
            await original()
            # As if it had been long ago.
            scene.partition._invocations._signed_at -= 1900

        monkeypatch.setattr(scene.partition._invocations, "sign_splits", sign)
        await scene.training()
        await scene.until(lambda: len(scene.gateway.calls) == 3)
        assert len(signed) == 4

    _play(act, tmp_path)


def test_a_pipeline_is_scaled_by_whole_pipelines_and_told_to_its_workers() -> None:
    plan = agent_pb2.PartitionPlan(workers=6, batch=8)
    assert [whole_pipelines(plan, workers) for workers in (0, 1, 5)] == [0, 1, 5]
    plan.pipeline.degree = 2
    for first, last in ((0, 3), (4, 4), (5, 9)):
        plan.pipeline.stages.add(first_layer=first, last_layer=last)
    assert [whole_pipelines(plan, workers) for workers in (0, 1, 3, 5, 6, 8)] == [0, 3, 3, 3, 6, 6]
