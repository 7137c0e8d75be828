"""A task that nobody has run is probed before its first plan: once, in time, and by nobody who may not see it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.cli._report import plan_text
from control_plane.client import ControlClient
from control_plane.server import ServeConfig
from control_plane.service.measuring import _probing
from control_plane.service.measuring._task_history import TaskHistory, probed_speeds, task_keys
from control_plane.service.planning._planning import snapshot_of
from control_plane.spec import load, pack
from control_plane.spec.sections import PROBED_BATCH
from control_plane.store import Change, RunRow, WeightRow, open_store
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, catalogue
from tests.control_plane.scenario import run

SOON = timedelta(seconds=0.3)


def weight(**changed: Any) -> agent_pb2.TaskWeight:
    fields: dict[str, Any] = {
        "parameters": 25_000, "model_bytes": 100_000, "steps": [{"batch": 10, "seconds": 0.05}],
        "start_seconds": 1.5, "usd": 1e-6, "last": True, **changed,
    }  # fmt: skip
    return agent_pb2.TaskWeight(**fields)


@asynccontextmanager
async def scales(stage: Stage, region: str = "a", workers: int = 2) -> AsyncIterator[FakeAgent]:
    """An agent that is asked, and answers as the test has it."""
    agent = await stage.agent(region)
    agent.probes = True
    capacity = replace(agent.catalogue.capacity, workers=workers, samples_per_second=None)
    agent.catalogue = replace(agent.catalogue, capacity=capacity)
    async with agent:
        yield agent


async def plan(stage: Stage, job_file: Path, *overrides: str) -> Any:
    loaded = load(job_file, overrides)
    packed = pack(loaded.folder, loaded.spec.task.module)
    content, digest = packed.content, packed.digest
    await stage.client.put_bundle(content, digest)
    return json.loads((await stage.client.plan(loaded.json, bundle_digest=digest)).plan_json)


async def told_of(stage: Stage, kind: str) -> list[Any]:
    return [event async for event in stage.client.watch("", follow=False) if event.kind == kind]


def asked(agent: FakeAgent) -> int:
    return sum(command.WhichOneof("body") == "probe" for command in agent.commands)


@pytest.mark.slow
def test_a_batch_that_is_left_to_the_plan_is_chosen_near_what_the_probe_has_measured(
    serve_config: ServeConfig, job_file: Path
) -> None:
    auto = ("train.batch=auto", "train.end={epochs: 20}")

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file, *auto))
            command = await agent.command("probe")
            assert command.batch == PROBED_BATCH
            steps = [{"batch": 64, "seconds": 0.05}, {"batch": 16, "seconds": 0.02}]
            agent.tell_profile(command.id, weight=weight(steps=steps))
            told = await answer
            assert told["batches"] == [8, 16, 32, 64]
            (part,) = told["partitions"]
            assert any(other["decision"] == f"batch {part['batch']}" for other in told["alternatives"])
            assert f"{part['batch']} samples of a worker in a step, chosen of 8, 16, 32, 64" in plan_text(told)
            job = (await stage.submit(job_file, overrides=auto)).job
            assert (await agent.command("start")).plan.batch == part["batch"]
            assert json.loads(job.spec_json)["train"]["batch"] == "auto"
            assert asked(agent) == 1

    run(scenario())


@pytest.mark.slow
def test_the_first_plan_knows_the_model_and_a_speed(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            assert (command.region, command.batch, command.limit_seconds) == ("a", 10, 2.0)
            assert 100 < command.wait_seconds <= 120, "the agent gives it up, too"
            assert await agent.fetch(command.task.bundle_digest), "its code may be fetched as long as it is probed"
            agent.tell_profile(command.id, weight=weight(steps=[], last=False))
            await asyncio.sleep(0.2)
            assert not answer.done(), "the steps are still to come"
            agent.tell_profile(command.id, weight=weight())
            told = await answer
            estimate = told["estimate"]
            assert (estimate["model_bytes"], estimate["model_basis"]) == (100_000, "counted")
            assert (estimate["basis"], estimate["start_basis"]) == ("probed", "probed")
            assert told["partitions"][0]["samples_per_second"] == pytest.approx(200)
            assert not [text for text in told.get("warnings", []) if "probe" in text or "timed" in text]
            text = plan_text(told)
            assert "100 kB, counted by an agent" in text
            assert "a few steps of the task" in text
            with pytest.raises(GeofedError, match="FORBIDDEN"):
                await agent.fetch(command.task.bundle_digest)
            # Neither asked again, nor waited for: by the same user or another, for the plan or the job itself.
            assert (await plan(stage, job_file, "metadata.name=zz", "train.batch=20"))["estimate"]["basis"] == "probed"
            assert (await stage.submit(job_file)).created
            assert asked(agent) == 1
            assert "task.probed" in await stage.events("")
        async with staged(serve_config) as stage, scales(stage) as agent:
            assert (await plan(stage, job_file))["estimate"]["model_basis"] == "counted"
            assert not asked(agent), "it is kept"

    run(scenario())


def test_what_a_region_refuses_one_user_is_probed_for_another(
    serve_config: ServeConfig, job_file: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            (tmp_path / "ann.token").write_text((await stage.client.add_user("ann")).token)
            async with ControlClient.connect(replace(stage.context, token_file=tmp_path / "ann.token")) as ann:
                of_ann = replace(stage, client=ann)
                answer = asyncio.create_task(plan(of_ann, job_file))
                refused = common_pb2.Error(code="FORBIDDEN", message="region a runs no code of user ann")
                agent.tell_profile((await agent.command("probe")).id, error=refused)
                assert any("no code of user ann" in text for text in (await answer)["warnings"])
                answer = asyncio.create_task(plan(stage, job_file))
                agent.tell_profile((await agent.command("probe", 2)).id, weight=weight())
                assert (await answer)["estimate"]["basis"] == "probed"
                assert (await plan(of_ann, job_file))["estimate"]["basis"] == "probed"
                assert asked(agent) == 2

    run(scenario())


def test_many_who_ask_at_once_have_it_probed_once(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answers = [asyncio.create_task(plan(stage, job_file, f"train.batch={size}")) for size in range(10, 20)]
            command = await agent.command("probe")
            await asyncio.sleep(0.3)
            agent.tell_profile(command.id, weight=weight())
            told = await asyncio.gather(*answers)
            assert {one["estimate"]["model_bytes"] for one in told} == {100_000}
            assert asked(agent) == 1

    run(scenario())


def test_an_answer_waits_no_longer_than_it_may_and_later_ones_know_more(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(replace(serve_config, probe_wait=SOON)) as stage, scales(stage) as agent:
            told = await plan(stage, job_file)
            assert told["estimate"]["model_basis"] == "prior"
            assert (
                "the task was not probed: the probe takes longer than 0.6 s; later plans will use its result"
                in told["warnings"]
            )
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight(steps=[], last=False))
            told = await told_so(stage, job_file, '"counted"')
            assert told["estimate"]["basis"] == "prior"
            assert any(
                "of a has not timed the task's steps: the probe is still running" in text for text in told["warnings"]
            )
            agent.tell_profile(command.id, weight=weight(steps=[], note="TASK_FAILED: loss raised KeyError"))
            await told_so(stage, job_file, "has not timed the task's steps: TASK_FAILED: loss raised KeyError")
            assert asked(agent) == 1

    run(scenario())


def test_a_plan_waits_longer_for_the_size_of_the_model_alone(serve_config: ServeConfig, job_file: Path) -> None:
    """It says how long an exchange takes: a guess would be wrong by hundreds of times for a large model."""

    async def scenario() -> None:
        wait = timedelta(seconds=2)
        async with staged(replace(serve_config, probe_wait=wait)) as stage, scales(stage) as agent:
            begun = time.monotonic()
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            await asyncio.sleep(wait.total_seconds() + 0.2)
            assert not answer.done()
            agent.tell_profile(command.id, weight=weight(steps=[], last=False, model_bytes=400_000_000))
            told = await answer
            assert told["estimate"]["model_basis"] == "counted"
            assert told["estimate"]["model_bytes"] == 400_000_000
            assert time.monotonic() - begun < 2 * wait.total_seconds(), "not longer than for the size"

    run(scenario())


async def told_so(stage: Stage, job_file: Path, words: str) -> Any:
    """The first plan that says it."""
    async with asyncio.timeout(10):
        while words not in json.dumps(told := await plan(stage, job_file)):  # noqa: ASYNC110 - plans alone tell
            await asyncio.sleep(0.02)
    return told


def test_a_model_that_cannot_be_made_is_told_at_once_and_makes_no_job(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            for number, ask in enumerate((plan, Stage.submit), 1):
                answer = asyncio.create_task(ask(stage, job_file))
                command = await agent.command("probe", number)
                error = common_pb2.Error(code="TASK_FAILED", message="model raised KeyError at task.py:3")
                agent.tell_profile(command.id, error=error)
                with pytest.raises(GeofedError, match=r"TASK_FAILED: a: model raised KeyError at task\.py:3"):
                    await answer
            assert not await stage.client.jobs(ended=True)

    run(scenario())


def test_a_step_that_fails_makes_no_job(serve_config: ServeConfig, job_file: Path) -> None:
    """The next region confirms it, unless its data or packages cannot be the cause; nothing of it is kept."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            for number, note in enumerate(("loss raised KeyError: 'y' at task.py:3 (batch['y'])", UNDEFINED), 1):
                answer = asyncio.create_task(stage.submit(job_file))
                for agent in (one, two) if "KeyError" in note else (one,):
                    command = await agent.command("probe", number)
                    agent.tell_profile(command.id, weight=weight(steps=[], note=f"TASK_FAILED: {note}"))
                with pytest.raises(GeofedError, match=re.escape(f"TASK_FAILED: {'b' if number == 1 else 'a'}: {note}")):
                    await answer
            assert not await stage.client.jobs(ended=True)
            answer = asyncio.create_task(plan(stage, job_file))
            command = await one.command("probe", 3)
            one.tell_profile(command.id, weight=weight(steps=[], note="TASK_FAILED: loss raised KeyError: 'y'"))
            two.tell_profile((await two.command("probe", 2)).id, weight=weight())
            told = await answer
            assert told["estimate"]["basis"] == "likened"
            assert "the probe in another region failed: a: loss raised KeyError: 'y'" in told["warnings"]

    run(scenario())


