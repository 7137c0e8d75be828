"""Devices of a region: jobs with several a worker hold no more of them than there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane.service.jobs._submission import _most_workers
from control_plane.service.measuring._measurements import Measurements
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._admission import AdmittedJob
from control_plane.service.planning._allocation import Allocation, begin
from control_plane.service.planning._planning import first_state, plan_json, snapshot_of
from control_plane.service.state._catalogue import fault_of
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import load
from control_plane.store import JobRow
from geofed_pb.errors import GeofedError
from geofed_pb.features import FEATURES
from scheduler import Declined
from scheduler._model import Devices
from tests.control_plane.test_possible_deadline import live

DEVICES = 8


class _Stand:
    """A region with eight workers and eight devices."""

    def __init__(self, job_file: Path, preemptible: int = 0) -> None:
        entry = live("east", 1000, DEVICES, 500.0)
        catalogue = entry.catalogue
        assert catalogue is not None
        assert catalogue.prices is not None
        there = Devices("a GPU", DEVICES + preemptible)
        capacity = replace(catalogue.capacity, devices=there, preemptible=preemptible)
        prices = replace(catalogue.prices, device_usd_per_second=1e-4)
        told = replace(catalogue, capacity=capacity, prices=prices)
        state = replace(entry.state, features=FEATURES)
        self.regions: dict[str, RegionEntry] = {"east": replace(entry, catalogue=told, state=state)}
        self.jobs: dict[str, JobEntry] = {}
        self.allocation, self.job_file, self.at = Allocation(), job_file, 1000.0

    def draft(self) -> Draft:
        return Draft(self.at, self.jobs, self.regions)

    def answer(self, name: str, *overrides: str) -> AdmittedJob | Declined:
        spec = load(self.job_file, ("regions.use=[east]", "train.end={epochs: 50}", *overrides)).spec
        return self.allocation.admission(self.draft(), spec, name, TaskHistory()).answer()

    def add(self, name: str, gpus: int | str, workers: int | str = 1, *more: str) -> AdmittedJob:
        overrides = (f"function.gpus={gpus}", "function.memoryMb=1024", f"train.workers={workers}", *more)
        answer = self.answer(name, *overrides)
        assert isinstance(answer, AdmittedJob), answer
        spec = load(self.job_file, ("regions.use=[east]", "train.end={epochs: 50}", *overrides)).spec
        state = first_state(name, self.at, spec, answer.plan, self.regions, answer.deadline_at)
        row = JobRow(name, "o", name, "", "", "", spec.to_json(), plan_json(answer.plan), "", "queued", self.at)
        entry = JobEntry(row, state, spec, answer.plan)
        if answer.workers:
            draft = self.draft()
            draft.add_job(entry)
            begin(draft, entry, answer.workers)
            entry = draft.changed_jobs[name]
        self.jobs[name] = entry
        self.at += 1.0
        return answer

    def review(self) -> None:
        self.at += 1.0
        draft = self.draft()
        self.allocation.review(draft)
        self.jobs |= draft.changed_jobs

    def ends(self, name: str) -> None:
        del self.jobs[name]

    def running(self) -> list[str]:
        return [name for name, entry in self.jobs.items() if entry.state.phase != "queued"]


def test_jobs_with_several_devices_a_worker_wait_until_devices_are_free(job_file: Path) -> None:
    stand = _Stand(job_file)
    assert [bool(stand.add(f"j{number}", 4).workers) for number in range(5)] == [True, True, False, False, False]
    assert stand.add("small", 1, 1).waits_for, "all devices are held"
    stand.review()
    assert stand.running() == ["j0", "j1"]
    stand.ends("j0")
    stand.review()
    assert stand.running() == ["j1", "j2"], "the one that has waited longest, and no other"


def test_workers_with_one_device_leave_no_room_for_one_with_many(job_file: Path) -> None:
    stand = _Stand(job_file)
    assert stand.add("five", 1, 5).workers == {"east": 5}
    assert stand.add("three", 3).workers == {"east": 1}
    assert stand.add("one", 1).waits_for
    stand.ends("three")
    stand.add("four", 4)
    stand.review()
    assert stand.running() == ["five", "one"], "three devices are too few for four"


def test_a_job_whose_workers_may_change_grows_no_further_than_the_devices(job_file: Path) -> None:
    stand = _Stand(job_file)
    stand.add("six", 6)
    assert stand.add("grows", 1, "auto", "objective.minimise=time").workers == {"east": 2}
    for _ in range(3):
        stand.review()
    grows = stand.jobs["grows"].state.partitions[0].workers
    assert grows is None or grows <= 2


def test_a_promise_counts_the_devices_that_others_hold(job_file: Path) -> None:
    stand = _Stand(job_file)
    stand.add("long", 8, 1, "objective.deadline=2h")
    alone = _Stand(job_file).answer(
        "job", "function={gpus: 4, memoryMb: 1024}", "train.workers=1", "objective.deadline=10m"
    )
    assert isinstance(alone, AdmittedJob)
    soon = alone.plan.estimate.seconds.high
    late = stand.answer(
        "job", "function={gpus: 4, memoryMb: 1024}", "train.workers=1", f"objective.deadline={int(1.5 * soon)}s"
    )
    assert isinstance(late, Declined)
    assert late.reasons[0].earliest_seconds is not None
    assert late.reasons[0].earliest_seconds >= 2 * soon


def test_devices_of_preemptible_workers_are_kept_for_them(job_file: Path) -> None:
    stand = _Stand(job_file, preemptible=1)
    assert isinstance(stand.answer("nine", "function={gpus: 9, memoryMb: 1024}", "train.workers=1"), Declined)
    assert stand.add("eight", 8).workers
    assert stand.add("one", 1).waits_for


@pytest.mark.parametrize(("now", "kept"), [(2, None), (2, 2), (0, 2)])
def test_a_worker_with_all_devices_has_those_that_are_not_kept(job_file: Path, now: int, kept: int | None) -> None:
    """Also when preemptible workers have been taken away, with their devices."""
    stand = _Stand(job_file, preemptible=2)
    entry = stand.regions["east"]
    assert entry.catalogue is not None
    devices = Devices("a GPU", DEVICES + 2, kept=kept)
    capacity = replace(entry.catalogue.capacity, preemptible=now, devices=devices)
    stand.regions["east"] = replace(entry, catalogue=replace(entry.catalogue, capacity=capacity))
    declined = stand.answer("nine", "function={gpus: 9, memoryMb: 1024}", "train.workers=1")
    assert isinstance(declined, Declined)
    assert declined.reasons[0].text == "functions in east have 8 devices, 9 are asked for"
    assert stand.add("all", "auto").workers == {"east": 1}
    assert stand.jobs["all"].plan.partitions[0].devices == DEVICES
    assert stand.add("one", 1).waits_for, "the worker holds all of them"


@pytest.mark.parametrize(("kept", "taken"), [(None, True), (0, True), (4, True), (5, False), (-1, False)])
def test_no_more_devices_are_kept_than_there_are(kept: int | None, taken: bool) -> None:
    catalogue = live("east", 1000, 4, 500.0).catalogue
    assert catalogue is not None
    capacity = replace(catalogue.capacity, devices=Devices("a GPU", 4, kept=kept))
    fault = fault_of("east", replace(catalogue, capacity=capacity))
    assert fault == "" if taken else "capacity.devices.kept" in fault


@pytest.mark.parametrize(("workers", "devices", "free"), [(3, 8, ""), (4, 4, "worker"), (2, 8, "device"), (0, 0, "")])
def test_a_task_is_measured_only_where_a_worker_and_a_device_are_free(workers: int, devices: int, free: str) -> None:
    capacity = SimpleNamespace(workers=4, shared_devices=8 if workers < 3 else 9)
    region = SimpleNamespace(catalogue=SimpleNamespace(capacity=capacity))
    held = {"east": workers, "east/devices": devices}
    index = SimpleNamespace(lasting=held.__getitem__)
    federation: Any = SimpleNamespace(regions={"east": region}, changes=SimpleNamespace(index=index))
    measurements = Measurements(federation)
    if not free:
        measurements.require_free("east")
        return
    with pytest.raises(GeofedError, match=f"region east has no free {free}"):
        measurements.require_free("east")


def test_by_hand_a_job_gets_no_more_workers_than_there_are_devices_for(job_file: Path) -> None:
    stand = _Stand(job_file)
    stand.add("two", 2, 1)
    stand.add("three", 3, 1)
    snapshot = snapshot_of(stand.regions.values(), stand.jobs.values(), TaskHistory())
    assert (snapshot.busy_workers, snapshot.busy_devices) == ({"east": 2}, {"east": 5})
    (part,) = stand.jobs["two"].plan.partitions
    assert _most_workers(snapshot, part, 1) == 2, "three devices are free, and it has one worker"
