"""A date that a refusal names can be promised, and much less cannot where there is nobody else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning import _admission
from control_plane.service.planning._admission import AdmittedJob, PendingAdmission
from control_plane.service.planning._allocation import Allocation
from control_plane.service.planning._planning import first_state, plan_json
from control_plane.service.state._certificates import unseen_region
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import JobSpec, load
from control_plane.store import JobRow
from scheduler import Capacity, Declined, Demand, Plan, Planner, Split, _plan
from tests.control_plane.fake_agent import catalogue

JOB = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: digits}
task: {module: task.py}
data: {dataset: digits}
train: {batch: 32, end: {epochs: 10}}
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dates") / "job.yaml"
    path.write_text(JOB)
    return path


def live(name: str, samples: int, workers: int, speed: float | None) -> RegionEntry:
    entry, told = unseen_region(name), catalogue(name, samples, workers)
    told = replace(told, capacity=Capacity(workers, 2048, speed))
    return replace(entry, state=replace(entry.state, phase="live"), catalogue=told)


class Stand:
    """A federation at one moment, with the jobs that were admitted so far."""

    def __init__(self, regions: list[RegionEntry]) -> None:
        self.allocation, self.regions = Allocation(), {entry.row.name: entry for entry in regions}
        self.jobs: dict[str, JobEntry] = {}
        self.at = 1000.0

    def asks(self, job_file: Path, *overrides: str) -> tuple[JobSpec, AdmittedJob | Declined]:
        spec = load(job_file, overrides).spec
        draft = Draft(self.at, self.jobs, self.regions)
        return spec, self.allocation.admission(draft, spec, "new", TaskHistory()).answer()

    def takes(self, job_file: Path, *overrides: str) -> None:
        """Take a job in, if it can be; it waits in line with its promise."""
        spec, answer = self.asks(job_file, *overrides)
        if isinstance(answer, AdmittedJob):
            name = f"other-{len(self.jobs)}"
            state = first_state(name, self.at, spec, answer.plan, self.regions, answer.deadline_at)
            row = JobRow(name, "o", "r", "", "", "", spec.to_json(), plan_json(answer.plan), "", "queued", self.at)
            self.jobs[name] = JobEntry(row, state, spec, answer.plan)


def named(answer: Declined) -> int:
    (reason,) = answer.reasons
    seconds = re.match(r"a deadline of (\d+) s from now could be promised", reason.remedy)
    assert seconds is not None, reason
    return int(seconds[1])


shapes = st.lists(
    st.tuples(st.integers(50, 30_000), st.integers(1, 8), st.sampled_from([None, 80.0, 900.0])), min_size=1, max_size=3
)
others = st.lists(st.tuples(st.integers(1, 60), st.floats(1.0, 4.0), st.booleans()), max_size=3)


@pytest.mark.slow
@settings(deadline=None, max_examples=budget(40))
@given(shape=shapes, before=others, part=st.floats(0.01, 1.0), epochs=st.integers(1, 60), fixed=st.booleans())
def test_the_date_that_a_refusal_names_is_promised_then_and_a_moment_later(
    job_file: Path,
    shape: list[tuple[int, int, float | None]],
    before: list[tuple[int, float, bool]],
    part: float,
    epochs: int,
    fixed: bool,
) -> None:
    stand = Stand([live(f"r{number}", *one) for number, one in enumerate(shape)])
    for passes, slack, is_fixed in before:
        _, alone = stand.asks(job_file, f"train.end={{epochs: {passes}}}")
        assert isinstance(alone, AdmittedJob)
        seconds = 60 + int(alone.plan.estimate.seconds.high * slack)
        workers = ("train.workers=1",) if is_fixed else ()
        stand.takes(job_file, f"train.end={{epochs: {passes}}}", f"objective.deadline={seconds}s", *workers)
    asked = (f"train.end={{epochs: {epochs}}}", *(("train.workers=1",) if fixed else ()))
    _, alone = stand.asks(job_file, *asked)
    assert isinstance(alone, AdmittedJob)
    soon = max(1, int(part * (15 + alone.plan.estimate.seconds.high)))
    _, answer = stand.asks(job_file, *asked, f"objective.deadline={soon}s")
    if isinstance(answer, AdmittedJob) or answer.reasons[0].remedy.startswith("no date can be named"):
        # Where a promise only just holds, a job with workers of its own to the end may find no place beside it.
        return
    told = named(answer)
    assert told > soon
    # Among others with promises one date may be too early by a hair, and one before it not: there nobody can say that
    # all earlier ones are refused who looks for it by halves.
    well_before = int(0.93 * told) - 3
    if well_before > soon and not stand.jobs:
        _, no = stand.asks(job_file, *asked, f"objective.deadline={well_before}s")
        assert isinstance(no, Declined), (well_before, told)
    for _ in range(2):
        _, taken = stand.asks(job_file, *asked, f"objective.deadline={told}s")
        assert isinstance(taken, AdmittedJob), taken
        assert taken.deadline_at == stand.at + told
        stand.at += 1.0


def test_a_date_that_would_be_refused_a_moment_later_is_not_named(job_file: Path) -> None:
    """Of 48, 49 and 50 s the middle one can be promised now, and half a second later only the others."""
    stand = Stand([live("r0", 10945, 6, 900.0)])
    for _ in range(2):
        stand.takes(job_file, "train.end={epochs: 1}", "objective.deadline=74s")
    _, answer = stand.asks(job_file, "train.end={epochs: 4}", "objective.deadline=21s")
    assert isinstance(answer, Declined)
    for _ in range(3):
        _, later = stand.asks(job_file, "train.end={epochs: 4}", f"objective.deadline={named(answer)}s")
        assert isinstance(later, AdmittedJob), named(answer)
        stand.at += 0.5


@pytest.mark.slow
def test_where_nobody_else_has_a_promise_none_is_blamed(job_file: Path) -> None:
    stand = Stand([live("r0", 1000, 4, 900.0)])
    _, answer = stand.asks(job_file, "objective.deadline=1s")
    assert isinstance(answer, Declined)
    told = named(answer)
    for seconds in range(2, told - 3):
        _, no = stand.asks(job_file, f"objective.deadline={seconds}s")
        assert isinstance(no, Declined)
        assert abs(named(no) - told) <= 1, "the date does not depend on how much too early was asked"
        assert "other jobs" not in no.reasons[0].text


@pytest.mark.slow
def test_a_date_costs_hardly_more_than_a_plan_where_shards_may_be_processed_anywhere(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_to_all(number: int) -> RegionEntry:
        entry = live(f"r{number}", 20_000 + 1_000 * number, 4 + number % 3, 500.0 + 50 * number)
        told = entry.catalogue
        assert told is not None
        splits = {name: Split(split.samples, 50_000_000) for name, split in told.datasets[0].splits.items()}
        shard = replace(told.datasets[0], residency="anywhere", splits=splits)
        return replace(entry, catalogue=replace(told, datasets=(shard,), takes_shards=True))

    evaluated, planned, choose, plan = 0, 0, _plan.exchange_options, Planner.plan

    def counted(*args: object) -> object:
        nonlocal evaluated
        evaluated += 1
        return choose(*args)  # type: ignore[arg-type]

    def counted_plan(planner: Planner, demand: Demand) -> Plan | Declined:
        nonlocal planned
        planned += 1
        return plan(planner, demand)

    monkeypatch.setattr(_plan, "exchange_options", counted)
    monkeypatch.setattr(Planner, "plan", counted_plan)
    stand = Stand([open_to_all(number) for number in range(5)])
    _, answer = stand.asks(job_file, "data.residency=anywhere", "objective.deadline=5s")
    assert isinstance(answer, Declined)
    # One plan evaluates about 9 placements, and a refusal asks for some 17 plans.
    assert evaluated < 50, "what depends on no deadline is evaluated once for all dates"
    told = named(answer)
    assert _admission._MAX_PLACEMENTS <= 150, "a refusal of a job that many regions may run ends in time"
    before = planned
    with monkeypatch.context() as bounded:
        bounded.setattr(_admission, "_MAX_PLACEMENTS", 1)
        _, rough = stand.asks(job_file, "data.residency=anywhere", "objective.deadline=5s")
        assert isinstance(rough, Declined)
        assert named(rough) > told, "a search that has evaluated enough names the date that it has"
    assert planned - before <= 12 < before, "then it plans no further dates to find an earlier one: 10 plans, not 16"
    stand.at += 0.5
    _, later = stand.asks(job_file, "data.residency=anywhere", f"objective.deadline={told}s")
    assert isinstance(later, AdmittedJob)
    _, no = stand.asks(job_file, "data.residency=anywhere", f"objective.deadline={int(0.93 * told) - 3}s")
    assert isinstance(no, Declined)


def test_an_answer_holds_as_long_as_what_it_rests_on_does(job_file: Path) -> None:
    """It is worked out while other things continue, and held against them before it is stored."""
    stand = Stand([live("r0", 10_000, 4, 900.0), live("r1", 8_000, 4, 900.0)])
    _, alone = stand.asks(job_file)
    assert isinstance(alone, AdmittedJob)
    seconds = int(60 + 1.3 * alone.plan.estimate.seconds.high)
    spec = load(job_file, (f"objective.deadline={seconds}s",)).spec

    def asked() -> PendingAdmission:
        return stand.allocation.admission(Draft(stand.at, stand.jobs, stand.regions), spec, "new", TaskHistory())

    before = asked()
    answer = before.answer()
    assert isinstance(answer, AdmittedJob)
    stand.at += 2.0
    now = asked().confirm(answer, before)
    assert now == replace(answer, deadline_at=stand.at + seconds), "the date counts from when it is stored"
    whole = dict(stand.regions)
    entry = stand.regions["r1"]
    stand.regions["r1"] = replace(entry, state=replace(entry.state, phase="lost"))
    assert asked().confirm(answer, before) is None
    assert entry.catalogue is not None
    stand.regions["r1"] = replace(entry, catalogue=replace(entry.catalogue, capacity=Capacity(1, 2048, 900.0)))
    assert asked().confirm(answer, before) is None
    stand.regions.update(whole)
    for _ in range(3):
        stand.takes(job_file, f"objective.deadline={seconds}s", "train.workers=4")
    assert asked().confirm(answer, before) is None, "what it needs is promised to others by now"
    stand.jobs.clear()
    assert asked().confirm(answer, before) is not None