PRIVATE = "privacy.differential={level: sample, epsilon: 3, delta: 1e-5, clipNorm: 1}"


@pytest.mark.slow
def test_the_first_plan_warns_of_labels_that_differ_between_regions(serve_config: ServeConfig, job_file: Path) -> None:
    """Which one region counts with its steps, and the other one meanwhile; unless the job does something about it."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            for number, (labels, settings, warned) in enumerate(
                (
                    ({0: 40, 1: 760}, (), True),
                    ({0: 610, 1: 590}, (), False),
                    ({0: 40, 1: 760, 100: 1}, (), False),
                    ({0: 40, 1: 760}, ("wan.policy=fedprox",), False),
                    (
                        {0: 40, 1: 760},
                        ("privacy.differential={level: sample, epsilon: 3, delta: 1e-5, clipNorm: 1}",),
                        False,
                    ),
                ),
                1,
            ):
                two.labels = labels
                answer = asyncio.create_task(plan(stage, job_file, f"task.config={{number: {number}}}", *settings))
                command = await one.command("probe", number)
                assert command.labels is (PRIVATE not in settings)
                one.tell_profile(command.id, weight=weight(samples=1200, labels={0: 600, 1: 600}))
                told = (await answer)["warnings"]
                found = [text for text in told if "labels differ between regions: 27 % of those of b" in text]
                assert bool(found) == warned, told
            kinds = await stage.events("")
            assert kinds.count("task.labels") == 4, "of the last one no labels are counted"
            assert asked(two) == 0, "it does nothing else"

    run(scenario())


@pytest.mark.slow
def test_a_region_that_counts_no_labels_keeps_no_plan_and_no_other_labels_waiting(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it tells later is used later."""
    monkeypatch.setattr(_probing, "_LABELS_SECONDS", 1.0)

    async def scenario() -> None:
        async with (
            staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two,
            scales(stage, "c") as three,
        ):  # fmt: skip
            two.labels, three.labels = None, {0: 40, 1: 760}
            answer = asyncio.create_task(plan(stage, job_file))
            silent = await two.command("probe")
            assert silent.labels_only
            one.tell_profile((await one.command("probe")).id, weight=weight(samples=1200, labels={0: 600, 1: 600}))
            told = await answer
            assert any("labels differ between regions: 27 % of those of c" in text for text in told["warnings"])
            assert not any("of those of b" in text or "probe takes" in text for text in told["warnings"])
            labels = agent_pb2.TaskWeight(last=True, samples=800, labels={0: 760, 1: 40}, usd=2e-6)
            two.tell_profile(silent.id, weight=labels)

            async def used() -> bool:
                return any("45 % of those of b" in text for text in (await plan(stage, job_file))["warnings"])

            await stage.until(used)
            assert asked(one) == 1
            costs = {event.region: json.loads(event.data_json)["usd"] for event in await told_of(stage, "task.labels")}
            assert costs == {"b": 2e-6, "c": 1e-6}

    run(scenario())


