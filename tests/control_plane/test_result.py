"""What is compared with the prediction is what was predicted: without the wait for workers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control_plane.cli._report import result_text
from control_plane.core import (
    JobMachine,
    JobState,
    Partition,
    Planned,
    Report,
    Reported,
    Speed,
    StartAllowed,
    StartDelayed,
)
from control_plane.service.jobs._result import result_of, runs_of
from control_plane.service.measuring._known import Learnt
from control_plane.service.planning._planning import plan_json, snapshot_of
from control_plane.spec import load, to_demand
from control_plane.store import JobRow
from scheduler import Plan, plan
from tests.control_plane.test_dates import live


def ended(begun_at: float, started_at: float, phase: str = "succeeded") -> JobState:
    report = Report(1, "published", round=5, step=50, samples=500, speed=Speed(samples_per_second=100.0))
    parts = (Partition("r0", state="published", report=report),)
    return JobState(
        "j", 600.0, 100.0, phase=phase, partitions=parts, begun_at=begun_at, started_at=started_at, finished_at=195.0,
        flat_bytes=40, blob_bytes=90,
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_wait_for_workers_is_told_apart(job_file: Path) -> None:
    spec = load(job_file).spec
    chosen = plan(
        snapshot_of([live("r0", 500, 2, 100.0)], (), Learnt()), to_demand(spec, "j", datetime.fromtimestamp(100.0, UTC))
    )
    assert isinstance(chosen, Plan)
    row = JobRow("j", "digits", "r", "", "", "t", spec.to_json(), plan_json(chosen), "", "succeeded", 100.0)
    result = result_of(row, ended(155.0, 158.0), chosen)
    assert (result["seconds"], result["queued_seconds"], result["training_seconds"]) == (95.0, 55.0, 37.0)
    assert result["measured"]["seconds"] == 40.0
    told = result_text({"result": result})
    assert "1 min 35 s, of which waiting for workers 55.0 s, training 37.0 s" in told
    assert told.splitlines()[-3].split()[-2:] == ["40.0", "s"]
    (known,) = runs_of(row, ended(155.0, 158.0), spec, chosen)
    assert (known.start_seconds, known.model_bytes) == (3.0, 40), "later plans do not start the later for it"
    stepped = replace(ended(155.0, 158.0), stepped_at=172.0, stepped_region="r0", stepped_steps=40)
    (known,) = runs_of(row, stepped, spec, chosen)
    assert known.start_seconds == 172.0 - 40 * spec.train.batch / 100.0 - 155.0, "a slow model too"
    never = result_of(row, ended(0.0, 0.0, "cancelled"), chosen)
    assert (never["queued_seconds"], never["measured"]["seconds"]) == (95.0, 0.0)
    before = result_of(row, ended(0.0, 101.0), chosen)
    assert before["queued_seconds"] == 0.0, "a job that began when this was not kept yet"


@pytest.mark.parametrize("waited", [0.0, 30.0])
def test_a_job_begins_when_it_gets_its_workers(waited: float) -> None:
    machine = JobMachine(replace(ended(0.0, 0.0), phase="queued", finished_at=0.0, partitions=(Partition("r0"),)))
    machine.handle(StartDelayed(100.0, "for workers in r0"))
    machine.handle(Planned(100.0 + waited))
    machine.handle(StartAllowed(100.0 + waited))
    assert machine.state.begun_at == 100.0 + waited


def test_the_first_steps_are_those_of_the_last_region_to_make_one() -> None:
    parts = tuple(Partition(name, state="training", workers=1) for name in ("r0", "r1"))
    machine = JobMachine(replace(ended(0.0, 0.0), phase="starting", finished_at=0.0, partitions=parts))
    for at, region, step in [(101.0, "r0", 3), (102.0, "r1", 0), (103.0, "r0", 9), (104.0, "r1", 2), (105.0, "r1", 8)]:
        machine.handle(Reported(at, region, Report(1, "training", step=step)))
    state = machine.state
    assert (state.started_at, state.stepped_at, state.stepped_region, state.stepped_steps) == (101.0, 104.0, "r1", 2)
