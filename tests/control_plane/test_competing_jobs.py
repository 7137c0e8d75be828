"""Which jobs are planned together, and what the others leave them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.core import Report, Speed
from control_plane.service.measuring._speeds import JobSpeeds
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning import _competing_jobs
from control_plane.service.planning._admission import AdmittedJob
from control_plane.service.planning._allocation import Allocation, begin
from control_plane.service.planning._competing_jobs import competing_jobs
from control_plane.service.planning._gangs import gang_of
from control_plane.service.planning._planning import first_state, plan_json
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.service.state._index import JobIndex
from control_plane.spec import load
from control_plane.store import JobRow
from tests.control_plane.test_possible_deadline import live

WORKERS = 4


class Chain:
    """Regions in a row, with a job of one worker over each two neighbours."""

    def __init__(self, job_file: Path, regions: int) -> None:
        self.regions: dict[str, RegionEntry] = {
            name: live(name, 1000, WORKERS, 500.0) for name in (f"r{number:02}" for number in range(regions))
        }
        self.jobs: dict[str, JobEntry] = {}
        self.allocation, self.job_file = Allocation(), job_file
        names = list(self.regions)
        for number, pair in enumerate(pairwise(names)):
            self.add(f"j{number:02}", *pair)

    def draft(self) -> Draft:
        return Draft(1000.0, self.jobs, self.regions)

    def add(self, name: str, *regions: str, workers: int | str = 1) -> None:
        use = (f"regions.use=[{', '.join(regions)}]", f"train.workers={workers}", "train.end={epochs: 50}")
        spec = load(self.job_file, use).spec
        draft = self.draft()
        answer = self.allocation.admission(draft, spec, name, TaskHistory()).answer()
        assert isinstance(answer, AdmittedJob)
        state = first_state(name, 1000.0, spec, answer.plan, self.regions, None)
        at = 1000.0 + len(self.jobs)
        row = JobRow(name, "o", name, "", "", "", spec.to_json(), plan_json(answer.plan), "", "queued", at)
        entry = JobEntry(row, state, spec, answer.plan)
        if answer.workers:
            draft.add_job(entry)
            begin(draft, entry, answer.workers)
            entry = draft.changed_jobs[name]
        self.jobs[name] = entry


def test_jobs_that_share_no_region_even_by_others_are_not_planned_together(job_file: Path) -> None:
    chain = Chain(job_file, 4)
    chain.regions["far"] = live("far", 1000, WORKERS, 500.0)
    chain.add("alone", "far")
    assert list(competing_jobs(chain.draft(), ("r00",), {}).entries) == ["j00", "j01", "j02"]
    assert list(competing_jobs(chain.draft(), ("far",), {}).entries) == ["alone"]
    together = competing_jobs(chain.draft(), ("r00",), {})
    assert {name: one.devices for name, one in together.lasting.items()} == dict.fromkeys(
        ("r00", "r01", "r02", "r03"), WORKERS
    )


def test_beyond_a_number_the_workers_of_others_are_not_there(job_file: Path) -> None:
    chain = Chain(job_file, 8)
    before, _competing_jobs._MOST_JOBS = _competing_jobs._MOST_JOBS, 3
    try:
        together = competing_jobs(chain.draft(), ("r03",), {})
    finally:
        _competing_jobs._MOST_JOBS = before
    assert list(together.entries) == ["j01", "j02", "j03"]
    left = {name: one.devices for name, one in together.lasting.items()}
    assert left == {"r01": WORKERS - 1, "r02": WORKERS, "r03": WORKERS, "r04": WORKERS - 1}


def test_an_admission_is_the_same_whatever_runs_far_away(job_file: Path) -> None:
    few, many = Chain(job_file, 3), Chain(job_file, 3)
    for number in range(20):
        many.regions[f"far{number}"] = live(f"far{number}", 1000, WORKERS, 500.0)
        many.add(f"far-{number}", f"far{number}")
    for chain in (few, many):
        chain.add("new", "r00", "r01", workers=3)
    assert few.jobs["new"].state == many.jobs["new"].state


def test_sums_are_kept_as_jobs_come_change_and_end(job_file: Path) -> None:
    chain = Chain(job_file, 5)
    index = JobIndex(chain.jobs.values())
    assert [index.lasting(name) for name in chain.regions] == [1, 2, 2, 2, 1]
    assert index.jobs_in("r01") == ("j00", "j01")
    index.touched.clear()
    one = chain.jobs["j00"]
    finishing = replace(one, state=replace(one.state, phase="finishing"))
    index.put(finishing)
    assert list(index.touched) == ["r00", "r01"]
    assert [index.lasting(name) for name in chain.regions] == [0, 1, 2, 2, 1]
    assert index.fixed("r01") == 1
    index.put(replace(one, state=replace(one.state, phase="failed")))
    assert index.jobs_in("r00") == ()
    parts = tuple(replace(part, link="lost") for part in chain.jobs["j02"].state.partitions)
    index.put(replace(chain.jobs["j02"], state=replace(chain.jobs["j02"].state, partitions=parts)))
    assert list(index.waiting_for_lost) == ["j02"]


REPORT = st.builds(
    lambda done, merge: Report(1, "training", round=done, speed=Speed(merge_seconds=merge)),
    st.integers(0, 400),
    st.sampled_from([0.0, 5.0]),
)
OF_JOB: dict[str, st.SearchStrategy[Any]] = {
    "phase": st.sampled_from(["queued", "starting", "running", "cancelling"]),
    "gave_way": st.booleans(),
    "deadline_at": st.sampled_from([None, 5000.0]),
}
OF_PART: dict[str, st.SearchStrategy[Any]] = {
    "workers": st.sampled_from([None, 0, 1, 2]),
    "link": st.sampled_from(["live", "unreachable"]),
    "preempted": st.booleans(),
    "preemptible": st.booleans(),
    "report": st.none() | REPORT,
}
CHANGE = st.one_of(*(st.tuples(st.just(key), value, st.integers(0, 1)) for key, value in (OF_JOB | OF_PART).items()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(CHANGE, min_size=1, max_size=12), st.sampled_from([2, "auto"]))
def test_what_a_job_asks_for_is_kept_only_while_nothing_else_follows_from_its_state(
    job_file: Path, changes: list[tuple[str, Any, int]], workers: int | str
) -> None:
    chain = Chain(job_file, 2)
    chain.add("own", *chain.regions, workers=workers)
    entry, allocation = chain.jobs["own"], Allocation()
    entry = replace(entry, state=replace(entry.state, phase="running"))
    for key, value, place in changes:
        assert allocation._gang(chain.draft(), entry) == gang_of(entry, JobSpeeds(), chain.regions)
        state, parts = entry.state, list(entry.state.partitions)
        if key in OF_JOB:
            state = replace(state, **{key: value})
        else:
            parts[place] = replace(parts[place], **{key: value})
        entry = replace(entry, state=replace(state, partitions=tuple(parts)))
    assert allocation._gang(chain.draft(), entry) == gang_of(entry, JobSpeeds(), chain.regions)