def test_a_region_that_never_tells_its_labels_is_noted(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its probe is one that has succeeded."""
    monkeypatch.setattr(_probing, "_COUNT_SECONDS", 0.3)

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            two.labels = None
            answer = asyncio.create_task(plan(stage, job_file))
            one.tell_profile((await one.command("probe")).id, weight=weight())
            assert (await answer)["estimate"]["model_basis"] == "counted"

            async def noted() -> bool:
                return bool(await told_of(stage, "task.probe-failed"))

            await stage.until(noted)
            failed = await told_of(stage, "task.probe-failed")
            assert [event.region for event in failed] == ["b"]
            assert "failed: WAIT_TIMEOUT: region b has not answered within 0.3 s" in failed[0].text
            assert json.loads(failed[0].data_json) == {"usd": 0.0}

    run(scenario())


UNDEFINED = "loss raised NameError: name 'y' is not defined at task.py:9 (y), called at task.py:3 (f(x))"
LACKS = "import raised ModuleNotFoundError: No module named 'timm' at task.py:2"


def test_one_of_several_regions_refuses_nobody(serve_config: ServeConfig, job_file: Path) -> None:
    """Its image may lack a package. The plan rests on the next one's answer, and tells what was said before."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            answer = asyncio.create_task(plan(stage, job_file))
            one.tell_profile((await one.command("probe")).id, error=common_pb2.Error(code="TASK_FAILED", message=LACKS))
            two.tell_profile((await two.command("probe")).id, weight=weight())
            told = await answer
            assert told["estimate"]["model_basis"] == "counted"
            assert f"the probe in another region failed: a: {LACKS}" in told["warnings"]
            assert (await stage.submit(job_file)).created
            assert (asked(one), asked(two)) == (1, 1)

    run(scenario())


def test_two_regions_that_say_the_same_refuse_the_job(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            answer = asyncio.create_task(stage.submit(job_file))
            for agent in (one, two):
                error = common_pb2.Error(code="TASK_FAILED", message=LACKS)
                agent.tell_profile((await agent.command("probe")).id, error=error)
            with pytest.raises(GeofedError, match="No module named 'timm'"):
                await answer
            assert not await stage.client.jobs(ended=True)

    run(scenario())


def test_surroundings_of_the_only_region_refuse_nobody(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            error = common_pb2.Error(code="TASK_FAILED", message=LACKS)
            agent.tell_profile((await agent.command("probe")).id, error=error)
            told = await answer
            assert told["estimate"]["model_basis"] == "prior"
            assert f"the task was not probed: a: {LACKS}" in told["warnings"]

    run(scenario())


KEY = "model raised KeyError: 'width' at task.py:3"
REFUSED = "model raised URLError: <urlopen error [Errno 111] Connection refused> at task.py:3"
TOO_LARGE = "model raised RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory at task.py:3"


@pytest.mark.parametrize(
    ("texts", "alone", "certain"),
    [
        ((KEY,), True, True),
        ((KEY,), False, False),
        ((KEY, KEY), False, True),
        ((KEY, LACKS), False, False),
        ((LACKS,), True, False),
        ((REFUSED,), True, False),
        ((LACKS, REFUSED, LACKS), False, True),
        ((TOO_LARGE,), True, False),
        # A plan may choose a larger function.
        ((TOO_LARGE, TOO_LARGE), False, False),
        (("loss raised NameError: name 'x' is not defined at task.py:9 (x), called at task.py:3 (f(x))",), False, True),
        (("loss raised RuntimeError: mat1 and mat2 shapes cannot be multiplied at task.py:9 (m(x))",), True, True),
        (("loss raised RuntimeError: CUDA error: no kernel image at task.py:9 (m(x))",), True, False),
        (("the backward pass raised RuntimeError: element 0 of tensors does not require grad",), True, True),
        (("model raised RuntimeError: no server at task.py:9 (m(x))",), True, False),
        # In no line of the task.
        (("model raised KeyError: 'width'",), True, False),
        (("model raised OSError: 0x7f1 at task.py:3", "model raised OSError: 0x9 at task.py:3"), False, True),
        (("model raised RuntimeError: a at task.py:3", "model raised RuntimeError: a at task.py:4"), False, False),
    ],
)  # fmt: skip
def test_who_refuses(texts: tuple[str, ...], alone: bool, certain: bool) -> None:
    failed = {name: GeofedError("TASK_FAILED", f"{name}: {text}") for name, text in zip("abc", texts, strict=False)}
    assert (_probing._certain_fault(failed, alone) is not None) == certain


def test_a_task_that_lacks_a_function_is_refused_and_one_that_did_not_arrive_is_not() -> None:
    lacks = GeofedError("TASK_INVALID", "a: task.py does not define model")
    lost = GeofedError("TASK_INVALID", "a: the task folder bundle/1 is not in the channel")
    other = GeofedError("FUNCTION_OUT_OF_MEMORY", "a: too little memory")
    assert _probing._certain_fault({"a": lacks}, alone=True) is lacks
    assert _probing._certain_fault({"a": lost}, alone=True) is None
    assert _probing._certain_fault({"a": other, "b": other}, alone=False) is None


@pytest.mark.slow
def test_what_may_be_otherwise_elsewhere_stops_nobody(serve_config: ServeConfig, job_file: Path) -> None:
    """The next region is asked; where none can, the plan is made as if nobody had been, and it rests for a while."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as one, scales(stage, "b") as two:
            answer = asyncio.create_task(plan(stage, job_file))
            for agent in (one, two):
                command = await agent.command("probe")
                error = common_pb2.Error(code="FUNCTION_OUT_OF_MEMORY", message="too little memory")
                agent.tell_profile(command.id, error=error)
            told = await answer
            assert told["estimate"]["model_basis"] == "prior"
            assert "the task was not probed: b: too little memory" in told["warnings"]
            assert "b: too little memory" in str((await plan(stage, job_file))["warnings"])
            assert (asked(one), asked(two)) == (1, 1)

    run(scenario())


def test_steps_that_something_else_was_in_the_way_of_are_timed_once_that_is_mended(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight(steps=[], note="SHARD_UNREADABLE: x.npz is not there"))
            assert "x.npz is not there" in str((await answer)["warnings"])
            assert (await plan(stage, job_file))["estimate"]["model_basis"] == "counted"
            assert asked(agent) == 1, "it rests"
            monkeypatch.setattr(_probing, "_REST_SECONDS", 0.0)
            answer = asyncio.create_task(plan(stage, job_file, "task.config.width=9"))
            command = await agent.command("probe", 2)
            agent.tell_profile(command.id, weight=weight(steps=[], note="SHARD_UNREADABLE: x.npz is not there"))
            await answer
            answer = asyncio.create_task(plan(stage, job_file, "task.config.width=9"))
            agent.tell_profile((await agent.command("probe", 3)).id, weight=weight())
            assert (await answer)["estimate"]["basis"] == "probed"

    run(scenario())


def test_steps_that_lacked_memory_are_timed_with_what_the_model_needs(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            large = {"model_bytes": 100 << 20, "held_bytes": 200 << 20}
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            assert list(command.memories_mb) == [1024]
            note = "FUNCTION_OUT_OF_MEMORY: it was killed"
            agent.tell_profile(command.id, weight=weight(steps=[], note=note, **large))
            command = await agent.command("probe", 2)
            assert list(command.memories_mb) == [1536], "320 MB, and 32 bytes a parameter"
            agent.tell_profile(command.id, weight=weight(**large))
            told = await answer
            assert (told["estimate"]["basis"], told["partitions"][0]["memory_mb"]) == ("probed", 1536)
            loaded = load(job_file)
            packed = pack(loaded.folder, loaded.spec.task.module)
            content, digest = packed.content, packed.digest
            await stage.client.put_bundle(content, digest)
            profile = asyncio.create_task(anext(stage.client.profile(loaded.json, digest, "p1")))
            command = await agent.command("profile")
            assert list(command.memories_mb) == [1536], "a profile measures with as much"
            agent.tell_profile(command.id, condition="measuring")
            await profile
            # One that states its memory, and one that would get no more, are not asked again.
            for at, (overrides, size) in enumerate(
                ((("task.config.width=7", "function.memoryMb=512"), large), (("task.config.width=9",), {})), 3
            ):
                answer = asyncio.create_task(plan(stage, job_file, *overrides))
                command = await agent.command("probe", at)
                agent.tell_profile(command.id, weight=weight(steps=[], note=note, **size))
                assert note in str((await answer)["warnings"])
                assert asked(agent) == at

    run(scenario())


@pytest.mark.parametrize("note", ["FUNCTION_OUT_OF_MEMORY: it was killed", "GPU_MEMORY: the GPU ran out of memory"])
def test_a_batch_that_is_left_to_the_plan_is_probed_smaller_until_it_fits(
    serve_config: ServeConfig, job_file: Path, note: str
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file, "train.batch=auto", "train.end={epochs: 20}"))
            for number, batch in enumerate((64, 16), 1):
                command = await agent.command("probe", number)
                assert command.batch == batch
                agent.tell_profile(command.id, weight=weight(steps=[], note=note))
            command = await agent.command("probe", 3)
            assert command.batch == 4
            steps = [{"batch": 4, "seconds": 0.05}, {"batch": 2, "seconds": 0.03}]
            agent.tell_profile(command.id, weight=weight(steps=steps))
            told = await answer
            assert (told["batches"], told["estimate"]["basis"]) == ([2, 4], "probed")
            # A job that states its batch is probed with no other.
            answer = asyncio.create_task(plan(stage, job_file, "task.config.width=9"))
            command = await agent.command("probe", 4)
            agent.tell_profile(command.id, weight=weight(steps=[], note="FUNCTION_OUT_OF_MEMORY: it was killed"))
            await answer
            assert asked(agent) == 4

    run(scenario())


GPU_NOTE = "GPU_MEMORY: the GPU ran out of memory in loss at task.py:9 (m(x))"


def test_a_step_that_does_not_fit_into_the_only_gpu_makes_no_job(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight(steps=[], note=GPU_NOTE))
            with pytest.raises(GeofedError, match="a: the GPU ran out of memory in loss") as caught:
                await answer
            assert caught.value.code == "GPU_MEMORY"
            assert "no job was created" in str(caught.value.hint)
            # With a smaller batch it is tried again, and what did not fit is kept in mind.
            answer = asyncio.create_task(plan(stage, job_file, "train.batch=5"))
            command = await agent.command("probe", 2)
            steps = [{"batch": 5, "seconds": 0.05, "device_bytes": 3 << 30}]
            agent.tell_profile(command.id, weight=weight(steps=steps))
            assert (await answer)["estimate"]["basis"] == "probed"
            refused = await plan(stage, job_file)
            assert [reason["code"] for reason in refused["reasons"]] == ["GPU_MEMORY"]
            assert asked(agent) == 2

    run(scenario())


def test_a_region_whose_gpu_is_too_small_is_declined_and_others_are_not(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as a, scales(stage, "b") as b:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await a.command("probe")
            a.tell_profile(command.id, weight=weight(steps=[], note=GPU_NOTE))
            command = await b.command("probe")
            b.tell_profile(command.id, weight=weight())
            (reason,) = (await answer)["reasons"]
            assert reason["code"] == "GPU_MEMORY"
            assert "a step of 10 samples does not fit into a GPU of region a: the GPU ran out" in reason["text"]
            assert "regions.avoid" in reason["remedy"]
            without = await plan(stage, job_file, "regions.avoid=[a]")
            assert [part["region"] for part in without["partitions"]] == ["b"]
            assert (asked(a), asked(b)) == (1, 1)

    run(scenario())


def test_a_gpu_that_was_too_small_keeps_its_region_out_for_a_day_whatever_others_tell() -> None:
    day = 86_400.0
    told = replace(WeightRow("k", "a", 1000.0, 1, 4, "[]", 0.0, ""), note=GPU_NOTE)
    lacks = _probing._lacks(told, 10, {})
    text = GPU_NOTE.partition(": ")[2]
    assert lacks == {"a": (10, text, 1000.0)}
    row = replace(told, region="b", note="", steps_json="[[5, 0.1]]", gpu_lacks_json=json.dumps(lacks))
    for at in (1000.0 + 0.4 * day, 1000.0 + 0.8 * day):
        known = _probing._recent_lacks(row, at)
        assert known == lacks
        row = replace(row, at=at, gpu_lacks_json=json.dumps(_probing._lacks(replace(row, at=at), 5, known)))
    assert _probing._recent_lacks(row, 1000.0 + day) == lacks
    assert _probing._recent_lacks(row, 1001.0 + day) == {}


def test_the_region_with_the_most_data_is_asked(serve_config: ServeConfig, job_file: Path) -> None:
    """It makes the most steps, and the others wait for it."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, "a") as small, scales(stage, "b") as large:
            large.catalogue = catalogue("b", samples=500)
            await large.close()
            await large.connect()
            answer = asyncio.create_task(plan(stage, job_file))
            large.tell_profile((await large.command("probe")).id, weight=weight())
            await answer
            assert not asked(small)

    run(scenario())


@pytest.mark.slow
def test_an_agent_that_goes_away_leaves_what_it_has_told(serve_config: ServeConfig, job_file: Path) -> None:
    """And one that comes back is asked again under the same id."""

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight(steps=[], last=False))
            await asyncio.sleep(0.2)
            await agent.close()
            await agent.connect()
            assert await agent.command("probe", 2) == command
            error = common_pb2.Error(code="INTERNAL", message="the agent has a bug")
            agent.tell_profile(command.id, error=error, usd=0.25)
            told = await answer
            events = [one async for one in stage.client.watch("", follow=False)]
            broken = [json.loads(one.data_json) for one in events if one.kind == "task.probe-failed"]
            assert broken == [{"usd": 0.25}]
            assert told["estimate"]["model_basis"] == "counted"
            assert "has not timed the task's steps: INTERNAL: a: the agent has a bug" in str(told["warnings"])

    run(scenario())


def test_no_more_tasks_than_so_many_are_probed_at_once(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_probing, "_MAX_PROBES", 2)

    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answers = [asyncio.create_task(plan(stage, job_file, f"task.config.width={n}")) for n in range(2)]
            commands = [await agent.command("probe", count) for count in (1, 2)]
            refused = await plan(stage, job_file, "task.config.width=5")
            assert "the task was not probed: 2 other tasks are being probed" in refused["warnings"]
            for command in commands:
                agent.tell_profile(command.id, weight=weight())
            assert {(await answer)["estimate"]["model_basis"] for answer in answers} == {"counted"}

    run(scenario())


def test_an_agent_that_talks_nonsense_is_not_believed(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight(model_bytes=2**62))
            assert "region a reported an implausible probe" in str((await answer)["warnings"])

    run(scenario())


def test_a_number_that_cannot_be_is_left_out_and_the_rest_kept(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            answer = asyncio.create_task(plan(stage, job_file))
            steps = [{"batch": 10, "seconds": 1e-310}, {"batch": 4, "seconds": 0.05}]
            told = weight(steps=steps, start_seconds=float("nan"), usd=float("nan"))
            agent.tell_profile((await agent.command("probe")).id, weight=told)
            answered = await answer
            estimate = answered["estimate"]
            assert (estimate["basis"], estimate["model_basis"], estimate["start_basis"]) == (
                "probed",
                "counted",
                "prior",
            )
            assert "region a reported implausible values" in str(answered["warnings"])

    run(scenario())


NUMBERS = st.floats() | st.floats(1e-7, 1e7)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), NUMBERS), max_size=20), NUMBERS, st.integers(1, 2**46),
    st.integers(1, 4096),
)  # fmt: skip
def test_whatever_an_agent_tells_what_is_kept_makes_finite_speeds(
    steps: list[tuple[int, float]], start: float, size: int, batch: int
) -> None:
    timed = [{"batch": one, "seconds": seconds} for one, seconds in steps]
    told = weight(model_bytes=size, parameters=size, steps=timed, start_seconds=start)
    kept = _probing._row("t", "a", 1.0, told)
    assert (kept.parameters, kept.model_bytes) == (size, size)
    for speed in (probed_speeds(kept, batch) or {"a": 1.0}).values():
        assert 0 < speed < math.inf
    assert 0 <= kept.start_seconds <= 1e6
    assert bool(kept.note) == (len(json.loads(kept.steps_json)) < len(steps) or kept.start_seconds != start)


