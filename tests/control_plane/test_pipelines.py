"""Pipelines from the job file to the agent: what is asked, what is stored of the plan, and what the region is told."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from control_plane.cli._report import plan_text
from control_plane.service._wire import _pipeline
from control_plane.spec import load, to_demand
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
    stored = STORED.validate_json(STORED.dump_json(plan))
    assert stored == plan
    shape = cut(stored)[0].pipeline
    assert shape is not None
    told = _pipeline(shape)
    assert [(stage.first_layer, stage.last_layer) for stage in told.stages] == [(s.first, s.last) for s in shape.stages]
    assert (told.degree, told.micro_batch, told.order) == (shape.degree, shape.micro_batch, shape.order)
    text = plan_text(STORED.dump_python(plan, mode="json"))
    assert all(sentence in text for sentence in shape.why)
    rows = text.split("OF THE TIME", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    names = [phase.name for phase in plan.estimate.phases]
    assert [row.startswith(name) for row, name in zip(rows, [*names, "total"], strict=True)] == [True] * len(rows)
