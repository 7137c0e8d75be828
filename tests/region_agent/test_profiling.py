"""The agent's part of a profile: the real function, called in this process through a gateway that deploys nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from support.jobs import LINEAR_TASK, pack, write_samples

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent import machine_rates
from region_agent import profiling as agent_profiling
from region_agent.config import DockerGateway, RegionConfig
from region_agent.config._data import PrivacyBudget
from region_agent.gateway.device_blocks import DeviceBlocks
from region_agent.gateway.functions import Isolation
from region_agent.partition.channel import RegionChannel
from region_agent.partition.context import PartitionContext
from region_agent.privacy import labels_that_leave
from region_agent.profiling import Profiler
from region_agent.tasks.folder import TaskFolder
from region_agent.worker import handler, profiling
from region_agent.worker.handler import handle
from region_agent.worker.profile_call import ProfileCall, Profiled
from scheduler.tuning import TaskProfile
from sync.framing import digest_of


class Gateway:
    """Knows which functions are there; a call runs the function here."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.deployed: list[tuple[str, str]] = []
        self.images: list[str] = []
        self.calls = 0
        self.open = asyncio.Event()
        self.open.set()

    async def deploy(self, spec: Any) -> None:
        self.there.add(spec.service)
        self.deployed.append((spec.service, spec.limits["memory"]))
        self.images.append(spec.image)

    async def scale(self, name: str, replicas: int) -> None: ...

    async def wait_ready(self, name: str, replicas: int, timeout: timedelta) -> None: ...

    async def delete(self, name: str) -> None:
        self.there.remove(name)

    async def list(self) -> Any:
        return [SimpleNamespace(spec=SimpleNamespace(service=name)) for name in sorted(self.there)]

    async def invoke(self, name: str, body: bytes, *, headers: dict[str, str], timeout: timedelta) -> Any:
        if name not in self.there:
            raise GeofedError("FUNCTION_NOT_FOUND", name)
        self.calls += 1
        await self.open.wait()
        answer = await asyncio.to_thread(handle, SimpleNamespace(body=body), None)
        return SimpleNamespace(status=200, body=str(answer["body"]).encode())


LABELLED_TASK = LINEAR_TASK.replace(
    'torch.from_numpy(held["y"]))', "(torch.arange(len(held['x'])) < 12).long())"
).replace("mse_loss", "cross_entropy")
"""12 of its labels are 1, and 28 are 0."""


PRICES = {
    "source": "test", "asOf": "2026-01", "functionUsdPerGbSecond": 1e-5, "functionUsdPerRequest": 1e-7,
    "serverUsdPerHour": 0.0, "egressUsdPerGb": 0.0,
}  # fmt: skip


class Scene:
    """A region that may be asked for profiles."""

    def __init__(self, folder: Path, **more: Any) -> None:
        data = write_samples(folder / "data.npz", 40)
        self.folder, self.gateway = folder, Gateway()
        self.config = RegionConfig.model_validate(
            {
                "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
                "capacity": {"workers": 2, "memoryMb": 1024},
                "datasets": {"d": {"splits": {"train": {"uri": str(data), "samples": 40}}}},
                "prices": PRICES,
                **more,
            }
        )  # fmt: skip
        self.channel = RegionChannel(self.config.channel, folder / "channel", "east")
        self.bundle = pack({"task.py": LINEAR_TASK})
        self.told: list[agent_pb2.ProfileReport] = []
        nobody: Any = None
        self.around = PartitionContext(
            config=self.config, identity=nobody, store=nobody, gateway=self.gateway,  # type: ignore[arg-type]
            state_dir=folder, channel=self.channel, image="image", fetch_task=self._fetch, fetch_model=nobody,
            publish_model=nobody, report=nobody, record_event=nobody, log=nobody, isolation=Isolation("bubblewrap"),
        )  # fmt: skip
        self.begun: list[str] = []
        self.profiler = Profiler(self.around, self.told.append, lambda id_, _: self.begun.append(id_))

    async def _fetch(self, digest: str) -> TaskFolder:
        assert digest == digest_of([self.bundle])
        return TaskFolder(self.bundle)

    def ask(self, job: str = "profile-1", **changed: Any) -> None:
        self.profiler.profile(self._command(job, **changed))

    def probe(self, job: str = "probe-1", **changed: Any) -> None:
        self.profiler.probe(self._command(job, **{"memories_mb": [512], "limit_seconds": 0.3, **changed}))

    def _command(self, job: str, sharding: str = "", **changed: Any) -> agent_pb2.ProfileTask:
        task = agent_pb2.TaskRef(bundle_digest=digest_of([self.bundle]), module="task.py", dataset="d")
        task.sharding = sharding
        fields: dict[str, Any] = {
            "id": job, "region": "east", "task": task, "batch": 8, "seed": 3, "memories_mb": [512, 1024],
            "limit_seconds": 20.0, **changed,
        }  # fmt: skip
        return agent_pb2.ProfileTask(**fields)

    async def answer(self, count: int = 1) -> agent_pb2.ProfileReport:
        """The `count`-th last word."""
        await until(lambda: len(self._last()) >= count)
        return self._last()[count - 1]

    def _last(self) -> list[agent_pb2.ProfileReport]:
        return [one for one in self.told if one.profile_json or one.weight.last or one.HasField("error")]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