def test_without_agents_workers_or_code_it_is_planned_as_before(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage, workers=1) as agent:
            loaded = load(job_file)
            told = json.loads((await stage.client.plan(loaded.json, loaded.code_digest)).plan_json)
            assert told["estimate"]["model_basis"] == "prior"
            assert "warnings" not in told or "probe" not in str(told["warnings"])
            with pytest.raises(GeofedError, match="has not arrived"):
                await stage.client.plan(loaded.json, bundle_digest=f"sha256:{'0' * 64}")
            # What is known needs no probing, whoever is busy.
            first = asyncio.create_task(stage.submit(job_file))
            command = await agent.command("probe")
            agent.tell_profile(command.id, weight=weight())
            assert (await first).created
            told = await plan(stage, job_file, "task.config.width=9")
            assert "no region that holds its data has a free worker" in str(told["warnings"])

    run(scenario())


def test_an_agent_that_comes_is_asked_though_a_moment_ago_there_was_none(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            async with scales(stage, workers=0) as none:
                assert "reasons" in await plan(stage, job_file)
                assert not asked(none)
            async with scales(stage, "b") as agent:
                answer = asyncio.create_task(plan(stage, job_file, "regions.use=[b]"))
                command = await agent.command("probe")
                agent.tell_profile(command.id, weight=weight())
                assert (await answer)["estimate"]["model_basis"] == "counted"

    run(scenario())


def test_a_task_with_runs_is_not_probed(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage, scales(stage) as agent:
            loaded = load(job_file)
            key, kin = task_keys(loaded.spec, loaded.code_digest)
            with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
                store.commit(Change(runs=(RunRow("j", "a", key, 1.0, 50.0, 700, 0.5, kin_key=kin, batch=10),)))
            assert (await plan(stage, job_file))["estimate"]["model_basis"] == "measured"
            assert not asked(agent)
            # Other code of that name may make another model; its speed is the best that is known.
            (job_file.parent / "task.py").write_text((job_file.parent / "task.py").read_text() + "\n# changed\n")
            answer = asyncio.create_task(plan(stage, job_file))
            agent.tell_profile((await agent.command("probe")).id, weight=weight())
            estimate = (await answer)["estimate"]
            assert (estimate["model_bytes"], estimate["basis"]) == (100_000, "measured")

    run(scenario())


def row(steps: list[tuple[int, float]]) -> WeightRow:
    return WeightRow("t", "a", 1.0, 10, 40, json.dumps(steps), 2.0)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-5, 10)), min_size=1, max_size=2), st.integers(1, 1024))
