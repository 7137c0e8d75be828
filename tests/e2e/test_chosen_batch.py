"""A batch that the plan chooses (`train.batch: auto`), from the first plan to the result, through the real daemons."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.running import Running, check_succeeded, named

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

AUTO = ("train.batch=auto", "train.end={epochs: 5}", "train.learningRate={batch: 64}")
"""With a batch of 8 training diverges by the template's own rate."""


def explained(running: Running, *settings: str) -> Any:
    chosen = [part for setting in settings for part in ("--set", setting)]
    job = str(running.job_folder(named("chosen batch")) / "job.yaml")
    ran = running.federation.control_plane("explain", job, *chosen, "-o", "json", timeout=60)
    return json.loads(ran.stdout)["data"]


def test_a_job_trains_with_the_batch_that_its_plan_has_chosen(running: Running) -> None:
    plan = explained(running, *AUTO)
    assert plan["batches"] == [8, 16, 32, 64], "as a probe has made steps of 16 and 64 samples"
    (batch,) = {part["batch"] for part in plan["partitions"]}
    assert batch in plan["batches"]
    assert plan["learning"]["basis"] == "prior"
    others = [other for other in plan["alternatives"] if other["decision"] == f"batch {batch}"]
    assert len(others) >= 2
    assert all(" s and $" in other["text"] for other in others[:2])
    job = running.submit(*AUTO)
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.5)
    (used,) = {part["batch"] for part in ended["plan"]["partitions"]}
    assert used in plan["batches"]
    assert ended["spec"]["train"]["batch"] == "auto"
    for part, region in zip(ended["plan"]["partitions"], ended["result"]["regions"], strict=True):
        steps = ended["plan"]["rounds"] * part["steps_per_round"]
        assert region["steps"] == steps
        passes = steps * used * part["workers"] / part["samples"]
        assert passes == pytest.approx(5.0, abs=max(0.5, used * part["workers"] / part["samples"]))
    told = running.federation.control_plane("describe", job).stdout
    assert f"{used} samples of a worker in a step, chosen of 8, 16, 32, 64; the learning rate stays, but for" in told
    # The next plan knows the speed with that batch from the run.
    again = explained(running, *AUTO, f"train.batch={used}")
    assert (again["estimate"]["basis"], again["batches"]) == ("measured", [])


def test_what_cannot_have_its_batch_chosen_is_refused_by_name(running: Running) -> None:
    job = str(running.job_folder() / "job.yaml")
    for setting, told in (
        ("train.end={steps: 40}", "`train.end.steps`"),
        ("clients={fraction: 0.5}", "`clients`"),
        ("parallelism={pipeline: {stages: 2}}", "a pipeline"),
    ):
        chosen = [part for one in (*AUTO, setting) for part in ("--set", one)]
        ran = running.federation.control_plane("validate", job, *chosen, check=False)
        assert ran.returncode != 0
        assert f"`train.batch: auto` cannot be used with {told}" in ran.stderr


def test_a_profile_widens_the_choice_and_tells_the_noise_scale(running_redis: Running) -> None:
    federation, auto = running_redis.federation, [part for one in AUTO for part in ("--set", one)]
    job = str(running_redis.job_folder(named("profiled batch")) / "job.yaml")
    ran = federation.control_plane("profile", job, *auto, "-o", "json", timeout=120)
    profiles = json.loads(ran.stdout)["data"]["regions"]
    assert {tuple(point["batch"] for point in one["steps"]) for one in profiles.values()} == {(16, 32, 64, 128)}
    plan = json.loads(federation.control_plane("explain", job, *auto, "-o", "json").stdout)["data"]
    assert plan["batches"] == [8, 16, 32, 64, 128, 256]
    measured = any(one["noise_samples"] for one in profiles.values())
    assert plan["learning"]["basis"] == ("measured" if measured else "prior")
    ended = running_redis.wait_end(running_redis.submit(*AUTO))
    assert ended["state"] == "succeeded", ended["error"]
    assert {part["batch"] for part in ended["plan"]["partitions"]} == {part["batch"] for part in plan["partitions"]}