def _measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of the machine are taken over less: tests/region_agent/test_machine_rates.py has them over all."""
    monkeypatch.setattr(machine_rates, "_FRESH_SECONDS", 0.01)
    monkeypatch.setattr(machine_rates, "_TRIAL_BYTES", 1 << 20)


def on_a_loop(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario() -> None:
            scene = Scene(tmp_path)
            try:
                await test(scene)
            finally:
                await scene.profiler.close()
                handler._drop_loaded()

        monkeypatch.setattr(handler, "_scratch", lambda: tmp_path / "scratch")
        _measure_little(monkeypatch)
        asyncio.run(scenario())

    run.__doc__ = test.__doc__
    return run


@pytest.mark.slow
@on_a_loop
async def test_what_is_told_is_a_profile_and_nothing_is_left_behind(scene: Scene) -> None:
    scene.ask()
    told = TypeAdapter(TaskProfile).validate_json((await scene.answer()).profile_json)
    assert (told.region, told.samples, told.model_bytes) == ("east", 40, 40)
    assert min(told.stored_bytes_per_second, told.fresh_bytes_per_second) > 0
    assert {(point.batch, point.memory_mb) for point in told.steps} == {
        (b, m) for b in (2, 4, 8, 16) for m in (512, 1024)
    }
    assert told.channel.name == "file"
    assert told.usd >= told.gb_seconds * 1e-5
    assert [memory for _, memory in scene.gateway.deployed] == ["512Mi", "1024Mi"]
    assert scene.begun == ["profile-1"]
    # One call that measures and one that only makes ready, for each memory.
    assert scene.gateway.calls == 4
    assert not scene.gateway.there
    assert not (scene.folder / "profiling").exists()
    assert not list((scene.folder / "channel").glob("profile-*"))
    assert "measuring the channel (file)" in [report.condition for report in scene.told]


def test_the_rate_of_fresh_memory_is_measured_again_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter((1.0, 2.0))
    monkeypatch.setattr(agent_profiling, "fresh_memory_rate", lambda: next(rates))
    profiler = Scene(tmp_path).profiler
    assert [profiler._memory_rate(), profiler._memory_rate()] == [1.0, 1.0]
    monkeypatch.setattr(agent_profiling, "_MEMORY_RATE_SECONDS", -1.0)
    assert profiler._memory_rate() == 2.0


@pytest.mark.slow
@on_a_loop
async def test_a_task_is_probed_before_its_steps_are_timed_and_nothing_is_left_behind(scene: Scene) -> None:
    scene.probe()
    told = (await scene.answer()).weight
    assert (told.parameters, told.model_bytes, told.note) == (10, 40, "")
    assert [step.batch for step in told.steps] == [8, 2]
    assert all(step.seconds > 0 for step in told.steps)
    assert told.start_seconds > 0
    assert told.usd > 0
    first = next(one.weight for one in scene.told if one.HasField("weight"))
    assert (first.model_bytes, len(first.steps), first.last) == (40, 0, False)
    assert scene.gateway.calls == 2
    assert not scene.gateway.there
    assert not (scene.folder / "profiling").exists()
    assert not list((scene.folder / "channel").glob("probe-*"))


def test_a_probe_ends_where_a_function_sees_no_gpu_that_would_be_billed(tmp_path: Path) -> None:
    async def scenario() -> agent_pb2.ProfileReport:
        devices = {"kind": "a GPU", "count": 2}
        priced = {**PRICES, "deviceUsdPerSecond": 0.001}
        scene = Scene(tmp_path, capacity={"workers": 2, "memoryMb": 1024, "devices": devices}, prices=priced)
        scene.probe()
        told = await scene.answer()
        await scene.profiler.close()
        return told

    told = asyncio.run(scenario())
    assert told.error.code == "GPUS_TOO_FEW"
    assert "the region bills 1 GPU for a worker, and a function sees none" in told.error.message


class _Measuring(Gateway):
    """Answers without a measurement; notes which GPU is to be, and who has one while a function is there."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        super().__init__()
        self.blocks, self.measured = blocks, list[tuple[str, int]]()
        self.held: list[tuple[int, ...]] = []

    async def invoke(self, name: str, body: bytes, *, headers: dict[str, str], timeout: timedelta) -> Any:
        call = ProfileCall.model_validate_json(body)
        self.measured.append((call.measure, call.gpu))
        return SimpleNamespace(status=200, body=Profiled(status="done").model_dump_json().encode())

    async def delete(self, name: str) -> None:
        self.held.append(self.blocks.workers("probe-1"))
        await super().delete(name)