def test_a_probe_tells_the_speed_with_its_own_batch_and_a_sane_one_with_others(
    steps: list[tuple[int, float]], batch: int
) -> None:
    speed = probed_speeds(row(steps), batch)["a"]
    assert speed > 0
    for size, seconds in reversed(steps):
        if size == batch:
            exact = seconds
    if any(size == batch for size, _ in steps):
        assert speed == pytest.approx(batch / exact)


def test_what_ran_counts_before_what_was_probed() -> None:
    ran = RunRow("j", "a", "t", 1.0, 50.0, 44, 0.5, batch=10)
    known = snapshot_of((), (), TaskHistory((ran,), row([(10, 0.1)])), 10)
    assert (known.model_bytes, known.counted, known.start_seconds, known.start_probed) == (44, False, 0.5, False)
    assert known.speeds == {"a": 50.0}
    kin = snapshot_of((), (), TaskHistory((replace(ran, task_key="before"),), row([(10, 0.1)])), 10)
    assert (kin.model_bytes, kin.counted, kin.start_seconds) == (40, True, 0.5)
    alone = snapshot_of((), (), TaskHistory((), row([(10, 0.1)])), 10)
    assert (alone.model_bytes, alone.start_seconds, alone.start_probed) == (40, 2.0, True)
    assert alone.probed == {"a": pytest.approx(100.0)}
    assert snapshot_of((), (), TaskHistory((), row([])), 10).probed == {}
