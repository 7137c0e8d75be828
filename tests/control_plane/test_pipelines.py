"""Pipelines from the job file to the agent: what is asked, what is stored of the plan, and what the region is told."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from control_plane.cli._report import plan_text
from control_plane.core import JobState, Report, Speed
from control_plane.core import Partition as CorePartition
from control_plane.service.jobs._result import result_of, runs_so_far
from control_plane.service.planning._planning import plan_json
from control_plane.service.rpc._wire import _pipeline
from control_plane.spec import load, to_demand
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from scheduler import Plan
from tests.scheduler.test_pipelined import cut, snapshot
from tests.scheduler.test_plan import demand, planned

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STORED = TypeAdapter(Plan)


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ("auto", ("auto", None)),
        ("data", ("data", None)),
        ("{pipeline: {}}", ("pipeline", None)),
        ("{pipeline: {stages: auto}}", ("pipeline", None)),
        ("{pipeline: {stages: 3}}", ("pipeline", 3)),
    ],
)
def test_the_job_file_says_how(job_file: Path, told: str, asked: tuple[str, int | None]) -> None:
    spec = load(job_file, [f"parallelism={told}"]).spec
    wanted = to_demand(spec, "j", NOW)
    assert (wanted.parallelism, wanted.stages) == asked


@pytest.mark.parametrize(("told", "asked"), [("auto", None), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_job_file_may_fix_what_stages_send(job_file: Path, told: str, asked: str | None) -> None:
    spec = load(job_file, [f"parallelism={{pipeline: {{activations: {told}}}}}"]).spec
    assert to_demand(spec, "j", NOW).activations == asked
    plan = planned(snapshot(300.0), demand(parallelism="pipeline", stages=2, workers=4, activations=asked or "fp32"))
    shape = cut(plan)[0].pipeline
    assert shape is not None
    assert _pipeline(shape).activation_codec == ("bf16" if asked == "bf16" else "")


@pytest.mark.parametrize("told", ["pipeline", "{pipeline: {stages: 0}}", "{stages: 2}", "{pipeline: {activations: 8}}"])
def test_other_words_are_errors(job_file: Path, told: str) -> None:
    with pytest.raises(GeofedError):
        load(job_file, [f"parallelism={told}"])


def test_a_plan_keeps_its_stages_and_tells_them() -> None:
    plan = planned(snapshot(300.0), demand(parallelism="pipeline", stages=2, workers=4))
    stored = STORED.validate_json(plan_json(plan))
    assert stored == plan
    shape = cut(stored)[0].pipeline
    assert shape is not None
    told = _pipeline(shape)
    assert [(stage.first_layer, stage.last_layer) for stage in told.stages] == [(s.first, s.last) for s in shape.stages]
    assert (told.degree, told.micro_batch, told.order) == (shape.degree, shape.micro_batch, shape.order)
    text = plan_text(json.loads(plan_json(plan)))
    assert all(sentence in text for sentence in shape.why)
    rows = text.split("PHASE ", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    names = [phase.name for phase in plan.estimate.phases]
    assert [row.startswith(name) for row, name in zip(rows, [*names, "total"], strict=True)] == [True] * len(rows)


@pytest.mark.parametrize(("workers", "took", "pace"), [(4, 3.0, 1.5), (2, 3.0, 0.0), (4, 0.0, 0.0)])
def test_a_run_tells_how_far_the_profile_was_from_it(job_file: Path, workers: int, took: float, pace: float) -> None:
    """However the plan was made; one whose workers changed meanwhile, or that made no two steps, tells nothing."""
    spec = load(job_file, ["parallelism={pipeline: {stages: 2}}"]).spec
    for known in ({}, {"a": 1.7, "b": 1.7}):
        there_is = replace(snapshot(300.0), stage_paces=known)
        plan = planned(there_is, demand(parallelism="pipeline", stages=2, workers=4))
        shape = cut(plan, sentences=1 if known else 0)[0].pipeline
        assert shape is not None
        by_profile = shape.step_seconds / known.get("a", 1.0)
        report = Report(
            1,
            "finished",
            step=9,
            workers=workers,
            speed=Speed(samples_per_second=5.0, step_seconds=took * by_profile / 2),
        )
        state = JobState("j", 600.0, 100.0, partitions=(CorePartition("a", report=report),))
        row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), "", "", "succeeded", 100.0)
        (told,) = runs_so_far(row, state, spec, plan, 200.0)
        assert told.stage_pace == pytest.approx(pace)
        result = result_of(row, state, plan)["regions"][0]
        assert result["predicted_step_seconds"] == shape.step_seconds
        assert took == 0.0 or result["step_seconds"] == pytest.approx(took * by_profile / 2)