@on_a_loop
async def test_a_measurement_has_a_device_of_its_own_until_its_function_is_gone(scene: Scene) -> None:
    blocks = DeviceBlocks(2)
    assert blocks.take("job-1", 0, 1) == (0,)
    gateway: Any = _Measuring(blocks)
    profiler = Profiler(replace(scene.around, devices=blocks, gateway=gateway), scene.told.append, lambda *_: None)
    profiler.probe(scene._command("probe-1", memories_mb=[512], limit_seconds=0.3))
    assert not (await scene.answer()).HasField("error")
    assert gateway.measured == [("size", 1), ("pace", 1)]
    assert gateway.held == [(0,)]
    assert blocks.workers("probe-1") == ()
    assert blocks.take("job-2", 0, 1) == (1,)
    profiler.probe(scene._command("probe-2", memories_mb=[512], limit_seconds=0.3, labels_only=True))
    await scene.answer(2)
    assert gateway.measured[2:] == [("labels", 0)], "which needs none, and waits for none"
    await profiler.close()


@pytest.mark.slow
@on_a_loop
async def test_the_model_is_known_where_its_data_cannot_be_read_or_its_loss_fails(scene: Scene) -> None:
    (scene.folder / "data.npz").unlink()
    scene.probe("w1")
    told = await scene.answer(1)
    assert not told.HasField("error")
    assert (told.weight.model_bytes, len(told.weight.steps), told.weight.start_seconds) == (40, 0, 0.0)
    assert told.weight.note.startswith("SHARD_")
    write_samples(scene.folder / "data.npz", 40)
    scene.bundle = pack({"task.py": LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(7, 2)")})
    scene.probe("w2")
    told = await scene.answer(2)
    assert told.weight.model_bytes == 64
    assert told.weight.note.startswith("TASK_FAILED: loss raised")
    scene.config.datasets["d"] = scene.config.datasets["d"].model_copy(update={"minimum_count": 2})
    scene.probe("w3")
    told = await scene.answer(3)
    assert told.weight.model_bytes == 64
    assert told.weight.note.startswith("TASK_FAILED: the text of this error stays in east")
    scene.ask("w4")
    told = await scene.answer(4)
    assert (told.error.code, "loss" in told.error.message) == ("TASK_FAILED", False)


@pytest.mark.slow
@on_a_loop
async def test_a_step_that_does_not_fit_into_the_gpu_is_told_as_such(scene: Scene) -> None:
    """By the error that torch raises then; a GPU is not needed for it."""
    raises = "    raise torch.OutOfMemoryError('CUDA out of memory')\n"
    scene.bundle = pack({"task.py": LINEAR_TASK.replace("    x, y = batch\n", raises, 1)})
    scene.probe()
    told = (await scene.answer()).weight
    assert (told.model_bytes, len(told.steps)) == (40, 0)
    assert told.note.startswith("GPU_MEMORY: the GPU ran out of memory in loss at task.py:")


@pytest.mark.slow
@on_a_loop
async def test_a_step_of_a_divided_model_that_does_not_fit_into_one_gpu_is_not_timed(scene: Scene) -> None:
    raises = "    raise torch.OutOfMemoryError('CUDA out of memory')\n"
    scene.bundle = pack({"task.py": LINEAR_TASK.replace("    x, y = batch\n", raises, 1)})
    scene.probe(sharding="fsdp")
    told = (await scene.answer()).weight
    assert (told.model_bytes, len(told.steps), told.samples, told.note) == (40, 0, 40, "")


@pytest.mark.slow
@on_a_loop
async def test_what_cannot_be_divided_is_told_by_the_probe(scene: Scene) -> None:
    scene.bundle = pack({"task.py": LINEAR_TASK + "\n\ndef on_round(model, completed):\n    pass\n"})
    scene.probe(sharding="fsdp")
    told = await scene.answer()
    assert told.error.code == "TASK_INVALID"
    assert "a task that defines on_round" in told.error.message


@pytest.mark.slow
def test_a_probe_tells_what_a_step_takes_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter((5 << 30, 2 << 30))
    monkeypatch.setattr(profiling, "device_peak_bytes", lambda where: next(taken))

    @on_a_loop
    async def probes(scene: Scene) -> None:
        scene.probe()
        told = (await scene.answer()).weight
        assert [(step.batch, step.device_bytes) for step in told.steps] == [(8, 5 << 30), (2, 2 << 30)]

    probes(tmp_path, monkeypatch)


@pytest.mark.slow
@on_a_loop
async def test_a_model_that_cannot_be_made_has_no_weight(scene: Scene) -> None:
    scene.bundle = pack({"task.py": LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(4, width)")})
    scene.probe()
    told = await scene.answer()
    assert told.error.code == "TASK_FAILED"
    assert "model raised NameError" in told.error.message
    assert told.usd > 0, "the call was made"
    assert not [one for one in scene.told if one.HasField("weight")]
    scene.probe("w2", region="west")
    assert (await scene.answer(2)).error.code == "RESIDENCY_VIOLATION"


@pytest.mark.slow
@on_a_loop
async def test_a_model_that_needs_what_dataset_sets_is_probed_after_it(scene: Scene) -> None:
    task = LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(width, 2)").replace(
        "    held = np.load(uri)\n", "    global width\n    held = np.load(uri)\n    width = held['x'].shape[1]\n"
    )
    scene.bundle = pack({"task.py": task})
    scene.probe()
    told = (await scene.answer()).weight
    assert (told.parameters, told.note) == (10, "")
    assert told.steps


@pytest.mark.slow
@on_a_loop
async def test_the_same_command_is_measured_once(scene: Scene) -> None:
    scene.gateway.open.clear()
    scene.ask()
    scene.ask()
    await asyncio.sleep(0.05)
    scene.gateway.open.set()
    first = await scene.answer()
    calls = scene.gateway.calls
    scene.ask()
    assert await scene.answer(2) == first
    assert scene.gateway.calls == calls


@pytest.mark.slow
@on_a_loop
async def test_another_command_waits_for_its_turn(scene: Scene) -> None:
    scene.gateway.open.clear()
    scene.ask("profile-1")
    await asyncio.sleep(0.05)
    scene.ask("profile-2")
    await asyncio.sleep(0.05)
    assert [one.condition for one in scene.told if one.id == "profile-2"] == ["waiting for another profile to end"]
    scene.gateway.open.set()
    assert {(await scene.answer(1)).id, (await scene.answer(2)).id} == {"profile-1", "profile-2"}


@pytest.mark.slow
@on_a_loop
async def test_a_task_that_nobody_waits_for_any_more_costs_nothing(scene: Scene) -> None:
    """It is dropped while others are before it, and those that come later are not held up."""
    scene.gateway.open.clear()
    scene.probe("w1")
    await until(lambda: scene.gateway.calls)
    scene.probe("w2", wait_seconds=0.05)
    told = await scene.answer()
    assert (told.id, told.error.code, told.usd) == ("w2", "WAIT_TIMEOUT", 0.0)
    scene.gateway.open.set()
    assert (await scene.answer(2)).id == "w1"
    assert scene.gateway.calls == 2
    scene.probe("w3", wait_seconds=60.0)
    assert (await scene.answer(3)).weight.steps


@pytest.mark.slow
@on_a_loop
async def test_one_that_goes_on_too_long_is_broken_off_and_tells_what_it_took(scene: Scene) -> None:
    scene.gateway.open.clear()
    scene.probe(wait_seconds=2.0)
    told = await scene.answer()
    assert told.error.code == "WAIT_TIMEOUT"
    assert scene.gateway.calls == 1
    assert told.usd > 0
    assert not scene.gateway.there
    assert not (scene.folder / "profiling").exists()
    scene.gateway.open.set()
    scene.probe("w2")
    assert (await scene.answer(2)).weight.steps


@on_a_loop
async def test_no_more_than_so_many_wait(scene: Scene) -> None:
    scene.gateway.open.clear()
    for number in range(16):
        scene.probe(f"w{number}")
    scene.probe("one more")
    scene.probe("w3")
    told = await scene.answer()
    assert (told.id, told.error.code, told.error.retryable) == ("one more", "FUNCTION_BUSY", True)
    assert len(scene._last()) == 1


@pytest.mark.slow
@on_a_loop
async def test_a_region_may_refuse_and_a_task_may_fail(scene: Scene) -> None:
    scene.ask("p1", region="west")
    assert (await scene.answer(1)).error.code == "RESIDENCY_VIOLATION"
    scene.ask("p2", memories_mb=[4096])
    assert (await scene.answer(2)).error.code == "FORBIDDEN"
    assert scene.begun == [], "nothing has run"
    scene.bundle = pack({"task.py": LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(7, 2)")})
    scene.ask("p3")
    assert (await scene.answer(3)).error.code == "TASK_FAILED"
    assert not scene.gateway.there
    lacking = replace(scene.around, isolation=Isolation("none", "bubblewrap is not installed"))
    unsafe = Profiler(lacking, scene.told.append, lambda id_, _: scene.begun.append(id_))
    unsafe.probe(scene._command("p4"))
    assert (await scene.answer(4)).error.code == "ISOLATION_UNAVAILABLE"
    await unsafe.close()


@on_a_loop
async def test_what_a_crash_has_left_goes_at_the_next_start(scene: Scene) -> None:
    channel = scene.channel.open("profile-9")
    channel.put("bundle/x", [b"task"])
    channel.close()
    (scene.folder / "profiling").write_text("profile-9")
    scene.gateway.there |= {"geofed-profile-east-512", "geofed-job-1", "geofed-profile-west-512"}
    again = Profiler(scene.around, scene.told.append, lambda id_, _: scene.begun.append(id_))
    await until(lambda: not (scene.folder / "profiling").exists())
    await again.close()
    assert scene.gateway.there == {"geofed-job-1", "geofed-profile-west-512"}
    assert scene.channel.open("profile-9").get("bundle/x") is None


@on_a_loop
async def test_an_agent_that_ends_breaks_off_and_clears_away(scene: Scene) -> None:
    scene.gateway.open.clear()
    scene.ask()
    await until(lambda: scene.gateway.calls)
    await scene.profiler.close()
    assert not scene.gateway.there
    assert not [one for one in scene.told if one.profile_json]


@on_a_loop
async def test_code_that_cannot_be_recorded_does_not_run(scene: Scene) -> None:
    def full(id_: str, task: agent_pb2.TaskRef) -> None:
        raise GeofedError("DISK_FULL", "no space")

    scene.profiler = Profiler(scene.around, scene.told.append, full)
    scene.probe()
    assert (await scene.answer()).error.code == "DISK_FULL"
    assert scene.gateway.calls == 0
    assert not scene.gateway.deployed


@pytest.mark.slow
def test_counts_of_labels_leave_the_region_only_as_its_file_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []

    async def labels(folder: Path, asked: bool, held: dict[str, Any]) -> Any:
        folder.mkdir()
        scene = Scene(folder)
        dataset = scene.config.datasets["d"].model_copy(update=held)
        config = scene.config.model_copy(update={"datasets": {"d": dataset}})
        scene.profiler = Profiler(
            replace(scene.around, config=config), scene.told.append, lambda id_, _: scene.begun.append(id_)
        )
        scene.bundle = pack({"task.py": LABELLED_TASK})
        scene.ask(labels=asked, memories_mb=[512])
        try:
            profile = json.loads((await scene.answer()).profile_json)
            norms.append(bool(profile["norms"]))
            return profile["labels"]
        finally:
            await scene.profiler.close()
            handler._drop_loaded()

    monkeypatch.setattr(handler, "_scratch", lambda: tmp_path / "scratch")
    _measure_little(monkeypatch)
    budget = PrivacyBudget.model_validate({"epsilon": 1.0, "delta": 1e-5})
    cases: list[tuple[bool, dict[str, Any], Any]] = [
        (True, {}, [[0, 28], [1, 12]]),
        (False, {}, []),
        # The smaller count alone could be subtracted from the number of all samples.
        (True, {"minimum_count": 13}, []),
        (True, {"minimum_count": 12}, [[0, 28], [1, 12]]),
        (True, {"minimum_count": 41}, []),
        (True, {"privacy": budget}, []),
    ]
    for number, (asked, held, expected) in enumerate(cases):
        assert asyncio.run(labels(tmp_path / str(number), asked, held)) == expected, held
    assert norms == [True] * 5 + [False], "gradients of data with a budget have no noise in a profile"


@pytest.mark.slow
@on_a_loop
async def test_a_probe_counts_labels_with_its_steps_or_nothing_else(scene: Scene) -> None:
    scene.bundle = pack({"task.py": LABELLED_TASK})
    scene.probe(labels=True)
    whole = (await scene.answer()).weight
    scene.probe("w2", labels=True, labels_only=True)
    alone = (await scene.answer(2)).weight
    scene.probe("w3")
    assert not (await scene.answer(3)).weight.labels, "they were not asked for"
    for told in (whole, alone):
        assert (dict(told.labels), told.samples, told.usd > 0) == ({0: 28, 1: 12}, 40, True)
    assert (len(whole.steps) > 0, len(alone.steps), alone.parameters) == (True, 0, 0)
    assert scene.begun == ["probe-1", "w2", "w3"], "the audit log has each"


def test_a_few_samples_of_a_label_stay_whatever_the_region_file_says(tmp_path: Path) -> None:
    config = Scene(tmp_path).config
    assert labels_that_leave(config, "d", {0: 500, 1: 300, 2: 9, 3: 40}) == [(0, 500), (1, 300)]
    assert labels_that_leave(config, "d", {0: 500, 1: 9, 2: 9}) == [(0, 500)]
    assert labels_that_leave(config, "d", {}) == []
    assert labels_that_leave(config, "other", {0: 500}) == []


@pytest.mark.slow
@on_a_loop
async def test_a_task_is_measured_in_its_own_image(scene: Scene) -> None:
    policy = scene.config.policy.model_copy(update={"allow_images": ("r/team/",)})
    gateway = DockerGateway(kind="docker", image="image")
    config = scene.config.model_copy(update={"policy": policy, "gateway": gateway})
    scene.profiler = Profiler(replace(scene.around, config=config), scene.told.append, lambda *_: None)
    command = scene._command("probe-1", memories_mb=[512], limit_seconds=0.3)
    command.task.image = "r/team/worker:1"
    scene.profiler.probe(command)
    await scene.answer()
    assert scene.gateway.images == ["r/team/worker:1"]
    scene.probe("probe-2")
    await scene.answer(2)
    assert scene.gateway.images == ["r/team/worker:1", "image"]
